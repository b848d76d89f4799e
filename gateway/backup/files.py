"""The data folder's other files: the admin key, adapters, answers for retries, whatever is not copied in a form of its
own. What this code does not know is copied too.

Knows: which names are copied otherwise or are of the running process. Does not know: what the files are for.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from gateway.restoring import MARKER
from gateway.settings import Settings

FILES = "files"
_OWN = frozenset({"folder.id", "folder.new", "server.lock", MARKER})  # of this folder and no other
_KEPT = ("journal/damaged", "spool/damaged-")  # of folders that are copied in a form of their own: evidence
_SIDES = ("-wal", "-shm", "-journal")
_TEMPORARY = (".lock", ".new")


def copy_files(settings: Settings, into: Path, turn: Callable[[], None]) -> None:
    """Copy what is new or changed since an earlier call. Raises `OSError`; a file that goes meanwhile is left out."""
    root = settings.data_dir.absolute()
    for path in _files(settings, root):
        turn()
        target = into / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.name.endswith(".sqlite3"):
                _copy_database(path, target)
            elif not _same(path, target):
                shutil.copy2(path, target)
        except FileNotFoundError:
            continue


def put_back(source: Path, data_dir: Path) -> None:
    """Copy the files into a data folder. May be repeated."""
    if source.is_dir():
        shutil.copytree(source, data_dir, dirs_exist_ok=True)


def _files(settings: Settings, root: Path) -> Iterator[Path]:
    elsewhere = _managed(settings, root)
    for folder, names, files in os.walk(root):
        here = Path(folder)
        names[:] = [name for name in names if here / name not in elsewhere or _leads_to_kept(root, here / name)]
        for name in files:
            path = here / name
            if path.parent == root and name in _OWN:
                continue
            if path in elsewhere or name.endswith((*_SIDES, *_TEMPORARY)) or not path.is_file() or path.is_symlink():
                continue
            inside = path.relative_to(root).as_posix()
            if any(parent in elsewhere for parent in path.parents) and not inside.startswith(_KEPT):
                continue
            yield path


def _managed(settings: Settings, root: Path) -> set[Path]:
    """Folders and files that the backup has in a form of its own."""
    found = {root / "spool", root / "journal", root / "clickhouse", root / "ledger.sqlite3"}
    found |= {settings.archive.absolute(), settings.spool_dir.absolute(), settings.journal_dir.absolute()}
    for url, scheme in ((settings.clickhouse, "chdb://"), (settings.ledger, "sqlite:///")):
        if url.startswith(scheme):
            found.add(Path(url.removeprefix(scheme)).absolute())
    return found


def _leads_to_kept(root: Path, path: Path) -> bool:
    return path in (root / "spool", root / "journal")


def _same(path: Path, target: Path) -> bool:
    if not target.exists():
        return False
    before, now = target.stat(), path.stat()
    return (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def _copy_database(path: Path, target: Path) -> None:
    """One instant of a database that others write."""
    if target.exists():
        return
    with (
        closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(target)) as to,
    ):
        source.backup(to)  # in one step: writers go on beside it, and it need not begin again for them
        to.execute("PRAGMA journal_mode = DELETE")
