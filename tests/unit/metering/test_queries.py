from __future__ import annotations

import re

import pytest

from metering import queries
from metering.counts import HOUR_US
from metering.events import UsageEvent


def test_usage_as_text() -> None:
    sql, parameters = queries.usage("acme", 5, 9, "day", ["model", "key", "model"])
    assert sql == (
        "SELECT toUnixTimestamp(toStartOfDay(ts)) AS start_s, model AS group_model, key_id AS group_key, "
        "count() AS requests, sum(toUInt128(prompt_tokens)) AS sum_prompt_tokens, "
        "sum(toUInt128(cached_tokens)) AS sum_cached_tokens, "
        "sum(toUInt128(completion_tokens)) AS sum_completion_tokens, "
        "sum(toUInt128(reasoning_tokens)) AS sum_reasoning_tokens FROM usage_events FINAL "
        "WHERE ts >= fromUnixTimestamp64Micro({start_us:Int64}, 'UTC') "
        "AND ts < fromUnixTimestamp64Micro({end_us:Int64}, 'UTC') AND tenant = {tenant:String} "
        "AND (event_id, content_hash) NOT IN (SELECT event_id, content_hash FROM usage_conflicts) "
        "GROUP BY start_s, group_model, group_key ORDER BY start_s, group_model, group_key"
    )
    assert parameters == {"start_us": 5, "end_us": 9, "tenant": "acme"}


@pytest.mark.parametrize("hostile", ["'; DROP TABLE usage_events; --", "\\", "{x:String}", "\0"])
def test_no_value_is_ever_part_of_the_text(hostile: str) -> None:
    built = [
        queries.usage(hostile, 1, 2, "hour", ["user"]),
        queries.events(hostile, 1, 2, 3, 4),
        queries.insert_check([hostile], [HOUR_US]),
        queries.contents([hostile], 1, 2),
    ]
    plain = [
        queries.usage("acme", 1, 2, "hour", ["user"]),
        queries.events("acme", 1, 2, 3, 4),
        queries.insert_check(["acme"], [HOUR_US]),
        queries.contents(["acme"], 1, 2),
    ]
    assert [q.sql for q in built] == [q.sql for q in plain]
    for sql, parameters in built:
        assert set(re.findall(r"\{(\w+):", sql)) == set(parameters)


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'password'"):
        queries.usage(None, 1, 2, "day", ["tenant", "password"])
    with pytest.raises(ValueError, match="hour, day, month"):
        queries.usage(None, 1, 2, "week", [])


def test_without_a_tenant_there_is_no_tenant_in_the_text() -> None:
    assert "tenant =" not in queries.usage(None, 1, 2, "day", []).sql
    assert queries.events(None, 1, 2).parameters == {"start_us": 1, "end_us": 2}


def test_hours_are_those_that_begin_in_the_range() -> None:
    for start, end, first, last in [(0, 1, 0, 1), (1, HOUR_US, 1, 1), (HOUR_US, HOUR_US + 1, 1, 2), (1, 1, 1, 1)]:
        parameters = queries.counts(start, end).parameters
        assert parameters == {"start_us": first * HOUR_US, "end_us": last * HOUR_US}


def test_every_field_of_an_event_has_a_column() -> None:
    fields = [
        name.removesuffix("_us") if name in ("ts_us", "settled_us") else name for name in UsageEvent.__struct_fields__
    ]
    assert list(queries.EVENT_COLUMNS) == fields
