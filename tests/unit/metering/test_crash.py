"""A process that journals and settles is killed at random instants; nothing acknowledged is lost, nothing is double."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from metering.counts import HOUR_US, Counts, add_rows
from metering.events import Outcome, UsageEvent
from metering.journal import Journal, OpenedRecord, recover_orphans
from metering.spool import Spool
from tests.sums import row_of

KILLS = 12
START_US = 1_000 * HOUR_US


def record(i: int) -> OpenedRecord:
    return OpenedRecord(
        event_id=f"id-{i:07d}",
        ts_us=START_US + i * 400_000_000,  # a few requests an hour
        tenant=("acme", "globex")[i % 2],
        key_id="k",
        model="m",
        base_model="m",
        endpoint="completions",
        gateway="child",
        prompt_tokens=20,
    )


def work(folder: Path, first: int) -> None:
    """The child: eight requests at a time, a step for all of them, one settled every step. Tells what it did."""
    spool = Spool(folder / "spool.sqlite3")
    journal = Journal(folder / "journal", max_bytes=20_000, on_retired=spool.forget)
    running: dict[str, tuple[OpenedRecord, int]] = {}
    number = first
    while True:
        while len(running) < 8:
            opened = record(number)
            journal.opened(opened)
            tell(f"o {opened.event_id}")
            running[opened.event_id] = (opened, 0)
            number += 1
        running = {event_id: (opened, done + 1) for event_id, (opened, done) in running.items()}
        journal.step([(event_id, Counts(20, 16, done)) for event_id, (_, done) in running.items()])
        tell(*(f"s {event_id} {done}" for event_id, (_, done) in running.items()))
        ended = [event_id for i, event_id in enumerate(running) if i % 3 == number % 3]
        waits = []
        for event_id in ended:
            opened, done = running.pop(event_id)
            event = opened.event(Counts(20, 16, done), outcome=Outcome.FINISHED, settled_us=7)
            waits.append((event_id, done, spool.settle(event)))
        for event_id, done, settled in waits:
            settled.result()
            tell(f"a {event_id} {done}")
            journal.settled(event_id)


def tell(*lines: str) -> None:
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


def run_and_kill(folder: Path, first: int, alive_s: float) -> str:
    code = f"from tests.unit.metering.test_crash import work, Path; work(Path({str(folder)!r}), {first})"
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = child.stdout.readline()  # it is at work
        time.sleep(alive_s)
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read()
    return told[: told.rfind("\n") + 1]


def test_killed_at_random_instants(tmp_path: Path) -> None:
    rng = random.Random(20251130)
    opened: set[str] = set()
    reached: dict[str, int] = {}
    acknowledged: dict[str, int] = {}
    stored: dict[str, UsageEvent] = {}
    first = 0
    for _ in range(KILLS):
        for line in run_and_kill(tmp_path, first, rng.uniform(0.0, 0.25)).splitlines():
            kind, event_id, *done = line.split()
            opened.add(event_id)
            if kind == "s":
                reached[event_id] = int(done[0])
            elif kind == "a":
                acknowledged[event_id] = int(done[0])
        spool = Spool(tmp_path / "spool.sqlite3")
        recover_orphans(tmp_path / "journal", spool, 99, "next")
        events = spool.pending("ledger", 1_000_000)
        assert spool.pending("clickhouse", 1_000_000) == events
        for event in events:
            assert event.event_id not in stored, "settled twice"
            stored[event.event_id] = event
        for consumer in spool.consumers:
            spool.ack(consumer, [event.event_id for event in events])
        assert spool.conflicts_total == spool.quarantined_total == 0
        spool.close()
        first = 1 + max(int(event_id.removeprefix("id-")) for event_id in stored)

    assert len(acknowledged) > 50
    assert opened <= set(stored), "a request that was let in has no event"
    for event_id, done in acknowledged.items():
        assert (stored[event_id].outcome, stored[event_id].completion_tokens) == (Outcome.FINISHED, done)
    for event_id, done in reached.items():
        assert done <= stored[event_id].completion_tokens <= done + 1, "what was journalled is billed"
    interrupted = sum(event.outcome is Outcome.INTERRUPTED for event in stored.values())
    assert 0 < interrupted <= 8 * KILLS + KILLS

    journal = Journal(tmp_path / "journal")
    assert journal.totals(0, 1 << 61) == add_rows(row_of(event) for event in stored.values())
    assert journal.damaged_total == journal.unknown_total == 0
    journal.close()
