"""Making a server's stores of a backup: everything is checked, then written, then compared.

| step | durable | killed right after it |
|---|---|---|
| 1 checked | nothing: every file, event and row was read, and the target is empty | run it again |
| 2 begun | `restoring.json` in the data folder, with the backup's id and the folder's new identity | run it again |
| 3 ledger | one transaction | found by its head, or not there |
| 4 usage store | inserts, which count once however often they are made | made again |
| 5 data folder | archive, spool, journal, files | emptied, and filled again |
| 6 whole | `restoring.json` is gone | `meterhouse reconcile` says what step 7 would have said |
| 7 compared | what waited is delivered, what ran is settled; all books are compared | the same |

While `restoring.json` lies there no server starts on the folder. What is restored is a gateway of its own: another data
folder, no leases, no duties. Two made of one backup share nothing, as long as their stores are different ones.

Knows: the steps. Does not know: what is in the parts.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from billing.errors import BillingError
from billing.ledgercopy import Head, Table, checked, load
from billing.reconcile import Difference
from billing.restorations import LedgerRestored
from billing.store import EventStore, StoredEvent
from gateway.backup.files import FILES, put_back
from gateway.backup.manifest import Backup, BackupError, check_files, read_manifest
from gateway.backup.take import EVENTS, LEDGER, ledger_lines
from gateway.restoring import MARKER
from gateway.settings import Settings
from gateway.stores import Stores, cluster_of
from metering.archive import Archive, shown
from metering.clickhouse import UsageStore
from metering.counts import HOUR_US
from metering.disk import fsync
from metering.errors import MeteringError, StoreDamaged
from metering.lines import read_lines
from metering.lock import FileLock, Locked
from metering.retention import Retention
from metering.spool import Spool, SpoolError
from metering.usagecopy import ARCHIVE, check_usage, restore_spool, restore_store
from migrations.runner import (
    MigrationError,
    ledger_is_empty,
    ledger_revisions,
    migrate_clickhouse,
    migrate_ledger,
    usage_store_is_empty,
)

LOCK = "server.lock"
WINDOW_EVENTS = 200_000  # compared at once, where a day does not have more
WINDOW_US = 24 * HOUR_US
FLUSH_S = 600.0
_FOREVER_US = 1 << 52


class Restored(msgspec.Struct, kw_only=True):
    """What stands now. `faults`: where the books part, as sentences; none in what was whole when it was taken."""

    id: str
    requests: int
    ledger_events: int
    settled: int  # requests that ran when the backup was taken
    faults: list[str]


class _Marker(msgspec.Struct, frozen=True):
    backup: str
    folder: str


def check(folder: Path) -> Backup:
    """Read every byte, event and row of a backup. Raises `BackupError` with what is wrong, naming the file."""
    backup = read_manifest(folder)
    check_files(folder, backup)
    try:
        if backup.ledger.revision not in ledger_revisions():
            raise BackupError("The backup's ledger is newer than this version of Meterhouse.")
        check_usage(folder, backup.usage)
        last = Head(0, "")
        for row in checked(_events(folder)):
            last = Head(row.seq, row.hash)
        if backup.ledger.seq and last != Head(backup.ledger.seq, backup.ledger.hash):
            raise BackupError(f"{LEDGER}/{EVENTS} of the backup does not end where it was taken.")
        if {table.name: len(table.rows) for table in _tables(folder)} != backup.ledger.tables:
            raise BackupError(f"{LEDGER} of the backup does not have the tables that were copied.")
    except (BillingError, MeteringError) as error:
        raise BackupError(f"The backup is damaged: {error}.") from None
    return backup


def restore(settings: Settings, folder: Path, clock_us: Callable[[], int], say: Callable[[str], None]) -> Restored:
    """Fill the empty stores that the settings name. Raises `BackupError`; until all was checked nothing is written."""
    say("Checking the backup")
    backup = check(folder)
    if settings.gateway_id != backup.gateway:
        raise BackupError(f"This is a backup of the gateway {backup.gateway!r}: restore it with --gateway-id.")
    cluster_of(settings)  # settings that contradict each other are told before anything is written
    try:
        marker = _check_target(settings, backup, folder)
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(settings.data_dir / LOCK):
            _begin(settings.data_dir, marker)
            say("Restoring the ledger")
            _restore_ledger(settings, folder, backup, marker, clock_us())
            say("Restoring usage")
            _restore_usage(settings, folder, marker)
            put_back(folder / FILES, settings.data_dir)
            _end(settings.data_dir, marker)
        say("Comparing all books")
        return _compare(settings, backup, clock_us)
    except Locked:
        raise BackupError(f"A server or another restore runs on the data folder {settings.data_dir}.") from None
    except (BillingError, MeteringError, MigrationError, SpoolError) as error:
        raise BackupError(f"{str(error)[:1].upper()}{str(error)[1:]}.") from error
    except OSError as error:
        raise BackupError(f"The stores cannot be written: {error.strerror or error}.") from error


# -- the target -----------------------------------------------------------------------------------


def _check_target(settings: Settings, backup: Backup, folder: Path) -> _Marker:
    """The marker of this restore, begun before or new. Raises `BackupError` where something else stands."""
    data_dir = settings.data_dir
    if data_dir.absolute().is_relative_to(folder.absolute()):
        raise BackupError("A backup is not restored into itself.")
    found = _marker(data_dir)
    if found is not None and found.backup != backup.id:
        raise BackupError(f"In {data_dir} the restore of another backup was begun: empty it, or end that one.")
    if found is None:
        if data_dir.is_dir() and any(path.name != LOCK for path in data_dir.iterdir()):
            raise BackupError(f"The data folder {data_dir} is not empty: a backup is restored into an empty one.")
        if not ledger_is_empty(settings.ledger):
            raise BackupError("The ledger has events: a backup is restored into an empty one.")
        if settings.clickhouse_url is not None and not usage_store_is_empty(settings.clickhouse, cluster_of(settings)):
            raise BackupError("The usage store has usage: a backup is restored into an empty one.")
    _check_archive(settings, folder)
    return found or _Marker(backup.id, uuid.uuid4().hex)


def _check_archive(settings: Settings, folder: Path) -> None:
    """An archive outside the data folder may be there still; what it has must be what is restored."""
    if settings.archive.absolute().is_relative_to(settings.data_dir.absolute()):
        return
    copied, standing = Archive(folder / ARCHIVE), Archive(settings.archive)
    for month in standing.months():
        if month not in copied.months() or standing.manifest(month) != copied.manifest(month):
            raise BackupError(f"The archive has {shown(month)} otherwise than the backup: give an empty --archive-dir.")
        standing.check(month)


def _marker(data_dir: Path) -> _Marker | None:
    try:
        return msgspec.json.decode((data_dir / MARKER).read_bytes(), type=_Marker)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        raise BackupError(f"{data_dir / MARKER} cannot be understood: empty the data folder.") from None


def _begin(data_dir: Path, marker: _Marker) -> None:
    """Mark the folder, and take out what an earlier run put into it."""
    unfinished = data_dir / f"{MARKER}.new"
    unfinished.write_bytes(msgspec.json.encode(marker))
    fsync(unfinished)
    unfinished.replace(data_dir / MARKER)
    fsync(data_dir)
    for path in data_dir.iterdir():
        if path.name not in (MARKER, LOCK):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _end(data_dir: Path, marker: _Marker) -> None:
    (data_dir / "folder.id").write_text(f"{marker.folder}\n")
    for path in data_dir.rglob("*"):
        if (path.is_file() and path.name != LOCK) or path.is_dir():
            fsync(path)
    fsync(data_dir)
    fsync(data_dir.absolute().parent)
    (data_dir / MARKER).unlink()
    fsync(data_dir)


# -- the parts ------------------------------------------------------------------------------------


def _restore_ledger(settings: Settings, folder: Path, backup: Backup, marker: _Marker, now_us: int) -> None:
    """At the schema it was copied with; then it is brought up to date, as that ledger would have been."""
    if ledger_is_empty(settings.ledger):
        migrate_ledger(settings.ledger, upto=backup.ledger.revision)
    store = EventStore(settings.ledger)
    try:
        head = Head(backup.ledger.seq, backup.ledger.hash)
        told = LedgerRestored(backup_id=backup.id, instant_us=backup.instant_us, seq=head.seq, at_us=now_us)
        load(store, _events(folder), list(_tables(folder)), told, head, {backup.folder: marker.folder})
    finally:
        store.close()
    migrate_ledger(settings.ledger)


def _restore_usage(settings: Settings, folder: Path, marker: _Marker) -> None:
    _restore_archive(settings, folder)
    migrate_clickhouse(settings.clickhouse, cluster=cluster_of(settings))
    archive = Archive(settings.archive)
    usage = UsageStore(settings.clickhouse, marker.folder, archive, cluster=settings.clickhouse_cluster is not None)
    try:
        restore_store(folder, usage, Retention(usage, archive))
    finally:
        usage.close()
    spool = Spool(settings.spool_dir / "spool.sqlite3")
    try:
        restore_spool(folder, spool, settings.journal_dir)
    finally:
        spool.close()


def _restore_archive(settings: Settings, folder: Path) -> None:
    """Each month's manifest last, as the archive itself writes it."""
    copied, standing = Archive(folder / ARCHIVE), Archive(settings.archive)
    for month in set(copied.months()) - set(standing.months()):
        source, target = copied.folder / shown(month), standing.folder / shown(month)
        target.mkdir(parents=True, exist_ok=True)
        for part in copied.manifest(month).parts:
            shutil.copyfile(source / part.file, target / part.file)
            fsync(target / part.file)
        unfinished = target / "manifest.json.new"
        shutil.copyfile(source / "manifest.json", unfinished)
        fsync(unfinished)
        unfinished.replace(target / "manifest.json")
        fsync(target)
        fsync(standing.folder)


