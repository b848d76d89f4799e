"""Token counts as metering passes them around: per request, and summed by tenant, model and hour.

Knows: the order of the counts on the wire and the row in which sums are compared. Does not know: where
they come from (the engine's `TokenCounts` has the same fields in the same order) or what they cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from metering.events import UsageEvent

HOUR_US = 3_600_000_000


class Counts(NamedTuple):
    """Cumulative tokens of one request, as its event has them. A plain tuple in this order does as well."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    recomputed: int = 0
    rejected: int = 0


CountsTuple = tuple[int, int, int, int, int, int]


class CountRow(msgspec.Struct, frozen=True, order=True):
    """Sums over the requests that began in one hour (UTC, `hour_us` its first microsecond) of one tenant and model."""

    tenant: str
    model: str
    hour_us: int
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Drift(msgspec.Struct, frozen=True):
    """An hour whose sums are not those of its events."""

    hour_us: int
    groups: int  # that differ
    events: int  # requests by its events
    summed: int  # requests by its sums


def hour_of(ts_us: int) -> int:
    """The first microsecond of the hour that holds `ts_us`."""
    return ts_us - ts_us % HOUR_US


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


def add_rows(rows: Iterable[CountRow]) -> list[CountRow]:
    """One row per (tenant, model, hour), sorted; the rows of one key are added up."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for row in rows:
        total = sums.setdefault((row.tenant, row.model, row.hour_us), [0, 0, 0, 0])
        for i, value in enumerate((row.requests, row.prompt, row.cached, row.completion)):
            total[i] += value
    return [CountRow(*key, *total) for key, total in sorted(sums.items())]
