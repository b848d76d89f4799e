# ruff: noqa: S608  (only whitelisted names are put into the text; every value is a parameter)
"""SQL over the usage store, as text and parameters.

Knows: the columns of the tables in `migrations/clickhouse`, which groupings and buckets exist. Does not know:
how a query is sent. Values travel as parameters, never inside the text; only whitelisted names are put into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from metering.counts import HOUR_US, hour_of


class Query(NamedTuple):
    """A statement and the values of its `{name:Type}` parameters."""

    sql: str
    parameters: dict[str, Any]


EVENTS = "usage_events"
DEAD_LETTERS = "usage_dead_letters"
CONFLICTS = "usage_conflicts"

EVENT_COLUMNS: dict[str, str] = {  # in the order of the UsageEvent's fields; `_us` fields are DateTime64 without it
    "v": "UInt16",
    "event_id": "String",
    "ts": "DateTime64(6, 'UTC')",
    "settled": "DateTime64(6, 'UTC')",
    "tenant": "LowCardinality(String)",
    "key_id": "LowCardinality(String)",
    "model": "LowCardinality(String)",
    "base_model": "LowCardinality(String)",
    "adapter": "LowCardinality(String)",
    "endpoint": "LowCardinality(String)",
    "gateway": "LowCardinality(String)",
    "outcome": "LowCardinality(String)",
    "finish_reason": "LowCardinality(String)",
    "prompt_tokens": "UInt64",
    "cached_tokens": "UInt64",
    "completion_tokens": "UInt64",
    "reasoning_tokens": "UInt64",
    "recomputed_tokens": "UInt64",
    "rejected_tokens": "UInt64",
    "n": "UInt32",
    "stream": "Bool",
    "estimated": "Bool",
    "user": "String",
    "metadata": "Map(String, String)",
    "queue_us": "Int64",
    "ttft_us": "Int64",
    "duration_us": "Int64",
    "compute_us": "Int64",
    "kv_block_us": "Int64",
    "preemptions": "Int64",
    "cache_write_tokens": "UInt64",
    "images": "UInt64",
    "audio_ms": "UInt64",
    "tool_calls": "UInt64",
}
INSERT_COLUMNS: dict[str, str] = {**EVENT_COLUMNS, "content_hash": "String"}

BUCKETS = {
    "minute": "toUnixTimestamp(toStartOfMinute(ts))",
    "hour": "toUnixTimestamp(toStartOfHour(ts))",
    "day": "toUnixTimestamp(toStartOfDay(ts))",
    "month": "toUnixTimestamp(toDateTime(toStartOfMonth(ts), 'UTC'))",
}
GROUPS = {
    "tenant": "tenant",
    "model": "model",
    "base_model": "base_model",
    "key": "key_id",
    "adapter": "adapter",
    "endpoint": "endpoint",
    "user": "user",
    "outcome": "outcome",
}
SUMS = (
    *("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"),
    *("cache_write_tokens", "images", "audio_ms", "tool_calls"),
)

# Of two contents under one id the first stands; the second was recorded when it was inserted.
STANDING = f"(event_id, content_hash) NOT IN (SELECT event_id, content_hash FROM {CONFLICTS})"


def insert_check(event_ids: Sequence[str], hours_us: Sequence[int]) -> Query:
    """Ids among those just inserted that now have more than one content, looked up in the hours they belong to."""
    return Query(
        f"SELECT event_id FROM {EVENTS} "
        "WHERE toStartOfHour(ts) IN {hours:Array(DateTime('UTC'))} AND event_id IN {ids:Array(String)} "
        "GROUP BY event_id HAVING uniqExact(content_hash) > 1 ORDER BY event_id",
        {"hours": [hour // 1_000_000 for hour in hours_us], "ids": list(event_ids)},
    )


def contents(event_ids: Sequence[str], start_us: int, end_us: int) -> Query:
    """Every content of the given ids with its place in the order of arrival: the first of an id stands."""
    where, parameters = within(None, start_us, end_us)
    return Query(
        "SELECT event_id, content_hash, max(precedence) AS arrival, "
        f"min(toUnixTimestamp64Micro(settled)) AS settled_us FROM {EVENTS} "
        f"WHERE {where} AND event_id IN {{ids:Array(String)}} "
        "GROUP BY event_id, content_hash ORDER BY event_id, arrival DESC, settled_us, content_hash",
        {**parameters, "ids": list(event_ids)},
    )


def conflicts(start_us: int, end_us: int) -> Query:
    """Ids that are stored with more than one content among the events of a time range."""
    where, parameters = within(None, start_us, end_us)
    return Query(
        f"SELECT event_id FROM {EVENTS} WHERE {where} "
        "GROUP BY event_id HAVING uniqExact(content_hash) > 1 ORDER BY event_id",
        parameters,
    )


def events(
    tenant: str | None,
    start_us: int,
    end_us: int,
    settled_from_us: int | None = None,
    settled_to_us: int | None = None,
) -> Query:
    """Every field of every standing event of [start, end), ordered by time and id, and its content hash.

    Rows of one sort key are equal in every column. So one tenant's, which are few among a granule's, are picked out
    first, and one of each is kept: a quarter less time than FINAL over all that lies between them.
    """
    where, parameters = _settled_within(start_us, end_us, settled_from_us, settled_to_us)
    merged, once = "FINAL", ""
    if tenant is not None:
        merged, once = "PREWHERE tenant = {tenant:String}", " LIMIT 1 BY event_id, content_hash"
        parameters["tenant"] = tenant
    return Query(
        f"SELECT {event_fields()} FROM {EVENTS} {merged} WHERE {where} AND {STANDING} ORDER BY ts, event_id{once}",
        parameters,
    )


def event_counts(
    tenant: str | None,
    start_us: int,
    end_us: int,
    settled_from_us: int | None = None,
    settled_to_us: int | None = None,
) -> Query:
    """(hour in seconds, at least as many as `events` gives of it), ascending: replays that are not merged yet count."""
    where, parameters = _settled_within(start_us, end_us, settled_from_us, settled_to_us)
    if tenant is not None:
        where += " AND tenant = {tenant:String}"
        parameters["tenant"] = tenant
    return Query(
        f"SELECT toUnixTimestamp(toStartOfHour(ts)) AS hour_s, count() FROM {EVENTS} WHERE {where} "
        "GROUP BY hour_s ORDER BY hour_s",
        parameters,
    )


def _settled_within(
    start_us: int, end_us: int, settled_from_us: int | None, settled_to_us: int | None
) -> tuple[str, dict[str, Any]]:
    where, parameters = within(None, start_us, end_us)
    for name, value, operator in (("settled_from", settled_from_us, ">="), ("settled_to", settled_to_us, "<")):
        if value is not None:
            where += f" AND settled {operator} fromUnixTimestamp64Micro({{{name}:Int64}}, 'UTC')"
            parameters[name] = value
    return where, parameters


def event_fields() -> str:
    """Every field of an event in order, times as microseconds, and its content hash."""
    return ", ".join(
        f"toUnixTimestamp64Micro({name}) AS {name}_us" if kind.startswith("DateTime64") else name
        for name, kind in INSERT_COLUMNS.items()
    )


def usage(
    tenant: str | None,
    start_us: int,
    end_us: int,
    bucket: str,
    group_by: Sequence[str],
    only: Mapping[str, Sequence[str]] | None = None,
    most: int | None = None,
) -> Query:
    """Requests and token sums per bucket and group, of the events that have in every group of `only` one of its values.
    With `most`: see `at_most`.

    Raises `ValueError` for a bucket or group that does not exist.
    """
    names, filters = checked_groups(bucket, group_by, only)
    where, parameters = within(tenant, start_us, end_us)
    narrowed, values = narrowing(filters)
    keys = ", ".join(["start_s", *(f"group_{name}" for name in names)])
    groups = "".join(f"{GROUPS[name]} AS group_{name}, " for name in names)
    sums = ", ".join(f"sum(toUInt128({name})) AS sum_{name}" for name in SUMS)  # a sum of UInt64 would wrap
    return Query(
        f"SELECT {BUCKETS[bucket]} AS start_s, {groups}count() AS requests, {sums} FROM {EVENTS} FINAL "
        f"WHERE {where} AND {STANDING}{narrowed} GROUP BY {keys} ORDER BY {keys}"
        f"{at_most(most)}",
        {**parameters, **values},
    )


def at_most(rows: int | None) -> str:
    """Behind a query that groups: so many rows and one."""
    return "" if rows is None else f" LIMIT {rows + 1:d}"


def stopped(query: Query, rows: int) -> Query:
    """An error as soon as the store holds more groups than that.

    Without it, the store (which may be in this process) holds every group there is before it gives the first. Not for
    tables that are spread over a cluster: a shard that throws in the middle takes its server down (26.7).
    """
    return query._replace(sql=f"{query.sql} SETTINGS max_rows_to_group_by = {rows:d}, group_by_overflow_mode = 'throw'")


def checked_groups(
    bucket: str, group_by: Sequence[str], only: Mapping[str, Sequence[str]] | None
) -> tuple[list[str], dict[str, list[str]]]:
    """The groups, each once, and the filters. Raises `ValueError` for a bucket or group that does not exist."""
    names = list(dict.fromkeys(group_by))
    filters = {name: list(values) for name, values in (only or {}).items()}
    if bucket not in BUCKETS:
        raise ValueError(f"bucket must be one of {', '.join(BUCKETS)}")
    if strange := [name for name in (*names, *filters) if name not in GROUPS]:
        raise ValueError(f"group_by has {', '.join(map(repr, strange))}; it takes {', '.join(GROUPS)}")
    return names, filters


def narrowing(filters: Mapping[str, list[str]]) -> tuple[str, dict[str, Any]]:
    """The conditions of filters by group, to be put behind others, and their parameters."""
    text = "".join(f" AND {GROUPS[name]} IN {{only_{name}:Array(String)}}" for name in filters)
    return text, {f"only_{name}": values for name, values in filters.items()}


def counts(start_us: int, end_us: int) -> Query:
    """Requests and token sums per tenant, model and hour, for hours that begin in [start, end)."""
    where, parameters = within(None, _next_hour(start_us), _next_hour(end_us))
    sums = ", ".join(f"sum(toUInt128({name}))" for name in SUMS[:3])
    return Query(
        f"SELECT tenant, model, toUnixTimestamp(toStartOfHour(ts)) AS hour_s, count(), {sums} FROM {EVENTS} FINAL "
        f"WHERE {where} AND {STANDING} GROUP BY tenant, model, hour_s ORDER BY tenant, model, hour_s",
        parameters,
    )


def within(tenant: str | None, start_us: int, end_us: int) -> tuple[str, dict[str, Any]]:
    """The condition that an event began in [start, end), of one tenant or of all, and its parameters."""
    where = (
        "ts >= fromUnixTimestamp64Micro({start_us:Int64}, 'UTC') "
        "AND ts < fromUnixTimestamp64Micro({end_us:Int64}, 'UTC')"
    )
    parameters: dict[str, Any] = {"start_us": start_us, "end_us": end_us}
    if tenant is not None:
        where += " AND tenant = {tenant:String}"
        parameters["tenant"] = tenant
    return where, parameters


def _next_hour(time_us: int) -> int:
    return hour_of(time_us + HOUR_US - 1)
