"""What is written is on the disk only when the disk says so."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries (a new, renamed or removed file), durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
