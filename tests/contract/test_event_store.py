"""What every event store must do, run against SQLite and PostgreSQL."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import msgspec
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import billing.store
from billing.errors import Conflict, LedgerCorrupt, LedgerUnavailable
from billing.store import EventStore, NewEvent, StoredEvent
from migrations.runner import migrate_ledger


@pytest.fixture
def store(ledger_url: str) -> Iterator[EventStore]:
    opened = EventStore(ledger_url)
    yield opened
    opened.close()


def event(stream: str = "a", payload: str = "{}", key: str | None = None) -> NewEvent:
    return NewEvent(
        stream=stream, type="t", payload=payload, key=key, payload_hash=key and f"hash of {key}", result=key
    )


def append(store: EventStore, *events: NewEvent, time_us: int = 1) -> list[StoredEvent]:
    with store.exclusive() as log:
        return log.append(events, actor="tester", time_us=time_us)


def raw(url: str) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.NullPool)


def test_numbers_have_no_gap_and_versions_count_per_stream(store: EventStore) -> None:
    append(store, event("a"), event("b"), event("a"))
    append(store, event("b"))
    assert [(row.seq, row.stream, row.version) for row in store.read()] == [
        (1, "a", 1),
        (2, "b", 1),
        (3, "a", 2),
        (4, "b", 2),
    ]


def test_a_row_is_read_as_it_was_written(store: EventStore, ledger_url: str) -> None:
    text = '{"name":"Zoë \\u0000 ‮ 🦊"}'
    written = append(store, event(payload=text, key="k"), time_us=2**62)
    reopened = EventStore(ledger_url)
    assert reopened.read() == written
    assert written[0].payload == text
    assert (written[0].actor, written[0].time_us, written[0].result) == ("tester", 2**62, "k")
    reopened.close()


def test_an_error_inside_leaves_nothing(store: EventStore) -> None:
    def append_and_fail() -> None:
        with store.exclusive() as log:
            log.append([event()], actor="tester", time_us=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        append_and_fail()
    assert store.read() == []
    assert append(store, event())[0].seq == 1


def test_a_key_stands_once(store: EventStore) -> None:
    append(store, event(key="once"))
    with pytest.raises(Conflict):
        append(store, event(), event(key="once"))
    assert [row.key for row in store.read()] == ["once"]
    found = store.find("once")
    assert found is not None
    assert found.payload_hash == "hash of once"
    assert store.find("never") is None


def test_more_keys_are_found_than_fit_one_query(store: EventStore) -> None:
    keys = [f"k{i}" for i in range(billing.store.KEYS_PER_QUERY * 2 + 1)]
    append(store, *(event(key=key) for key in keys))
    with store.exclusive() as log:
        assert set(log.find([*keys, "other"])) == set(keys)


def test_time_never_runs_backwards(store: EventStore) -> None:
    append(store, event(), time_us=50)
    assert append(store, event(), time_us=40)[0].time_us == 50


def test_pages_and_the_writers_view(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.store, "PAGE", 3)
    append(store, *(event("a" if i % 2 else "b") for i in range(10)))
    assert [row.seq for row in store.read(4, 3)] == [5, 6, 7]
    with store.exclusive() as log:
        assert log.seq == 10
        assert [[row.seq for row in log.read(after)] for after in (2, 5, 8, 10)] == [[3, 4, 5], [6, 7, 8], [9, 10], []]
    assert [row.version for row in store.scan("a")] == [1, 2, 3, 4, 5]


def test_a_scan_starts_at_a_time(store: EventStore) -> None:
    for time_us in (10, 20, 30):
        append(store, event("a"), event("b"), time_us=time_us)
    assert [(row.stream, row.time_us) for row in store.scan("a", recorded_from_us=20)] == [("a", 20), ("a", 30)]


def test_a_scan_finds_every_time_without_walking_the_stream(store: EventStore) -> None:
    """On a long stream the first row that is asked for is found by a few look-ups."""
    times = sorted((7 * i) % 40 // 2 * 10 for i in range(60))  # some several times, with holes between them
    for time_us in times:
        append(store, event("a"), event("b"), time_us=time_us)
    for from_us in range(0, max(times) + 20, 5):
        found = [row.time_us for row in store.scan("a", recorded_from_us=from_us)]
        assert found == [time_us for time_us in times if time_us >= from_us]
    assert list(store.scan("nobody's", recorded_from_us=5)) == []
    asked: list[str] = []
    sa.event.listen(store._engine, "before_cursor_execute", lambda _c, _cursor, sql, *_: asked.append(sql))
    assert len(list(store.scan("a", recorded_from_us=times[-1]))) == times.count(times[-1])
    assert len(asked) <= 12
    assert not any("time_us >=" in sql for sql in asked)  # which would read every earlier row to pass it over


def test_the_database_refuses_to_change_history(store: EventStore, ledger_url: str) -> None:
    append(store, event())
    for statement in ("UPDATE events SET payload = 'x'", "DELETE FROM events"):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"), raw(ledger_url).begin() as connection:
            connection.execute(sa.text(statement))
    assert store.verify_chain() == 1


def tamper(url: str, statement: str) -> None:
    """What only somebody with the database's own rights can do."""
    with raw(url).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("ALTER TABLE events DISABLE TRIGGER USER"))
        else:
            connection.execute(sa.text("DROP TRIGGER events_are_never_updated"))
            connection.execute(sa.text("DROP TRIGGER events_are_never_deleted"))
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize(
    ("statement", "seq"),
    [
        ("UPDATE events SET payload = '{\"amount\":2}' WHERE seq = 3", 3),
        ("UPDATE events SET actor = 'another' WHERE seq = 2", 2),
        ("UPDATE events SET time_us = 2 WHERE seq = 1", 1),
        ("UPDATE events SET payload_hash = NULL WHERE seq = 4", 4),
        ("DELETE FROM events WHERE seq = 2", 2),
        ("UPDATE events SET hash = (SELECT hash FROM events WHERE seq = 1) WHERE seq = 2", 2),
    ],
)
def test_the_chain_finds_what_was_changed(store: EventStore, ledger_url: str, statement: str, seq: int) -> None:
    append(store, *(event(key=f"k{i}") for i in range(5)))
    assert store.verify_chain() == 5
    tamper(ledger_url, statement)
    with pytest.raises(LedgerCorrupt) as caught:
        store.verify_chain()
    assert caught.value.seq == seq


