# ruff: noqa: S608  (only names written here are put into the text; every value is a parameter)
"""Retention: a month of events goes to the archive, and only what is there for certain leaves the usage store.

| step | durable | killed right after it |
|---|---|---|
| 1 summed | the month's hourly sums stand (of a month dropped before, they are the archive's) | nothing to do |
| 2 archived | a part, read back and compared; the manifest names it | who reads takes each event once |
| 3 noted | `usage_archives`: how many events, and their digest | the same |
| 4 moved | the partition, to a table of its own, in one step | who reads takes the archive; the next start goes on |
| 5 compared | nothing: what was moved has the noted number and digest, else it goes back | the same |
| 6 summed again | sums of late events' hours, from the archive (only of a month dropped before) | the same |
| 7 dropped | `usage_archives.dropped`, then the moved table | what comes later stays in the store, for the next part |

While a month is moved, its sums are nobody's: it is read event by event, from the archive and what came later, and
not at all (`StoreUnavailable`) where the archive lacks something that was moved.

Whatever is inserted at whatever instant, by whichever gateway: before 4 it is compared in 5, after 4 it stays. Gateways
that archive one store share its archive's folder: its lock lets one of them do so at a time.

Knows: the steps. Does not know: files (`archive`), which months are old enough (its caller).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from metering import hourly, queries
from metering.archive import Archive, ArchivedEvent, Digest, Manifest, month_of, month_us, shown
from metering.counts import HOUR_US
from metering.errors import StoreDamaged, StoreError, StoreUnavailable
from metering.frozen import hourly_sums
from metering.lock import FileLock, Locked
from metering.queries import EVENTS, Query

if TYPE_CHECKING:
    from metering.clickhouse import UsageStore

log = logging.getLogger(__name__)

ARCHIVES = "usage_archives"
RETIRING = "usage_events_retiring"  # exists while a month is moved out
_COLUMNS = {"month": "UInt32", "events": "UInt64", "digest": "String", "dropped": "Bool", "version": "UInt64"}
ATTEMPTS = 3
TURN_EVENTS = 1000  # after so many, others get their turn: this shares a process with streams
TURN_S = 0.01


class Noted(msgspec.Struct, frozen=True):
    """What `usage_archives` says of a month: the archive holds so many of the table's events, of this digest."""

    month: int
    dropped: bool
    events: int
    digest: str


def noted_months() -> Query:
    """The rows of `Noted`."""
    return Query(f"SELECT month, dropped, events, digest FROM {ARCHIVES} FINAL ORDER BY month", {})


