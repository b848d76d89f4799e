"""The durable local queue of settlements, in front of every consumer of usage events.

Knows: SQLite (WAL, synchronous=FULL), one committer thread with group commit, who still has to be given which
event. Does not know: ClickHouse, prices, the journal's format. A settlement is acknowledged when its bytes
are on disk and not before; from then on it leaves only when every consumer has acknowledged it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from metering.disk import database_damage, fsync
from metering.events import UsageEvent, VersionError, decode, encode
from metering.lock import FileLock
from metering.salvage import adopt, mend, note, salvage

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settled (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which events are handed out
    event_id TEXT NOT NULL UNIQUE,
    digest BLOB NOT NULL,                   -- sha256 of body
    body BLOB NOT NULL                      -- canonical bytes of the event
);
CREATE TABLE IF NOT EXISTS delivery (       -- one row per event and consumer that has not acknowledged it
    consumer TEXT NOT NULL,
    seq INTEGER NOT NULL,
    ts_us INTEGER NOT NULL,
    PRIMARY KEY (consumer, seq)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS delivery_by_time ON delivery (consumer, ts_us);
CREATE INDEX IF NOT EXISTS delivery_by_seq ON delivery (seq);
CREATE TABLE IF NOT EXISTS known (          -- ids settled here, until the journal has forgotten the request
    event_id TEXT PRIMARY KEY,
    digest BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quarantine (     -- rows whose bytes are not what was settled: never shipped, kept to look at
    seq INTEGER PRIMARY KEY,
    event_id BLOB NOT NULL,
    reason TEXT NOT NULL,
    digest BLOB NOT NULL,
    body BLOB NOT NULL
);
"""
_VERSION = 3  # grows with the events': code that does not know their version must not open the file
_BATCH = 4096  # settlements in one transaction: bounds the time to the first acknowledgement
_RETRY_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
CONSUMERS = ("clickhouse", "ledger")


class SpoolError(Exception):
    """Root of what the spool tells its callers."""


class SpoolBroken(SpoolError):
    """The disk does not take writes now. The settlement stays queued in memory and is tried again."""


class SpoolFull(SpoolBroken):
    """The disk has no room left; otherwise as `SpoolBroken`."""


class SpoolConflict(SpoolError):
    """The id was settled before with other bytes. The first settlement stands."""


class SpoolClosed(SpoolError):
    """The spool was closed."""


class _Entry:
    """One settlement on its way to the disk, with everyone who waits for it."""

    __slots__ = ("body", "digest", "event", "futures")

    def __init__(self, event: UsageEvent, body: bytes) -> None:
        self.event = event
        self.body = body
        self.digest = hashlib.sha256(body).digest()
        self.futures: list[Future[None]] = []


