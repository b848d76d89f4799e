"""Files of lines, packed: one JSON value a line, the same bytes for the same lines.

Knows: gzip without names and times in it. Does not know: what a line means.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from metering.errors import StoreDamaged

_LEVEL = 1  # the disk is the slower part of it


class LineWriter:
    """A file that is being written; a context manager. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("xb")
        self._packed = gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=self._raw, mtime=0)
        self.count = 0

    def write(self, line: bytes) -> None:
        self._packed.write(line + b"\n")
        self.count += 1

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._packed.close()
        finally:
            self._raw.close()


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write a new file; how many lines there were. Raises `OSError`."""
    with LineWriter(path) as file:
        for line in lines:
            file.write(line)
    return file.count


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file. Raises `StoreDamaged`, naming it, when it is missing or cut."""
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                yield line.rstrip(b"\n")
    except FileNotFoundError:
        raise StoreDamaged(f"{path.name} is missing") from None
    except (OSError, EOFError, zlib.error):
        raise StoreDamaged(f"{path.name} cannot be read") from None