class Retention:
    """Archives months of one store into one archive. Thread-safe."""

    def __init__(self, store: UsageStore, archive: Archive, *, turn_s: float = TURN_S) -> None:
        self.archive = archive
        self._store, self._turn_s = store, turn_s
        self._running = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One archives at a time, of all gateways that share the folder. Raises `StoreUnavailable`."""
        with self._running:
            try:
                lock = FileLock(self.archive.folder / ".lock")
            except Locked:
                raise StoreUnavailable("another gateway is archiving: try again later") from None
            except OSError as error:
                raise StoreUnavailable(f"the archive's folder cannot be written ({error.strerror})") from None
            with lock:
                yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing moves between the store and the archive meanwhile, on no gateway. Raises `StoreUnavailable`."""
        with self._alone():
            self._recover()
            yield

    def sum_up_archived(self, month: int) -> None:
        """Make the hourly sums of a month that was dropped of the archive alone. May be repeated."""
        self._sum_from_archive(month, *month_us(month))

    def renew(self) -> None:
        """Make the sums of dropped months anew that lack what is summed now. Raises `StoreUnavailable`."""
        if self._store.outdated_months():
            with self._alone():
                self._recover()
                for month in self._store.outdated_months():
                    self.sum_up_archived(month)

    def recover(self) -> None:
        """Finish, or undo, what an earlier process left half done, if it left anything. Raises `StoreUnavailable`."""
        if not self._store.cluster and self._store.moving():
            with self._alone():
                self._recover()

    def months(self, before_us: int) -> list[int]:
        """The months that lie whole before a time and of which the store has events."""
        self._check_kind()
        with self._alone():
            self._recover()
            return [month for (month,) in self._store.query(_live_months()) if month_us(month)[1] <= before_us]

    def run(self, month: int) -> Manifest:
        """Archive and drop what the store has of a month that is over. Safe to repeat after any failure.

        Raises `StoreUnavailable` while events of the month still arrive, `StoreDamaged` when what is stored or
        archived is not what it was; nothing is dropped then.
        """
        self._check_kind()
        with self._alone():
            for _ in range(ATTEMPTS):
                self._recover()
                before = next((one for one in self._store.archived() if one.month == month), None)
                again = before is not None and before.dropped
                if not again:
                    self._sum_up(month)
                manifest, digest = self._archive_all(month)
                if not digest.rows:
                    return manifest
                self._note(Noted(month, again, digest.rows, str(digest)))
                self._move(month)
                if self._finish():
                    log.info("usage store: %d events of %s are archived and dropped", digest.rows, shown(month))
                    return manifest
        raise StoreUnavailable(f"events of {shown(month)} are still arriving: they are archived later")

    # -- the steps -------------------------------------------------------------------------------

    def _check_kind(self) -> None:
        if self._store.cluster:
            raise StoreError("months are not archived on a cluster")  # parts are moved between tables of one server

    def _recover(self) -> None:
        """Finish, or undo, what an earlier run left half done."""
        if self._store.query(Query(f"EXISTS TABLE {RETIRING}", {}))[0][0]:
            self._finish()

    def _sum_up(self, month: int) -> None:
        span = month_us(month)
        self._store.rollups.rebuild(*span)
        known = {hour_s for (hour_s,) in self._store.query(hourly.known_hours(*span))}
        if known - {hour_s for (hour_s,) in self._store.query(hourly.clean_hours(*span))}:
            raise StoreUnavailable(f"events of {shown(month)} are still arriving: they are archived later")

    def _archive_all(self, month: int) -> tuple[Manifest, Digest]:
        """The archive with everything that the store has of the month, and the digest of that."""
        digest = Digest()
        hours = [hour_s * 1_000_000 for (hour_s,) in self._store.query(hourly.event_hours(*month_us(month)))]
        already: set[str] = set()
        if hours and month in self.archive.months():  # what a run before this one archived, and did not drop
            already = self.archive.hashes(month, hours[0], hours[-1] + HOUR_US)

        def new() -> Iterator[ArchivedEvent]:
            for hour_us in hours:  # no query may take as long as the files of a month
                for archived, hash in self._store.contents(live_events(hour_us)):
                    digest.add(hash)
                    if digest.rows % TURN_EVENTS == 0:
                        time.sleep(self._turn_s)
                    if hash not in already:
                        yield archived

        return self.archive.write(month, new()), digest

    def _note(self, noted: Noted) -> None:
        (last,) = self._store.query(Query(f"SELECT max(version) FROM {ARCHIVES}", {}))[0]
        row = [noted.month, noted.events, noted.digest, noted.dropped, max(last + 1, time.time_ns() // 1000)]
        self._store.insert_rows(ARCHIVES, [row], _COLUMNS)

    def _move(self, month: int) -> None:
        self._store.command(Query(f"CREATE TABLE IF NOT EXISTS {RETIRING} AS {EVENTS}", {}))
        self._store.command(Query(f"ALTER TABLE {EVENTS} MOVE PARTITION {month:d} TO TABLE {RETIRING}", {}))

    def _finish(self) -> bool:
        """Drop what was moved if the archive holds it all; else put it back: False."""
        months = [month for (month,) in self._store.query(Query(f"SELECT DISTINCT toYYYYMM(ts) FROM {RETIRING}", {}))]
        for month in months:
            noted = {one.month: one for one in self._store.archived()}.get(month)
            moved = self._store.query(moved_digest())[0]
            if noted is None or len(months) > 1 or (noted.events, noted.digest) != moved:
                for each in months:
                    self._store.command(Query(f"ALTER TABLE {RETIRING} MOVE PARTITION {each:d} TO TABLE {EVENTS}", {}))
                self._drop_moved()
                return False
            self._check_archive(noted)
            if noted.dropped:
                self._sum_again(month)
            self._note(msgspec.structs.replace(noted, dropped=True))
            self._check_sums(month)
        self._drop_moved()
        return True

    def _check_archive(self, noted: Noted) -> None:
        """The archive that is at hand is the one that was noted. Raises `StoreDamaged`."""
        if self.archive.manifest(noted.month).rows < noted.events:
            raise StoreDamaged(f"the archive of {shown(noted.month)} has less than was put into it")

    def _sum_again(self, month: int) -> None:
        for (hour_s,) in self._store.query(
            Query(f"SELECT DISTINCT toUnixTimestamp(toStartOfHour(ts)) FROM {RETIRING}", {})
        ):
            self._sum_from_archive(month, hour_s * 1_000_000, hour_s * 1_000_000 + HOUR_US)

    def _check_sums(self, month: int) -> None:
        """The sums, which outlive the events, count as many as the archive; else they are made of it."""
        span = month_us(month)
        (summed,) = self._store.query(hourly.requests(*span))[0]
        if summed != self.archive.manifest(month).standing:
            log.warning("usage store: the sums of %s are made anew from the archive", shown(month))
            self._sum_from_archive(month, *span)

    def _sum_from_archive(self, month: int, start_us: int, end_us: int) -> None:
        (version,) = self._store.query(hourly.next_version(start_us, end_us))[0]
        rows = hourly_sums(self.archive.events([month], None, start_us, end_us), version)
        self._store.insert_rows(hourly.HOURLY, rows, hourly.COLUMNS)

    def _drop_moved(self) -> None:
        self._store.command(Query(f"DROP TABLE IF EXISTS {RETIRING} SYNC SETTINGS max_table_size_to_drop = 0", {}))


class Retirer:
    """A thread that ends what an earlier process left half archived, makes dropped months' sums what they are now, and
    archives what is older than so many months.

    What fails is tried again at the next pass. Without `months` nothing is archived, and it ends with the first.
    """

    def __init__(
        self,
        retention: Retention,
        months: int | None,
        *,
        stored_until_us: Callable[[], int],
        clock_us: Callable[[], int],
        period_s: float = 3600.0,
    ) -> None:
        self._retention, self._months, self._period_s = retention, months, period_s
        self._stored_until_us, self._clock_us = stored_until_us, clock_us
        self.last_error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retirer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the month under way is done: a thread inside chDB at exit takes the process down with it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pass_once(self) -> list[int]:
        """Archive every month that is due; which they were."""
        self._retention.recover()
        self._retention.renew()
        if self._months is None:
            return []
        due = self._retention.months(min(kept_from_us(self._clock_us(), self._months), self._stored_until_us()))
        for month in due:
            if self._stopping.is_set():
                break
            self._retention.run(month)
        return due

    def _run(self) -> None:
        again_s = 0.0
        while not self._stopping.wait(again_s):
            again_s = self._period_s
            try:
                self.pass_once()
                self.last_error = None
                if self._months is None:
                    return
            except Exception as error:  # whatever it is, nothing was dropped that is not archived
                self.last_error = str(error) or type(error).__name__
                log.error("usage store: a month is not archived now: %s", self.last_error)


def kept_from_us(now_us: int, months: int) -> int:
    """The first microsecond of the oldest month that is kept, if so many are beside the one that runs."""
    year, number = divmod(month_of(now_us), 100)
    index = max(1970 * 12, year * 12 + number - 1 - months)
    return month_us(index // 12 * 100 + index % 12 + 1)[0]


def _live_months() -> Query:
    return _months_of(EVENTS)


def moving_months() -> Query:
    """The months that are moved out of the events, and neither dropped nor put back yet."""
    return _months_of(RETIRING)


def _months_of(table: str) -> Query:
    return Query(
        "SELECT DISTINCT toUInt32(partition) AS month FROM system.parts "
        f"WHERE database = currentDatabase() AND table = '{table}' AND active AND rows > 0 ORDER BY month",
        {},
    )


def live_events(hour_us: int) -> Query:
    """Every field, the hash, and whether it stands, of every content of an hour, by time, id and hash."""
    where, parameters = queries.within(None, hour_us, hour_us + HOUR_US)
    return Query(
        f"SELECT {queries.event_fields()}, {queries.STANDING} AS standing FROM {EVENTS} FINAL WHERE {where} "
        "ORDER BY ts, event_id, content_hash",
        parameters,
    )


def moved_digest() -> Query:
    """(number, digest) of the events that are moved out, each once; `archive.Digest` is the same in Python."""
    return Query(
        "SELECT count(), toString(sum(reinterpretAsUInt256(reverse(unhex(content_hash))))) "
        f"FROM (SELECT DISTINCT event_id, content_hash FROM {RETIRING})",
        {},
    )