def _events(folder: Path) -> Iterator[StoredEvent]:
    names = StoredEvent.__struct_fields__
    for line in read_lines(folder / LEDGER / EVENTS):
        try:
            yield msgspec.convert(dict(zip(names, msgspec.json.decode(line), strict=True)), StoredEvent)
        except (msgspec.MsgspecError, TypeError, ValueError):
            raise StoreDamaged(f"{LEDGER}/{EVENTS} has a line that is no event") from None


def _tables(folder: Path) -> Iterator[Table]:
    for path in ledger_lines(folder):
        rows: list[list[Any]] = []
        try:
            rows = [msgspec.json.decode(line, type=list[Any]) for line in read_lines(path)]
        except msgspec.MsgspecError:
            raise StoreDamaged(f"{LEDGER}/{path.name} has a line that is no row") from None
        if not rows:
            raise StoreDamaged(f"{LEDGER}/{path.name} has no columns")
        yield Table(path.name.removesuffix(".jsonl.gz"), [str(name) for name in rows[0]], rows[1:])


# -- the books ------------------------------------------------------------------------------------


def _compare(settings: Settings, backup: Backup, clock_us: Callable[[], int]) -> Restored:
    """Open everything as a server does, deliver what waits, and compare all books over all time."""
    stores = Stores(settings, clock_us)
    stores.open("", serves=False)
    try:
        faults = [] if stores.flush(FLUSH_S) else ["not all usage was taken by the stores in time"]
        hours: dict[int, int] = {}
        for row in stores.usage.counts(0, _FOREVER_US):
            hours[row.hour_us] = hours.get(row.hour_us, 0) + row.requests
        if (found := sum(hours.values())) != backup.requests:
            faults.append(f"the usage store counts {found} requests, and the backup has {backup.requests}")
        if backup.lacking:
            faults.append(f"the ledger knows {backup.lacking} requests whose usage was not in the backup")
        for start_us, end_us in _windows(hours):
            faults += map(_sentence, _differences(stores, backup.gateway, start_us, end_us))
        return Restored(
            id=backup.id,
            requests=found,
            ledger_events=backup.ledger.seq,
            settled=stores.recovered,
            faults=faults,
        )
    finally:
        stores.close()


def _differences(stores: Stores, gateway: str, start_us: int, end_us: int) -> list[Difference]:
    report = stores.billing.reconcile(
        start_us,
        end_us,
        usage=stores.usage,
        spool_events=stores.spool.pending_between("clickhouse", start_us, end_us, WINDOW_EVENTS),
        journal_totals=stores.journal.totals(start_us, end_us),
        gateway=gateway,
        open_from_us=None,
    )
    return report.differences


def _windows(hours: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Ranges of whole hours that cover all of these, each of at most a day and, unless it is one hour, the bound."""
    start_us = last_us = count = 0
    for hour_us in sorted(hours):
        if count and (count + hours[hour_us] > WINDOW_EVENTS or hour_us - start_us >= WINDOW_US):
            yield start_us, last_us + HOUR_US
            count = 0
        if not count:
            start_us = hour_us
        last_us, count = hour_us, count + hours[hour_us]
    if count:
        yield start_us, last_us + HOUR_US


def _sentence(found: Difference) -> str:
    where = " ".join(filter(None, (found.tenant, found.model or "", found.invoice_id or "")))
    return f"{found.between}: {where}: {found.left} and {found.right}"
