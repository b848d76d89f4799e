from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import msgspec
import pytest

from metering.events import Outcome, UsageEvent, encode
from metering.lock import Locked
from metering.spool import Spool, SpoolClosed, SpoolConflict, SpoolError, SpoolFull
from tests import oldevents

BOTH = ("clickhouse", "ledger")


def make_event(i: int, **changes: object) -> UsageEvent:
    event = UsageEvent(
        event_id=f"id-{i:05d}",
        ts_us=1_000_000 + i,
        settled_us=2_000_000 + i,
        tenant="acme",
        key_id="k1",
        model="m",
        base_model="m",
        endpoint="completions",
        gateway="g",
        outcome=Outcome.FINISHED,
        prompt_tokens=10,
        cached_tokens=3,
        completion_tokens=i,
    )
    return msgspec.structs.replace(event, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "spool.sqlite3"


@pytest.fixture
def spool(path: Path):
    spool = Spool(path)
    yield spool
    spool.close()


def test_settled_events_wait_for_every_consumer_and_then_leave(spool: Spool) -> None:
    events = [make_event(i) for i in range(5)]
    for event in events:
        spool.settle(event).result()
    assert spool.pending("clickhouse", 3) == events[:3]
    spool.ack("clickhouse", [e.event_id for e in events[:3]])
    assert spool.pending("clickhouse", 10) == events[3:]
    assert spool.pending("ledger", 10) == events
    assert (spool.count("clickhouse"), spool.count("ledger")) == (2, 5)
    assert spool.oldest_unacked_us("clickhouse") == events[3].ts_us
    spool.ack("ledger", [e.event_id for e in events])
    spool.ack("clickhouse", [e.event_id for e in events])
    assert spool.nbytes == 0
    assert spool.oldest_unacked_us("ledger") is None
    assert all(spool.knows(e.event_id) for e in events)


def test_same_bytes_again_are_no_second_event_and_other_bytes_are_a_conflict(spool: Spool) -> None:
    event = make_event(7)
    wait([spool.settle(event) for _ in range(3)])
    spool.settle(event).result()
    assert spool.pending("ledger", 10) == [event]
    with pytest.raises(SpoolConflict):
        spool.settle(make_event(7, completion_tokens=8)).result()
    spool.ack("clickhouse", [event.event_id])
    spool.ack("ledger", [event.event_id])
    spool.settle(event).result()  # shipped, still known
    with pytest.raises(SpoolConflict):
        spool.settle(make_event(7, completion_tokens=8)).result()
    assert spool.conflicts_total == 2
    assert spool.settled_total == 1
    assert spool.pending("ledger", 10) == []


def test_a_conflict_between_two_queued_settlements_leaves_the_first(spool: Spool) -> None:
    results = [spool.settle(make_event(1, completion_tokens=i)) for i in range(20)]
    wait(results)
    assert results[0].exception() is None
    assert all(isinstance(r.exception(), SpoolConflict) for r in results[1:])
    assert [e.completion_tokens for e in spool.pending("ledger", 10)] == [0]


def test_forgotten_ids_are_known_only_while_they_wait(spool: Spool) -> None:
    a, b = make_event(1), make_event(2)
    wait([spool.settle(a), spool.settle(b)])
    for consumer in BOTH:
        spool.ack(consumer, [a.event_id])
    spool.forget([a.event_id, b.event_id])
    spool.settle(make_event(3)).result()  # rides behind the forget
    assert not spool.knows(a.event_id)
    assert spool.knows(b.event_id)
    with pytest.raises(SpoolConflict):
        spool.settle(make_event(2, completion_tokens=99)).result()


def test_everything_is_there_after_a_restart(path: Path) -> None:
    first = Spool(path)
    wait([first.settle(make_event(i)) for i in range(100)])
    first.ack("clickhouse", ["id-00000"])
    size = first.nbytes
    first.close()
    second = Spool(path)
    assert second.nbytes == size
    assert [e.event_id for e in second.pending("ledger", 1000)] == [f"id-{i:05d}" for i in range(100)]
    assert second.count("clickhouse") == 99
    second.close()


def test_many_threads_settle_in_groups(spool: Spool) -> None:
    def run(base: int) -> None:
        for i in range(50):
            spool.settle(make_event(base + i)).result()

    threads = [threading.Thread(target=run, args=(1000 * t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spool.count("ledger") == spool.settled_total == 400


@pytest.mark.parametrize("column", ["body", "digest", "event_id"])
def test_a_row_that_is_not_what_was_settled_is_quarantined_and_never_shipped(path: Path, column: str) -> None:
    spool = Spool(path)
    wait([spool.settle(make_event(i)) for i in range(4)])
    spool.close()
    with sqlite3.connect(path) as db:
        (value,) = db.execute(f"SELECT CAST({column} AS BLOB) FROM settled WHERE seq = 2").fetchone()
        flipped = bytes([value[0] ^ 0x80]) + value[1:]
        kind = "TEXT" if column == "event_id" else "BLOB"
        db.execute(f"UPDATE settled SET {column} = CAST(? AS {kind}) WHERE seq = 2", (flipped,))
    db.close()
    spool = Spool(path)
    for consumer in BOTH:
        assert [e.event_id for e in spool.pending(consumer, 3)] == ["id-00000", "id-00002", "id-00003"]
    assert spool.quarantined_total == 1
    assert spool.count("ledger") == 3
    assert spool.knows("id-00001")  # it was settled: nobody may settle it anew
    spool.close()
    again = Spool(path)
    assert again.quarantined_total == 1
    again.close()


def test_a_truncated_body_is_quarantined(path: Path) -> None:
    spool = Spool(path)
    spool.settle(make_event(1)).result()
    spool.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE settled SET body = substr(body, 1, 40)")
    db.close()
    spool = Spool(path)
    assert spool.pending("ledger", 3) == []
    assert spool.quarantined_total == 1
    assert spool.nbytes == 0
    spool.close()


def put(path: Path, event_id: str, body: bytes) -> None:
    """A row of a closed spool, as another version of the code would have written it."""
    digest = hashlib.sha256(body).digest()
    with sqlite3.connect(path) as db:
        sql = "INSERT INTO settled (event_id, digest, body) VALUES (?, ?, ?) RETURNING seq"
        (seq,) = db.execute(sql, (event_id, digest, body)).fetchone()
        db.execute("INSERT INTO known VALUES (?, ?)", (event_id, digest))
        db.executemany("INSERT INTO delivery VALUES (?, ?, 1)", [(consumer, seq) for consumer in BOTH])
    db.close()


def test_a_spool_of_version_1_hands_out_what_was_settled_to_the_byte(path: Path) -> None:
    Spool(path).close()
    for number, body in enumerate(oldevents.EVENTS, 1):
        put(path, f"0190aaaa-0000-7000-8000-{number:012d}", body)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    spool = Spool(path)
    for consumer in BOTH:
        assert [encode(event) for event in spool.pending(consumer, 9)] == list(oldevents.EVENTS)
    for event in spool.pending("ledger", 9):
        spool.settle(event).result()  # the same: no conflict
    spool.settle(make_event(1)).result()
    assert [event.v for event in spool.pending("clickhouse", 9)] == [1, 1, 3]
    assert (spool.conflicts_total, spool.quarantined_total) == (0, 0)
    spool.close()


def test_an_event_of_a_newer_version_is_quarantined_whole(path: Path) -> None:
    spool = Spool(path)
    spool.settle(make_event(1)).result()
    spool.close()
    newer = encode(make_event(2)).replace(b'"v":3', b'"v":4')[:-1] + b',"tomorrow":"x"}'
    put(path, "id-00002", newer)
    spool = Spool(path)
    for consumer in BOTH:
        assert spool.pending(consumer, 9) == [make_event(1)]
    assert spool.quarantined_total == 1
    assert spool.knows("id-00002")
    spool.close()
    with sqlite3.connect(path) as db:
        ((reason, body),) = db.execute("SELECT reason, body FROM quarantine").fetchall()
    db.close()
    assert reason == "an event of version 4: this version of Meterhouse knows 1 to 3"
    assert body == newer


def test_a_spool_of_a_newer_version_is_not_opened(path: Path) -> None:
    Spool(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 4")
    db.close()
    with pytest.raises(SpoolError, match=r"newer version \(format 4\)"):
        Spool(path)


class SmallDisk(Spool):
    """A spool on a disk of `pages`: SQLite's own limit answers SQLITE_FULL, as a full disk does."""

    pages = 20

    def _connect(self) -> sqlite3.Connection:
        db = super()._connect()
        db.execute(f"PRAGMA max_page_count = {self.pages}")
        return db


def test_a_full_disk_breaks_the_promise_but_loses_no_settlement(path: Path) -> None:
    spool = SmallDisk(path)
    spool.settle(make_event(0)).result()
    big = [make_event(i, user="x" * 200_000) for i in range(1, 6)]
    results = [spool.settle(event) for event in big]
    wait(results, timeout=10)
    assert all(isinstance(r.exception(), SpoolFull) for r in results)
    assert not spool.writable()
    assert spool.oldest_unacked_us("ledger") == make_event(0).ts_us
    assert spool.failures_total >= 1
    assert spool.count("ledger") == 1
    assert spool.nbytes > 100_000
    spool.pages = 10_000  # space returns; the connection is opened anew after each failure
    deadline = time.monotonic() + 10
    while not spool.writable() and time.monotonic() < deadline:
        time.sleep(0.02)
    wait([spool.settle(event) for event in big], timeout=10)
    assert spool.pending("ledger", 10) == [make_event(0), *big]
    spool.close()


def test_closing_on_a_disk_that_stays_full_gives_up_in_time(path: Path) -> None:
    spool = SmallDisk(path)
    result = spool.settle(make_event(1, user="x" * 200_000))
    with pytest.raises(SpoolError):
        result.result(timeout=10)
    spool.close(timeout=0.1)
    with pytest.raises(SpoolClosed):
        spool.settle(make_event(2))
    reopened = Spool(path)
    assert reopened.pending("ledger", 10) == []
    reopened.close()


def test_past_its_bound_it_takes_settlements_but_no_new_requests(path: Path) -> None:
    spool = Spool(path, max_bytes=2000)
    assert spool.writable()
    wait([spool.settle(make_event(i)) for i in range(10)])
    assert not spool.writable()
    spool.settle(make_event(11)).result()
    for consumer in BOTH:
        spool.ack(consumer, [e.event_id for e in spool.pending(consumer, 100)])
    assert spool.writable()
    spool.close()
    tight = Spool(path, min_free_bytes=1 << 60)
    assert not tight.writable()
    tight.close()


def test_what_the_file_cannot_hold_is_refused_alone(spool: Spool) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        spool.settle(make_event(1, ts_us=1 << 63))
    with pytest.raises(UnicodeEncodeError):
        spool.settle(make_event(1, user="\ud800"))
    spool.settle(make_event(1, user="a\0b\u2028🦙")).result()
    assert spool.pending("ledger", 2) == [make_event(1, user="a\0b\u2028🦙")]


def filled(path: Path, count: int) -> list[UsageEvent]:
    spool = Spool(path)
    events = [make_event(i, user="x" * 300) for i in range(count)]
    wait([spool.settle(event) for event in events])
    spool.ack("ledger", [event.event_id for event in events[:10]])
    spool.close()
    return events


def test_pages_that_are_damaged_cost_no_row_but_their_own(path: Path) -> None:
    events = filled(path, 400)
    data = bytearray(path.read_bytes())
    page = next(at for at in range(0, len(data), 4096) if data[at] == 0x0D and b"id-00200" in data[at : at + 4096])
    data[page : page + 200] = b"\xaa" * 200  # a leaf of the table of events
    path.write_bytes(bytes(data))
    spool = Spool(path)
    saved = spool.pending("ledger", 1000)
    assert spool.pending("clickhouse", 1000) == saved
    assert {e.event_id for e in saved} < {e.event_id for e in events}
    assert len(saved) > 300
    assert all(event in events for event in saved)
    assert spool.quarantined_total == 1
    assert (path.parent / "damaged-1" / path.name).read_bytes() == bytes(data)
    spool.close()
    again = Spool(path)
    assert again.count("ledger") == len(saved)
    again.close()


def test_a_file_that_is_no_database_any_more_is_kept_and_begun_anew(path: Path) -> None:
    filled(path, 20)
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    spool = Spool(path)
    assert spool.count("ledger") == 0
    assert spool.quarantined_total == 1
    spool.settle(make_event(3)).result()
    spool.close()
    assert (path.parent / "damaged-1").exists()


def test_a_salvage_that_was_killed_is_finished(path: Path) -> None:
    events = filled(path, 20)
    whole = path.with_name(path.name + ".salvaged")
    path.replace(whole)
    path.write_bytes(b"the damaged one")
    path.with_name(path.name + "-wal").write_bytes(b"its log")
    spool = Spool(path)
    assert spool.pending("clickhouse", 100) == events
    spool.close()
    assert not whole.exists()


def test_an_idle_spool_finds_out_by_itself_that_the_disk_takes_writes_again(path: Path) -> None:
    spool = SmallDisk(path)
    spool.settle(make_event(0)).result()
    spool.pages = 1  # no page is left, and the connection is opened anew after each failure
    spool._writer.execute("PRAGMA max_page_count = 1")
    spool.forget(["id-00000"] * 3)
    failed = spool._change(lambda db: db.execute("CREATE TABLE more (x)").rowcount)
    with pytest.raises(SpoolError):
        failed.result(10)
    assert not spool.writable()
    spool.pages = 10_000
    deadline = time.monotonic() + 10
    while not spool.writable():
        assert time.monotonic() < deadline, "nobody asks anything of it, so it has to look itself"
        time.sleep(0.01)
    assert spool.failures_total == 1, "a look is no failure"
    spool.close()


def test_the_oldest_that_waits_closes_the_door_by_its_age(path: Path) -> None:
    now_us = [1_000_000]
    spool = Spool(path, max_age_s=1.0, clock_us=lambda: now_us[0])
    wait([spool.settle(make_event(i)) for i in (3, 1, 2)])
    now_us[0] = 2_000_000
    assert spool.writable()
    now_us[0] = 2_000_001
    assert not spool.writable()
    for consumer in BOTH:
        spool.ack(consumer, ["id-00001"])
    assert spool.writable()
    now_us[0] = 2_000_002
    assert not spool.writable()
    spool.close()
    again = Spool(path, max_age_s=1.0, clock_us=lambda: now_us[0])
    assert not again.writable()
    again.close()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM delivery WHERE seq = 2",
        "UPDATE delivery SET seq = 99 WHERE seq = 2 AND consumer = 'ledger'",
        "UPDATE delivery SET consumer = CAST(x'6c65e46765' AS TEXT) WHERE seq = 2 AND consumer = 'ledger'",
    ],
)
def test_rows_of_who_lacks_what_that_contradict_each_other_cost_no_event(path: Path, damage: str) -> None:
    spool = Spool(path)
    events = [make_event(i) for i in range(4)]
    wait([spool.settle(event) for event in events])
    spool.ack("ledger", [events[0].event_id])
    spool.close()
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    for _ in range(2):
        spool = Spool(path)
        for consumer in BOTH:
            assert spool.pending(consumer, 9) == events, "all of them again: who has one counts it once"
        assert spool.oldest_unacked_us("ledger") == events[0].ts_us
        assert spool.quarantined_total == 1
        spool.close()


def test_an_event_that_is_gone_under_its_row_is_told_for_ever(path: Path, spool: Spool) -> None:
    spool.settle(make_event(1)).result()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM settled")
    db.close()
    assert spool.pending("ledger", 9) == spool.pending("clickhouse", 9) == []
    spool.close()
    again = Spool(path)
    assert again.quarantined_total == 1
    again.close()


def test_pages_that_are_damaged_under_it_close_the_door_until_the_next_start_salvages(path: Path) -> None:
    events = filled(path, 400)
    spool = Spool(path)
    with path.open("r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xaa" * 40)
    with pytest.raises(SpoolError, match="cannot be read"):
        spool.pending("clickhouse", 1000)
    assert not spool.writable()
    assert spool.failures_total == 1
    spool.close()
    again = Spool(path)
    assert again.quarantined_total == 1
    assert {event.event_id for event in again.pending("ledger", 1000)} <= {event.event_id for event in events}
    assert again.writable()
    again.close()


def test_whatever_byte_is_flipped_nothing_else_is_handed_out_and_nothing_is_missed_in_silence(
    path: Path, tmp_path: Path
) -> None:
    spool = Spool(path)
    events = [make_event(i) for i in range(12)]
    wait([spool.settle(event) for event in events])
    left = shutil.copytree(path.parent, tmp_path / "left")  # as a killed process leaves it: most of it in the log
    spool.close()
    rng = random.Random(20251130)
    for number in range(60):
        folder = shutil.copytree(left, tmp_path / str(number))
        file = folder / (path.name if number % 2 else path.name + "-wal")
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        again = Spool(folder / path.name)
        missing = [event for event in events if not again.knows(event.event_id)]
        again.missed([event.event_id for event in missing])  # the journal still has what the log lost
        for consumer in BOTH:
            found = again.pending(consumer, 99)
            assert all(event in events for event in found)
            assert len(found) == len(events) or again.quarantined_total > 0
        again.close()


def test_what_waits_is_read_by_time_up_to_a_limit(spool: Spool) -> None:
    times = [30, 10, 20, 40]
    wait([spool.settle(make_event(i, ts_us=ts_us)) for i, ts_us in enumerate(times)])
    spool.ack("ledger", ["id-00002"])
    found = spool.pending_between("ledger", 10, 40, 9)
    assert [event.ts_us for event in found] == [10, 30]
    assert [event.ts_us for event in spool.pending_between("clickhouse", 10, 40, 2)] == [10, 20]
    assert spool.pending_between("ledger", 31, 40, 9) == []


def test_one_owner(path: Path, spool: Spool) -> None:
    with pytest.raises(Locked):
        Spool(path)
    code = f"from pathlib import Path; from metering.spool import Spool; Spool(Path({str(path)!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "Locked" in other.stderr


def test_events_for_a_consumer_that_is_gone_are_not_dropped_in_silence(path: Path, spool: Spool) -> None:
    spool.settle(make_event(1)).result()
    spool.close()
    with pytest.raises(SpoolError, match="ledger"):
        Spool(path, consumers=("clickhouse",))
    with pytest.raises(ValueError):
        spool.pending("somebody", 1)
