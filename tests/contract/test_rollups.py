"""The hourly sums, against chDB and ClickHouse servers: what is read with them is what the events say, always."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import clickhouse_connect
import pytest

from metering import hourly, queries
from metering.clickhouse import UsageRow, UsageStore, client_options
from metering.counts import HOUR_US, hour_of
from metering.errors import StoreUnavailable
from metering.events import Outcome, UsageEvent
from metering.rollups import Roller
from tests.contract.test_usage_store import DAY_US, HOUR, make_event
from tests.fixtures.clickhouse import behind

EVER_US = 1 << 61


@pytest.fixture(params=["chdb", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a migrated, empty store."""
    if request.param == "chdb":
        request.getfixturevalue("usage_store").close()
        return str(request.getfixturevalue("chdb_url"))
    return str(request.getfixturevalue("cluster_url"))


@pytest.fixture
def open_store(url: str) -> Iterator[Any]:
    made: list[UsageStore] = []

    def make(writer: str = "gw0", to: str = url) -> UsageStore:
        made.append(UsageStore(to, writer, cluster="/cluster_" in to))
        return made[-1]

    yield make
    for store in made:
        store.close()


def run(url: str, sql: str) -> None:
    client = clickhouse_connect.get_client(**client_options(url))
    client.command(sql)
    client.close()


def raw(store: UsageStore, **asked: Any) -> list[UsageRow]:
    """What the events alone say."""
    names = asked["group_by"]
    query = queries.usage(
        asked["tenant"], asked["start_us"], asked["end_us"], asked["bucket"], names, asked.get("only")
    )
    return [
        UsageRow(r[0] * 1_000_000, dict(zip(names, r[1 : 1 + len(names)], strict=True)), *r[1 + len(names) :])
        for r in store._query(query)
    ]


def agree(store: UsageStore, start_us: int = 0, end_us: int = EVER_US) -> None:
    """Usage with the sums is usage by the events, however it is asked for."""
    for bucket, group_by, tenant, only in [
        ("hour", ["tenant", "model", "base_model", "key", "adapter", "endpoint", "outcome"], None, None),
        ("day", [], None, None),
        ("month", ["tenant"], None, {"model": ["base", "other"], "key": ["k0", "k1"]}),
        ("day", ["model"], "acme", {"tenant": ["globex", "acme"]}),
        ("minute", ["tenant"], None, None),
        ("day", ["user"], None, None),
    ]:
        asked: dict[str, Any] = {"tenant": tenant, "start_us": start_us, "end_us": end_us, "bucket": bucket}
        asked |= {"group_by": group_by, "only": only}
        assert store.usage(**asked) == raw(store, **asked)


def marks(store: UsageStore) -> set[tuple[int, str]]:
    return {(hour_s * 1_000_000, writer) for hour_s, writer, _ in store._query(hourly.dirty_marks())}


