"""Archiving a month and dropping it, against chDB and a ClickHouse server: whoever reads sees no difference, ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from metering import frozen, retention
from metering.archive import Archive, month_us
from metering.clickhouse import UsageStore
from metering.counts import HOUR_US, add_rows, hour_of
from metering.errors import StoreDamaged, StoreTooMuch, StoreUnavailable
from metering.events import UsageEvent
from metering.lock import FileLock
from metering.queries import Query
from metering.retention import RETIRING, Retention, Retirer
from tests.contract.test_rollups import OLDER
from tests.contract.test_usage_store import DAY_US, make_event
from tests.fixtures.clickhouse import behind
from tests.sums import row_of

MONTH = 202509
FIRST_US, END_US = month_us(MONTH)
EVER_US = 1 << 61


@pytest.fixture(params=["chdb", "server"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a migrated, empty store."""
    if request.param == "chdb":
        request.getfixturevalue("usage_store").close()
        return str(request.getfixturevalue("chdb_url"))
    request.getfixturevalue("server_store")
    return str(request.getfixturevalue("server_url"))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


@pytest.fixture
def open_store(url: str, archive: Archive) -> Iterator[Callable[..., UsageStore]]:
    made: list[UsageStore] = []

    def make(writer: str = "gw0", at_hand: Archive | None = archive) -> UsageStore:
        made.append(UsageStore(url, writer, at_hand))
        return made[-1]

    yield make
    for store in made:
        store.close()


def event_at(i: int, **changes: object) -> UsageEvent:
    """Thirty over the month, the next of the month after."""
    ts_us = FIRST_US + i * DAY_US + i * 123_456_789
    counted = {"cache_write_tokens": i % 4, "images": i % 2, "audio_ms": 10 * i, "tool_calls": i % 3}
    return make_event(i, ts_us=ts_us, settled_us=ts_us + 1000, user=f"u{i % 2}", **counted, **changes)


def check(store: UsageStore, events: list[UsageEvent]) -> None:
    """All that can be asked of the store is what these events say."""
    events = sorted(events, key=lambda event: (event.ts_us, event.event_id))
    assert list(store.events(None, 0, EVER_US)) == events
    assert list(store.events("acme", 0, EVER_US)) == [e for e in events if e.tenant == "acme"]
    settled = [e for e in events if e.settled_us >= FIRST_US + 9 * DAY_US]
    assert list(store.events(None, 0, EVER_US, settled_from_us=FIRST_US + 9 * DAY_US)) == settled
    assert store.counts(0, EVER_US) == add_rows(row_of(event) for event in events)
    cut_us = FIRST_US + 3 * DAY_US + HOUR_US // 3
    for start_us, end_us in ((0, EVER_US), (cut_us, END_US + DAY_US)):
        inside = [event for event in events if start_us <= event.ts_us < end_us]
        for bucket, names, only in [
            ("hour", ["tenant", "outcome"], {}),
            ("month", [], {"model": ["base"]}),
            ("minute", ["user"], {}),
        ]:
            found = store.usage(tenant=None, start_us=start_us, end_us=end_us, bucket=bucket, group_by=names, only=only)
            assert found == frozen.usage_of(inside, bucket, names, only), (bucket, names, start_us)


def glance(store: UsageStore, events: list[UsageEvent]) -> None:
    """One question for each way to read."""
    assert list(store.events(None, 0, EVER_US)) == sorted(events, key=lambda event: (event.ts_us, event.event_id))
    assert store.counts(FIRST_US, END_US) == add_rows(row_of(event) for event in events)
    for bucket, names in (("day", ["tenant"]), ("minute", ["user"])):
        found = store.usage(tenant=None, start_us=FIRST_US, end_us=END_US, bucket=bucket, group_by=names)
        assert found == frozen.usage_of(events, bucket, names, {})


def test_a_month_that_was_archived_and_dropped_reads_as_before(open_store: Any, archive: Archive) -> None:
    store = open_store()
    events = [event_at(i) for i in range(34)]
    store.insert(events)
    store.insert(events[::3])
    store.insert([event_at(5, completion_tokens=99)])
    assert Retention(store, archive).months(END_US - 1) == []
    assert Retention(store, archive).months(END_US) == [MONTH]
    manifest = Retention(store, archive).run(MONTH)
    assert (manifest.rows, manifest.standing) == (31, 30)
    assert store._query(Query("SELECT count() FROM usage_events FINAL", {})) == [(4,)]
    assert [(one.month, one.dropped, one.events) for one in store.archived()] == [(MONTH, True, 31)]
    check(store, events)
    assert store.conflicts(0, EVER_US) == [event_at(5).event_id]
    assert store.rollups.check(0, EVER_US) == []
    assert Retention(store, archive).months(END_US) == []
    assert Retention(store, archive).run(MONTH) == manifest, "there is nothing more"
    store.rollups.rebuild(0, EVER_US)
    check(store, events)


