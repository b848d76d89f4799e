"""One owner per folder or file: an advisory lock that dies with its process.

Knows: `flock` on a file beside what is guarded (SQLite drops its own locks when its file is opened and closed
by somebody else). Does not know: what is guarded.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class Locked(Exception):
    """Another process (or another object of this one) owns it; the text names the file."""


class FileLock:
    """Held from construction to `release`, or to the end of the process. Raises `Locked` at once when taken."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Python opens with O_CLOEXEC: a child started by exec does not keep the lock alive.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise Locked(f"{path} is held by another process") from None

    def release(self) -> None:
        """Give it back; again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def held(path: Path) -> bool:
    """Whether somebody owns the lock now. Creates nothing."""
    try:
        found = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(found)
    return False
