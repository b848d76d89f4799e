"""What a backup is: a folder whose manifest names every file with its size and SHA-256, and what they hold.

The manifest is written last, in one rename, when all it names is on the disk. So a folder without one is not a backup,
whatever lies in it, and one with one is whole or is found out. Its own sum stands in it.

Knows: files and sums. Does not know: what is in the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from metering.disk import fsync
from metering.usagecopy import CopiedUsage

FORMAT = 1
MANIFEST = "manifest.json"


class BackupError(Exception):
    """A backup cannot be taken, or is none; the text is one clear sentence."""


class BackupFile(msgspec.Struct, frozen=True):
    """One file, by its path inside the backup."""

    path: str
    nbytes: int
    sha256: str


class CopiedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at the backup's instant. `hash` is the last row's, which covers all; `usage` has how many requests are
    in it; `tables` the rows of each table beside the log."""

    revision: str
    seq: int
    hash: str
    usage: int
    tables: dict[str, int]


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says. `others`: gateways on the same ledger, whose data folders are not in this backup.

    `lacking`: requests that the ledger knows and whose usage is nowhere here.
    """

    format: int = FORMAT
    id: str
    version: str  # of Meterhouse
    began_us: int
    instant_us: int  # what the ledger and the journal had then is in it
    ended_us: int
    gateway: str
    folder: str
    others: list[str]
    ledger: CopiedLedger
    usage: CopiedUsage
    lacking: int
    files: list[BackupFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def requests(self) -> int:
        """How many there are when it is restored: those that ended, and those that ran."""
        return self.usage.standing + self.usage.open


class _Sealed(msgspec.Struct, frozen=True):
    sha256: str  # of the compact bytes of the other field
    backup: msgspec.Raw


def listed(folder: Path, turn: Callable[[], None]) -> list[BackupFile]:
    """Every file in a folder, by path, each on the disk. Raises `OSError`."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        turn()
        fsync(path)
        name = path.relative_to(folder).as_posix()
        found.append(BackupFile(name, path.stat().st_size, _sha256(path)))
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        fsync(path)
    return found


def seal(folder: Path, backup: Backup) -> None:
    """Make the folder a backup: from here on it is one. Raises `OSError`."""
    body = msgspec.json.encode(backup)
    sealed = _Sealed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    unfinished = folder / f"{MANIFEST}.new"
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(sealed)))
    fsync(unfinished)
    unfinished.replace(folder / MANIFEST)
    fsync(folder)
    fsync(folder.parent)


def read_manifest(folder: Path) -> Backup:
    """What a folder says of itself. Raises `BackupError`."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        reason = "it was not finished" if folder.is_dir() else "there is no such folder"
        raise BackupError(f"{folder} is not a backup: {reason}.") from None
    except OSError as error:
        raise BackupError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        sealed = msgspec.json.decode(raw, type=_Sealed)
        body = msgspec.json.format(sealed.backup, indent=-1)
        head = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if msgspec.json.decode(head["format"], type=int) > FORMAT:
            raise BackupError(f"{folder} was made by a newer version of Meterhouse.")
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise BackupError(f"{path} is damaged: it is not what was written.")
        return msgspec.json.decode(body, type=Backup)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
        raise BackupError(f"{path} is damaged: it cannot be understood.") from None


def check_files(folder: Path, backup: Backup) -> None:
    """Whether every file is there with its bytes, and no other. Raises `BackupError`, naming the first that is not."""
    for file in backup.files:
        path = folder / file.path
        try:
            if path.stat().st_size != file.nbytes or _sha256(path) != file.sha256:
                raise BackupError(f"{file.path} of the backup is damaged: it is not what was written.")
        except FileNotFoundError:
            raise BackupError(f"{file.path} of the backup is missing.") from None
        except OSError as error:
            raise BackupError(f"{file.path} of the backup cannot be read: {error.strerror}.") from None
    known = {MANIFEST, *(file.path for file in backup.files)}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if strange := sorted(found - known):
        raise BackupError(f"{strange[0]} lies in the backup and is not of it.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