def test_what_comes_after_the_archive_is_counted_and_is_its_next_part(open_store: Any, archive: Archive) -> None:
    store = open_store()
    events = [event_at(i) for i in range(30)]
    store.insert(events)
    Retention(store, archive).run(MONTH)
    late = [event_at(2, event_id="late-1"), event_at(29, event_id="late-2", tenant="new")]
    store.insert([*late, event_at(4), event_at(5)])  # the last two were archived: a replay
    check(store, [*events, *late])
    store.rollups.roll()
    check(store, [*events, *late])
    store.insert([event_at(6, prompt_tokens=7_000_000)])  # another content under an archived id
    assert store.conflicts_total == 1
    check(store, [*events, *late])
    manifest = Retention(store, archive).run(MONTH)
    assert [(part.rows, part.standing) for part in manifest.parts] == [(30, 30), (3, 2)]
    assert store._query(Query("SELECT count() FROM usage_events", {})) == [(0,)]
    check(store, [*events, *late])
    assert store.conflicts(0, EVER_US) == [event_at(6).event_id]
    store.insert(late)
    check(store, [*events, *late])


def test_what_is_read_one_by_one_of_an_archive_is_bounded(
    open_store: Any, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.insert([msgspec.structs.replace(event_at(i), user=f"u{i}") for i in range(30)])
    Retention(store, archive).run(MONTH)
    asked: dict[str, Any] = {"tenant": None, "start_us": FIRST_US, "end_us": END_US, "bucket": "month"}
    assert len(store.usage(**asked, group_by=["user"], most=30)) == 30
    with pytest.raises(StoreTooMuch, match="more than 29 results"):
        store.usage(**asked, group_by=["user"], most=29)
    monkeypatch.setattr("metering.clickhouse.MOST_READ", 20)
    assert len(store.usage(**asked | {"tenant": "acme"}, group_by=["user"], most=30)) == 15
    with pytest.raises(StoreTooMuch, match="more than 20 requests one by one"):
        store.usage(**asked, group_by=["user"], most=30)
    monkeypatch.setattr("metering.clickhouse.MOST_SCANNED", 29)
    monkeypatch.setattr(archive, "_part", None)  # nothing of a file is read then
    with pytest.raises(StoreTooMuch, match="more than 29 archived requests"):
        store.usage(**asked | {"tenant": "acme"}, group_by=["user"], most=30)
    assert store.usage(**asked, most=1)[0].requests == 30, "its sums stand"


def test_sums_of_a_dropped_month_that_older_code_made_are_made_anew_from_the_archive(
    open_store: Any, archive: Archive
) -> None:
    store = open_store()
    events = [event_at(i) for i in range(33)]
    store.insert(events)
    retention = Retention(store, archive)
    retention.run(MONTH)
    store.rollups.roll()
    behind(store, OLDER)
    assert store.outdated_months() == [MONTH]
    found = store.usage(tenant=None, start_us=0, end_us=EVER_US, group_by=["tenant"])
    assert found == frozen.usage_of(events, "day", ["tenant"], {})
    assert len(store.rollups.renew()) == 3, "those of the month after: what is archived is not made of no events"
    retirer = Retirer(retention, None, stored_until_us=lambda: 0, clock_us=lambda: 0)
    retirer.pass_once()
    assert store.outdated_months() == []
    store.archive = None  # the sums do alone
    (row,) = store.usage(tenant=None, start_us=FIRST_US, end_us=END_US, bucket="month")
    assert row == frozen.usage_of(events[:30], "month", [], {})[0]
    assert row.cache_write_tokens == 43


class Killed(BaseException):
    """The process ended here."""


STEPS = (
    *("_sum_up", "_archive_all", "_note", "_move", "_finish"),
    *("_check_archive", "_sum_again", "_check_sums", "_drop_moved"),
)


@pytest.mark.parametrize(("url", "again"), [("chdb", True), ("server", False)], indirect=["url"])
def test_killed_before_or_after_any_step_nothing_is_lost_or_doubled(
    open_store: Any, archive: Archive, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    store = open_store()
    events = [event_at(i) for i in range(0, 30, 5)]
    store.insert(events)
    if again:
        Retention(store, archive).run(MONTH)
        store.insert([event_at(2)])
        events.append(event_at(2))
    killed = 0
    for step in STEPS:
        for after in (False, True):
            real = getattr(Retention, step)

            def cut(self: Retention, *args: Any, real: Any = real, after: bool = after, **options: Any) -> Any:
                if after:
                    real(self, *args, **options)
                raise Killed

            monkeypatch.setattr(Retention, step, cut)
            try:
                Retention(store, archive, turn_s=0).run(MONTH)
            except Killed:
                killed += 1
            monkeypatch.setattr(Retention, step, real)
            glance(store, events)
            late = event_at(1, event_id=f"late-{step}-{after}")
            store.insert([late])  # so that the next run has something to do
            events.append(late)
            assert list(store.events(None, 0, EVER_US)) == sorted(events, key=lambda e: (e.ts_us, e.event_id))
    assert killed >= 12
    Retention(store, archive).run(MONTH)
    assert store._query(Query(f"EXISTS TABLE {RETIRING}", {})) == [(0,)]
    check(store, events)
    assert archive.check(MONTH).standing == len(events)


def test_an_event_that_comes_while_its_month_is_moved_out_goes_back_and_is_archived(
    open_store: Any, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(), open_store("gw1")
    events = [event_at(i) for i in range(5)]
    store.insert(events)
    late, move = [event_at(7), event_at(8)], Retention._move

    def slow(self: Retention, month: int) -> None:
        if late:
            other.insert([late.pop()])
            other.rollups.roll()
        move(self, month)

    monkeypatch.setattr(Retention, "_move", slow)
    manifest = Retention(store, archive).run(MONTH)
    assert [part.rows for part in manifest.parts] == [5, 1, 1]
    check(store, [*events, event_at(7), event_at(8)])


def test_what_was_moved_and_is_not_archived_is_not_read_as_nothing(
    open_store: Any, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while moved, with an event that came after the archive was written: the next start puts it back."""
    store, other = open_store(), open_store("gw1")
    events = [event_at(i) for i in range(5)]
    store.insert(events)
    move = Retention._move

    def killed(self: Retention, month: int) -> None:
        other.insert([event_at(7)])
        move(self, month)
        raise Killed

    monkeypatch.setattr(Retention, "_move", killed)
    with pytest.raises(Killed):
        Retention(store, archive).run(MONTH)
    for read in (
        lambda: list(store.events(None, 0, EVER_US)),
        lambda: store.counts(0, EVER_US),
        lambda: store.usage(tenant=None, start_us=0, end_us=EVER_US, bucket="day"),
    ):
        with pytest.raises(StoreUnavailable, match="being archived"):
            read()
    assert store.counts(0, FIRST_US) == []
    retirer = Retirer(Retention(store, archive), None, stored_until_us=lambda: 0, clock_us=lambda: 0)
    retirer.start()
    retirer._thread.join()
    assert retirer.last_error is None
    assert store.moving() == []
    check(store, [*events, event_at(7)])


def test_a_read_during_which_a_month_moves_is_made_again(open_store: Any, archive: Archive) -> None:
    store = open_store()
    events = [event_at(i) for i in range(5)]
    store.insert(events)
    read = store._summed_counts

    tries: list[int] = []

    def moved(start_us: int, end_us: int) -> Any:
        tries.append(start_us)
        if len(tries) == 1:
            Retention(store, archive).run(MONTH)
            return []
        return read(start_us, end_us)

    store._summed_counts = moved
    assert store.counts(0, EVER_US) == add_rows(row_of(event) for event in events)
    assert len(tries) == 2


def test_a_month_that_still_arrives_is_archived_later(open_store: Any, archive: Archive) -> None:
    store, other = open_store(), open_store("gw1")
    store.insert([event_at(1)])
    other.insert([event_at(2)])
    with pytest.raises(StoreUnavailable, match="still arriving"):
        Retention(store, archive).run(MONTH)
    other.rollups.roll()
    Retention(store, archive).run(MONTH)
    check(store, [event_at(1), event_at(2)])


def test_without_its_archive_a_month_is_an_error_and_not_nothing(open_store: Any, archive: Archive) -> None:
    store = open_store()
    store.insert([event_at(1), event_at(33)])
    Retention(store, archive).run(MONTH)
    without = open_store("gw1", None)
    assert list(without.events(None, END_US, EVER_US)) == [event_at(33)]
    with pytest.raises(StoreDamaged, match="not at hand"):
        list(without.events(None, 0, EVER_US))
    with pytest.raises(StoreDamaged, match="not at hand"):
        without.usage(tenant=None, start_us=0, end_us=EVER_US, group_by=["user"])
    (archive.folder / "2025-09" / "manifest.json").rename(archive.folder / "gone")
    with pytest.raises(StoreDamaged, match="2025-09 is missing"):
        list(store.events(None, 0, EVER_US))
    (row,) = store.usage(tenant=None, start_us=0, end_us=END_US, bucket="month")
    assert row.requests == 1, "the sums outlive both"


def test_what_was_changed_in_the_store_or_the_archive_is_not_dropped(
    open_store: Any, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    events = [event_at(i) for i in range(4)]
    store.insert(events)
    monkeypatch.setattr(retention, "ATTEMPTS", 1)
    store.command(
        Query(
            "ALTER TABLE usage_events UPDATE completion_tokens = 99 "
            f"WHERE event_id = '{events[1].event_id}' SETTINGS mutations_sync = 2",
            {},
        )
    )
    with pytest.raises(StoreDamaged, match=events[1].event_id):
        Retention(store, archive).run(MONTH)
    assert archive.months() == []
    store.command(
        Query(
            "ALTER TABLE usage_events UPDATE completion_tokens = 1 "
            f"WHERE event_id = '{events[1].event_id}' SETTINGS mutations_sync = 2",
            {},
        )
    )
    move = Retention._move

    def lost(self: Retention, month: int) -> None:
        move(self, month)
        (archive.folder / "2025-09" / "manifest.json").unlink()

    monkeypatch.setattr(Retention, "_move", lost)
    with pytest.raises(StoreDamaged, match="2025-09 is missing"):
        Retention(store, archive).run(MONTH)
    assert store._query(Query(f"SELECT count() FROM {RETIRING}", {})) == [(4,)], "kept until it is archived"
    with pytest.raises(StoreDamaged, match="2025-09 is missing"):
        Retention(store, archive).run(MONTH)


def test_one_gateway_archives_at_a_time(open_store: Any, archive: Archive) -> None:
    store = open_store()
    events = [event_at(i) for i in range(4)]
    store.insert(events)
    with FileLock(archive.folder / ".lock"), pytest.raises(StoreUnavailable, match="another gateway is archiving"):
        Retention(store, archive, turn_s=0).run(MONTH)
    assert archive.months() == []
    check(store, events)


def test_a_thread_archives_what_is_old_enough_and_stored_everywhere(open_store: Any, archive: Archive) -> None:
    store = open_store()
    events = [event_at(i) for i in (1, 2, 33)]
    store.insert(events)
    now_us, stored_us = [month_us(202510)[0] + 1], [0]
    retirer = Retirer(
        Retention(store, archive), 1, stored_until_us=lambda: stored_us[0], clock_us=lambda: now_us[0], period_s=0.01
    )
    assert retirer.pass_once() == []
    now_us[0] = month_us(202511)[0]
    assert retirer.pass_once() == [], "a gateway may still have usage of it"
    stored_us[0] = now_us[0]
    assert retirer.pass_once() == [MONTH]
    check(store, events)
    retirer.start()
    retirer.stop()
    assert retirer.last_error is None


def test_any_order_of_inserts_rolls_and_archives(open_store: Any, archive: Archive) -> None:
    rng = random.Random(5)
    store = open_store()
    seen: dict[str, UsageEvent] = {}
    for _ in range(10):
        what = rng.random()
        if what < 0.6:
            some = [event_at(rng.randrange(40)) for _ in range(4)]
            store.insert(some)
            seen |= {event.event_id: event for event in some}
        elif what < 0.8:
            store.rollups.roll()
        else:
            Retention(store, archive).run(rng.choice([MONTH, 202510]))
    check(store, list(seen.values()))
    assert hour_of(FIRST_US) == FIRST_US
    assert msgspec.json.encode(store.archived())
