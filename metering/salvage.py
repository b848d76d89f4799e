"""What can be saved of a spool file whose pages are damaged.

Knows: how to read around damage, and how to put a new file in the old one's place so that a kill at any point
loses nothing: `.salvaging` is being written, `.salvaged` is whole and wins over the old file, which is kept in
`damaged-N/`. Does not know: who was given which event; all of them are handed out again, and consumers count them
once. What cannot be read the journal still has, unless it retired the request. The rows that say who lacks which event
have no checksum: where sound pages hold rows that contradict each other, `mend` hands all out again too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from metering.disk import fsync
from metering.events import VersionError, decode

log = logging.getLogger(__name__)

_SIDES = ("-wal", "-shm")
_SINGLE_STEPS = 64  # past an unreadable row go on by ones, then by doubles: a page holds a few dozen rows


def adopt(path: Path) -> None:
    """Finish a salvage that was killed after its file was whole."""
    whole = path.with_name(path.name + ".salvaged")
    if whole.exists():
        for side in _SIDES:  # the old file's log must never be applied to the new one
            path.with_name(path.name + side).unlink(missing_ok=True)
        whole.replace(path)
        fsync(path.parent)


def salvage(path: Path, schema: str, consumers: tuple[str, ...], reason: str) -> int:
    """Replace a damaged spool by one with every row that can be read; returns how many.

    Raises `OSError` or `sqlite3.Error` with the damaged file where it was.
    """
    _keep(path)
    draft = path.with_name(path.name + ".salvaging")
    draft.unlink(missing_ok=True)
    saved = 0
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        db.executescript(schema)
        db.execute("BEGIN IMMEDIATE")
        note(db, f"file damaged: {reason}")
        for digest, body in _readable(path):
            saved += _insert(db, digest, body, consumers)
        db.execute("COMMIT")
    draft.replace(path.with_name(path.name + ".salvaged"))
    fsync(path.parent)
    adopt(path)
    return saved


def _keep(path: Path) -> None:
    number = 1 + len(list(path.parent.glob("damaged-*")))
    folder = path.parent / f"damaged-{number}"
    folder.mkdir()
    for side in ("", *_SIDES):
        source = path.with_name(path.name + side)
        if source.exists():
            shutil.copy2(source, folder / source.name)


def _insert(db: sqlite3.Connection, digest: bytes, body: bytes, consumers: tuple[str, ...]) -> bool:
    if hashlib.sha256(body).digest() != digest:
        return False
    try:
        event = decode(body)
    except (msgspec.MsgspecError, VersionError):
        return False
    seq = db.execute(
        "INSERT OR IGNORE INTO settled (event_id, digest, body) VALUES (?, ?, ?) RETURNING seq",
        (event.event_id, digest, body),
    ).fetchone()
    if seq is None:
        return False
    db.execute("INSERT INTO known VALUES (?, ?)", (event.event_id, digest))
    db.executemany("INSERT INTO delivery VALUES (?, ?, ?)", [(consumer, seq[0], event.ts_us) for consumer in consumers])
    return True


def _readable(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(digest, body) of every row that SQLite can still reach."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        last, tries = 0, 0
        while last < 1 << 62:
            found = False
            try:
                sql = "SELECT seq, digest, body FROM settled NOT INDEXED WHERE seq > ? ORDER BY seq"
                for seq, digest, body in db.execute(sql, (last,)):
                    found, last, tries = True, seq, 0
                    if isinstance(digest, bytes) and isinstance(body, bytes):
                        yield digest, body
                return
            except sqlite3.DatabaseError:
                tries = 0 if found else tries + 1
                last += 1 if tries < _SINGLE_STEPS else 1 << min(tries - _SINGLE_STEPS, 61)


def mend(db: sqlite3.Connection, consumers: tuple[str, ...], known: set[str]) -> None:
    """Where an event lacks nobody, or somebody lacks no event, or is none of `known`: all lack all again.

    What was found is told by a row in the quarantine. Raises `sqlite3.Error` with nothing changed.
    """
    names = {name for (name,) in db.execute("SELECT DISTINCT CAST(consumer AS BLOB) FROM delivery")}
    strange = names - {name.encode() for name in known}
    if not strange and not _contradiction(db):
        return
    log.error("spool: the rows of who lacks what are damaged: every event is handed out again")
    db.execute("BEGIN IMMEDIATE")
    for name in strange:
        db.execute("DELETE FROM delivery WHERE CAST(consumer AS BLOB) = ?", (name,))
    for seq, body in db.execute("SELECT seq, body FROM settled"):
        rows = [(consumer, seq, _time_of(body)) for consumer in consumers]
        db.executemany("INSERT OR REPLACE INTO delivery VALUES (?, ?, ?)", rows)
    db.execute("DELETE FROM delivery WHERE seq NOT IN (SELECT seq FROM settled)")
    note(db, "rows of who lacks what contradicted each other")
    db.execute("COMMIT")


def note(db: sqlite3.Connection, reason: str, event_id: str = "") -> None:
    """Tell in the quarantine of damage that left no row behind; the same of one event once."""
    sql = (
        "INSERT INTO quarantine SELECT (SELECT MIN(0, COALESCE(MIN(seq), 0)) - 1 FROM quarantine), ?1, ?2, x'', x'' "
        "WHERE ?1 = x'' OR NOT EXISTS (SELECT 1 FROM quarantine WHERE event_id = ?1 AND reason = ?2)"
    )
    db.execute(sql, (event_id.encode(), reason))


def _contradiction(db: sqlite3.Connection) -> bool:
    sql = (
        "SELECT EXISTS (SELECT 1 FROM settled WHERE seq NOT IN (SELECT seq FROM delivery)) "
        "OR EXISTS (SELECT 1 FROM delivery WHERE seq NOT IN (SELECT seq FROM settled))"
    )
    return bool(db.execute(sql).fetchone()[0])


def _time_of(body: bytes) -> int:
    """When an event's request began; 0 where the body is none, which who reads it will find."""
    try:
        return decode(body).ts_us
    except (msgspec.MsgspecError, VersionError, TypeError):
        return 0
