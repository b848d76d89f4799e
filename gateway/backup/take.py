"""Taking a backup beside the gateway that runs, in the one order in which nothing falls between two parts.

| part | read | what that gives |
|---|---|---|
| files | first, and what came since once more at the end | no answer is kept for a request that is not in the backup |
| ledger | one transaction, which sees no later change | every charge in it is of a request that the next two have |
| journal, spool | after it | what runs; what waits |
| store, archive | last | what was delivered from the spool meanwhile; a restore delivers again what somebody lacks |

So the books of what is restored agree: journal = usage = ledger. A kill anywhere leaves a folder without a manifest.

Knows: the order, the ledger's files. Does not know: what the parts are (`metering.usagecopy`, `billing.ledgercopy`).
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog

from billing.errors import BillingError, Conflict, IdempotencyConflict, NotFound
from billing.ledgercopy import USAGE_KEY, Snapshot, checked, snapshot
from gateway.backup.files import FILES, copy_files
from gateway.backup.manifest import Backup, BackupError, CopiedLedger, listed, seal
from gateway.settings import Settings
from metering.errors import MeteringError
from metering.lines import LineWriter, write_lines
from metering.spool import SpoolError
from metering.usagecopy import UsageCopier

if TYPE_CHECKING:  # it imports the admin API, which takes backups
    from gateway.stores import Stores

log = structlog.get_logger(__name__)

LEDGER = "ledger"
EVENTS = "events.jsonl.gz"
OTHERS_S = 3.0  # another gateway's usage gets to the store within so long after it was charged
TURN_S = 0.01
KEPT_RUNS = 100


class Stopped(BackupError):
    """The server stops: the backup is given up."""


class Run(msgspec.Struct, kw_only=True):
    """One backup that was asked for. `fault` of one that failed; `backup` of one that is whole."""

    id: str
    folder: Path
    state: Literal["running", "done", "failed"] = "running"
    fault: str = ""
    backup: Backup | None = None


class Backups:
    """The backups of a process, one at a time, each on a thread of its own."""

    def __init__(self, settings: Settings, stores: Stores, clock_us: Callable[[], int]) -> None:
        self._settings, self._stores, self._clock_us = settings, stores, clock_us
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, "backup")
        self._runs: dict[str, Run] = {}

    def start(self, id: str, folder: Path) -> Run:
        """Begin one; asked again under its id, it is the one that was begun. Raises `Conflict` while another runs and
        for a folder that cannot be used, `IdempotencyConflict` for the id of a backup in another folder."""
        with self._lock:
            if begun := self._runs.get(id):
                if begun.folder != folder:
                    raise IdempotencyConflict("this idempotency key was used before, for another request")
                return begun
            if any(run.state == "running" for run in self._runs.values()):
                raise Conflict("a backup is being taken: one at a time")
            _prepare(self._settings, folder)
            run = self._runs[id] = Run(id=id, folder=folder)
            while len(self._runs) > KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
        self._thread.submit(self._run, run)
        return run

    def find(self, id: str) -> Run:
        """Raises `NotFound`."""
        with self._lock:
            run = self._runs.get(id)
        if run is None:
            raise NotFound("backup", id)
        return run

    def close(self) -> None:
        """Give up what runs, and wait for it: a thread in a query at exit brings chDB down."""
        self._stopping.set()
        self._thread.shutdown(wait=True)

    def _run(self, run: Run) -> None:
        try:
            backup = take(self._settings, self._stores, run.folder, id=run.id, clock_us=self._clock_us, turn=self._turn)
        except Exception as error:  # whatever it is, there is no backup
            log.error("backup_failed", id=run.id, reason=str(error) or type(error).__name__)
            _remove(run.folder)
            run.fault = _told(error)
            run.state = "failed"
            return
        log.info("backup_taken", id=run.id, nbytes=backup.nbytes, requests=backup.requests, lacking=backup.lacking)
        run.backup = backup
        run.state = "done"

    def _turn(self) -> None:
        if self._stopping.wait(TURN_S):
            raise Stopped("The server stops: there is no backup.")


def take(
    settings: Settings, stores: Stores, folder: Path, *, id: str, clock_us: Callable[[], int], turn: Callable[[], None]
) -> Backup:
    """Fill an empty folder; when this returns it is a backup. Blocking, for as long as all usage takes to be read.

    Raises an error of the room at fault, `BackupError` or `OSError`; then the folder is none.
    """
    began_us = clock_us()
    copy_files(settings, folder / FILES, turn)
    with snapshot(stores.events) as ledger:
        instant_us = clock_us()
        others = [row for row in stores.gateways.all() if row.folder != stores.folder]
        if any(row.alive(instant_us) for row in others):
            _pause(OTHERS_S, turn)
        usage = UsageCopier(
            folder,
            usage=stores.usage,
            retention=stores.retention,
            spool=stores.spool,
            journal=stores.journal,
            recorded=ledger.recorded,
            turn=turn,
        ).take()
        copied = _copy_ledger(ledger, folder / LEDGER, turn)
    copy_files(settings, folder / FILES, turn)
    backup = Backup(
        id=id,
        version=_version(),
        began_us=began_us,
        instant_us=instant_us,
        ended_us=clock_us(),
        gateway=settings.gateway_id,
        folder=stores.folder,
        others=[row.id for row in others],
        ledger=copied,
        usage=usage,
        lacking=max(0, copied.usage - usage.recorded),
        files=listed(folder, turn),
    )
    seal(folder, backup)
    return backup


def _copy_ledger(ledger: Snapshot, folder: Path, turn: Callable[[], None]) -> CopiedLedger:
    folder.mkdir()
    usage = 0
    with LineWriter(folder / EVENTS) as file:
        for row in checked(ledger.events()):
            if row.seq % 1000 == 0:
                turn()
            usage += (row.key or "").startswith(USAGE_KEY)
            file.write(msgspec.json.encode(msgspec.structs.astuple(row)))
    tables = {}
    for table in ledger.tables():
        lines = (msgspec.json.encode(row) for row in (table.columns, *table.rows))
        tables[table.name] = write_lines(folder / f"{table.name}.jsonl.gz", lines) - 1
    return CopiedLedger(
        revision=ledger.revision, seq=ledger.head.seq, hash=ledger.head.hash, usage=usage, tables=tables
    )


def _prepare(settings: Settings, folder: Path) -> None:
    """An empty folder, for its owner only: keys and end users' names will lie in it. Raises `Conflict`."""
    if not folder.is_absolute():
        raise Conflict("the folder of a backup is given by its whole path")
    kept = (settings.data_dir.absolute(), settings.archive.absolute())
    if any(folder.is_relative_to(one) or one.is_relative_to(folder) for one in kept):
        raise Conflict("a backup does not lie in the folder that it is of")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise Conflict("the folder of a backup must be empty: what lies there may be another one, or half of one")
        folder.chmod(0o700)
    except OSError as error:
        raise Conflict(f"the folder of the backup cannot be used ({error.strerror})") from None


def _remove(folder: Path) -> None:
    """What there is of a backup that failed; the folder stays, empty."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _told(error: Exception) -> str:
    """A sentence for the caller; what is nobody's business but the log's is not in it."""
    if isinstance(error, BillingError | MeteringError | BackupError):
        return str(error)
    if isinstance(error, SpoolError):
        return "the spool cannot be read now; the log says why"
    if isinstance(error, OSError):
        return f"the backup cannot be written ({error.strerror})"
    return "the backup failed; the log says why"


def _pause(seconds: float, turn: Callable[[], None]) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        turn()
        time.sleep(0.05)


def _version() -> str:
    try:
        return version("meterhouse")
    except PackageNotFoundError:
        return "0"


def ledger_lines(folder: Path) -> Iterator[Path]:
    """The files of the ledger's tables beside the log, in a backup."""
    return (path for path in sorted((folder / LEDGER).glob("*.jsonl.gz")) if path.name != EVENTS)
