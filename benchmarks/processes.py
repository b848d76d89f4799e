"""What a process takes of the machine, read from Linux's /proc: memory, open descriptors, threads.

Knows: the files of proc(5). Does not know: what the processes do.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

PROC = Path("/proc")


class Memory(msgspec.Struct, frozen=True):
    """Resident bytes, and those of them that lie in no file."""

    rss_bytes: int
    anonymous_bytes: int


class Handles(msgspec.Struct, frozen=True):
    """Open file descriptors and threads, as counts, without ClickHouse's: its pools give their threads names, and each
    thread has descriptors into /proc. They grow with its own background work, up to a limit of its own."""

    descriptors: int
    threads: int


def memory(pid: int) -> Memory:
    """Raises `OSError` when the process is gone."""
    found = dict(line.split(":", 1) for line in (PROC / str(pid) / "status").read_text().splitlines())
    return Memory(*(int(found[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon")))


def handles(pid: int) -> Handles:
    """Raises `OSError` when the process is gone."""
    folder = PROC / str(pid)
    name = (folder / "comm").read_text()
    opened = [_target(descriptor) for descriptor in (folder / "fd").iterdir()]
    return Handles(
        descriptors=sum(target is not None and not target.startswith("/proc/") for target in opened),
        threads=sum(_named(task) == name for task in (folder / "task").iterdir()),
    )


def _target(descriptor: Path) -> str | None:
    """None: it was closed meanwhile."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return None


def _named(task: Path) -> str | None:
    """None: it has ended meanwhile."""
    try:
        return (task / "comm").read_text()
    except OSError:
        return None


def child(pid: int, part: str) -> int:
    """The child of a process whose command line has `part` in it. Raises `LookupError` when there is none."""
    for task in (PROC / str(pid) / "task").iterdir():
        for number in (task / "children").read_text().split():
            if part in (PROC / number / "cmdline").read_text():
                return int(number)
    raise LookupError(f"process {pid} has no child {part}")


def family(pid: int) -> list[int]:
    """The process and all that came of it, itself first, as it stands now."""
    found = [pid]
    for each in found:  # grows meanwhile
        for task in (PROC / str(each) / "task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended
                continue
    return found


class Course(msgspec.Struct):
    """A number as it went over time."""

    values: list[int]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> float:
        """The farthest from the median, as a part of it."""
        return max(abs(value / self.median - 1) for value in self.values)

    @property
    def growth(self) -> float:
        """From the first fifth to the last, of the medians of both, as a part of the first."""
        fifth = max(1, len(self.values) // 5)
        return median(self.values[-fifth:]) / median(self.values[:fifth]) - 1
