"""What events add up to, for tests that compare sums."""

from __future__ import annotations

from metering.counts import CountRow, hour_of
from metering.events import UsageEvent


def row_of(event: UsageEvent) -> CountRow:
    """What one event adds to the sums."""
    return CountRow(
        event.tenant,
        event.model,
        hour_of(event.ts_us),
        1,
        event.prompt_tokens,
        event.cached_tokens,
        event.completion_tokens,
    )