class _Change:
    """Another write (acknowledge, forget, quarantine) that rides in the committer's transaction."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[sqlite3.Connection], int]) -> None:
        self.work = work  # returns the event bytes that it freed
        self.future: Future[None] = _pending_future()


def _pending_future() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # what is to be settled cannot be cancelled by who waits for it
    return future


class Spool:
    """One file, one process, many threads. All methods but `close` are thread-safe and may be called at any time.

    Counters (from the start of this object): `settled_total`, `conflicts_total`, `failures_total` (failed
    commits and reads); `quarantined_total` counts from the file's beginning.
    """

    def __init__(
        self,
        path: Path,
        consumers: tuple[str, ...] = CONSUMERS,
        max_bytes: int = 256 << 20,
        max_age_s: float = math.inf,
        min_free_bytes: int = 16 << 20,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """`max_bytes` of events that wait, the oldest of them `max_age_s` old by `clock_us`, `min_free_bytes` free on
        the disk: past any of these, `writable` is False.

        Raises `SpoolError` when the file belongs to a living process or cannot be used.
        """
        self.path = path
        self.consumers = consumers
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self.min_free_bytes = min_free_bytes
        self._clock_us = clock_us
        self.settled_total = self.conflicts_total = self.failures_total = self.quarantined_total = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file_lock = FileLock(path.with_name(path.name + ".lock"))
        try:
            self._writer = self._open()
            self._reader = self._connect()
            self._check_consumers()
        except BaseException as error:
            self._file_lock.release()
            if isinstance(error, sqlite3.Error | OSError):
                raise SpoolBroken(f"the spool {path} cannot be used: {error}") from error
            raise
        self._read_lock = threading.Lock()
        self._wake = threading.Condition()
        self._queued: dict[str, _Entry] = {}
        self._changes: list[_Change] = []
        self._queued_bytes = 0
        self._broken: SpoolBroken | None = None
        self._damaged = False
        self._closing = self._giving_up = False
        self._thread = threading.Thread(target=self._run, name="spool-committer", daemon=True)
        self._thread.start()

    # -- settling --------------------------------------------------------------------------------

    def settle(self, event: UsageEvent) -> Future[None]:
        """Queue a settlement; the future resolves when its bytes are fsynced.

        The same bytes again: resolves as well. Other bytes under a known id: the future gets `SpoolConflict`.
        While the disk fails it gets `SpoolBroken`, and the settlement is retried for as long as the spool is open.
        Raises `SpoolClosed`, and `ValueError` for an event that has no canonical bytes.
        """
        if not -(1 << 63) <= event.ts_us < 1 << 63:  # it would make every commit it is part of fail
            raise ValueError("ts_us must fit 64 bits")
        entry = _Entry(event, encode(event))
        future = _pending_future()
        with self._wake:
            if self._closing:
                raise SpoolClosed("the spool is closed")
            first = self._queued.get(event.event_id)
            if first is None:
                first = self._queued[event.event_id] = entry
                self._queued_bytes += len(entry.body)
            if first.digest == entry.digest:
                first.futures.append(future)
                self._wake.notify()
                return future
        self._conflict(event.event_id, future)
        return future

    def writable(self) -> bool:
        """False: take no new request. Settlements of requests that run are taken all the same."""
        with self._wake:
            if self._closing or self._damaged or self._broken is not None:
                return False
            if self._stored_bytes + self._queued_bytes >= self.max_bytes:
                return False
            oldest_us = self._oldest_us
        if oldest_us is not None and self._clock_us() - oldest_us >= self.max_age_s * 1e6:
            return False
        try:
            return shutil.disk_usage(self.path.parent).free >= self.min_free_bytes
        except OSError:
            return False

    def knows(self, event_id: str) -> bool:
        """Whether the id was settled here, shipped or not, and on disk. Forgotten and shipped: False."""
        sql = "SELECT 1 FROM known WHERE event_id = ?1 UNION ALL SELECT 1 FROM settled WHERE event_id = ?1 LIMIT 1"
        return bool(self._read(sql, (event_id,)))

    # -- consuming -------------------------------------------------------------------------------

    def pending(self, consumer: str, limit: int) -> list[UsageEvent]:
        """The oldest events that `consumer` has not acknowledged, at most `limit`.

        Rows that are not what was settled are quarantined and counted, never returned.
        """
        return self.batch(consumer, limit)[0]

    def batch(self, consumer: str, limit: int, max_bytes: int | None = None) -> tuple[list[UsageEvent], bool]:
        """The same, ended by the event with which they have `max_bytes`; and whether a bound ended them."""
        events, size = self._pending("d.consumer = ? ORDER BY d.seq LIMIT ?", consumer, limit, max_bytes=max_bytes)
        return events, len(events) == limit or (max_bytes is not None and size >= max_bytes)

    def pending_between(self, consumer: str, start_us: int, end_us: int, limit: int) -> list[UsageEvent]:
        """The same of requests that began in [start, end), by their time; all of them when fewer than `limit`."""
        rows = "d.consumer = ? AND d.ts_us >= ? AND d.ts_us < ? ORDER BY d.ts_us LIMIT ?"
        return self._pending(rows, consumer, start_us, end_us, limit)[0]

    def _pending(
        self, rows: str, consumer: str, *values: int, max_bytes: int | None = None
    ) -> tuple[list[UsageEvent], int]:
        """The events, and how many bytes of theirs were read."""
        self._check_consumer(consumer)
        columns = "d.seq, CAST(s.event_id AS BLOB), s.digest, s.body"
        sql = f"SELECT {columns} FROM delivery d LEFT JOIN settled s ON s.seq = d.seq WHERE {rows}"  # noqa: S608  # all written here
        while True:
            events: list[UsageEvent] = []
            bad: list[tuple[int, str]] = []
            size = 0
            for seq, event_id, digest, body in self._read(sql, (consumer, *values), max_bytes):
                size += len(body or b"")
                event, reason = _checked(event_id, digest, body)
                if event is None:
                    bad.append((seq, reason))
                else:
                    events.append(event)
            if not bad:
                return events, size
            self._quarantine(bad)  # and read again: the caller gets `limit` good events where there are

    def waiting(self, consumer: str) -> Iterator[UsageEvent]:
        """Every event that `consumer` lacked when this began and still lacks when it is read, oldest first, by pages.

        What is acknowledged meanwhile may or may not be among them.
        """
        self._check_consumer(consumer)
        sql = (
            "SELECT d.seq, CAST(s.event_id AS BLOB), s.digest, s.body FROM delivery d JOIN settled s ON s.seq = d.seq "
            "WHERE d.consumer = ? AND d.seq > ? ORDER BY d.seq LIMIT ?"
        )
        seq = 0
        while rows := self._read(sql, (consumer, seq, _BATCH)):
            seq = rows[-1][0]
            for _, event_id, digest, body in rows:
                event, _ = _checked(event_id, digest, body)
                if event is not None:  # what is none is quarantined by who delivers
                    yield event

    def quarantined(self) -> list[tuple[bytes, str, bytes, bytes]]:
        """(id, reason, digest, body) of every row that was set aside."""
        rows = self._read("SELECT event_id, reason, digest, body FROM quarantine ORDER BY seq", ())
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    def set_aside(self, rows: Sequence[tuple[bytes, str, bytes, bytes]]) -> None:
        """Take over what another file had set aside, as `quarantined` gave it."""

        def work(db: sqlite3.Connection) -> int:
            for event_id, reason, digest, body in rows:
                db.execute(
                    "INSERT INTO quarantine VALUES "
                    "((SELECT MIN(0, COALESCE(MIN(seq), 0)) - 1 FROM quarantine), ?, ?, ?, ?)",
                    (event_id, reason, digest, body),
                )
            return 0

        self._change(work).result()
        self.quarantined_total += len(rows)

    def ack(self, consumer: str, event_ids: Sequence[str]) -> None:
        """`consumer` has these for good. Returns when that is on disk; raises `SpoolBroken`, then nothing changed."""
        self._check_consumer(consumer)
        ids = list(event_ids)

        def work(db: sqlite3.Connection) -> int:
            freed = 0
            for event_id in ids:
                row = db.execute("SELECT seq, length(body) FROM settled WHERE event_id = ?", (event_id,)).fetchone()
                if row is None:
                    continue
                db.execute("DELETE FROM delivery WHERE consumer = ? AND seq = ?", (consumer, row[0]))
                if db.execute("SELECT 1 FROM delivery WHERE seq = ? LIMIT 1", (row[0],)).fetchone() is None:
                    db.execute("DELETE FROM settled WHERE seq = ?", (row[0],))
                    freed += row[1]
            return freed

        self._change(work).result()

    def forget(self, event_ids: Iterable[str]) -> None:
        """Drop what `knows` remembers of shipped events. Returns at once: a lost forget costs a few bytes, no more."""
        ids = [(event_id,) for event_id in event_ids]

        def work(db: sqlite3.Connection) -> int:
            db.executemany("DELETE FROM known WHERE event_id = ?", ids)
            return 0

        self._change(work)

    def forget_all(self) -> None:
        """`forget` every id; for the start, when the journal has no segment left."""

        def work(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM known")
            return 0

        self._change(work)

    def missed(self, event_ids: Sequence[str]) -> None:
        """These were settled here, as somebody else can tell, and the file does not know them: damage to be told."""
        if not event_ids:
            return

        def work(db: sqlite3.Connection) -> int:
            for event_id in event_ids:
                note(db, "the file had lost it; it is settled again from the journal", event_id)
            return 0

        self._change(work).result()
        self.quarantined_total += len(event_ids)
        log.error("spool: %d settlements were lost by the file and are settled again", len(event_ids))

    # -- looking ---------------------------------------------------------------------------------

    def oldest_unacked_us(self, consumer: str) -> int | None:
        """The smallest `ts_us` that `consumer` has not acknowledged, queued ones too; None when it has all."""
        self._check_consumer(consumer)
        with self._wake:  # queued first: a settlement moves from there to the table, never back
            queued = [entry.event.ts_us for entry in self._queued.values()]
        (stored,) = self._read("SELECT MIN(ts_us) FROM delivery WHERE consumer = ?", (consumer,))[0]
        return min([*queued, *([stored] if stored is not None else [])], default=None)

    def count(self, consumer: str) -> int:
        """How many events on disk `consumer` has not acknowledged."""
        self._check_consumer(consumer)
        (count,) = self._read("SELECT COUNT(*) FROM delivery WHERE consumer = ?", (consumer,))[0]
        return int(count)

    @property
    def nbytes(self) -> int:
        """Event bytes that wait, on disk and in memory."""
        with self._wake:
            return self._stored_bytes + self._queued_bytes

    def close(self, timeout: float = 10.0) -> None:
        """Commit what is queued and give the file back. What the disk refuses for `timeout` seconds stays with the
        journal, from which the next start settles it."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        with self._wake:
            self._giving_up = True
            self._wake.notify_all()
        self._thread.join()
        with self._read_lock:
            self._reader.close()
        self._writer.close()
        self._file_lock.release()

    # -- the committer ---------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            with self._wake:
                while not (self._queued or self._changes or self._closing or self._broken):
                    self._wake.wait()
                if self._giving_up or (self._closing and not (self._queued or self._changes)):
                    break
                entries = list(self._queued.values())[:_BATCH]
                changes, self._changes = self._changes, []
            try:
                verdicts, freed, oldest_us = self._commit(entries, changes)
            except Exception as error:  # whatever it is, the settlements must outlive it
                self._failed(error, changes, told=not (entries or changes))
                self._pause(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
            else:
                failures = 0
                self._committed(entries, verdicts, changes, freed, oldest_us)
        self._abandon()

    def _commit(self, entries: list[_Entry], changes: list[_Change]) -> tuple[list[str], int, int | None]:
        """One transaction: what became of each entry ("new", "same", "conflict"), the bytes that were freed, and the
        time of the oldest event that waits now."""
        db = self._writer
        db.execute("BEGIN IMMEDIATE")
        verdicts = [self._insert(db, entry) for entry in entries]
        freed = sum(change.work(db) for change in changes)
        if not entries and not changes:  # nothing to be done but to see whether the disk takes writes again
            db.execute(f"PRAGMA user_version = {_VERSION}")
        oldest_us = self._oldest(db)
        db.execute("COMMIT")
        return verdicts, freed, oldest_us

    def _oldest(self, db: sqlite3.Connection) -> int | None:
        sql = "SELECT MIN(ts_us) FROM delivery WHERE consumer = ?"
        found = [db.execute(sql, (consumer,)).fetchone()[0] for consumer in self.consumers]
        return min((ts_us for ts_us in found if ts_us is not None), default=None)

    def _insert(self, db: sqlite3.Connection, entry: _Entry) -> str:
        event_id = entry.event.event_id
        sql = (
            "SELECT digest FROM known WHERE event_id = ?1 "
            "UNION ALL SELECT digest FROM settled WHERE event_id = ?1 LIMIT 1"
        )
        stored = db.execute(sql, (event_id,)).fetchone()
        if stored is not None:
            return "same" if stored[0] == entry.digest else "conflict"
        cursor = db.execute(
            "INSERT INTO settled (event_id, digest, body) VALUES (?, ?, ?)", (event_id, entry.digest, entry.body)
        )
        db.execute("INSERT INTO known VALUES (?, ?)", (event_id, entry.digest))
        db.executemany(
            "INSERT INTO delivery VALUES (?, ?, ?)",
            [(consumer, cursor.lastrowid, entry.event.ts_us) for consumer in self.consumers],
        )
        return "new"

    def _committed(
        self, entries: list[_Entry], verdicts: list[str], changes: list[_Change], freed: int, oldest_us: int | None
    ) -> None:
        with self._wake:
            if self._broken is not None:
                log.warning("spool: the disk takes writes again")
            self._broken = None
            self._oldest_us = oldest_us
            self._stored_bytes -= freed
            for entry, verdict in zip(entries, verdicts, strict=True):
                del self._queued[entry.event.event_id]
                self._queued_bytes -= len(entry.body)
                if verdict == "new":
                    self._stored_bytes += len(entry.body)
                    self.settled_total += 1
        for entry, verdict in zip(entries, verdicts, strict=True):
            for future in entry.futures:
                if verdict == "conflict":
                    self._conflict(entry.event.event_id, future)
                else:
                    future.set_result(None)
        for change in changes:
            change.future.set_result(None)

    def _failed(self, error: Exception, changes: list[_Change], *, told: bool) -> None:
        """Undo, tell everyone who waits, keep the settlements. `told`: nobody waits, it was another look."""
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        broken = (SpoolFull if full else SpoolBroken)(f"the spool cannot be written: {error}")
        if not told:
            log.error("spool: commit failed, settlements stay queued: %s", error)
        waiting = [change.future for change in changes]
        with self._wake:
            self.failures_total += not told
            self._broken = broken
            self._damaged = self._damaged or _is_damage(error)
            for entry in self._queued.values():
                waiting += entry.futures
                entry.futures = []
        for future in waiting:
            future.set_exception(broken)
        try:  # a connection that has seen an I/O error is not trusted with the next attempt
            self._writer.close()
            self._writer = self._connect()
        except sqlite3.Error as again:
            log.error("spool: cannot be opened again yet: %s", again)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._wake:
            while not self._giving_up and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(left)

    def _abandon(self) -> None:
        with self._wake:
            waiting = [future for entry in self._queued.values() for future in entry.futures]
            waiting += [change.future for change in self._changes]
            lost = len(self._queued)
            self._queued.clear()
            self._changes.clear()
        if lost:
            log.error("spool: closed with %d settlements that the disk refused; the journal has them", lost)
        for future in waiting:
            future.set_exception(SpoolClosed("the spool was closed before the disk took this"))

    def _conflict(self, event_id: str, future: Future[None]) -> None:
        with self._wake:
            self.conflicts_total += 1
        log.error("spool: %s was settled again with other content; the first stands", event_id)
        future.set_exception(SpoolConflict(f"{event_id} was settled before with other content"))

    def _change(self, work: Callable[[sqlite3.Connection], int]) -> Future[None]:
        change = _Change(work)
        with self._wake:
            if self._closing:
                raise SpoolClosed("the spool is closed")
            self._changes.append(change)
            self._wake.notify()
        return change.future

    def _quarantine(self, bad: list[tuple[int, str]]) -> None:
        def work(db: sqlite3.Connection) -> int:
            freed = 0
            for seq, reason in bad:
                (size,) = db.execute(
                    "SELECT COALESCE(SUM(length(body)), 0) FROM settled WHERE seq = ?", (seq,)
                ).fetchone()
                db.execute(
                    "INSERT OR IGNORE INTO quarantine SELECT ?1, COALESCE(event_id, x''), ?2, COALESCE(digest, x''), "
                    "COALESCE(body, x'') FROM (SELECT 1) LEFT JOIN settled ON seq = ?1",
                    (seq, reason),
                )
                db.execute("DELETE FROM settled WHERE seq = ?", (seq,))
                db.execute("DELETE FROM delivery WHERE seq = ?", (seq,))
                freed += size
            return freed

        self._change(work).result()
        self.quarantined_total += len(bad)
        for seq, reason in bad:
            log.error("spool: row %d is quarantined: %s", seq, reason)

    # -- SQLite ----------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=5.0)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        return db

    def _open(self) -> sqlite3.Connection:
        adopt(self.path)
        if damage := database_damage(self.path):
            log.error("spool: the file is damaged, its rows are salvaged: %s", damage)
            saved = salvage(self.path, _SCHEMA, self.consumers, damage)
            log.error("spool: %d settlements were saved and will be delivered again", saved)
        db = self._connect()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise SpoolError(f"the spool {self.path} was written by a newer version (format {version})")
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        fsync(self.path.parent)
        mend(db, self.consumers, {*CONSUMERS, *self.consumers})
        self._oldest_us = self._oldest(db)
        self._stored_bytes = int(db.execute("SELECT COALESCE(SUM(length(body)), 0) FROM settled").fetchone()[0])
        (self.quarantined_total,) = db.execute("SELECT COUNT(*) FROM quarantine").fetchone()
        return db

    def _check_consumers(self) -> None:
        found = {name for (name,) in self._reader.execute("SELECT DISTINCT consumer FROM delivery")}
        if strange := sorted(found - set(self.consumers)):
            raise SpoolError(f"the spool holds events for {', '.join(strange)}, which this process does not deliver to")

    def _check_consumer(self, consumer: str) -> None:
        if consumer not in self.consumers:
            raise ValueError(f"unknown consumer {consumer!r}")

    def _read(self, sql: str, values: tuple[Any, ...], max_bytes: int | None = None) -> list[tuple[Any, ...]]:
        """The rows; with `max_bytes` up to the one with which their last column has so many."""
        with self._read_lock:
            try:
                found = self._reader.execute(sql, values)
                return found.fetchall() if max_bytes is None else _up_to(found, max_bytes)
            except sqlite3.ProgrammingError as error:
                raise SpoolClosed("the spool is closed") from error
            except sqlite3.Error as error:
                with self._wake:
                    self.failures_total += 1
                    self._damaged = self._damaged or _is_damage(error)
                raise SpoolBroken(f"the spool cannot be read: {error}") from error


def _up_to(found: sqlite3.Cursor, max_bytes: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in found:
        rows.append(row)
        size += len(row[-1] or b"")
        if size >= max_bytes:
            break
    found.close()  # a statement that is not at its end keeps the log from being written back
    return rows


def _is_damage(error: Exception) -> bool:
    """Whether the file's pages are not what was written: the next start salvages what it can, until then nothing
    new is let in."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _DAMAGE


def _checked(event_id: Any, digest: Any, body: Any) -> tuple[UsageEvent | None, str]:
    """The event of a row, or None and what is wrong with it."""
    if not isinstance(body, bytes):
        return None, "the row is gone or not bytes"
    if hashlib.sha256(body).digest() != digest:
        return None, "checksum mismatch"
    try:
        event = decode(body)
    except VersionError as error:
        return None, str(error)
    except msgspec.MsgspecError as error:
        return None, f"not an event: {error}"
    if event.event_id.encode() != event_id:  # read as bytes: a flipped one need not be UTF-8
        return None, "filed under another id"
    return event, ""
