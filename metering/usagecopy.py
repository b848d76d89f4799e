"""All usage that a gateway knows of, as files, taken beside the gateway that runs; and back again.

The copy is of the instant at which the journal is read. A request passes journal → spool → usage store and is never in
none of them, so they are read in that order, and what passes meanwhile is found at least once:

| a request that | is in the copy as |
|---|---|
| runs when the journal is read | how far it was; settled when the copy is opened, as after a crash |
| of these, has ended before the spool or the store is read | its event; the journal's copy says it had ended |
| had ended before | its event, from the spool or the store, whatever was delivered meanwhile |
| begins after | nothing: its event is left out wherever it turns up |

    usage/2026-11/…          what the store has, in the archive's files: canonical bytes, and whether each stands
    archive/2026-09/…        the archive as it is
    waiting.jsonl.gz         events that the store or the ledger's copy lacks: to be delivered again
    quarantine.jsonl.gz conflicts.jsonl.gz dead_letters.jsonl.gz archives.jsonl.gz journal.json

Knows: spool, journal, store, archive, and by `recorded` what the ledger's copy has, which must be older than this one.
Hourly sums are not copied: they are made again. Does not know: the ledger, the manifest.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from metering import hourly
from metering.archive import Archive, ArchivedEvent, Digest, month_of, shown
from metering.batches import batched
from metering.clickhouse import UsageStore
from metering.errors import StoreDamaged
from metering.events import UsageEvent, decode, encode
from metering.journal import Journal
from metering.journalcopy import JournalCopy, write_journal
from metering.lines import LineWriter, read_lines, write_lines
from metering.queries import CONFLICTS, DEAD_LETTERS, Query
from metering.retention import ARCHIVES, Retention, live_events
from metering.spool import Spool

USAGE, ARCHIVE = "usage", "archive"
_WAITING, _QUARANTINE = "waiting.jsonl.gz", "quarantine.jsonl.gz"
_JOURNAL = "journal.json"
_CONSUMER = "clickhouse"
_LOOKED_UP = 500
_INSERTED = 10_000
_FOREVER_US = 1 << 52  # the year 2112: later than any event that the store takes

_TABLES: dict[str, dict[str, str]] = {  # beside the events: what cannot be made again
    CONFLICTS: {"event_id": "String", "content_hash": "String"},
    DEAD_LETTERS: {"event_id": "String", "content_hash": "String", "reason": "String", "body": "String"},
    ARCHIVES: {"month": "UInt32", "events": "UInt64", "digest": "String", "dropped": "Bool", "version": "UInt64"},
}
_FILES = {CONFLICTS: "conflicts.jsonl.gz", DEAD_LETTERS: "dead_letters.jsonl.gz", ARCHIVES: "archives.jsonl.gz"}

Recorded = Callable[[Sequence[str]], set[str]]
"""Those of some events' ids that the ledger's copy knows."""


class CopiedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy holds. `digest` is over the ids of the events that stand, in any order (`add_id`)."""

    standing: int  # events that stand: those of the store, of dropped months, and those that only the spool has
    digest: str
    second: int  # second contents under their ids
    archived: int  # of `standing`, those in months that the store has dropped
    waiting: int  # lines to be delivered again
    open: int  # requests that run in the copy
    recorded: int  # usage that is in the ledger's copy too
    dead_letters: int
    quarantined: int


def add_id(digest: Digest, event_id: str) -> None:
    """Count an event by its id."""
    digest.add(hashlib.sha256(event_id.encode()).hexdigest())


# -- taking one -----------------------------------------------------------------------------------