def test_sums_are_the_events_before_and_after_they_are_made_late_ones_too(open_store: Any) -> None:
    store = open_store()
    events = [make_event(i, ts_us=HOUR + i * HOUR_US // 3, images=i, audio_ms=7 * i, tool_calls=i) for i in range(30)]
    store.insert(events)
    agree(store)
    assert store.rollups.roll(quiet_s=3600) == 0, "an hour that was touched just now is not quiet"
    assert store.rollups.roll() == 10
    assert marks(store) == set()
    assert store.rollups.dirty() == 0
    agree(store)
    late = make_event(90, ts_us=HOUR + HOUR_US // 2, settled_us=HOUR + 5 * DAY_US, cache_write_tokens=3)
    store.insert([late])
    assert marks(store) == {(HOUR, "gw0")}
    agree(store)
    (first, *_) = store.usage(tenant=None, start_us=0, end_us=EVER_US, bucket="hour")
    assert (first.start_us, first.requests) == (HOUR, 4), "three events and the late one"
    assert store.rollups.roll() == 1
    agree(store)
    agree(store, HOUR + 1, HOUR + 7 * HOUR_US + 1_800_000_000)  # hours that are not whole
    assert store.rollups.check(0, EVER_US) == []


def test_a_read_takes_the_sums_where_they_stand(open_store: Any, url: str) -> None:
    store = open_store()
    store.insert([make_event(i, ts_us=HOUR + i * HOUR_US) for i in range(4)])
    store.rollups.roll()
    behind(store, "TRUNCATE TABLE usage_events")
    behind(
        store,
        "INSERT INTO usage_events (v, event_id, ts, tenant, model) SELECT 2, 'x', toDateTime64("
        f"{(HOUR + 9 * HOUR_US) // 1_000_000}, 6, 'UTC'), 'acme', 'base'",
    )
    (row,) = store.usage(tenant=None, start_us=0, end_us=EVER_US, bucket="month")
    assert row.requests == 5, "four by the sums, one by an event whose hour has none"


def test_replays_and_second_contents_change_no_sum(open_store: Any) -> None:
    store = open_store()
    events = [make_event(i) for i in range(20)]
    store.insert(events)
    store.rollups.roll()
    store.insert(events[5:])
    store.insert([make_event(3, completion_tokens=77), make_event(4, model="other")])
    agree(store)
    store.rollups.roll()
    agree(store)
    (row,) = store.usage(tenant=None, start_us=0, end_us=EVER_US, bucket="month")
    assert (row.requests, row.completion_tokens) == (20, sum(range(20)))


def test_a_group_that_an_hour_has_no_more_counts_nothing(open_store: Any, url: str) -> None:
    store = open_store()
    store.insert([make_event(0), make_event(1)])
    store.rollups.roll()
    behind(store, "ALTER TABLE usage_events DELETE WHERE tenant = 'globex' SETTINGS mutations_sync = 2")
    assert store.rollups.rebuild(0, EVER_US) == 1
    assert [
        row.group["tenant"] for row in store.usage(tenant=None, start_us=0, end_us=EVER_US, group_by=["tenant"])
    ] == ["acme"]
    store.insert([make_event(2)])
    store.rollups.roll()
    agree(store)


def test_sums_that_were_tampered_with_are_found_and_made_anew(open_store: Any, url: str) -> None:
    store = open_store()
    last = (1 << 64) - 1  # no version is higher
    if store.cluster:  # where sums are only replaced
        last -= 1
    store.insert([make_event(i, ts_us=HOUR + i * HOUR_US) for i in range(6)])
    store.rollups.roll()
    behind(
        store,
        "INSERT INTO usage_hourly SELECT * REPLACE (completion_tokens + 7 AS completion_tokens, "
        f"{last} AS version) FROM usage_hourly FINAL WHERE hour = {HOUR // 1_000_000}",
    )
    behind(
        store,
        "INSERT INTO usage_hourly (hour, tenant, model, requests, version, layout) VALUES "
        f"({(HOUR - 40 * DAY_US) // 1_000_000}, 'acme', 'base', 3, {last}, {hourly.LAYOUT})",
    )
    found = store.rollups.check(0, EVER_US)
    assert [(drift.hour_us, drift.groups, drift.events, drift.summed) for drift in found] == [
        (HOUR - 40 * DAY_US, 1, 0, 3),
        (HOUR, 1, 1, 1),
    ]
    assert store.rollups.check(HOUR + HOUR_US, EVER_US) == []
    assert store.rollups.rebuild(0, EVER_US) == 7
    assert store.rollups.check(0, EVER_US) == []
    agree(store)
    assert marks(store) == set()


OLDER = (  # as code that does not know the columns inserts them
    "INSERT INTO usage_hourly (hour, tenant, model, base_model, key_id, adapter, endpoint, outcome, requests, "
    "prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, version) "
    "SELECT hour, tenant, model, base_model, key_id, adapter, endpoint, outcome, requests, "
    "prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, version + 1 FROM usage_hourly FINAL"
)


def test_sums_of_older_code_stand_for_nothing_until_they_are_made_anew(
    open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.insert([make_event(i, ts_us=HOUR + i * HOUR_US, cache_write_tokens=2, images=1) for i in range(5)])
    store.rollups.roll()
    assert store.rollups.renew() == []
    behind(store, OLDER)
    assert store._query(hourly.clean_hours(0, EVER_US)) == []
    assert store.rollups.check(0, EVER_US) == []
    agree(store)
    store.insert([make_event(7)])  # dirty: it is summed when it is quiet
    monkeypatch.setattr("metering.rollups.RENEWED_AT_ONCE", 3)
    assert [len(store.rollups.renew()) for _ in range(3)] == [3, 1, 0]
    assert marks(store) == {(HOUR, "gw0")}
    agree(store)
    assert len(store._query(hourly.clean_hours(0, EVER_US))) == 4
    store.rollups.roll()
    (row,) = store.usage(tenant=None, start_us=0, end_us=EVER_US, bucket="month")
    assert (row.cache_write_tokens, row.images) == (10, 5)
    agree(store)


def test_an_hour_that_is_touched_while_it_is_compared_has_not_drifted(
    open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.insert([make_event(0)])
    store.rollups.roll()
    before = hourly.differences

    def differences(hours: list[int]) -> queries.Query:
        monkeypatch.setattr(hourly, "differences", before)
        store.insert([make_event(2)])
        return before(hours)

    monkeypatch.setattr(hourly, "differences", differences)
    assert store.rollups.check(0, EVER_US) == []


def test_killed_between_events_and_sums_the_successor_makes_them(open_store: Any) -> None:
    dead = open_store("gw0")
    dead.insert([make_event(0)])
    dead.rollups.roll()
    dead.insert([make_event(2), make_event(4, ts_us=HOUR - 3 * DAY_US)])  # and it dies here
    other = open_store("gw1")
    other.insert([make_event(6, ts_us=HOUR + HOUR_US)])
    assert other.rollups.roll() == 1, "its own hour; nobody knows what the other one is about to insert"
    agree(other)
    successor = open_store("gw0")
    assert successor.rollups.roll() == 2
    assert marks(successor) == set()
    agree(successor)


def test_killed_between_the_mark_and_the_events_the_hour_is_read_from_its_events(open_store: Any) -> None:
    store = open_store("gw0")
    store.insert([make_event(0)])
    store.rollups.roll()
    with pytest.raises(StoreUnavailable), failing(store, "usage_events"):
        store.insert([make_event(2)])
    assert marks(store) == {(HOUR, "gw0")}
    assert store.rollups.roll() == 0, "what failed may have been stored all the same, and appear later"
    agree(store)
    store.insert([make_event(2)])
    assert store.rollups.roll() == 1
    agree(store)


def test_without_its_mark_no_event_is_inserted(open_store: Any) -> None:
    store = open_store()
    with pytest.raises(StoreUnavailable), failing(store, "usage_dirty_hours"):
        store.insert([make_event(0)])
    assert list(store.events(None, 0, EVER_US)) == []
    store.insert([make_event(0)])
    store.rollups.roll()
    agree(store)


def test_a_mark_that_could_not_be_taken_back_is_taken_back_later(open_store: Any) -> None:
    store = open_store()
    store.insert([make_event(0)])
    with pytest.raises(StoreUnavailable), failing(store, "usage_dirty_hours"):
        store.rollups.roll()
    assert store.rollups.dirty() == 1
    assert store.rollups.roll() == 1
    assert marks(store) == set()


def test_an_insert_during_the_recomputing_leaves_the_hour_dirty(
    open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.insert([make_event(0)])
    before = hourly.recompute

    def recompute(hours: list[int]) -> queries.Query:
        monkeypatch.setattr(hourly, "recompute", before)
        store.insert([make_event(2)])
        return queries.Query("SELECT 1", {})  # as if it had read the events before the insert

    monkeypatch.setattr(hourly, "recompute", recompute)
    assert store.rollups.roll() == 0
    agree(store)
    assert store.rollups.roll() == 1
    agree(store)


def test_what_a_writer_that_is_gone_left_dirty_is_adopted(open_store: Any) -> None:
    open_store("gone").insert([make_event(0)])
    open_store("alive").insert([make_event(1, ts_us=HOUR + HOUR_US)])
    store = open_store("gw0")
    store.insert([make_event(3)])
    assert store.rollups.adopt({"alive"}, 0) == 0, "none is that old"
    assert store.rollups.adopt({"alive"}, EVER_US) == 1
    assert store.rollups.roll() == 1
    assert marks(store) == {(HOUR + HOUR_US, "alive")}
    agree(store)


def test_marks_rise_though_the_clock_steps_back(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.insert([make_event(0)])
    store.rollups.roll()
    monkeypatch.setattr("metering.rollups.time.time_ns", lambda: 1_000)
    for successor in (store, open_store("gw0")):
        successor.insert([make_event(2)])
        assert marks(successor) == {(HOUR, "gw0")}
        assert successor.rollups.roll() == 1
        assert marks(successor) == set()
    agree(store)


def test_a_thread_recomputes_what_is_quiet(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    rolled = threading.Event()
    roll = store.rollups.roll

    def watched(quiet_s: float) -> int:
        found = roll(quiet_s)
        if store.rollups.dirty() == 0:
            rolled.set()
        return found

    store.rollups.roll = watched
    store.insert([make_event(0)])
    open_store("gone").insert([make_event(2)])
    monkeypatch.setattr("metering.rollups.ABANDONED_US", 0)
    roller = Roller(store.rollups, alive=lambda: {"gw0"}, period_s=0.01, quiet_s=0.0)
    roller.start()
    assert rolled.wait(20)
    roller.stop()
    assert roller.last_error is None
    assert marks(store) == set()


def test_two_writers_in_any_order_against_plain_sums(open_store: Any) -> None:
    rng = random.Random(11)
    writers = [open_store("gw0"), open_store("gw1")]
    sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    seen: set[str] = set()
    for step in range(24):
        store = rng.choice(writers)
        if rng.random() < 0.4:
            store.rollups.roll()
            continue
        events = [_random_event(rng) for _ in range(rng.randint(1, 6))]
        store.insert(events)
        for event in events:
            if event.event_id not in seen:
                seen.add(event.event_id)
                sums[hour_of(event.ts_us), event.tenant][0] += 1
                sums[hour_of(event.ts_us), event.tenant][1] += event.completion_tokens
        if step % 8 == 0:
            _check_sums(rng.choice(writers), sums)
    for store in writers:
        store.rollups.roll()
    _check_sums(writers[0], sums)
    assert marks(writers[0]) == set()
    assert writers[0].rollups.check(0, EVER_US) == []


def _random_event(rng: random.Random) -> UsageEvent:
    i = rng.randrange(60)  # few, so that many are replays; everything follows from the number
    return make_event(i, ts_us=HOUR - (i % 7) * 11 * HOUR_US + i, outcome=list(Outcome)[i % 3], user=f"u{i % 5}")


def _check_sums(store: UsageStore, sums: dict[tuple[int, str], list[int]]) -> None:
    rows = store.usage(tenant=None, start_us=0, end_us=EVER_US, bucket="hour", group_by=["tenant"])
    assert {(r.start_us, r.group["tenant"]): [r.requests, r.completion_tokens] for r in rows} == sums


@contextmanager
def failing(store: UsageStore, table: str) -> Iterator[None]:
    """Inserts into a table fail, as when the connection breaks."""
    take = store._take

    def broken() -> Any:
        client = take()
        insert = client.insert

        def refuse(into: str, *args: Any, **options: Any) -> Any:
            if into == table:
                raise OSError("broken")
            return insert(into, *args, **options)

        client.insert = refuse
        return client

    store._take = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        store._take = take  # type: ignore[method-assign]
        for client in store._idle:
            client.__dict__.pop("insert", None)
