"""Durable settlements a second, and how long one takes, beside a bare SQLite loop that writes the same rows.

    python benchmarks/spool.py                                  # a minute
    python benchmarks/spool.py --folder /mnt/data --repeats 5   # on another disk

An appender settles an event, waits until it is on disk, and settles the next one, as a gateway's requests do: all on
one event loop. The bare loop has no queue, no second thread and nobody who waits: it encodes and hashes as many events
as there are appenders, inserts them in one transaction with the same settings, and commits. Both in turn, on the same
disk, in the same run; medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from metering.events import Outcome, UsageEvent, encode
from metering.spool import _SCHEMA, CONSUMERS, Spool

APPENDERS = (1, 32, 256)
SECONDS = 2.0


class Result(msgspec.Struct, frozen=True):
    """One run: events a second, and percentiles of the time from a settlement to its acknowledgement."""

    events_per_s: float
    p50_ms: float
    p99_ms: float


def make_events(count: int) -> list[UsageEvent]:
    """Events as a gateway makes them."""
    first = UsageEvent(
        event_id="",
        ts_us=1_764_547_200_000_000,
        settled_us=1_764_547_201_000_000,
        tenant="acme",
        key_id="key_0190aaaa-0000-7000-8000-000000000001",
        model="SmolLM2-135M-Instruct",
        base_model="SmolLM2-135M-Instruct",
        endpoint="chat.completions",
        gateway="gw0",
        outcome=Outcome.FINISHED,
        finish_reason="stop",
        prompt_tokens=211,
        cached_tokens=128,
        completion_tokens=64,
        stream=True,
        ttft_us=20_000,
        duration_us=900_000,
        compute_us=500_000,
        kv_block_us=9_000_000,
    )
    replace = msgspec.structs.replace
    return [replace(first, event_id=f"0190aaaa-0000-7000-8000-{i:012x}", ts_us=first.ts_us + i) for i in range(count)]


def through_the_spool(folder: Path, appenders: int, events: list[UsageEvent], seconds: float) -> Result:
    """So many appenders on one event loop, until the time is over or the events are."""
    spool = Spool(folder / "spool.sqlite3", max_bytes=1 << 40)
    took_s: list[float] = []
    left = iter(events)
    end_s = 0.0

    async def append() -> None:
        for event in left:
            began_s = time.perf_counter()
            if began_s >= end_s:
                return
            await asyncio.wrap_future(spool.settle(event))
            took_s.append(time.perf_counter() - began_s)

    async def run() -> float:
        nonlocal end_s
        began_s = time.perf_counter()
        end_s = began_s + seconds
        await asyncio.gather(*(append() for _ in range(appenders)))
        return time.perf_counter() - began_s

    elapsed_s = asyncio.run(run())
    spool.close()
    return _result(took_s, elapsed_s)


def bare(folder: Path, appenders: int, events: list[UsageEvent], seconds: float) -> Result:
    """The same rows by one thread, so many in a transaction."""
    db = sqlite3.connect(folder / "bare.sqlite3", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.executescript(_SCHEMA)
    took_s: list[float] = []
    began_s = time.perf_counter()
    for at in range(0, len(events), appenders):
        batch_s = time.perf_counter()
        if batch_s - began_s >= seconds:
            break
        bodies = [(event, encode(event)) for event in events[at : at + appenders]]
        db.execute("BEGIN IMMEDIATE")
        for event, body in bodies:
            digest = hashlib.sha256(body).digest()
            row = (event.event_id, digest, body)
            seq = db.execute("INSERT INTO settled (event_id, digest, body) VALUES (?, ?, ?)", row).lastrowid
            db.execute("INSERT INTO known VALUES (?, ?)", (event.event_id, digest))
            lacking = [(consumer, seq, event.ts_us) for consumer in CONSUMERS]
            db.executemany("INSERT INTO delivery VALUES (?, ?, ?)", lacking)
        db.execute("COMMIT")
        took_s += [time.perf_counter() - batch_s] * len(bodies)
    elapsed_s = time.perf_counter() - began_s
    db.close()
    return _result(took_s, elapsed_s)


def _result(took_s: list[float], elapsed_s: float) -> Result:
    cuts = statistics.quantiles(took_s, n=100)
    return Result(len(took_s) / elapsed_s, cuts[49] * 1e3, cuts[98] * 1e3)


def _median(results: list[Result]) -> Result:
    columns = zip(*map(msgspec.structs.astuple, results), strict=True)
    return Result(*(statistics.median(column) for column in columns))


def measure(folder: Path, repeats: int, seconds: float) -> dict[tuple[str, int], Result]:
    """Both ways in turn, each in an empty folder."""
    ways: dict[str, Callable[[Path, int, list[UsageEvent], float], Result]] = {
        "spool": through_the_spool,
        "bare": bare,
    }
    events = make_events(int(60_000 * seconds))
    gc.collect()
    gc.freeze()
    found: dict[tuple[str, int], list[Result]] = {}
    for _ in range(repeats):
        for appenders in APPENDERS:
            for name, way in ways.items():
                own = Path(tempfile.mkdtemp(dir=folder))
                found.setdefault((name, appenders), []).append(way(own, appenders, events, seconds))
                shutil.rmtree(own)
    return {key: _median(results) for key, results in found.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: the temporary one's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run")
    options = parser.parse_args()
    found = measure(options.folder or Path(tempfile.gettempdir()), options.repeats, options.seconds)
    table = Table("appenders", "events/s", "bare", "ratio", "p50 ms", "bare", "p99 ms", "bare", title="durable appends")
    for appenders in APPENDERS:
        ours, other = found["spool", appenders], found["bare", appenders]
        table.add_row(
            str(appenders),
            *(f"{ours.events_per_s:,.0f}", f"{other.events_per_s:,.0f}"),
            f"{ours.events_per_s / other.events_per_s:.2f}",
            *(f"{ours.p50_ms:.2f}", f"{other.p50_ms:.2f}", f"{ours.p99_ms:.2f}", f"{other.p99_ms:.2f}"),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
