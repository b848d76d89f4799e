"""Killed right after each write of the rows of the states table that no ordinary life of a gateway comes to.

Salvage, quarantine and dead letter; the campaign in `tests/chaos` has the others. A child wraps one call of the
product, which has no such hooks of its own, and kills itself when it returns.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from metering.errors import Rejected
from metering.events import UsageEvent
from metering.shipper import Drain
from metering.spool import CONSUMERS, Spool
from tests.unit.metering.test_spool import make_event

EVENTS = [make_event(i, user="x" * 300) for i in range(400)]


def die_after(owner: Any, name: str, nth: int = 1) -> None:
    """From now on this process kills itself when `owner.name` has returned for the nth time."""
    real, left = getattr(owner, name), [nth]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def killed(code: str) -> None:
    """Run it in a process of its own, which must kill itself."""
    lines = f"from tests.unit.metering.test_crash_points import *\nfrom metering import salvage, spool\n{code}"
    ran = subprocess.run(
        [sys.executable, "-c", lines], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr[-2000:]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A spool of a process that is gone, with all events in it for everybody."""
    path = tmp_path / "spool.sqlite3"
    spool = Spool(path)
    wait([spool.settle(event) for event in EVENTS])
    spool.close()
    return path


@pytest.mark.parametrize(
    "instant",
    ["salvage, '_keep'", "salvage, '_insert', 100", "salvage.Path, 'replace', 1", "salvage.Path, 'replace', 2"],
)
def test_salvage(path: Path, instant: str) -> None:
    data = bytearray(path.read_bytes())
    page = next(at for at in range(0, len(data), 4096) if data[at] == 0x0D and b"id-00200" in data[at : at + 4096])
    data[page : page + 200] = b"\xaa" * 200
    path.write_bytes(bytes(data))
    for _ in range(2):  # and once more in the next start, where that still comes so far
        code = f"die_after({instant})\nSpool(Path({str(path)!r}))\nos.kill(os.getpid(), signal.SIGKILL)"
        killed(code)
    spool = Spool(path)
    saved = spool.pending("ledger", 1000)
    assert spool.pending("clickhouse", 1000) == saved
    assert 300 < len(saved) < len(EVENTS)
    assert all(event in EVENTS for event in saved)
    assert spool.quarantined_total == 1
    assert (path.parent / "damaged-1" / path.name).read_bytes() == bytes(data), "what was damaged is kept"
    spool.close()


def test_quarantine(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE settled SET body = CAST('{}' AS BLOB) WHERE event_id = 'id-00007'")
    db.close()
    killed(f"found = Spool(Path({str(path)!r}))\ndie_after(found, '_commit')\nfound.pending('ledger', 9)")
    spool = Spool(path)
    for consumer in CONSUMERS:
        assert spool.pending(consumer, 1000) == EVENTS[:7] + EVENTS[8:]
    assert spool.quarantined_total == 1
    assert spool.knows("id-00007"), "nobody settles it anew"
    spool.close()


class Store:
    """Refuses one event for ever; its dead letters are a folder, where a second of one name is the first again."""

    def __init__(self, folder: Path) -> None:
        self.graves = folder / "graves"
        self.graves.mkdir(exist_ok=True)
        self.taken: list[UsageEvent] = []

    def insert(self, events: list[UsageEvent]) -> None:
        if any(event.event_id == "id-00007" for event in events):
            raise Rejected("never")
        self.taken += events

    def bury(self, event: UsageEvent, reason: str) -> None:
        (self.graves / event.event_id).write_text(reason)


def deliver(spool: Spool, store: Store) -> Drain:
    """Everything in the spool to the store."""
    drain = Drain(spool, "clickhouse", store.insert, bury=store.bury)
    drain.start()
    drain.stop(30)
    return drain


def test_dead_letter(path: Path) -> None:
    folder = str(path.parent)
    killed(f"die_after(Store, 'bury')\ndeliver(Spool(Path({str(path)!r})), Store(Path({folder!r})))")
    spool, store = Spool(path), Store(path.parent)
    assert "id-00007" in {event.event_id for event in spool.pending("clickhouse", 1000)}, "buried, not acknowledged"
    assert deliver(spool, store).buried_total == 1
    assert [grave.name for grave in store.graves.iterdir()] == ["id-00007"]
    assert (store.graves / "id-00007").read_text() == "never"
    assert spool.count("clickhouse") == 0
    assert "id-00007" not in {event.event_id for event in store.taken}
    spool.close()
