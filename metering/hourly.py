# ruff: noqa: S608  (only names written here are put into the text; every value is a parameter)
"""SQL over the hourly sums, as text and parameters.

Knows: the tables `usage_hourly` and `usage_dirty_hours`, which groups the sums keep apart, how sums and events are read
together. Does not know: when an hour is recomputed (`metering.rollups`), how a query is sent. The sums are a copy:
everything in them can be made again from the events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from metering.counts import HOUR_US
from metering.queries import (
    BUCKETS,
    EVENTS,
    GROUPS,
    STANDING,
    SUMS,
    Query,
    at_most,
    checked_groups,
    narrowing,
    within,
)

HOURLY = "usage_hourly"
DIRTY = "usage_dirty_hours"

KEPT_APART = ("tenant", "model", "base_model", "key", "adapter", "endpoint", "outcome")
"""Groups of the sums. Not `user`: an end user's name may be new in every event."""

LAYOUT = 1
"""Which sums there are: 0 has no more than the first four of `SUMS`, and stands for nothing any more."""

COLUMNS = {
    "hour": "DateTime('UTC')",
    **{GROUPS[name]: "LowCardinality(String)" for name in KEPT_APART},
    "requests": "UInt64",
    **dict.fromkeys(SUMS, "UInt128"),
    "version": "UInt64",
    "layout": "UInt8",
}

_DIMENSIONS = ", ".join(GROUPS[name] for name in KEPT_APART)
_SUMMED = tuple(f"sum_{name}" for name in SUMS)
_IN_HOURS = "hour IN {hours:Array(DateTime('UTC'))}"
_FROM, _TO = "fromUnixTimestamp64Micro({start_us:Int64}, 'UTC')", "fromUnixTimestamp64Micro({end_us:Int64}, 'UTC')"
_BETWEEN = f"hour >= {_FROM} AND hour < {_TO}"
_WHOLE = f"hour >= {_FROM} AND hour < toStartOfHour({_TO})"
_OUTDATED = f"GROUP BY hour HAVING argMax(layout, version) < {LAYOUT}"
_RAW_HOURS = (
    "(SELECT arrayJoin(arrayFlatten(arrayMap((first, hours) -> arrayMap(i -> first + i * 3600, range(hours)), "
    "{raw_from:Array(DateTime('UTC'))}, {raw_hours:Array(UInt32)}))))"
)
_MOST_RUNS = 5000  # ClickHouse takes at most 128 KiB in a parameter
_MOST_HOURS = 500_000


def can_answer(bucket: str, groups: Sequence[str]) -> bool:
    """Whether the hourly sums have what is asked for."""
    return bucket != "minute" and set(KEPT_APART).issuperset(groups)


def can_list(raw_hours_us: Sequence[int]) -> bool:
    """Whether one query can name these hours."""
    return len(raw_hours_us) <= _MOST_HOURS and len(_runs(raw_hours_us)) <= _MOST_RUNS


