from __future__ import annotations

import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from metering.counts import HOUR_US, CountRow
from metering.events import Outcome
from metering.frames import MAGIC, frame, scan
from metering.journal import Journal, JournalError, OpenedRecord, recover_orphans
from metering.segments import live_segments
from metering.spool import Spool
from tests.orphans import orphans_of

HOUR = 1000 * HOUR_US


def opened(i: int, **changes: object) -> OpenedRecord:
    record = OpenedRecord(
        event_id=f"id-{i:05d}",
        ts_us=HOUR + i,
        tenant="acme",
        key_id="k",
        model="m",
        base_model="base",
        adapter="m",
        endpoint="chat.completions",
        gateway="old",
        n=2,
        stream=True,
        user="ü",
        metadata={"b": "2", "a": "1"},
        prompt_tokens=50,
    )
    return msgspec.structs.replace(record, **changes)


def counts(completion: int, prompt: int = 50, cached: int = 16) -> tuple[int, int, int, int, int, int]:
    return (prompt, cached, completion, 0, 1, 2)


def crashed(folder: Path, to: Path) -> Path:
    """The folder as it would be found had the process been killed now."""
    shutil.copytree(folder, to)
    return to


def only_segment(folder: Path) -> Path:
    (path,) = folder.glob("segment-*.mhj")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def spool(tmp_path: Path):
    spool = Spool(tmp_path / "spool.sqlite3")
    yield spool
    spool.close()


@pytest.fixture
def journal(folder: Path):
    journal = Journal(folder)
    yield journal
    journal.close()


def test_what_is_open_and_how_far_it_came(journal: Journal, folder: Path) -> None:
    for i in range(3):
        journal.opened(opened(i))
    journal.step([("id-00000", counts(0, 20)), ("id-00001", counts(3))])
    journal.step([("id-00000", counts(1)), ("id-00001", counts(4))])
    assert journal.oldest_open_us() == HOUR
    journal.settled("id-00000")
    assert journal.oldest_open_us() == HOUR + 1
    assert [(o.opened, o.counts.completion) for o in orphans_of(folder)] == [(opened(1), 4), (opened(2), 0)]
    assert orphans_of(folder)[0].counts == counts(4)
    assert journal.totals(HOUR, HOUR + 1) == [CountRow("acme", "m", HOUR, 3, 100, 32, 5)]
    assert journal.totals(HOUR + 1, HOUR + HOUR_US) == []
    journal.settled("id-00001")
    journal.settled("id-00002")
    assert journal.oldest_open_us() is None


def test_orphans_are_settled_once_as_interrupted(journal: Journal, folder: Path, spool: Spool, tmp_path: Path) -> None:
    for i in range(4):
        journal.opened(opened(i))
    journal.step([(f"id-{i:05d}", counts(i)) for i in range(1, 4)])
    spool.settle(opened(3).event(counts(3), outcome=Outcome.FINISHED, settled_us=9)).result()  # killed before `settled`
    left = crashed(folder, tmp_path / "left")
    again = crashed(folder, tmp_path / "again")
    events = recover_orphans(left, spool, 77, "new")
    assert [e.event_id for e in events] == ["id-00000", "id-00001", "id-00002"]
    assert [(e.prompt_tokens, e.cached_tokens, e.completion_tokens) for e in events] == [
        (0, 0, 0),
        (50, 16, 1),
        (50, 16, 2),
    ]
    assert {(e.outcome, e.settled_us, e.gateway, e.user, e.n, e.adapter) for e in events} == {
        (Outcome.INTERRUPTED, 77, "new", "ü", 2, "m")
    }
    assert all(not e.faults() for e in events)
    assert len(spool.pending("ledger", 10)) == 4
    assert recover_orphans(left, spool, 88, "newer") == []
    assert orphans_of(left) == []
    # killed after the spool had them and before the folder was cleared: an id settled here is not settled again
    assert [e.event_id for e in recover_orphans(again, spool, 99, "newest")] == []
    assert spool.conflicts_total == 0
    next_run = Journal(left)
    assert next_run.totals(HOUR, HOUR + 1) == [CountRow("acme", "m", HOUR, 4, 150, 48, 6)]
    next_run.close()


