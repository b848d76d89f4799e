from __future__ import annotations

import re

import pytest

from metering import hourly, queries
from metering.counts import HOUR_US
from metering.events import UsageEvent


def test_usage_as_text() -> None:
    sql, parameters = queries.usage("acme", 5, 9, "day", ["model", "key", "model"])
    assert sql == (
        "SELECT toUnixTimestamp(toStartOfDay(ts)) AS start_s, model AS group_model, key_id AS group_key, "
        "count() AS requests, sum(toUInt128(prompt_tokens)) AS sum_prompt_tokens, "
        "sum(toUInt128(cached_tokens)) AS sum_cached_tokens, "
        "sum(toUInt128(completion_tokens)) AS sum_completion_tokens, "
        "sum(toUInt128(reasoning_tokens)) AS sum_reasoning_tokens, "
        "sum(toUInt128(cache_write_tokens)) AS sum_cache_write_tokens, sum(toUInt128(images)) AS sum_images, "
        "sum(toUInt128(audio_ms)) AS sum_audio_ms, sum(toUInt128(tool_calls)) AS sum_tool_calls "
        "FROM usage_events FINAL "
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
        queries.usage(None, 1, 2, "hour", ["user"], {"user": [hostile], "model": [hostile]}),
        hourly.usage(hostile, 1, 2, "hour", ["key"], {"model": [hostile]}, raw_hours_us=[0]),
        hourly.marks_of(hostile),
    ]
    plain = [
        queries.usage("acme", 1, 2, "hour", ["user"]),
        queries.events("acme", 1, 2, 3, 4),
        queries.insert_check(["acme"], [HOUR_US]),
        queries.contents(["acme"], 1, 2),
        queries.usage(None, 1, 2, "hour", ["user"], {"user": ["acme"], "model": ["acme"]}),
        hourly.usage("acme", 1, 2, "hour", ["key"], {"model": ["acme"]}, raw_hours_us=[0]),
        hourly.marks_of("acme"),
    ]
    assert [q.sql for q in built] == [q.sql for q in plain]
    for sql, parameters in built:
        assert set(re.findall(r"\{(\w+):", sql)) == set(parameters)


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'password'"):
        queries.usage(None, 1, 2, "day", ["tenant", "password"])
    with pytest.raises(ValueError, match="minute, hour, day, month"):
        queries.usage(None, 1, 2, "week", [])


def test_one_tenants_events_are_picked_out_before_anything_else_is_read() -> None:
    sql, parameters = queries.events("acme", 5, 9)
    assert " FROM usage_events PREWHERE tenant = {tenant:String} WHERE ts >= " in sql
    assert sql.endswith(" ORDER BY ts, event_id LIMIT 1 BY event_id, content_hash")
    assert parameters == {"start_us": 5, "end_us": 9, "tenant": "acme"}
    everybody = queries.events(None, 5, 9).sql
    assert " FROM usage_events FINAL WHERE ts >= " in everybody
    assert everybody.endswith(" ORDER BY ts, event_id")


def test_usage_by_the_sums_as_text() -> None:
    sql, parameters = hourly.usage(
        "acme", 5, 9, "day", ["model"], {"key": ["k1"]}, raw_hours_us=[0, HOUR_US, 2 * HOUR_US, 9 * HOUR_US]
    )
    hours = (
        "(SELECT arrayJoin(arrayFlatten(arrayMap((first, hours) -> arrayMap(i -> first + i * 3600, range(hours)), "
        "{raw_from:Array(DateTime('UTC'))}, {raw_hours:Array(UInt32)}))))"
    )
    sums = ", ".join(f"sum({{0}}({name})) AS sum_{name}" for name in queries.SUMS)
    of_hours, of_events = sums.replace("{0}(", "").replace("))", ")"), sums.replace("{0}", "toUInt128")
    assert sql == (
        "SELECT start_s, group_model, sum(counted) AS requests, sum(sum_prompt_tokens), sum(sum_cached_tokens), "
        "sum(sum_completion_tokens), sum(sum_reasoning_tokens), sum(sum_cache_write_tokens), sum(sum_images), "
        "sum(sum_audio_ms), sum(sum_tool_calls) FROM ("
        "SELECT toUnixTimestamp(toStartOfDay(hour)) AS start_s, model AS group_model, sum(requests) AS counted, "
        f"{of_hours} FROM usage_hourly FINAL WHERE hour >= fromUnixTimestamp64Micro({{start_us:Int64}}, 'UTC') "
        f"AND hour < toStartOfHour(fromUnixTimestamp64Micro({{end_us:Int64}}, 'UTC')) AND hour NOT IN {hours} "
        "AND requests > 0 "
        "AND tenant = {tenant:String} AND key_id IN {only_key:Array(String)} GROUP BY start_s, group_model "
        "UNION ALL SELECT toUnixTimestamp(toStartOfDay(ts)) AS start_s, model AS group_model, count() AS counted, "
        f"{of_events} FROM usage_events FINAL WHERE toStartOfHour(ts) IN {hours} "
        "AND ts >= fromUnixTimestamp64Micro({start_us:Int64}, 'UTC') "
        "AND ts < fromUnixTimestamp64Micro({end_us:Int64}, 'UTC') AND tenant = {tenant:String} "
        "AND (event_id, content_hash) NOT IN (SELECT event_id, content_hash FROM usage_conflicts) "
        "AND key_id IN {only_key:Array(String)} GROUP BY start_s, group_model) "
        "GROUP BY start_s, group_model ORDER BY start_s, group_model"
    )
    assert parameters == {
        "start_us": 5,
        "end_us": 9,
        "tenant": "acme",
        "only_key": ["k1"],
        "raw_from": [0, 9 * 3600],
        "raw_hours": [3, 1],
    }


def test_of_months_that_were_dropped_sums_and_events_are_both_read() -> None:
    sql, parameters = hourly.usage(None, 5, 9, "day", [], raw_hours_us=[0], dropped=[202609])
    assert ")))) OR toYYYYMM(hour) IN {dropped:Array(UInt32)})" in sql
    assert parameters["dropped"] == [202609]


def test_what_the_sums_cannot_answer() -> None:
    assert hourly.can_answer("hour", ["tenant", "model", "key", "outcome"])
    assert not hourly.can_answer("minute", [])
    assert not hourly.can_answer("day", ["user"])
    for bucket, groups in (("minute", []), ("day", ["user"])):
        with pytest.raises(ValueError, match="hourly sums"):
            hourly.usage(None, 1, 2, bucket, groups, raw_hours_us=[])
    assert hourly.can_list(range(0, 5000 * HOUR_US, HOUR_US))
    assert not hourly.can_list(range(0, 10_002 * HOUR_US, 2 * HOUR_US)), "each a run of its own"
    assert not hourly.can_list(range(0, 500_001 * HOUR_US, HOUR_US))


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
