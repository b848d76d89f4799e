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

log = logging.getLogger(__name__)


class _Damaged(Exception):
    """The file is no database any more."""


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
        try:
            self._db = self._open(path)
        except _Damaged:
            kept = path.with_name(f"damaged-{path.stat().st_mtime_ns}.sqlite3")
            log.error("the journal's sums are damaged: kept as %s, begun anew; reconcile will miss them", kept.name)
            path.rename(kept)
            self._db = self._open(path)
            self._db.execute("INSERT OR IGNORE INTO damage VALUES (0, 0, ?)", (kept.stat().st_size,))

    def _open(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(self._SCHEMA)
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise _Damaged
        except sqlite3.DatabaseError as error:
            db.close()
            if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise _Damaged from error
            raise
        except BaseException:
            db.close()
            raise
        return db

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

    def damaged(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM damage").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()
