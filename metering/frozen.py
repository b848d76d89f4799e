"""Usage of months that the store no longer has the events of: by their sums, and from archived events where no sum is.

Knows: how rows of usage are made of events, and added to each other; buckets in UTC as `metering.queries` has them.
Does not know: where events and rows come from. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from metering import hourly
from metering.counts import HOUR_US, hour_of
from metering.errors import StoreTooMuch
from metering.events import UsageEvent
from metering.queries import GROUPS, SUMS


class UsageRow(msgspec.Struct, frozen=True):
    """Sums of one bucket and group. `group` has the names that were asked for."""

    start_us: int
    group: dict[str, str]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cache_write_tokens: int
    images: int
    audio_ms: int
    tool_calls: int


def usage_of(
    events: Iterable[UsageEvent],
    bucket: str,
    names: Sequence[str],
    filters: Mapping[str, Sequence[str]],
    most: int | None = None,
) -> list[UsageRow]:
    """What `queries.usage` says, of these events. Raises `StoreTooMuch` at the row past `most`."""
    start, wanted = _STARTS[bucket], {GROUPS[name]: set(values) for name, values in filters.items()}
    columns = [GROUPS[name] for name in names]
    sums: dict[tuple[Any, ...], list[int]] = {}
    for event in events:
        if all(str(getattr(event, column)) in values for column, values in wanted.items()):
            key = (start(event.ts_us), *(str(getattr(event, column)) for column in columns))
            _add(sums.setdefault(key, [0] * (1 + len(SUMS))), event)
            check_rows(len(sums), most)
    return _rows(sums, names)


def check_rows(rows: int, most: int | None) -> None:
    """Raises `StoreTooMuch` for more rows than `most`."""
    if most is not None and rows > most:
        raise StoreTooMuch(f"gives more than {most} results")


def added(rows: Iterable[UsageRow], names: Sequence[str], most: int | None = None) -> list[UsageRow]:
    """One row per bucket and group, in order; the rows of one are added up. Raises as `usage_of` does."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        total = sums.setdefault((row.start_us, *(row.group[name] for name in names)), [0] * (1 + len(SUMS)))
        for i, value in enumerate((row.requests, *(getattr(row, name) for name in SUMS))):
            total[i] += value
        check_rows(len(sums), most)
    return _rows(sums, names)


def hourly_sums(events: Iterable[UsageEvent], version: int) -> list[list[Any]]:
    """Rows of `usage_hourly` for these events, in the order of `hourly.COLUMNS`."""
    columns = [GROUPS[name] for name in hourly.KEPT_APART]
    sums: dict[tuple[Any, ...], list[int]] = {}
    for event in events:
        key = (hour_of(event.ts_us) // 1_000_000, *(str(getattr(event, column)) for column in columns))
        _add(sums.setdefault(key, [0] * (1 + len(SUMS))), event)
    return [[*key, *total, version, hourly.LAYOUT] for key, total in sorted(sums.items())]


def edges(start_us: int, end_us: int) -> list[tuple[int, int]]:
    """The parts of [start, end) that are no whole hours."""
    first, last = hour_of(start_us + HOUR_US - 1), hour_of(end_us)
    if first > last:
        return [(start_us, end_us)]
    return [(begin, end) for begin, end in ((start_us, first), (last, end_us)) if begin < end]


def _add(total: list[int], event: UsageEvent) -> None:
    total[0] += 1
    for i, name in enumerate(SUMS, 1):
        total[i] += getattr(event, name)


def _rows(sums: Mapping[tuple[Any, ...], list[int]], names: Sequence[str]) -> list[UsageRow]:
    return [UsageRow(key[0], dict(zip(names, key[1:], strict=True)), *total) for key, total in sorted(sums.items())]


def _month_start(time_us: int) -> int:
    time = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    return int(datetime(time.year, time.month, 1, tzinfo=UTC).timestamp()) * 1_000_000


def _multiple(width_us: int) -> Callable[[int], int]:
    return lambda time_us: time_us - time_us % width_us


_STARTS: dict[str, Callable[[int], int]] = {
    "minute": _multiple(60_000_000),
    "hour": hour_of,
    "day": _multiple(24 * HOUR_US),
    "month": _month_start,
}