def test_the_chain_finds_a_row_that_was_rewritten_with_its_hash(store: EventStore, ledger_url: str) -> None:
    rows = append(store, *(event() for _ in range(3)))
    forged = msgspec.structs.replace(rows[1], payload='"forged"')
    digest = billing.store.chained(rows[0].hash, forged)
    tamper(ledger_url, f"UPDATE events SET payload = '\"forged\"', hash = '{digest}' WHERE seq = 2")
    with pytest.raises(LedgerCorrupt) as caught:
        store.verify_chain()
    assert caught.value.seq == 3


def test_a_part_of_the_chain_is_checked_up_to_a_row_that_was_checked_before(store: EventStore, ledger_url: str) -> None:
    rows = append(store, *(event() for _ in range(5)))
    known = rows[-1].seq, rows[-1].hash
    append(store, event())  # behind what is known: not looked at
    assert [store.verify_chain(after, upto=known) for after in range(6)] == [5] * 6
    tamper(ledger_url, "UPDATE events SET payload = 'x' WHERE seq = 3")
    assert store.verify_chain(3, upto=known) == 5
    with pytest.raises(LedgerCorrupt) as caught:
        store.verify_chain(2, upto=known)
    assert caught.value.seq == 3


def test_a_chain_that_was_forged_to_its_end_is_told_by_a_hash_from_before(store: EventStore, ledger_url: str) -> None:
    rows = append(store, *(event() for _ in range(3)))
    forged = msgspec.structs.replace(rows[2], payload='"forged"')
    digest = billing.store.chained(rows[1].hash, forged)
    tamper(ledger_url, f"UPDATE events SET payload = '\"forged\"', hash = '{digest}' WHERE seq = 3")
    assert store.verify_chain() == 3  # by itself it holds
    with pytest.raises(LedgerCorrupt, match="rewritten"):
        store.verify_chain(upto=(3, rows[2].hash))


@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_chain_whose_end_is_gone_is_told(store: EventStore, ledger_url: str, after: int) -> None:
    rows = append(store, *(event() for _ in range(3)))
    tamper(ledger_url, "DELETE FROM events WHERE seq = 3")
    with pytest.raises(LedgerCorrupt, match="event 3: a number is missing"):
        store.verify_chain(after, upto=(3, rows[2].hash))


def test_the_last_number_before_a_time(store: EventStore) -> None:
    assert store.last_before(100) == 0
    for time_us in (10, 20, 20, 30):
        append(store, event("a"), event("b"), time_us=time_us)
    assert [store.last_before(time_us) for time_us in (10, 11, 20, 21, 30, 31)] == [0, 2, 2, 6, 6, 8]


def test_a_store_that_is_not_migrated_says_so(postgres_url: str, tmp_path: object) -> None:
    for url in (postgres_url, f"sqlite:///{tmp_path}/new.sqlite3"):
        with pytest.raises(LedgerUnavailable, match="meterhouse migrate"):
            EventStore(url)


@pytest.mark.parametrize("url", ["sqlite://", "mysql://x/y", "nonsense", "sqlite:////no/such/folder/x.sqlite3"])
def test_a_url_that_is_no_ledger_is_refused(url: str) -> None:
    with pytest.raises(LedgerUnavailable):
        EventStore(url)


def test_an_unreachable_server_is_told_without_its_address() -> None:
    with pytest.raises(LedgerUnavailable) as caught:
        EventStore("postgresql+psycopg://someone:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)


def test_the_migration_makes_the_table_that_the_code_reads(ledger_url: str) -> None:
    assert migrate_ledger(ledger_url) == []  # again: nothing to do
    ours = billing.store._table.metadata
    with raw(ledger_url).connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_name": lambda name, kind, _: kind != "table" or name == "events"}
        )
        assert compare_metadata(context, ours) == []


def write(url: str, name: str, count: int) -> None:
    """A writer that decides on what it sees: each event says which number it expects to be."""
    store = EventStore(url)
    for _ in range(count):
        with store.exclusive() as log:
            log.append([event(f"stream-{name}", payload=str(log.seq + 1))], actor=name, time_us=1)
    store.close()


def check_interleaved(store: EventStore, count: int) -> None:
    rows = store.read(limit=10_000)
    assert [row.seq for row in rows] == list(range(1, count + 1))
    assert [int(row.payload) for row in rows] == [row.seq for row in rows]
    assert store.verify_chain() == count


def test_threads_write_one_after_the_other(store: EventStore, ledger_url: str) -> None:
    threads = [threading.Thread(target=write, args=(ledger_url, str(i), 25)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_interleaved(store, 100)


def test_processes_write_one_after_the_other(store: EventStore, ledger_url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=write, args=(ledger_url, str(i), 20)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    check_interleaved(store, 60)