class UsageCopier:
    """Takes one copy into a folder. Blocking. `turn` is called now and then, and may sleep or raise."""

    def __init__(
        self,
        folder: Path,
        *,
        usage: UsageStore,
        retention: Retention,
        spool: Spool,
        journal: Journal,
        recorded: Recorded,
        turn: Callable[[], None],
    ) -> None:
        self._folder, self._usage, self._retention = folder, usage, retention
        self._spool, self._journal = spool, journal
        self._lookup, self._turn = recorded, turn
        self._digest = Digest()
        self._second = self._recorded = 0
        self._in_spool: set[str] = set()  # of the events that wait there, those that the store was not seen to have
        self._written: set[str] = set()  # ids of the lines to be delivered again
        self._running: dict[str, UsageEvent | None] = {}  # what ran when the journal was read, and its event, if any
        self._looked: list[UsageEvent] = []

    def take(self) -> CopiedUsage:
        """Write all files; they are not fsynced. Raises `MeteringError`, `SpoolError`, `OSError`."""
        copy, since = self._journal.copy()
        try:
            self._running = {request.opened.event_id: None for request in copy.open}
            with LineWriter(self._folder / _WAITING) as waiting:
                self._copy_spool(waiting, since)
                with self._retention.paused():
                    archived = self._copy_archive(waiting)
                    self._copy_store(waiting, since)
                    tables = {name: self._copy_table(name) for name in _TABLES}
                self._recorded += len(self._lookup(list(self._in_spool)))
                for event_id in self._in_spool:
                    add_id(self._digest, event_id)
        finally:
            self._journal.end_copy()
        copy = copy.ended({id: event for id, event in self._running.items() if event is not None})
        (self._folder / _JOURNAL).write_bytes(msgspec.json.encode(copy))
        return CopiedUsage(
            standing=self._digest.rows,
            digest=str(self._digest),
            second=self._second,
            archived=archived,
            waiting=waiting.count,
            open=len(copy.open),
            recorded=self._recorded + self._recorded_elsewhere(),
            dead_letters=tables[DEAD_LETTERS],
            quarantined=self._copy_quarantine(),
        )

    def _copy_spool(self, waiting: LineWriter, since: set[str]) -> None:
        for event in self._spool.waiting(_CONSUMER):
            if event.event_id in since:
                continue
            if event.event_id in self._running:
                self._running[event.event_id] = event
            waiting.write(encode(event))
            self._written.add(event.event_id)
            self._in_spool.add(event.event_id)

    def _copy_store(self, waiting: LineWriter, since: set[str]) -> None:
        hours = [hour_s * 1_000_000 for (hour_s,) in self._usage.query(hourly.event_hours(0, _FOREVER_US))]
        copied = Archive(self._folder / USAGE)
        for month, of_month in itertools.groupby(hours, key=month_of):
            copied.write(month, self._contents(list(of_month), waiting, since))
        self._look_up(waiting)

    def _contents(self, hours_us: list[int], waiting: LineWriter, since: set[str]) -> Iterator[ArchivedEvent]:
        for hour_us in hours_us:
            for count, (archived, _) in enumerate(self._usage.contents(live_events(hour_us))):
                if count % 1000 == 0:
                    self._turn()
                if archived.event.event_id not in since:
                    self._see(archived, waiting)
                    yield archived

    def _see(self, archived: ArchivedEvent, waiting: LineWriter) -> None:
        event = archived.event
        if not archived.standing:
            self._second += 1
            return
        add_id(self._digest, event.event_id)
        self._in_spool.discard(event.event_id)
        if event.event_id in self._running:
            self._running[event.event_id] = event
        self._looked.append(event)
        if len(self._looked) == _LOOKED_UP:
            self._look_up(waiting)

    def _look_up(self, waiting: LineWriter) -> None:
        """Which of the events just seen the ledger's copy lacks: they are delivered again."""
        known = self._lookup([event.event_id for event in self._looked])
        self._recorded += len(known)
        for event in self._looked:
            if event.event_id not in known and event.event_id not in self._written:
                waiting.write(encode(event))
                self._written.add(event.event_id)
        self._looked.clear()

    def _copy_archive(self, waiting: LineWriter) -> int:
        """The archive's files; how many events stand in the months that the store has dropped."""
        archive, standing = self._retention.archive, 0
        dropped = {noted.month for noted in self._usage.archived() if noted.dropped}
        for month in archive.months():
            source, copied = archive.folder / shown(month), self._folder / ARCHIVE / shown(month)
            copied.mkdir(parents=True)
            for name in (*(part.file for part in archive.manifest(month).parts), "manifest.json"):
                self._turn()
                shutil.copyfile(source / name, copied / name)
            if month in dropped:
                standing += self._see_dropped(Archive(self._folder / ARCHIVE), month, waiting)
        if lacking := dropped - set(archive.months()):
            raise StoreDamaged(f"the archive of {shown(min(lacking))} is missing")
        return standing

    def _see_dropped(self, archive: Archive, month: int, waiting: LineWriter) -> int:
        lacking: set[str] = set()
        count = 0
        for ids in batched(archive.standing_ids(month), _LOOKED_UP):
            self._turn()
            known = self._lookup(ids)
            self._recorded += len(known)
            lacking.update(set(ids) - known)
            for event_id in ids:
                add_id(self._digest, event_id)
                self._in_spool.discard(event_id)
            count += len(ids)
        for archived in archive.contents(month) if lacking else ():
            if archived.standing and archived.event.event_id in lacking - self._written:
                waiting.write(encode(archived.event))
                self._written.add(archived.event.event_id)
        return count

    def _copy_table(self, name: str) -> int:
        final = "" if name != ARCHIVES else "FINAL"
        rows = self._usage.query(Query(f"SELECT DISTINCT {', '.join(_TABLES[name])} FROM {name} {final}", {}))  # noqa: S608
        return write_lines(self._folder / _FILES[name], (msgspec.json.encode(row) for row in sorted(rows)))

    def _copy_quarantine(self) -> int:
        return write_lines(
            self._folder / _QUARANTINE,
            (
                msgspec.json.encode([_text(event_id), reason, _text(digest), _text(body)])
                for event_id, reason, digest, body in self._spool.quarantined()
            ),
        )

    def _recorded_elsewhere(self) -> int:
        """Usage that the ledger's copy knows and the store never took: dead letters, and what the spool set aside."""
        ids = {str(msgspec.json.decode(line)[0]) for line in read_lines(self._folder / _FILES[DEAD_LETTERS])}
        ids |= {event_id.decode(errors="replace") for event_id, *_ in self._spool.quarantined()}
        ids -= self._in_spool
        return len(self._lookup(list(ids)))


