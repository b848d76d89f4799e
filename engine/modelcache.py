"""A folder of converted models, shared by every server of a user and safe to fill from several at once.

Knows: how a model folder gets into the cache whole or not at all, and how it is told to be intact later.
Does not know: where models come from or what is in them (`engine.weights` does).

A cache entry is a folder whose last written file is `SHA256SUMS` (the format of `sha256sum -c`). It is built
beside its place under another name, synced, and renamed into place under a file lock: a reader sees a whole
entry or none, and what a killed builder left is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class WeightsError(Exception):
    """A model cannot be had or read; the text is one sentence for the person who started the server."""


class Progress(Protocol):
    """Told what is being done: `stage` in words; `done` of `total` in bytes, or both 0 when there is no measure."""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None: ...


def silent(stage: str, done: int = 0, total: int = 0) -> None:
    """The progress of a caller who does not want any."""


SUMS = "SHA256SUMS"
FORMAT = "# meterhouse model cache, format 1"  # another first line is another layout: the entry is made again
_SMALL_BYTES = 16 << 20  # up to here a file's digest is checked at every start


def cached(
    cache_dir: Path,
    name: str,
    build: Callable[[Path, Progress], None],
    *,
    need_bytes: int,
    progress: Progress = silent,
    full: bool = False,
) -> Path:
    """The entry `name` of the cache, made by `build(empty folder, progress)` when it is missing or not intact.

    `full` compares every byte with its digest; otherwise only the small files are, and `engine.weights`
    still finds a truncated weights file by its own header. `need_bytes` is what building takes on disk.
    Raises `WeightsError`.
    """
    entry = cache_dir / name
    if intact(entry, full=full):
        return entry
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{name}.lock", progress):
            if not intact(entry, full=full):  # another process may have made it while we waited
                _build(cache_dir, entry, build, need_bytes, progress)
    except OSError as error:
        raise WeightsError(_os_sentence(error, cache_dir)) from error
    return entry


def intact(entry: Path, *, full: bool = False) -> bool:
    """Whether every file named in the entry's checksums is there and, so far as it was looked at, unchanged."""
    try:
        lines = (entry / SUMS).read_text().splitlines()
        if not lines or lines[0] != FORMAT:
            return False
        for line in lines[1:]:
            digest, _, name = line.partition("  ")
            path = entry / name
            small = path.stat().st_size <= _SMALL_BYTES
            if (full or small) and file_digest(path) != digest:
                return False
    except (OSError, UnicodeDecodeError):
        return False
    return len(lines) > 1


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(
    cache_dir: Path, entry: Path, build: Callable[[Path, Progress], None], need_bytes: int, progress: Progress
) -> None:
    for stale in cache_dir.glob(f".{entry.name}.building-*"):
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(cache_dir).free
    if free < need_bytes:
        raise WeightsError(
            f"Not enough disk space in {cache_dir}: {need_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free."
        )
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.building-", dir=cache_dir))
    try:
        build(temporary, progress)
        progress("Computing checksums")
        _seal(temporary)
        temporary.chmod(0o755)
        shutil.rmtree(entry, ignore_errors=True)  # what stands there is not intact
        temporary.rename(entry)
        _sync(cache_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Sync every file, then write the checksums, then sync those: the checksums never vouch for lost bytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        path.chmod(0o644)
        _sync(path)
    sums = folder / SUMS
    sums.write_text("\n".join([FORMAT, *(f"{file_digest(path)}  {path.name}" for path in files)]) + "\n")
    _sync(sums)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file. It is never deleted: a deleted one could be locked by two processes at once."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that prepares the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _os_sentence(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk that holds {folder} is full."
    return f"The model cache {folder} cannot be used: {error.strerror or error}."
