"""One suite for the usage store, run against chDB in process, a ClickHouse server over HTTP, and two as a cluster."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import clickhouse_connect
import msgspec
import pytest

from metering import queries
from metering.clickhouse import UsageStore, client_options
from metering.counts import HOUR_US, CountRow
from metering.errors import Rejected, StoreDamaged, StoreError, StoreNewer, StoreTooMuch, StoreUnavailable
from metering.events import Outcome, UsageEvent, content_hash, decode, encode
from tests import oldevents
from tests.fixtures.clickhouse import behind

HOUR = 490_000 * HOUR_US  # 2025-11-24 16:00 UTC
DAY_US = 24 * HOUR_US


@pytest.fixture(params=["usage_store", "server_store", "cluster_store"])
def store(request: pytest.FixtureRequest) -> UsageStore:
    return request.getfixturevalue(request.param)


def make_event(i: int, **changes: object) -> UsageEvent:
    event = UsageEvent(
        event_id=f"0190aaaa-0000-7000-8000-{i:012d}",
        ts_us=HOUR + i * 1_000_003,
        settled_us=HOUR + i * 1_000_003 + 5_000_000,
        tenant=("acme", "globex")[i % 2],
        key_id=f"k{i % 3}",
        model=("base", "pirate")[i % 2],
        base_model="base",
        adapter=("", "pirate")[i % 2],
        endpoint="chat.completions",
        gateway="g1",
        outcome=Outcome.FINISHED,
        finish_reason="stop",
        prompt_tokens=100 + i,
        cached_tokens=32,
        completion_tokens=i,
        metadata={"team": "x"},
    )
    return msgspec.structs.replace(event, **changes)


def stored(store: UsageStore) -> list[UsageEvent]:
    return list(store.events(None, 0, 1 << 61))


def raw_client(store: UsageStore) -> Iterator[object]:
    return clickhouse_connect.get_client(**store._options)


def test_every_field_comes_back_to_the_same_bytes(store: UsageStore) -> None:
    events = [
        make_event(0),
        make_event(
            1,
            user="Zoë 🦙 \0 \t ' \\ \" \u2028",
            metadata={"ключ": "値", "b": "", "a": "1" * 5000, "": "empty"},
            tenant="t'; DROP TABLE usage_events; --",
            finish_reason="",
            outcome=Outcome.INTERRUPTED,
            stream=True,
            estimated=True,
            n=8,
        ),
        make_event(
            2,
            prompt_tokens=(1 << 63) - 1,
            cached_tokens=(1 << 62) + 1,
            completion_tokens=(1 << 63) - 1,
            reasoning_tokens=(1 << 53) + 1,
            recomputed_tokens=(1 << 63) - 1,
            rejected_tokens=1,
            n=(1 << 32) - 1,
            queue_us=(1 << 63) - 1,
            ttft_us=-1,
            duration_us=-(1 << 63),
            compute_us=(1 << 63) - 1,
            kv_block_us=-(1 << 63),
            preemptions=(1 << 53) + 1,
            cache_write_tokens=(1 << 53) + 1,
            images=(1 << 63) - 1,
            audio_ms=(1 << 63) - 1,
            tool_calls=1,
        ),
        make_event(3, ts_us=1, settled_us=0),
        make_event(4, ts_us=(1 << 32) * 1_000_000 - 1, settled_us=(1 << 63) - 1),
    ]
    events = [msgspec.structs.replace(e, outcome=o) for e, o in zip(events, Outcome, strict=False)]
    store.insert(events)
    expected = sorted(events, key=lambda e: (e.ts_us, e.event_id))
    assert [encode(e) for e in stored(store)] == [encode(e) for e in expected]


def test_events_of_every_version_come_back_to_the_same_bytes(store: UsageStore) -> None:
    old = [decode(body) for body in (*oldevents.EVENTS, oldevents.SECOND)]
    new = make_event(11, compute_us=1500, kv_block_us=64_000, preemptions=2, images=3, audio_ms=1500, tool_calls=2)
    for _ in range(2):
        store.insert([*old, new])
    expected = sorted([*old, new], key=lambda event: event.ts_us)
    assert [encode(event) for event in stored(store)] == [encode(event) for event in expected]
    assert {event.event_id: content_hash(event) for event in stored(store) if event.v == 1} == {
        decode(body).event_id: digest for body, digest in oldevents.EVENTS.items()
    }
    assert store.conflicts_total == 0


def test_an_event_that_differs_in_its_cost_alone_is_another_content(store: UsageStore) -> None:
    store.insert([make_event(1, compute_us=1500)])
    store.insert([make_event(1, compute_us=1501)])
    assert stored(store) == [make_event(1, compute_us=1500)]
    assert store.conflicts_total == 1


def test_an_event_of_a_newer_version_is_told_as_such(store: UsageStore) -> None:
    store.insert([make_event(0), make_event(1)])
    behind(
        store,
        "ALTER TABLE usage_events UPDATE v = 4, outcome = 'tomorrow' "
        f"WHERE event_id = '{make_event(1).event_id}' SETTINGS mutations_sync = 2",
    )
    with pytest.raises(StoreNewer, match=f"{make_event(1).event_id} .*newer"):
        stored(store)
    assert list(store.events("acme", 0, 1 << 61)) == [make_event(0)]


def test_a_replayed_reordered_half_replayed_batch_counts_once(store: UsageStore) -> None:
    events = [make_event(i) for i in range(60)]
    rng = random.Random(7)
    store.insert(events[:40])
    store.insert(events[:40])
    store.insert(events[20:])
    for _ in range(5):
        part = rng.sample(events, rng.randint(1, 60))
        store.insert(part)
    expected_counts = [
        CountRow("acme", "base", HOUR, 30, sum(100 + i for i in range(0, 60, 2)), 30 * 32, sum(range(0, 60, 2))),
        CountRow("globex", "pirate", HOUR, 30, sum(100 + i for i in range(1, 60, 2)), 30 * 32, sum(range(1, 60, 2))),
    ]
    assert stored(store) == events
    assert store.counts(0, 1 << 61) == expected_counts
    (row,) = store.usage(tenant=None, start_us=0, end_us=1 << 61, bucket="month")
    assert (row.requests, row.prompt_tokens) == (60, sum(r.prompt for r in expected_counts))
    behind(store, "OPTIMIZE TABLE usage_events FINAL")
    client = raw_client(store)
    assert client.query("SELECT count() FROM usage_events").result_rows == [(60,)]
    client.close()
    assert stored(store) == events
    assert store.conflicts_total == 0
    assert store.conflicts(0, 1 << 61) == []


def test_of_two_contents_under_one_id_the_first_stands_and_the_second_is_an_alarm(store: UsageStore) -> None:
    first = make_event(5)
    second = make_event(5, completion_tokens=500, settled_us=first.settled_us - 1_000_000)
    elsewhere = make_event(6)
    store.insert([first, elsewhere])
    store.insert([second])
    for _ in range(2):  # whichever is replayed, the first stays the first
        assert stored(store) == [first, elsewhere]
        (row,) = store.usage(tenant="globex", start_us=0, end_us=1 << 61)
        assert (row.requests, row.completion_tokens) == (1, 5)
        assert [r.completion for r in store.counts(0, 1 << 61)] == [6, 5]
        assert store.conflicts(0, 1 << 61) == [first.event_id]
        assert store.conflicts(0, HOUR) == []
        store.insert([first])
        behind(store, "OPTIMIZE TABLE usage_events FINAL")
        store.insert([second])
    assert store.conflicts_total >= 1


def test_a_conflict_under_another_tenant_or_model_is_found_too(store: UsageStore) -> None:
    first = make_event(5)
    store.insert([first])
    store.insert([make_event(5, tenant="acme"), make_event(6)])
    store.insert([make_event(5, model="other")])
    assert stored(store) == [first, make_event(6)]
    assert store.conflicts(0, 1 << 61) == [first.event_id]


def test_what_the_table_cannot_hold_is_rejected_whole_and_buried_whole(store: UsageStore) -> None:
    bad = [
        make_event(1, cached_tokens=1000),
        make_event(1, completion_tokens=-1),
        make_event(1, prompt_tokens=1 << 63),
        make_event(1, ts_us=1 << 62),
        make_event(1, tenant=""),
        make_event(1, v=4),
        make_event(1, v=1, compute_us=1),
        make_event(1, compute_us=1 << 63),
        make_event(1, n=-1),
    ]
    for event in bad:
        with pytest.raises(Rejected, match=event.event_id):
            store.insert([make_event(0), event])
    assert stored(store) == []
    for _ in range(2):
        store.bury(bad[0], "why")
    client = raw_client(store)
    rows = client.query("SELECT event_id, content_hash, reason, body FROM usage_dead_letters FINAL").result_rows
    client.close()
    assert rows == [(bad[0].event_id, content_hash(bad[0]), "why", encode(bad[0]).decode())]


def test_the_table_itself_refuses_counts_that_contradict_each_other(
    store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UsageEvent, "faults", lambda self: [])
    with pytest.raises(Rejected, match="rejects the data"):
        store.insert([make_event(1, cached_tokens=1000)])
    monkeypatch.undo()
    assert stored(store) == []


def test_usage_groups_and_buckets(store: UsageStore) -> None:
    month_end = 1_764_547_199_999_999  # the last microsecond of November 2025
    events = [
        make_event(0, ts_us=month_end, user="u1"),
        make_event(2, ts_us=month_end + 1, user="u1"),
        make_event(4, ts_us=month_end + 1 + DAY_US, user="u2", outcome=Outcome.ABORT),
        make_event(1, ts_us=month_end + 1, user="u2"),
    ]
    store.insert(events)

    def usage(**options: object) -> list[tuple[int, dict[str, str], int, int, int, int]]:
        query = {"tenant": None, "start_us": 0, "end_us": 1 << 61, **options}
        rows = store.usage(**query)
        return [(r.start_us, r.group, r.requests, r.prompt_tokens, r.cached_tokens, r.completion_tokens) for r in rows]

    november, december = 1_761_955_200_000_000, month_end + 1
    assert usage(bucket="month") == [(november, {}, 1, 100, 32, 0), (december, {}, 3, 307, 96, 7)]
    assert usage(bucket="month", group_by=["tenant", "model"]) == [
        (november, {"tenant": "acme", "model": "base"}, 1, 100, 32, 0),
        (december, {"tenant": "acme", "model": "base"}, 2, 206, 64, 6),
        (december, {"tenant": "globex", "model": "pirate"}, 1, 101, 32, 1),
    ]
    assert [(r[0], r[2]) for r in usage(bucket="day", tenant="acme")] == [
        (december - DAY_US, 1),
        (december, 1),
        (december + DAY_US, 1),
    ]
    assert [r[0] for r in usage(bucket="hour", tenant="globex")] == [december]
    assert [(r[1], r[2]) for r in usage(bucket="month", group_by=["outcome", "user"], start_us=december)] == [
        ({"outcome": "abort", "user": "u2"}, 1),
        ({"outcome": "finished", "user": "u1"}, 1),
        ({"outcome": "finished", "user": "u2"}, 1),
    ]
    for name in ("key", "adapter", "endpoint", "base_model"):
        assert usage(group_by=[name])
    assert usage(start_us=december, end_us=december) == []
    assert usage(tenant="nobody' OR 1=1") == []
    with pytest.raises(ValueError, match="group_by"):
        usage(group_by=["tenant; DROP TABLE usage_events"])
    with pytest.raises(ValueError, match="bucket"):
        usage(bucket="week")


def test_sums_do_not_wrap(store: UsageStore) -> None:
    huge = (1 << 63) - 1
    store.insert([make_event(i, prompt_tokens=huge, completion_tokens=huge) for i in (0, 2, 4)])
    (row,) = store.usage(tenant="acme", start_us=0, end_us=1 << 61, bucket="month")
    assert (row.prompt_tokens, row.completion_tokens) == (3 * huge, 3 * huge)
    assert store.counts(0, 1 << 61)[0].prompt == 3 * huge


def test_events_by_tenant_time_and_settlement(store: UsageStore) -> None:
    events = [make_event(i) for i in range(10)]
    store.insert(events)
    assert list(store.events("acme", 0, 1 << 61)) == events[0::2]
    assert list(store.events(None, events[3].ts_us, events[6].ts_us)) == events[3:6]
    late = store.events(None, 0, 1 << 61, settled_from_us=events[4].settled_us, settled_to_us=events[5].settled_us)
    assert list(late) == [events[4]]
    half_read = store.events(None, 0, 1 << 61)
    assert next(half_read) == events[0]
    half_read.close()
    assert len(stored(store)) == 10


def test_counts_take_whole_hours(store: UsageStore) -> None:
    store.insert(
        [make_event(0, ts_us=HOUR), make_event(2, ts_us=HOUR + HOUR_US - 1), make_event(4, ts_us=HOUR + HOUR_US)]
    )
    assert [(r.hour_us, r.requests) for r in store.counts(HOUR, HOUR + 1)] == [(HOUR, 2)]
    assert [(r.hour_us, r.requests) for r in store.counts(HOUR + 1, HOUR + 2 * HOUR_US)] == [(HOUR + HOUR_US, 1)]


def test_a_row_that_was_changed_behind_our_back_is_not_billed(store: UsageStore) -> None:
    store.insert([make_event(0)])
    behind(store, "ALTER TABLE usage_events UPDATE completion_tokens = 99 WHERE 1 SETTINGS mutations_sync = 2")
    with pytest.raises(StoreDamaged, match=make_event(0).event_id):
        stored(store)


def test_a_cost_that_came_to_an_event_of_version_1_is_no_event_of_ours(store: UsageStore) -> None:
    event = decode(oldevents.FULL)
    store.insert([event])
    behind(store, "ALTER TABLE usage_events UPDATE kv_block_us = 1 WHERE 1 SETTINGS mutations_sync = 2")
    with pytest.raises(StoreDamaged, match=event.event_id):  # the hash of version 1 does not cover the column
        stored(store)


def test_events_are_read_by_hours_that_have_so_many_together(
    store: UsageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [make_event(i, ts_us=HOUR + i * HOUR_US // 4 + 1) for i in range(40)]
    store.insert(events)
    store.insert(events[7:])
    store.insert([make_event(11, ts_us=events[11].ts_us, completion_tokens=99)])
    whole, asked = store._stored_events, []

    def noted(query: queries.Query) -> Iterator[UsageEvent]:
        asked.append((query.parameters["start_us"], query.parameters["end_us"]))
        return whole(query)

    monkeypatch.setattr(store, "_stored_events", noted)
    monkeypatch.setattr("metering.clickhouse.SLICE_EVENTS", 10)  # four an hour, and their replays
    start_us, end_us = HOUR + 5, HOUR + 9 * HOUR_US + HOUR_US // 2 + 2
    assert list(store.events(None, start_us, end_us)) == events[1:39]
    assert len(asked) > 4
    assert [asked[0][0], *(span[1] for span in asked)] == [*(span[0] for span in asked), end_us], "they tile the range"
    assert all(first_us % HOUR_US == 0 for first_us, _ in asked[1:])
    assert list(store.events("acme", start_us, end_us)) == events[2:39:2]
    late = {"settled_from_us": events[20].settled_us, "settled_to_us": events[30].settled_us}
    assert list(store.events(None, 0, 1 << 61, **late)) == events[20:30]
    asked.clear()
    (first, *_) = store.events(None, HOUR, HOUR + HOUR_US)
    assert (first, asked) == (events[0], [(HOUR, HOUR + HOUR_US)])


def test_usage_of_more_groups_than_are_taken_is_refused_by_the_store_itself(store: UsageStore) -> None:
    store.insert([make_event(i, user=f"u{i}", key_id=f"k{i}") for i in range(40)])
    asked: dict[str, Any] = {"tenant": None, "start_us": 0, "end_us": 1 << 61, "bucket": "month"}
    for name in ("user", "key"):
        for summed in (False, True):
            assert len(store.usage(**asked, group_by=[name], most=40)) == 40
            with pytest.raises(StoreTooMuch, match="more than 39 results"):
                store.usage(**asked, group_by=[name], most=39)
            if not summed:
                store.rollups.roll()
    if store.cluster:
        return
    query = queries.stopped(queries.usage(None, 0, 1 << 61, "month", ["user"], most=9), 9)
    with pytest.raises(StoreUnavailable) as caught:
        store._query(query._replace(sql=query.sql.replace("LIMIT 10", "LIMIT 100")))
    assert getattr(caught.value.__cause__, "code", None) == 158, "it stops: it does not only give less"


def test_many_threads(store: UsageStore) -> None:
    def run(base: int) -> None:
        for i in range(5):
            store.insert([make_event(base + i)])
            store.usage(tenant=None, start_us=0, end_us=1 << 61)

    threads = [threading.Thread(target=run, args=(100 * t,)) for t in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stored(store)) == 60


def test_a_large_batch_in_one_insert(store: UsageStore) -> None:
    events = [make_event(i, ts_us=HOUR + i * 60_000_000) for i in range(5000)]
    store.insert(events)
    assert stored(store) == events


def test_nothing_after_close(store: UsageStore) -> None:
    store.counts(0, 1)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.counts(0, 1)
    store.close()


def test_an_empty_batch_needs_no_store() -> None:
    UsageStore("http://127.0.0.1:1/nowhere").insert([])


def test_a_store_that_is_not_there_is_unavailable_and_never_rejects() -> None:
    store = UsageStore("http://default:secret@127.0.0.1:1/nowhere")
    with pytest.raises(StoreUnavailable) as caught:
        store.insert([make_event(0)])
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreUnavailable):
        store.counts(0, 1)


@pytest.mark.parametrize("url", ["", "chdb://", "chdb://relative/x", "postgresql://x/y", "http:///db"])
def test_a_url_that_names_no_store(url: str) -> None:
    with pytest.raises(ValueError, match="chdb:///"):
        client_options(url)