def usage(
    tenant: str | None,
    start_us: int,
    end_us: int,
    bucket: str,
    group_by: Sequence[str],
    only: Mapping[str, Sequence[str]] | None = None,
    most: int | None = None,
    *,
    raw_hours_us: Sequence[int],
    dropped: Sequence[int] = (),
) -> Query:
    """`queries.usage` from the sums, and from the events in `raw_hours_us` (ascending): every hour whose sums do not
    stand, and every one that does not lie whole in the range; of such that `can_list`.

    `dropped` months (202609) have both, sums of what was archived and events that came later. Raises `ValueError`.
    """
    names, filters = checked_groups(bucket, group_by, only)
    if not can_answer(bucket, [*names, *filters]):
        raise ValueError("the hourly sums do not have this bucket or group")
    where, parameters = within(tenant, start_us, end_us)
    narrowed, values = narrowing(filters)
    runs = _runs(raw_hours_us)
    values |= {"raw_from": [first // 1_000_000 for first, _ in runs], "raw_hours": [hours for _, hours in runs]}
    keys = ", ".join(["start_s", *(f"group_{name}" for name in names)])
    groups = "".join(f"{GROUPS[name]} AS group_{name}, " for name in names)
    sums_stand = f"hour NOT IN {_RAW_HOURS}"
    if dropped:
        sums_stand = f"({sums_stand} OR toYYYYMM(hour) IN {{dropped:Array(UInt32)}})"
        values["dropped"] = list(dropped)
    of_tenant = "" if tenant is None else " AND tenant = {tenant:String}"
    summed = ", ".join(f"sum({name}) AS sum_{name}" for name in SUMS)
    counted = ", ".join(f"sum(toUInt128({name})) AS sum_{name}" for name in SUMS)
    total = ", ".join(f"sum({name})" for name in _SUMMED)
    return Query(
        f"SELECT {keys}, sum(counted) AS requests, {total} FROM ("
        f"SELECT {BUCKETS[bucket].replace('(ts)', '(hour)')} AS start_s, {groups}sum(requests) AS counted, {summed} "
        f"FROM {HOURLY} FINAL WHERE {_WHOLE} AND {sums_stand} AND requests > 0{of_tenant}{narrowed} "
        f"GROUP BY {keys} "
        f"UNION ALL SELECT {BUCKETS[bucket]} AS start_s, {groups}count() AS counted, {counted} FROM {EVENTS} FINAL "
        f"WHERE toStartOfHour(ts) IN {_RAW_HOURS} AND {where} AND {STANDING}{narrowed} "
        f"GROUP BY {keys}) GROUP BY {keys} ORDER BY {keys}{at_most(most)}",
        {**parameters, **values},
    )


def span() -> Query:
    """(first, last, number) of the events' times; read from what ClickHouse keeps of each part, not from the events."""
    return Query(
        f"SELECT toUnixTimestamp64Micro(min(ts)), toUnixTimestamp64Micro(max(ts)), count() FROM {EVENTS}",
        {},
    )


def clean_hours(start_us: int, end_us: int) -> Query:
    """Hours that begin in [start, end) and whose sums stand: what was recomputed, and is not dirty since."""
    return Query(
        f"SELECT toUnixTimestamp(hour) FROM {HOURLY} WHERE {_BETWEEN} "
        f"AND hour NOT IN (SELECT hour FROM {DIRTY} FINAL WHERE {_BETWEEN} AND dirty) "
        f"GROUP BY hour HAVING argMax(layout, version) >= {LAYOUT}",
        {"start_us": start_us, "end_us": end_us},
    )


def outdated_hours(but_months: Collection[int], most: int) -> Query:
    """The latest hours whose sums lack something that is summed now, of other months than these."""
    return Query(
        f"SELECT toUnixTimestamp(hour) AS hour_s FROM {HOURLY} WHERE toYYYYMM(hour) NOT IN {{months:Array(UInt32)}} "
        f"{_OUTDATED} ORDER BY hour_s DESC LIMIT {most:d}",
        {"months": list(but_months)},
    )


def outdated_months(months: Collection[int]) -> Query:
    """Those of these months that have such an hour."""
    return Query(
        f"SELECT DISTINCT toYYYYMM(hour) FROM (SELECT hour FROM {HOURLY} "
        f"WHERE toYYYYMM(hour) IN {{months:Array(UInt32)}} {_OUTDATED})",
        {"months": list(months)},
    )


def known_hours(start_us: int, end_us: int) -> Query:
    """Hours that begin in [start, end), whole ones, and have an event or a sum."""
    where, parameters = within(None, start_us, end_us)
    return Query(
        "SELECT DISTINCT toUnixTimestamp(hour) AS hour_s FROM ("
        f"SELECT toStartOfHour(ts) AS hour FROM {EVENTS} WHERE {where} GROUP BY hour "
        f"UNION ALL SELECT hour FROM {HOURLY} WHERE {_BETWEEN} GROUP BY hour) ORDER BY hour_s",
        parameters,
    )


def event_hours(start_us: int, end_us: int) -> Query:
    """Hours, ascending, of the events of [start, end)."""
    where, parameters = within(None, start_us, end_us)
    return Query(
        f"SELECT toUnixTimestamp(toStartOfHour(ts)) AS hour_s FROM {EVENTS} WHERE {where} "
        "GROUP BY hour_s ORDER BY hour_s",
        parameters,
    )


def requests(start_us: int, end_us: int) -> Query:
    """How many requests the sums of the hours of [start, end) count."""
    return Query(f"SELECT sum(requests) FROM {HOURLY} FINAL WHERE {_BETWEEN}", {"start_us": start_us, "end_us": end_us})


def next_version(start_us: int, end_us: int) -> Query:
    """A version above those of all sums of the hours of [start, end)."""
    return Query(
        f"SELECT greatest(toUInt64(toUnixTimestamp64Micro(now64(6))), 1 + max(version)) FROM {HOURLY} WHERE {_BETWEEN}",
        {"start_us": start_us, "end_us": end_us},
    )


def counts(start_us: int, end_us: int) -> Query:
    """`queries.counts` from the sums, for hours that begin in [start, end)."""
    sums = ", ".join(f"sum({name})" for name in SUMS[:3])
    return Query(
        f"SELECT tenant, model, toUnixTimestamp(hour) AS hour_s, sum(requests) AS counted, {sums} FROM {HOURLY} FINAL "
        f"WHERE {_BETWEEN} GROUP BY tenant, model, hour_s HAVING counted > 0 ORDER BY tenant, model, hour_s",
        {"start_us": start_us, "end_us": end_us},
    )


def marks_of(writer: str) -> Query:
    """(hour, version, whether it is dirty) of everything that a writer ever marked."""
    return Query(
        f"SELECT toUnixTimestamp(hour), version, dirty FROM {DIRTY} FINAL WHERE writer = {{writer:String}}",
        {"writer": writer},
    )


def dirty_marks() -> Query:
    """(hour, writer, version) of everything that is dirty."""
    return Query(
        f"SELECT toUnixTimestamp(hour), writer, version FROM {DIRTY} FINAL WHERE dirty ORDER BY hour, writer", {}
    )


def recompute(hours_us: Sequence[int]) -> Query:
    """Replace the sums of these hours, all of one month, by those of their events."""
    zeros = ", ".join(f"toUInt128(0) AS {name}" for name in _SUMMED)
    total = ", ".join(f"sum({name})" for name in _SUMMED)
    return Query(
        f"INSERT INTO {HOURLY} (hour, {_DIMENSIONS}, requests, {', '.join(SUMS)}, version, layout) "
        "WITH (SELECT greatest(toUInt64(toUnixTimestamp64Micro(now64(6))), 1 + max(version)) "
        f"FROM {HOURLY} WHERE {_IN_HOURS}) AS following "
        f"SELECT hour, {_DIMENSIONS}, sum(counted), {total}, following, {LAYOUT} "
        f"FROM ({_of_events()} "
        f"UNION ALL SELECT DISTINCT hour, {_DIMENSIONS}, toUInt64(0) AS counted, {zeros} FROM {HOURLY} "
        f"WHERE {_IN_HOURS}) GROUP BY hour, {_DIMENSIONS}",
        {"hours": _seconds(hours_us)},
    )


def forget(hours_us: Sequence[int]) -> Query:
    """Delete the sums of these hours, whatever their version."""
    return Query(
        f"ALTER TABLE {HOURLY} DELETE WHERE {_IN_HOURS} SETTINGS mutations_sync = 2", {"hours": _seconds(hours_us)}
    )


def differences(hours_us: Sequence[int]) -> Query:
    """Of these hours those whose sums are not their events': (hour, groups that differ, requests of the events, of the
    sums)."""
    names = ("counted", *_SUMMED)
    sides = ", ".join(f"sumIf({name}, side = {side}) AS {name}_{side}" for name in names for side in (0, 1))
    apart = " OR ".join(f"{name}_0 != {name}_1" for name in names)
    renamed = ", ".join(f"{name} AS sum_{name}" for name in SUMS)
    return Query(
        f"SELECT toUnixTimestamp(hour) AS hour_s, countIf({apart}) AS groups, sum(counted_0), sum(counted_1) FROM ("
        f"SELECT hour, {_DIMENSIONS}, {sides} FROM (SELECT *, 0 AS side FROM ({_of_events()}) "
        f"UNION ALL SELECT hour, {_DIMENSIONS}, requests AS counted, {renamed}, 1 AS side "
        f"FROM {HOURLY} FINAL WHERE {_IN_HOURS}) GROUP BY hour, {_DIMENSIONS}) "
        "GROUP BY hour_s HAVING groups > 0 ORDER BY hour_s",
        {"hours": _seconds(hours_us)},
    )


def _of_events() -> str:
    """The sums of the hours in the parameter `hours`, from the events."""
    counted = ", ".join(f"sum(toUInt128({name})) AS sum_{name}" for name in SUMS)
    return (
        f"SELECT toStartOfHour(ts) AS hour, {_DIMENSIONS}, count() AS counted, {counted} FROM {EVENTS} FINAL "
        f"WHERE toStartOfHour(ts) IN {{hours:Array(DateTime('UTC'))}} AND {STANDING} GROUP BY hour, {_DIMENSIONS}"
    )


def _seconds(times_us: Sequence[int]) -> list[int]:
    return [time_us // 1_000_000 for time_us in times_us]


def _runs(hours_us: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending hours as (first, how many follow each other)."""
    runs: list[tuple[int, int]] = []
    for hour_us in hours_us:
        if runs and hour_us == runs[-1][0] + runs[-1][1] * HOUR_US:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((hour_us, 1))
    return runs
