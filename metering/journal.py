"""Progress of the requests that run: what was opened, how far every step brought it, what was settled.

Knows: an append-only file of CRC-framed records, written with one unbuffered `write` per call and without
fsync (a killed process loses nothing, a power cut at most the kernel's flush interval), and the sums of
what was journalled, for reconciliation. Does not know: the engine, money, where settlements go.

Files in the folder: `segment-*.mhj`; `totals.sqlite3`, the sums of the requests whose segments are gone;
`damaged/`, segments in which damage was found. A segment is closed at `max_bytes` or `max_age_s`: what is still open
is carried to the head of the next one, then the settled requests' counts are added to the totals, then the
old segment is deleted. So a request is in the totals or in a live segment, never in both. Where segments cannot leave,
they end at `max_total_bytes`: from there on no request is opened, and what is open goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from metering.counts import CountRow, CountsTuple, add_rows
from metering.disk import fsync
from metering.events import Outcome, UsageEvent
from metering.journalcopy import JournalCopy, OpenRequest
from metering.lock import FileLock, Locked
from metering.segments import (
    FORMAT,
    Carried,
    Header,
    JournalError,
    Opened,
    OpenedRecord,
    Record,
    Settled,
    State,
    Step,
    Tracked,
    read_folder,
    record_frame,
    retire,
    segment_path,
)
from metering.spool import Spool
from metering.totals import Totals

__all__ = ["Journal", "JournalError", "OpenedRecord", "recover_orphans"]

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # a disk that did not let a segment go is tried again


def recover_orphans(journal_folder: Path, spool: Spool, now_us: int, gateway: str) -> list[UsageEvent]:
    """Settle every request a dead gateway left, once, as `interrupted` with its last journalled counts.

    Returns the events it settled; then the folder has no segment left and `Journal` can be opened on it.
    May be killed at any point and run again: an id that the spool knows is not settled a second time, and
    the totals take a segment once. A request that the journal calls settled and the spool does not know
    lost its spool row (the row comes first): the spool's quarantine tells it, and it is settled again from here; the
    store, where the first stands, can tell. Raises `JournalError` or `SpoolError` with everything left as it was.
    """
    journal_folder.mkdir(parents=True, exist_ok=True)
    with _owned(journal_folder):
        totals = Totals(journal_folder)
        try:
            found = read_folder(journal_folder, totals.through())
            left = [request for id, request in found.state.requests.items() if not spool.knows(id)]
            events = [
                request.opened.event(request.counts, outcome=Outcome.INTERRUPTED, settled_us=now_us, gateway=gateway)
                for request in left
            ]
            spool.missed([request.opened.event_id for request in left if request.settled])
            for done in [spool.settle(event) for event in events]:
                done.result()
            retire(journal_folder, totals, found)
        finally:
            totals.close()
    spool.forget_all()
    return events


def _owned(folder: Path) -> FileLock:
    try:
        return FileLock(folder / "journal.lock")
    except Locked as error:
        raise JournalError(f"another process writes the journal: {error}") from None


# -- the running journal -------------------------------------------------------------------------


class _Closed(NamedTuple):
    """A closed segment that is not in the totals yet, and the requests that end with it."""

    number: int
    nbytes: int
    requests: list[Tracked]


class Journal:
    """One folder, one process. Thread-safe; `opened`, `step` and `settled` each return when the kernel has the bytes.

    `unknown_total` counts progress of requests that are not open here; `damaged_total` the stretches ever found.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int = 16 << 20,
        on_retired: Callable[[list[str]], None] | None = None,
        *,
        max_total_bytes: int = 1 << 30,
        max_age_s: float = 3600.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """A segment is closed at `max_bytes`, or `max_age_s` old by `clock_s`; all of them together may have
        `max_total_bytes`. `on_retired` gets the ids that no segment mentions any more; give it `spool.forget`.

        Raises `JournalError` when the folder has unsettled requests of a dead process: run `recover_orphans` first.
        """
        self.folder = folder
        self.max_bytes = max_bytes
        self.max_total_bytes = max_total_bytes
        self.max_age_s = max_age_s
        self._clock_s = clock_s
        self._on_retired = on_retired
        folder.mkdir(parents=True, exist_ok=True)
        self._file_lock = _owned(folder)
        self._lock = threading.Lock()  # the running segment; held for one write
        self._moving = threading.Lock()  # the totals and what leaves for them; held over an fsync, taken before `_lock`
        self._state = State()
        self._opened_since: set[str] | None = None
        self._fd = -1
        self._broken = self._torn = False
        self._leaving: list[_Closed] = []
        self._closing = threading.Event()
        try:
            self._totals = Totals(folder)
            found = read_folder(folder, self._totals.through())
            if orphans := len(found.state.orphans()):
                raise JournalError(f"{orphans} requests of an earlier run are not settled: recover them first")
            retire(folder, self._totals, found)
            self._start(self._totals.through() + 1)
        except BaseException:
            self._file_lock.release()
            raise
        self._worker = ThreadPoolExecutor(1, "journal-retirer")

    @property
    def unknown_total(self) -> int:
        return self._state.unknown_total

    @property
    def damaged_total(self) -> int:
        return self._totals.damaged()

    @property
    def nbytes(self) -> int:
        """Bytes of all segments that have not left."""
        with self._lock:
            return self._size + sum(closed.nbytes for closed in self._leaving)

    def writable(self) -> bool:
        """False: the last write failed, or there are too many bytes. `opened` tries all the same."""
        return self._fd >= 0 and not self._broken and self.nbytes < self.max_total_bytes

    def opened(self, record: OpenedRecord) -> None:
        """A request was let in; before the engine is told. Raises `JournalError`, then it is not open."""
        if self.nbytes >= self.max_total_bytes:
            raise JournalError(f"the journal has {self.max_total_bytes} bytes that cannot leave")
        self._append(Opened(record))

    def step(self, progress: Sequence[tuple[str, CountsTuple]]) -> None:
        """All that one engine step did: (request id, cumulative counts) each, in one record.

        To be called before any frame of that step leaves. Raises `JournalError`, then nothing was recorded.
        """
        self._append(Step(list(progress)))

    def settled(self, event_id: str) -> None:
        """The request's event is in the spool, fsynced; never to be called before that."""
        self._append(Settled(event_id))

    def oldest_open_us(self) -> int | None:
        """The smallest `ts_us` of a request that is open; None when there is none.

        For a watermark read this first, then the spool's `oldest_unacked_us`: events move in that direction.
        """
        with self._lock:
            return min((r.opened.ts_us for r in self._state.requests.values() if not r.settled), default=None)

    def totals(self, start_us: int, end_us: int) -> list[CountRow]:
        """Sums of the last journalled counts of every request whose hour begins in [start, end), open ones too."""
        with self._moving:  # no segment moves into the totals between the two reads
            with self._lock:  # a step waits for it: only the list is copied under it
                live = [*self._state.requests.values(), *(r for closed in self._leaving for r in closed.requests)]
            rows = [request.row() for request in live]
            return add_rows(
                [*(r for r in rows if start_us <= r.hour_us < end_us), *self._totals.rows(start_us, end_us)]
            )

    def copy(self) -> tuple[JournalCopy, set[str]]:
        """All that is known at one instant, and a set that every id opened since then is put into.

        The set fills until the next `copy` or `end_copy`: read it only after the last event was read that it is for.
        """
        with self._moving:  # as in `totals`
            with self._lock:
                since = self._opened_since = set()
                live = [(r, r.counts, r.settled) for r in self._state.requests.values()]
                leaving = [request for closed in self._leaving for request in closed.requests]
            rows, damage = self._totals.rows(0, 1 << 62), self._totals.damage()
        ended = [Tracked(request.opened, counts) for request, counts, settled in live if settled]
        rows += [request.row() for request in (*ended, *leaving)]
        open_now = [OpenRequest(request.opened, counts) for request, counts, settled in live if not settled]
        return JournalCopy(settled=add_rows(rows), open=open_now, damage=damage), since

    def end_copy(self) -> None:
        """Nobody asks any more what was opened since."""
        with self._lock:
            self._opened_since = None

    def close(self) -> None:
        """Give the folder back. When nothing is open its counts go to the totals, else the next start recovers."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            if not self._state.orphans():
                self._leaving.append(_Closed(self._number, self._size, self._state.take_settled()))
        self._closing.set()
        self._worker.submit(self._retire_leaving).result()
        self._worker.shutdown()
        self._totals.close()
        self._file_lock.release()

    # -- segments --------------------------------------------------------------------------------

    def _append(self, record: Record) -> None:
        data = record_frame(record)
        with self._lock:
            if self._fd < 0:
                raise JournalError("the journal is closed")
            self._write(data)
            self._state.apply(record)
            if self._opened_since is not None and isinstance(record, Opened):
                self._opened_since.add(record.opened.event_id)
            if self._size >= self._rotate_at or self._clock_s() >= self._rotate_at_s:
                self._rotate()

    def _write(self, data: bytes) -> None:
        """One write; what was taken of a failed one is taken back before the next, so the file stays whole frames."""
        try:
            if self._torn:
                os.ftruncate(self._fd, self._size)
                self._torn = False
            written = os.write(self._fd, data)
            if written != len(data):
                self._torn = True
                os.ftruncate(self._fd, self._size)
                self._torn = False
                raise OSError(f"{written} of {len(data)} bytes were taken")
        except OSError as error:
            self._broken = True
            raise JournalError(f"the journal cannot be written: {error.strerror or error}") from error
        self._broken = False
        self._size += len(data)

    def _start(self, number: int) -> None:
        """Begin a segment whose head carries all that is open. Raises `OSError` and leaves the old one in use."""
        head = [record_frame(Header(FORMAT, number))]
        head += [
            record_frame(Carried(request.opened, request.counts))
            for request in self._state.requests.values()
            if not request.settled
        ]
        data = b"".join(head)
        path = segment_path(self.folder, number)
        # An earlier attempt may have left its beginning here, which nothing was promised about.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError("short write")
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number, self._size, self._torn = fd, number, len(data), False
        self._rotate_at = len(data) + self.max_bytes
        self._rotate_at_s = self._clock_s() + self.max_age_s

    def _rotate(self) -> None:
        old = _Closed(self._number, self._size, [])
        try:
            self._start(old.number + 1)
        except OSError as error:
            self._rotate_at = self._size + self.max_bytes // 4
            self._rotate_at_s = self._clock_s() + _RETRY_S
            log.error("journal: no new segment, the old one grows: %s", error)
            return
        self._leaving.append(old._replace(requests=self._state.take_settled()))
        self._worker.submit(self._retire_leaving)  # fsync has no place on the step's path

    def _retire_leaving(self) -> None:
        """In the worker: move the closed segments into the totals, oldest first. A failure is tried again, in the end
        by the next start."""
        while self._leaving:
            try:
                self._retire(self._leaving[0])
            except (OSError, sqlite3.Error) as error:
                log.error("journal: segment %d stays for now: %s", self._leaving[0].number, error)
                if self._closing.is_set():
                    return
                self._closing.wait(_RETRY_S)

    def _retire(self, closed: _Closed) -> None:
        if closed.number != self._number:  # what was carried must outlive what is dropped
            self._sync_head()
        rows = add_rows(request.row() for request in closed.requests)
        with self._moving:
            self._totals.add(closed.number, rows)
            with self._lock:
                self._leaving.pop(0)
        with contextlib.suppress(OSError):  # the totals have it: whoever starts next deletes it unread
            segment_path(self.folder, closed.number).unlink(missing_ok=True)
        if self._on_retired is not None:
            self._on_retired([request.opened.event_id for request in closed.requests])

    def _sync_head(self) -> None:
        """Make the running segment durable, whose head has everything that is open. Raises `OSError`.

        After a failed fsync a second one may succeed without the bytes: they are written anew, into another segment.
        """
        try:
            fsync(segment_path(self.folder, self._number))
            fsync(self.folder)
        except OSError:
            with self._lock:
                self._rotate_at_s = float("-inf")
            raise
