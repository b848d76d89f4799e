"""Every write of spool and journal fails, in every way a disk fails: nothing that ran is lost, nothing is double."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from metering.counts import HOUR_US, Counts, add_rows
from metering.events import Outcome, UsageEvent
from metering.journal import Journal, JournalError, OpenedRecord, recover_orphans
from metering.spool import Spool, SpoolBroken
from tests.doubles.bad_disk import HALF, NEVER, BadDisk, environment
from tests.sums import row_of

REQUESTS, STEPS = 8, 2
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, HALF)
FAULTS = 100
START_US = 1_000 * HOUR_US


def record(i: int) -> OpenedRecord:
    return OpenedRecord(
        event_id=f"id-{i:03d}",
        ts_us=START_US + i,
        tenant="acme",
        key_id="k",
        model="m",
        base_model="m",
        endpoint="completions",
        gateway="g",
        user="x" * 300,
    )


class House:
    """A gateway's spool and journal, and what is known of its requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spool = Spool(folder / "spool.sqlite3", min_free_bytes=0)
        self.journal = Journal(folder / "journal", 2500, self.spool.forget)
        self.events: dict[str, UsageEvent] = {}  # of requests that were let in

    def serve(self, i: int) -> None:
        """One request, as the gateway does it: refused when it cannot be journalled, cut when a step cannot."""
        opened, done = record(i), 0
        try:
            self.journal.opened(opened)
        except JournalError:
            return
        for step in range(1, STEPS + 1):
            try:
                self.journal.step([(opened.event_id, Counts(20, 16, step))])
            except JournalError:
                break
            done = step
        counts = Counts(20, 16, done) if done else Counts()
        event = self.events[opened.event_id] = opened.event(counts, outcome=Outcome.FINISHED, settled_us=7)
        try:
            self.spool.settle(event).result(10)
            self.journal.settled(event.event_id)
        except (SpoolBroken, JournalError):
            assert not (self.spool.writable() and self.journal.writable())

    def space_returns(self) -> None:
        """What the disk refused is settled, and the door opens again by itself."""
        deadline = time.monotonic() + 10
        for event in self.events.values():
            while True:
                assert time.monotonic() < deadline
                try:
                    self.spool.settle(event).result(10)
                    break
                except SpoolBroken:
                    time.sleep(0.001)
            self.journal.settled(event.event_id)
        while not self.spool.writable():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert self.journal.writable() or not self.events

    def check(self) -> None:
        events = self.spool.pending("ledger", 1000)
        assert sorted(events, key=lambda event: event.event_id) == list(self.events.values())
        assert self.spool.pending("clickhouse", 1000) == events
        assert (self.spool.conflicts_total, self.spool.quarantined_total) == (0, 0)
        assert self.journal.totals(0, 1 << 61) == add_rows(row_of(event) for event in events)
        assert (self.journal.damaged_total, self.journal.unknown_total) == (0, 0)
        assert self.journal.oldest_open_us() is None

    def close(self) -> None:
        self.journal.close()
        self.spool.close()


def play(disk: BadDisk, folder: Path, first: int, count: int, error: int) -> int:
    """One gateway whose calls from `first` on fail, and the next one on its folder. Returns how many calls it made."""
    folder.mkdir()
    house = House(folder)
    disk.arm(folder, first, count, error)
    for i in range(REQUESTS):
        house.serve(i)
    calls = disk.disarm(folder)
    house.space_returns()
    house.check()
    house.close()
    again = Spool(folder / "spool.sqlite3")
    assert recover_orphans(folder / "journal", again, 9, "next") == []
    again.close()
    next_house = House(folder)
    next_house.events = house.events
    next_house.check()
    next_house.close()
    return calls


def campaign(folder: Path, seed: int) -> None:
    """The child: a gateway for every fault. Says how many calls one makes and how many faults were met."""
    disk = BadDisk()
    calls = play(disk, folder / "sound", NEVER, 0, 0)
    rng = random.Random(seed)
    met = 0
    for number in range(FAULTS):
        first = calls * number // FAULTS
        met += play(disk, folder / str(number), first, rng.choice((1, 1, 2, 5, 20)), rng.choice(ERRORS)) > first
    sys.stdout.write(f"{calls} {met}\n")


def test_a_disk_that_fails_at_any_write_loses_nothing(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # fsync costs nothing there, and it is the library that fails
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        code = f"from tests.unit.metering.test_bad_disk import campaign, Path; campaign(Path({folder!r}), 20251130)"
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[3],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    calls, met = map(int, ran.stdout.split())
    assert calls > 100, "the library counts nothing"
    assert met > FAULTS * 3 // 4
