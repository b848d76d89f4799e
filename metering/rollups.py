"""Which hours' sums stand, and the recomputing of those that do not.

An hour's life: *dirty* in the store before the first of its events is inserted → events → quiet for a while →
recomputed whole from its events → clean, unless an insert touched it meanwhile. While it is dirty, whoever reads takes
its events. So a crash between any two of these steps leaves an hour that is read from its events, and that the writer's
successor recomputes.

Knows: what this writer touched, what it marked. Does not know: how sums are read (`metering.hourly`), what is sold. A
mark is taken back by its own writer alone: nobody else knows what that one is about to insert. `writer` is therefore
the name of a data folder, which has one owner; a writer without a name (a test, a script) leaves its hours dirty for
`adopt`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from metering import hourly
from metering.archive import month_of
from metering.counts import Drift
from metering.queries import Query

log = logging.getLogger(__name__)

AT_ONCE = 24  # hours of one month that are recomputed by one insert
CHECKED_AT_ONCE = 240
RENEWED_AT_ONCE = 240
ABANDONED_US = 3_600_000_000

Clients = Callable[[], AbstractContextManager[Any]]


class _Hour:
    """What this writer did to an hour since it is dirty."""

    __slots__ = ("at_s", "inserting", "marked", "touched", "uncertain")

    def __init__(self) -> None:
        self.inserting = 0  # inserts under way
        self.touched = 0  # inserts ever
        self.at_s = float("-inf")  # of the last one
        self.marked = False  # in the store
        self.uncertain = False  # an insert failed and may appear later


class Rollups:
    """Thread-safe. `clients` gives a connection of one's own."""

    def __init__(
        self,
        clients: Clients,
        writer: str,
        *,
        frozen: Callable[[], Collection[int]] = tuple,
        forgets: bool = True,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`frozen`: months (202609) whose sums are of an archive: they are never made of events again. `forgets`: sums
        can be deleted; else `rebuild` only replaces them.
        """
        self._clients = clients
        self._frozen = frozen
        self._forgets = forgets
        self._writer = writer
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._rolling = threading.Lock()
        self._hours: dict[int, _Hour] = {}
        self._version = 0  # of the last mark; rises whatever the clock does
        self._loaded = False

    @contextmanager
    def touched(self, client: Any, hours_us: Collection[int]) -> Iterator[None]:
        """Around an insert of events in these hours, with its connection: they are dirty in the store before it."""
        self._load(client)
        with self._lock:
            for hour_us in hours_us:
                hour = self._hours.setdefault(hour_us, _Hour())
                hour.inserting += 1
                hour.touched += 1
                hour.at_s = self._monotonic_s()
            new = [hour_us for hour_us in hours_us if not self._hours[hour_us].marked]
        inserted = False
        try:
            if new:
                self._mark(client, {hour_us: self._next_version() for hour_us in new}, dirty=True)
                with self._lock:
                    for hour_us in new:
                        self._hours[hour_us].marked = True
            yield
            inserted = True
        finally:
            with self._lock:
                for hour_us in hours_us:
                    hour = self._hours[hour_us]
                    hour.inserting -= 1
                    hour.uncertain = not inserted
                    hour.at_s = self._monotonic_s()

    def roll(self, quiet_s: float = 0.0) -> int:
        """Recompute the dirty hours that no insert touched for so long; how many are clean now."""
        with self._rolling, self._clients() as client:
            self._load(client)
            due = self._thawed(client, self._due(quiet_s))
            return sum(self._roll(client, some) for some in _by_month(sorted(due), AT_ONCE))

    def dirty(self) -> int:
        """How many hours this writer has yet to recompute."""
        with self._lock:
            return len(self._hours)

    def check(self, start_us: int, end_us: int) -> list[Drift]:
        """Compare sums and events of every hour that begins in [start, end) and that is said to be clean.

        An hour into which something was inserted meanwhile is not told: who inserts says before that it is dirty.
        """
        with self._clients() as client:
            found = [
                Drift(hour_s * 1_000_000, int(groups), int(events), int(summed))
                for some in _by_month(self._clean(client, start_us, end_us), CHECKED_AT_ONCE)
                for hour_s, groups, events, summed in _rows(client, hourly.differences(some))
            ]
            still = set(self._clean(client, start_us, end_us)) if found else set()
        return [drift for drift in found if drift.hour_us in still]

    def rebuild(self, start_us: int, end_us: int) -> int:
        """Forget the sums of every hour that begins in [start, end) and make them anew; how many hours there were."""
        with self._rolling, self._clients() as client:
            self._load(client)
            frozen = set(self._frozen())
            hours = [row[0] * 1_000_000 for row in _rows(client, hourly.known_hours(start_us, end_us))]
            hours = [hour_us for hour_us in hours if month_of(hour_us) not in frozen]
            for some in _by_month(hours, CHECKED_AT_ONCE):
                with self.touched(client, some):
                    if self._forgets:
                        _run(client, hourly.forget(some))
                for part in _by_month(some, AT_ONCE):
                    self._roll(client, part)
        return len(hours)

    def renew(self) -> list[int]:
        """Recompute some hours whose sums lack what is summed now, the latest first; which, none: there are no more.

        Dropped months are the archive's (`Retention.renew`).
        """
        with self._rolling, self._clients() as client:
            self._load(client)
            rows = _rows(client, hourly.outdated_hours(self._frozen(), RENEWED_AT_ONCE))
            with self._lock:  # what is dirty is recomputed anyway, when it is quiet
                hours = sorted(hour_us for (s,) in rows if (hour_us := s * 1_000_000) not in self._hours)
            with self.touched(client, hours):
                pass
            for part in _by_month(hours, AT_ONCE):
                self._roll(client, part)
        if hours:
            log.info("usage store: the sums of %d hours are made anew, with what they lacked", len(hours))
        return hours

    def adopt(self, alive: Collection[str], older_than_us: int) -> int:
        """Take over what writers that are not `alive` marked before a time; how many hours. `roll` recomputes them."""
        with self._rolling, self._clients() as client:
            self._load(client)
            left = [
                (hour_s * 1_000_000, writer, version)
                for hour_s, writer, version in _rows(client, hourly.dirty_marks())
                if writer != self._writer and writer not in alive and version < older_than_us
            ]
            if not left:
                return 0
            hours = {hour_us for hour_us, _, _ in left}
            with self.touched(client, hours):  # ours first: nobody may find the hour clean in between
                rows = [[hour_us // 1_000_000, writer, version + 1, False] for hour_us, writer, version in left]
                _insert_marks(client, rows)
        log.warning("usage store: %d hours that other writers left dirty are recomputed here", len(hours))
        return len(hours)

    # -- inside ----------------------------------------------------------------------------------

    def _clean(self, client: Any, start_us: int, end_us: int) -> list[int]:
        """The hours whose sums stand, of those whose events are here to compare them with."""
        frozen = set(self._frozen())
        clean = sorted(row[0] * 1_000_000 for row in _rows(client, hourly.clean_hours(start_us, end_us)))
        return [hour_us for hour_us in clean if month_of(hour_us) not in frozen]

    def _load(self, client: Any) -> None:
        """What this writer's predecessor left dirty, and its last version."""
        if self._loaded:
            return
        rows = _rows(client, hourly.marks_of(self._writer))
        with self._lock:
            first, self._loaded = not self._loaded, True
            if first:
                self._version = max((version for _, version, _ in rows), default=0)
                for hour_s, _, dirty in rows:
                    if dirty:
                        self._hours.setdefault(hour_s * 1_000_000, _Hour()).marked = True

    def _due(self, quiet_s: float) -> list[int]:
        before_s = self._monotonic_s() - quiet_s
        with self._lock:
            return [
                hour_us
                for hour_us, hour in self._hours.items()
                if hour.marked and not hour.inserting and not hour.uncertain and hour.at_s <= before_s
            ]

    def _thawed(self, client: Any, hours_us: list[int]) -> list[int]:
        """The hours but those of frozen months, which this writer lets go: their events are read beside their sums."""
        frozen = set(self._frozen()) if hours_us else set()
        cold = [hour_us for hour_us in hours_us if month_of(hour_us) in frozen]
        with self._lock:
            versions = {hour_us: self._following() for hour_us in cold if not self._hours[hour_us].inserting}
            for hour_us in versions:
                del self._hours[hour_us]
        self._mark(client, versions, dirty=False)
        return [hour_us for hour_us in hours_us if hour_us not in cold]

    def _roll(self, client: Any, hours_us: Sequence[int]) -> int:
        with self._lock:
            seen = {hour_us: self._hours[hour_us].touched for hour_us in hours_us}
        _run(client, hourly.recompute(hours_us))
        with self._lock:  # versions are given under the lock in which the hour is let go: a later mark has a higher one
            clean = [
                hour_us
                for hour_us in hours_us
                if not self._hours[hour_us].inserting and self._hours[hour_us].touched == seen[hour_us]
            ]
            versions = {hour_us: self._following() for hour_us in clean}
            for hour_us in clean:
                del self._hours[hour_us]
        try:
            self._mark(client, versions, dirty=False)
        except BaseException:
            with self._lock:
                for hour_us in clean:
                    self._hours.setdefault(hour_us, _Hour()).marked = True
            raise
        return len(clean)

    def _mark(self, client: Any, versions: dict[int, int], *, dirty: bool) -> None:
        rows = [[hour_us // 1_000_000, self._writer, version, dirty] for hour_us, version in versions.items()]
        if rows:
            _insert_marks(client, rows)

    def _next_version(self) -> int:
        with self._lock:
            return self._following()

    def _following(self) -> int:
        """With `_lock` held."""
        self._version = max(self._version + 1, time.time_ns() // 1000)
        return self._version


class Roller:
    """A thread that recomputes what has become quiet. What fails is tried again at the next pass.

    `alive`: the writers that may still insert something; what others marked more than an hour ago is adopted.
    """

    def __init__(
        self,
        rollups: Rollups,
        *,
        alive: Callable[[], Collection[str]] | None = None,
        period_s: float = 5.0,
        quiet_s: float = 30.0,
    ) -> None:
        self._rollups, self._alive, self._period_s, self._quiet_s = rollups, alive, period_s, quiet_s
        self._adopt_at_s = float("-inf")
        self._renewing = True
        self._renewed: list[int] = []
        self.last_error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the pass under way has ended: a thread inside chDB at exit takes the process down with it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            try:
                self._adopt()
                self._rollups.roll(self._quiet_s)
                if self._renewing:
                    self._renew()
                self.last_error = None
            except Exception as error:  # whatever it is, the hours stay dirty, and what is read stays right
                self.last_error = str(error) or type(error).__name__
                log.warning("usage store: hours are not recomputed now: %s", self.last_error)

    def _renew(self) -> None:
        hours = self._rollups.renew()
        # What comes again was forged with the highest version there is: `check` tells, `rebuild` mends.
        self._renewing = bool(hours) and hours != self._renewed
        self._renewed = hours

    def _adopt(self) -> None:
        if self._alive is not None and time.monotonic() >= self._adopt_at_s:
            self._rollups.adopt(self._alive(), time.time_ns() // 1000 - ABANDONED_US)
            self._renewing = True  # a gateway of older code may have made such sums meanwhile
            self._adopt_at_s = time.monotonic() + ABANDONED_US / 1_000_000


def _by_month(hours_us: Sequence[int], most: int) -> Iterator[list[int]]:
    """Runs of hours that one insert may replace: of one month, so that they go to one part."""
    for _, of_month in itertools.groupby(hours_us, key=lambda hour_us: time.gmtime(hour_us // 1_000_000)[:2]):
        hours = list(of_month)
        for at in range(0, len(hours), most):
            yield hours[at : at + most]


def _insert_marks(client: Any, rows: list[list[Any]]) -> None:
    client.insert(
        hourly.DIRTY,
        rows,
        column_names=["hour", "writer", "version", "dirty"],
        column_type_names=["DateTime('UTC')", "LowCardinality(String)", "UInt64", "Bool"],
        settings={"async_insert": 0},
    )


def _rows(client: Any, query: Query) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = client.query(*query).result_rows
    return rows


def _run(client: Any, query: Query) -> None:
    client.command(*query)
