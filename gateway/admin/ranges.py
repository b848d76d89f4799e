"""The range of time that a report is asked for: its end excluded, neither end needed."""

from __future__ import annotations

from collections.abc import Callable

from gateway.admin.body import refuse
from gateway.admin.fields import time_fault
from gateway.admin.times import parse_time

DAY_US = 86_400_000_000


def parse_range(
    start: str | None, end: str | None, *, default_start: Callable[[int], int], default_end_us: int, max_days: int
) -> tuple[int, int]:
    """(first, end) in microseconds; `default_start` makes one of the end. Raises `BadRequest` with every fault."""
    refuse([fault for field, text in (("start", start), ("end", end)) if text for fault in time_fault(field, text)])
    end_us = parse_time(end) if end else default_end_us
    start_us = parse_time(start) if start else default_start(end_us)
    if not start_us < end_us <= start_us + max_days * DAY_US:
        refuse([("end", f"must be later than start, by at most {max_days} days")])
    return start_us, end_us