# -- opening one ----------------------------------------------------------------------------------


def check_usage(folder: Path, copied: CopiedUsage) -> None:
    """Whether the files are a whole copy, to the last event. Raises `StoreDamaged` or `StoreNewer`."""
    for name in (USAGE, ARCHIVE):
        archive = Archive(folder / name)
        for month in archive.months():
            archive.check(month)
    if sum(1 for _ in _waiting(folder)) != copied.waiting or len(_journal(folder).open) != copied.open:
        raise StoreDamaged(f"{_WAITING} or {_JOURNAL} is not what was copied")
    for name in _TABLES:
        _rows(folder, name)
    _quarantine(folder)


def restore_store(folder: Path, store: UsageStore, retention: Retention) -> None:
    """Put a copy into a usage store that has nothing else; its archive lies in place. May be repeated."""
    for name, columns in _TABLES.items():
        rows = _rows(folder, name)
        if name == ARCHIVES:  # what was not dropped the store has whole
            rows = [row for row in rows if row[3]]
        store.insert_rows(name, rows, columns)
    copied = Archive(folder / USAGE)
    for month in copied.months():
        second: list[UsageEvent] = []
        for batch in batched(_standing(copied.contents(month), second), _INSERTED):
            store.insert(batch)
        store.insert(second)  # after those that stand, as it was
    for row in _rows(folder, ARCHIVES):
        if row[3]:
            retention.sum_up_archived(row[0])


def restore_spool(folder: Path, spool: Spool, journal_folder: Path) -> None:
    """Fill a new spool and a new journal of a copy: everything in it is delivered again, to all."""
    for batch in batched(_waiting(folder), 1000):
        for done in [spool.settle(event) for event in batch]:
            done.result()
    spool.set_aside(_quarantine(folder))
    write_journal(journal_folder, _journal(folder))


def _standing(contents: Iterable[ArchivedEvent], second: list[UsageEvent]) -> Iterator[UsageEvent]:
    for archived in contents:
        if archived.standing:
            yield archived.event
        else:
            second.append(archived.event)


def _waiting(folder: Path) -> Iterator[UsageEvent]:
    for line in read_lines(folder / _WAITING):
        try:
            yield decode(line)
        except (msgspec.MsgspecError, ValueError):
            raise StoreDamaged(f"{_WAITING} has a line that is no event") from None


def _journal(folder: Path) -> JournalCopy:
    try:
        return msgspec.json.decode((folder / _JOURNAL).read_bytes(), type=JournalCopy)
    except (OSError, msgspec.MsgspecError):
        raise StoreDamaged(f"{_JOURNAL} cannot be read") from None


def _rows(folder: Path, name: str) -> list[list[Any]]:
    try:
        return [msgspec.json.decode(line) for line in read_lines(folder / _FILES[name])]
    except msgspec.MsgspecError:
        raise StoreDamaged(f"{_FILES[name]} has a line that is no row") from None


def _quarantine(folder: Path) -> list[tuple[bytes, str, bytes, bytes]]:
    try:
        rows = [msgspec.json.decode(line) for line in read_lines(folder / _QUARANTINE)]
        return [(_bytes(row[0]), str(row[1]), _bytes(row[2]), _bytes(row[3])) for row in rows]
    except (msgspec.MsgspecError, ValueError):
        raise StoreDamaged(f"{_QUARANTINE} has a line that is no row") from None


def _text(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
