"""What is written is on the disk only when the disk says so, and what is read may be damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries (a new, renamed or removed file), durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def database_damage(path: Path) -> str:
    """What SQLite finds wrong with a database's pages; empty when nothing is. Makes the file when there is none.

    Raises `sqlite3.OperationalError` when it cannot be opened or read now, which says nothing about what is in it.
    """
    with contextlib.closing(sqlite3.connect(path)) as db:
        try:
            found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            return str(error)
    return "" if found == "ok" else found.replace("\n", " ")