def test_a_spool_that_lost_a_settled_row_gets_it_from_the_journal(
    journal: Journal, folder: Path, spool: Spool, tmp_path: Path
) -> None:
    journal.opened(opened(1))
    journal.step([("id-00001", counts(5))])
    journal.settled("id-00001")
    again = crashed(folder, tmp_path / "again")
    (event,) = recover_orphans(crashed(folder, tmp_path / "left"), spool, 7, "g")
    assert event.completion_tokens == 5
    assert spool.quarantined_total == 1, "a settlement that the disk lost is told"
    spool.missed(["id-00001"])
    assert recover_orphans(again, spool, 8, "g") == []
    with sqlite3.connect(spool.path) as db:
        assert db.execute("SELECT CAST(event_id AS TEXT) FROM quarantine").fetchall() == [("id-00001",)], "told once"
    db.close()


def test_a_journal_is_not_opened_over_unsettled_requests(
    journal: Journal, folder: Path, tmp_path: Path, spool: Spool
) -> None:
    journal.opened(opened(1))
    left = crashed(folder, tmp_path / "left")
    with pytest.raises(JournalError, match="recover"):
        Journal(left)
    recover_orphans(left, spool, 5, "g")
    Journal(left).close()
    with pytest.raises(JournalError, match="another process"):
        Journal(folder)
    with pytest.raises(JournalError, match="another process"):
        recover_orphans(folder, spool, 5, "g")


def test_rotation_carries_what_is_open_and_keeps_the_totals(folder: Path, spool: Spool, tmp_path: Path) -> None:
    forgotten: list[str] = []
    journal = Journal(folder, max_bytes=2000, on_retired=forgotten.extend)
    journal.opened(opened(0, ts_us=HOUR + HOUR_US))
    for i in range(1, 60):
        journal.opened(opened(i))
        journal.step([("id-00000", counts(i)), (f"id-{i:05d}", counts(2))])
        journal.settled(f"id-{i:05d}")
    expected = [
        CountRow("acme", "m", HOUR, 59, 59 * 50, 59 * 16, 118),
        CountRow("acme", "m", HOUR + HOUR_US, 1, 50, 16, 59),
    ]
    assert journal.totals(HOUR, HOUR + 2 * HOUR_US) == expected
    assert journal.oldest_open_us() == HOUR + HOUR_US
    journal._worker.submit(lambda: None).result()  # a folder cannot be copied in one instant while segments retire
    left = crashed(folder, tmp_path / "left")
    for event in recover_orphans(left, spool, 5, "g"):
        if event.event_id == "id-00000":
            assert event.completion_tokens == 59
    recovered = Journal(left)
    assert recovered.totals(HOUR, HOUR + 2 * HOUR_US) == expected
    recovered.close()
    journal.close()
    assert len(list(folder.glob("segment-*"))) == 1, "old segments are gone, the open request keeps the last"
    assert set(forgotten) <= {f"id-{i:05d}" for i in range(1, 60)}
    assert len(forgotten) == len(set(forgotten)) > 40
    assert [o.counts.completion for o in orphans_of(folder)] == [59]


def test_a_segment_is_closed_by_its_age(folder: Path) -> None:
    now_s, forgotten = [0.0], list[str]()
    journal = Journal(folder, on_retired=forgotten.extend, max_age_s=60.0, clock_s=lambda: now_s[0])
    journal.opened(opened(1))
    journal.settled("id-00001")
    now_s[0] = 59.9
    journal.opened(opened(2))
    assert len(live_segments(folder)) == 1
    now_s[0] = 60.0
    journal.step([("id-00002", counts(1))])
    journal._worker.submit(lambda: None).result()
    assert forgotten == ["id-00001"]
    assert [number for number, _ in live_segments(folder)] == [2]
    assert [o.counts.completion for o in orphans_of(folder)] == [1]
    journal.close()


def test_segments_that_cannot_leave_are_bounded_and_leave_when_they_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metering.journal._RETRY_S", 0.01)
    journal = Journal(folder, max_bytes=1000, max_total_bytes=4000)
    add, failing = journal._totals.add, True

    def refuse(*arguments: Any) -> None:
        if failing:
            raise sqlite3.OperationalError("database or disk is full")
        add(*arguments)

    monkeypatch.setattr(journal._totals, "add", refuse)
    journal.opened(opened(0))
    i = 0
    while journal.nbytes < 4000:
        i += 1
        journal.opened(opened(i))
        journal.settled(f"id-{i:05d}")
    with pytest.raises(JournalError, match="4000 bytes"):
        journal.opened(opened(100))
    assert 4000 <= journal.nbytes < 6000
    assert not journal.writable()
    journal.step([("id-00000", counts(7))])  # what runs is journalled all the same
    failing = False
    deadline = time.monotonic() + 10
    while not journal.writable():
        assert time.monotonic() < deadline, "nothing is appended any more, so it has to try itself"
        time.sleep(0.01)
    journal.opened(opened(101))
    (row,) = journal.totals(HOUR, HOUR + 1)
    assert (row.requests, row.completion) == (i + 2, 7)
    journal.close()


