"""A disk that fails at a chosen call: `bad_disk.c`, compiled and preloaded into a Python process of its own.

`environment(folder)` is what a process is started with; in it, `BadDisk()` arms and disarms. What is counted and made
to fail: every call that writes, syncs, truncates, makes or removes a file below the folder, SQLite's as well as
Python's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

HALF = 0
"""In place of an error number: half of a write is taken, as by a disk that becomes full in the middle of it."""

NEVER = 1 << 62
_SOURCE = Path(__file__).with_suffix(".c")


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process with the library in it; compiled into `folder`."""
    library = folder / "bad_disk.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


class BadDisk:
    """The library in this process. Without it in `LD_PRELOAD` nothing can be armed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.bad_disk_seen.restype = ctypes.c_long

    def arm(self, folder: Path, first: int, count: int, error: int) -> None:
        """From now on calls are counted from 0; those from `first` on, `count` of them, fail with `error`."""
        arguments = (ctypes.c_long(first), ctypes.c_long(count), ctypes.c_int(error))
        self._library.bad_disk_arm(str(folder).encode(), *arguments)

    def disarm(self, folder: Path) -> int:
        """Nothing fails any more. Returns how many calls were counted."""
        seen = int(self._library.bad_disk_seen())
        self.arm(folder, NEVER, 0, 0)
        return seen
