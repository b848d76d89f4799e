"""The sums of journalled counts whose segments are gone.

Knows: one small SQLite file in the journal's folder. Does not know: segments' format, which requests are open.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from metering.counts import CountRow
from metering.disk import database_damage

log = logging.getLogger(__name__)


class Totals:
    """The sums of retired segments. A segment is added at most once: `through` is the last one that was."""

    _SCHEMA = """
    CREATE TABLE IF NOT EXISTS through (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL);
    INSERT OR IGNORE INTO through VALUES (1, 0);
    CREATE TABLE IF NOT EXISTS totals (
        tenant TEXT NOT NULL, model TEXT NOT NULL, hour_us INTEGER NOT NULL,
        requests INTEGER NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL, completion INTEGER NOT NULL,
        PRIMARY KEY (tenant, model, hour_us)
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS damage (
        number INTEGER NOT NULL, at INTEGER NOT NULL, length INTEGER NOT NULL, PRIMARY KEY (number, at)
    );
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        path = folder / "totals.sqlite3"
        damage = database_damage(path)
        kept_bytes = self._put_aside(path, damage) if damage else 0
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(self._SCHEMA)
        if damage:
            self._db.execute("INSERT OR IGNORE INTO damage VALUES (0, 0, ?)", (kept_bytes,))

    @staticmethod
    def _put_aside(path: Path, damage: str) -> int:
        """Keep a damaged file, of so many bytes, under another name."""
        kept = path.with_name(f"damaged-{path.stat().st_mtime_ns}.sqlite3")
        log.error(
            "the journal's sums are damaged (%s): kept as %s, begun anew; reconcile misses them", damage, kept.name
        )
        path.with_name(path.name + "-journal").unlink(missing_ok=True)  # it must never be applied to the new file
        path.rename(kept)
        return kept.stat().st_size

    def through(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT number FROM through").fetchone()[0])

    def add(self, through: int, rows: Iterable[CountRow], damage: Iterable[tuple[int, int, int]] = ()) -> None:
        """All or nothing: the rows of every segment up to `through`, unless they were added before."""
        sql = (
            "INSERT INTO totals VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + "
            "excluded.requests, prompt = prompt + excluded.prompt, cached = cached + excluded.cached, "
            "completion = completion + excluded.completion"
        )
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                moved = self._db.execute("UPDATE through SET number = ?1 WHERE number < ?1", (through,)).rowcount
                if moved:
                    self._db.executemany(sql, [msgspec.structs.astuple(row) for row in rows])
                    self._db.executemany("INSERT OR IGNORE INTO damage VALUES (?, ?, ?)", damage)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def rows(self, start_us: int, end_us: int) -> list[CountRow]:
        sql = "SELECT * FROM totals WHERE hour_us >= ? AND hour_us < ?"
        with self._lock:
            return [CountRow(*row) for row in self._db.execute(sql, (start_us, end_us))]

    def damage(self) -> list[tuple[int, int, int]]:
        """(segment, offset, length) of every stretch ever found."""
        with self._lock:
            return [(row[0], row[1], row[2]) for row in self._db.execute("SELECT number, at, length FROM damage")]

    def damaged(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM damage").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()