def test_the_beginning_of_a_segment_that_could_not_be_made_is_in_nobodys_way(journal: Journal, folder: Path) -> None:
    (folder / "segment-0000000002.mhj").write_bytes(b"half a head of an earlier attempt" * 100)
    journal.opened(opened(1))
    journal._rotate_at = 0
    journal.step([("id-00001", counts(1))])
    journal._worker.submit(lambda: None).result()
    assert orphans_of(folder) == [(opened(1), counts(1))]
    assert only_segment(folder).name == "segment-0000000002.mhj"


def test_what_an_fsync_refused_is_written_anew_before_the_old_goes(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metering.journal._RETRY_S", 0.01)
    synced: list[str] = []

    def fsync(path: Path) -> None:
        synced.append(path.name)
        if len(synced) == 1:
            raise OSError("Input/output error")

    monkeypatch.setattr("metering.journal.fsync", fsync)
    journal.opened(opened(1))
    journal._rotate_at = 0
    journal.step([("id-00001", counts(1))])
    deadline = time.monotonic() + 10
    while live_segments(folder)[0][0] != 3:
        assert time.monotonic() < deadline
        journal.step([("id-00001", counts(2))])
        time.sleep(0.005)
    assert synced[0] == "segment-0000000002.mhj"
    assert orphans_of(folder)[0].counts.completion == 2


def test_totals_are_right_at_every_moment_of_a_rotation(folder: Path) -> None:
    journal = Journal(folder, max_bytes=1500)
    for i in range(300):
        journal.opened(opened(i))
        journal.step([(f"id-{i:05d}", counts(2))])
        journal.settled(f"id-{i:05d}")
        (row,) = journal.totals(HOUR, HOUR + 1)
        assert (row.requests, row.completion) == (i + 1, 2 * (i + 1))
    journal.close()


def test_every_crash_point_of_a_rotation_counts_each_request_once(folder: Path, tmp_path: Path, spool: Spool) -> None:
    """The folder with old and new segment, with the new one torn, with the totals moved and the old not yet deleted."""
    journal = Journal(folder, max_bytes=10**9)
    for i in range(3):
        journal.opened(opened(i))
        journal.step([(f"id-{i:05d}", counts(i + 1))])
        spool.settle(opened(i).event(counts(i + 1), outcome=Outcome.FINISHED, settled_us=1)).result()
    journal.settled("id-00000")
    before = crashed(folder, tmp_path / "before")
    old = only_segment(before)
    journal._rotate_at = 0
    journal.settled("id-00001")  # rotates; id-00002 is carried
    journal._worker.submit(lambda: None).result()
    after = crashed(folder, tmp_path / "after")
    journal.close()
    new = only_segment(after)
    expected = [CountRow("acme", "m", HOUR, 3, 150, 48, 6)]

    for name, cut in (("both", None), ("torn", 30), ("empty", 0)):
        both = crashed(before, tmp_path / name)
        (both / new.name).write_bytes(new.read_bytes()[:cut])
        assert recover_orphans(both, spool, 1, "g") == []
        run = Journal(both)
        assert run.totals(HOUR, HOUR + 1) == expected
        run.close()
    moved = crashed(after, tmp_path / "moved")
    shutil.copy(old, moved / old.name)  # the totals have it, the file is not deleted yet
    assert recover_orphans(moved, spool, 1, "g") == []
    run = Journal(moved)
    assert run.totals(HOUR, HOUR + 1) == expected
    run.close()


def test_a_torn_tail_costs_nothing_else(journal: Journal, folder: Path, tmp_path: Path) -> None:
    journal.opened(opened(1))
    journal.step([("id-00001", counts(1))])
    whole = only_segment(folder).stat().st_size
    journal.step([("id-00001", counts(2))])
    data = only_segment(folder).read_bytes()
    for size in range(whole, len(data)):
        left = tmp_path / f"left{size}"
        left.mkdir()
        (left / only_segment(folder).name).write_bytes(data[:size])
        assert [o.counts.completion for o in orphans_of(left)] == [1]


def test_any_flipped_byte_is_found_and_the_rest_is_read(
    journal: Journal, folder: Path, tmp_path: Path, spool: Spool
) -> None:
    journal.opened(opened(1))
    start = only_segment(folder).stat().st_size
    journal.step([("id-00001", counts(1))])
    end = only_segment(folder).stat().st_size
    journal.step([("id-00001", counts(2))])
    name, data = only_segment(folder).name, only_segment(folder).read_bytes()
    for at in range(start, end):
        found = scan(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        assert [(d.offset, d.length) for d in found.damage] == [(start, end - start)], at
        assert len(found.payloads) == 3
        assert found.torn == 0
    left = tmp_path / "left"
    left.mkdir()
    (left / name).write_bytes(data[:start] + b"\xff" + data[start + 1 :])
    (event,) = recover_orphans(left, spool, 1, "g")
    assert event.completion_tokens == 2, "counts are cumulative: the next step has what the damaged one had"
    assert (left / "damaged" / name).exists()
    run = Journal(left)
    assert run.damaged_total == 1
    run.close()


def test_magic_in_a_payload_is_no_frame() -> None:
    payloads = [MAGIC * 5, frame(b"inner"), b""]
    data = b"".join(frame(p) for p in payloads)
    assert scan(data).payloads == payloads
    broken = scan(b"junk" + data + b"\0" * 100)
    assert broken.payloads == payloads
    assert broken.torn == 100


def test_records_of_a_newer_version_stop_the_start(
    journal: Journal, folder: Path, tmp_path: Path, spool: Spool
) -> None:
    left = crashed(folder, tmp_path / "left")
    with only_segment(left).open("ab") as file:
        file.write(frame(msgspec.msgpack.encode(["new-kind", 1])))
    with pytest.raises(JournalError, match="this version"):
        recover_orphans(left, spool, 1, "g")
    only_segment(left).write_bytes(frame(msgspec.msgpack.encode(["h", 99, 1])))
    with pytest.raises(JournalError, match="newer"):
        Journal(left)


def test_progress_after_the_settlement_shows_in_the_totals(journal: Journal) -> None:
    journal.opened(opened(1))
    journal.settled("id-00001")
    journal.step([("id-00001", counts(9)), ("never-opened", counts(1))])
    assert journal.totals(HOUR, HOUR + 1)[0].completion == 9
    assert journal.unknown_total == 1


def test_a_disk_that_takes_half_a_record_takes_none(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.opened(opened(1))
    write = os.write
    monkeypatch.setattr("os.write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(JournalError, match="cannot be written"):
        journal.step([("id-00001", counts(1))])
    assert not journal.writable()
    monkeypatch.setattr("os.ftruncate", lambda fd, size: os.close(-1))  # and the half cannot be taken back
    with pytest.raises(JournalError):
        journal.step([("id-00001", counts(1))])
    with pytest.raises(JournalError):
        journal.step([("id-00001", counts(1))])
    monkeypatch.undo()
    journal.step([("id-00001", counts(2))])
    assert journal.writable()
    assert scan(only_segment(folder).read_bytes()).damage == []
    assert orphans_of(folder)[0].counts.completion == 2


@pytest.mark.parametrize("damage", ["truncated", "no database"])
def test_damaged_sums_are_kept_aside_and_told_and_stop_nothing(folder: Path, damage: str) -> None:
    Journal(folder).close()
    sums = folder / "totals.sqlite3"
    sums.write_bytes(sums.read_bytes()[:5000] if damage == "truncated" else b"x" * 5000)
    journal = Journal(folder)
    try:
        assert journal.damaged_total == 1
        journal.opened(opened(1))
        journal.step([("id-00001", counts(3))])
        assert [row.completion for row in journal.totals(0, 2**60)] == [3]
    finally:
        journal.close()
    assert len(list(folder.glob("damaged-*.sqlite3"))) == 1


def test_nothing_is_written_after_close(folder: Path) -> None:
    journal = Journal(folder)
    journal.opened(opened(1))
    journal.settled("id-00001")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.settled("id-00001")
    assert list(folder.glob("segment-*")) == []
