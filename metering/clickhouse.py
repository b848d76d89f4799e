"""The usage store: events in ClickHouse, by clickhouse-connect.

Knows: how events become rows and rows the same events, which errors mean "never" and which mean "not now".
Does not know: prices, the spool; the tables are made by `migrations.runner`. Insertion is at-least-once,
counting is exactly-once: see `migrations/clickhouse/0001_usage_events.sql`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import clickhouse_connect
import msgspec
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError

from metering import frozen, hourly, queries, retention
from metering.archive import Archive, ArchivedEvent, month_of, month_us, within
from metering.counts import HOUR_US, CountRow, add_rows, hour_of, row_of
from metering.errors import Rejected, StoreDamaged, StoreError, StoreNewer, StoreTooMuch, StoreUnavailable
from metering.events import VERSION, Outcome, UsageEvent, VersionError, content_hash, encode
from metering.frozen import UsageRow
from metering.queries import Query
from metering.rollups import Rollups

__all__ = ["UsageRow", "UsageStore", "client_options"]

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_CLIENTS = 8
STEADY_ATTEMPTS = 3  # a month moves once in its life
_SLOT_WAIT_S = 60.0
_CHECKED_AT_ONCE = 1000  # ids in one query: ClickHouse takes at most 128 KiB in a parameter
_ON_CLUSTER = {
    "distributed_foreground_insert": 1,  # answered when every shard has its rows
    "insert_quorum": "auto",  # and in each a majority of the replicas: the spool forgets what was answered
    "insert_deduplicate": 0,
    "skip_unavailable_shards": 0,  # a sum without a shard is an error, never a smaller sum
    "distributed_product_mode": "global",  # what a subquery finds is of all shards
    "parallel_distributed_insert_select": 0,  # rows go where the sharding key says
    "load_balancing": "in_order",  # all read the replica that all write
    "fallback_to_stale_replicas_for_distributed_queries": 0,
}
_DATABASE = "meterhouse"  # inside a chDB folder; `migrations.runner`, which may not be imported here, has the same
SLICE_EVENTS = 250_000  # some seconds of a reader's time
MOST_READ = 1_000_000  # events read one by one for an answer that is bounded: some ten seconds
MOST_SCANNED = 5_000_000  # of all tenants, in the archive's files that lie in the range
_TOO_MANY_ROWS = 158
_VIOLATED_CONSTRAINT = 469  # the one server error that speaks of the rows alone: nothing else may bury an event
_TS_LIMIT_US = (1 << 32) * 1_000_000  # toStartOfHour of the sort key is 32 bits wide
_LIMITS = {
    "v": 1 << 16,
    "n": 1 << 32,
    **{name: 1 << 63 for name, kind in queries.EVENT_COLUMNS.items() if "64" in kind},
}


def client_options(url: str) -> dict[str, Any]:
    """What `clickhouse_connect.get_client` needs for a URL: `chdb:///abs/path` or `http(s)://user:pw@host:port/db`.

    Raises `ValueError` with a text that does not repeat the password.
    """
    parts = urlsplit(url)
    settings = {"async_insert": 0, "max_execution_time": 120}
    if parts.scheme == "chdb":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("a chDB store is written chdb:///absolute/path")
        return {"interface": "chdb", "path": parts.path, "database": _DATABASE, "settings": settings}
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a usage store is chdb:///absolute/path or http(s)://user:password@host:port/database")
    return {
        "dsn": url,
        "interface": parts.scheme,
        "settings": settings,
        "autogenerate_session_id": False,  # sessions are locked to one query at a time
        "form_encode_query_params": True,  # lists of ids do not fit a URL
        "connect_timeout": 5,
        "send_receive_timeout": 130,
    }


class UsageStore:
    """Thread-safe: every call takes a client of its own from a small pool. A client is made on first use."""

    def __init__(
        self, url: str, writer: str | None = None, archive: Archive | None = None, *, cluster: bool = False
    ) -> None:
        """Connects nothing yet. `writer`: see `metering.rollups`. `archive`: has the events that the store has dropped;
        without it, asking for them is an error. `cluster`: the tables are spread over one (`migrations/cluster.py`).
        Raises `ValueError` for a URL that names no store.
        """
        self.archive = archive
        self.cluster = cluster
        self._options = client_options(url)
        if cluster:
            self._options["settings"] |= _ON_CLUSTER
        self.conflicts_total = 0  # contents that came second, as found when they were inserted
        self._idle: list[Any] = []
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._lock = threading.Lock()
        self._closed = False
        self.rollups = Rollups(
            self._client, writer or uuid.uuid4().hex, frozen=self._dropped_months, forgets=not cluster
        )

    def insert(self, events: Sequence[UsageEvent]) -> None:
        """Store the events; again does no harm. Returns when they are on the store's disk and conflicts are recorded.

        Raises `Rejected` when the batch can never be stored as it is (then nothing of it was), `StoreUnavailable`
        when it may or may not have been stored.
        """
        if not events:
            return
        for event in events:
            if reasons := _unstorable(event):
                raise Rejected(f"{event.event_id}: {'; '.join(reasons)}")
        events = self._not_archived(events)
        if not events:
            return
        rows = [(*_row(event), content_hash(event)) for event in events]
        hours = {hour_of(event.ts_us) for event in events}
        with self._client() as client, self.rollups.touched(client, hours):
            client.insert(
                queries.EVENTS,
                list(zip(*rows, strict=True)),
                column_names=list(queries.INSERT_COLUMNS),
                column_type_names=list(queries.INSERT_COLUMNS.values()),
                column_oriented=True,
                settings={"async_insert": 0},
            )
            self._record_conflicts(client, events)

    def bury(self, event: UsageEvent, reason: str) -> None:
        """Put an event that the store rejects among the dead letters, whole."""
        row = [event.event_id, content_hash(event), reason, encode(event)]
        with self._client() as client:
            client.insert(
                queries.DEAD_LETTERS,
                [row],
                column_names=["event_id", "content_hash", "reason", "body"],
                column_type_names=["String"] * 4,
                settings={"async_insert": 0},
            )
        log.error("usage store: %s is a dead letter: %s", event.event_id, reason)

    def events(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        *,
        settled_from_us: int | None = None,
        settled_to_us: int | None = None,
    ) -> Iterator[UsageEvent]:
        """The events of [start, end) that stand, by time and id, equal to what was inserted: the store's, and the
        archive's of months that it has dropped.

        Read by whole hours, as many as have `SLICE_EVENTS` together: no query lasts as long as who reads a month. A
        client is held until the iterator ends. Raises `StoreDamaged` at an event whose bytes are not its hash's and
        for an archive that is not at hand, `StoreNewer` at one whose version this code does not know, and
        `StoreUnavailable` when a month was archived meanwhile: some of its events may have been missed.
        """
        months = self._whole_archive_within(start_us, end_us)
        live = self._live_events(tenant, start_us, end_us, settled_from_us, settled_to_us)
        if not months:
            yield from live
        else:
            archived = (
                event
                for event in self._archive().events(months, tenant, start_us, end_us)
                if (settled_from_us is None or event.settled_us >= settled_from_us)
                and (settled_to_us is None or event.settled_us < settled_to_us)
            )
            yield from _once(heapq.merge(archived, live, key=lambda event: (event.ts_us, event.event_id)))
        if self._whole_archive_within(start_us, end_us) != months:
            raise StoreUnavailable("a month was archived while its events were read: read them again")

    def usage(
        self,
        *,
        tenant: str | None,
        start_us: int,
        end_us: int,
        bucket: str = "day",
        group_by: Sequence[str] = (),
        only: Mapping[str, Sequence[str]] | None = None,
        most: int | None = None,
    ) -> list[UsageRow]:
        """Requests and token sums of [start, end) per UTC bucket and group, by the sums of hours where they stand.

        `only`: group → the values that are taken. `most`: rows; no more are held at once, here or by a thread of the
        store, and no more than `MOST_READ` archived events are read. Raises `ValueError` for an unknown name, and
        `StoreTooMuch` past `most`.
        """
        names, filters = queries.checked_groups(bucket, group_by, only)

        def of_sums(start_us: int, end_us: int) -> list[UsageRow]:
            return self._summed_usage(tenant, start_us, end_us, bucket, names, filters, most)

        def of_events(start_us: int, end_us: int) -> list[UsageRow]:
            return self._read_usage(tenant, start_us, end_us, bucket, names, filters, most)

        def cut(dropped: Sequence[int]) -> list[tuple[int, int]]:
            if not hourly.can_answer(bucket, [*names, *filters]):
                return _clipped(dropped, start_us, end_us)
            lacking = self.outdated_months() if within(dropped, start_us, end_us) else []
            edges = frozen.edges(start_us, end_us)
            return [
                *_clipped(lacking, start_us, end_us),
                *(span for span in edges if within(dropped, *span) and not within(lacking, *span)),
            ]

        parts = self._steadily(start_us, end_us, of_sums, of_events, cut)
        return frozen.added(itertools.chain(*parts), names, most) if len(parts) > 1 else parts[0]

    def _summed_usage(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        bucket: str,
        names: Sequence[str],
        filters: Mapping[str, Sequence[str]],
        most: int | None,
    ) -> list[UsageRow]:
        """`usage` of a range of which no month is moved, and no hour of a dropped month is cut."""
        dropped = within(self._dropped_months(), start_us, end_us)
        raw = self._unsummed(start_us, end_us, dropped)
        query = queries.usage(tenant, start_us, end_us, bucket, names, filters, most)
        if hourly.can_answer(bucket, [*names, *filters]) and hourly.can_list(raw):
            query = hourly.usage(
                tenant, start_us, end_us, bucket, names, filters, most, raw_hours_us=raw, dropped=dropped
            )
        elif dropped:
            return self._read_usage(tenant, start_us, end_us, bucket, names, filters, most)
        if most is not None and not self.cluster:
            query = queries.stopped(query, most)
        try:
            rows = self._query(query)
        except StoreUnavailable as error:
            if most is not None and getattr(error.__cause__, "code", None) == _TOO_MANY_ROWS:
                frozen.check_rows(most + 1, most)
            raise
        frozen.check_rows(len(rows), most)
        return [_usage_row(row, names) for row in rows]

    def _read_usage(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        bucket: str,
        names: Sequence[str],
        filters: Mapping[str, Sequence[str]],
        most: int | None,
    ) -> list[UsageRow]:
        """`usage` event by event. With `most`, bounded before anything is read and while it is."""
        events = self.events(tenant, start_us, end_us)
        if most is not None:
            months = self._archived_within(start_us, end_us)
            if months and self._archive().scanned(months, start_us, end_us) > MOST_SCANNED:
                raise StoreTooMuch(f"reads more than {MOST_SCANNED} archived requests one by one")
            events = _at_most(events, MOST_READ)
        return frozen.usage_of(events, bucket, names, filters, most)

    def counts(self, start_us: int, end_us: int) -> list[CountRow]:
        """Sums per tenant, model and hour, for hours that begin in [start, end): of the events, and of the hourly sums
        for months that the store has dropped."""

        def of_events(start_us: int, end_us: int) -> list[CountRow]:
            first_us, last_us = (hour_of(time_us + HOUR_US - 1) for time_us in (start_us, end_us))
            return add_rows(row_of(event) for event in self.events(None, first_us, last_us))

        parts = self._steadily(start_us, end_us, self._summed_counts, of_events, lambda _: [])
        return add_rows(itertools.chain(*parts)) if len(parts) > 1 else parts[0]

    def _summed_counts(self, start_us: int, end_us: int) -> list[CountRow]:
        found = [self._query(queries.counts(start_us, end_us))]
        for month in within(self._dropped_months(), start_us, end_us):
            first, last = month_us(month)
            found.append(self._query(hourly.counts(max(start_us, first), min(end_us, last))))
        rows = [
            CountRow(row[0], row[1], row[2] * 1_000_000, *(int(value) for value in row[3:]))
            for part in found
            for row in part
        ]
        return add_rows(rows) if len(found) > 1 else rows

    def conflicts(self, start_us: int, end_us: int) -> list[str]:
        """Ids of events in [start, end) that are stored with more than one content. The first stands; look why."""
        live = [row[0] for row in self._query(queries.conflicts(start_us, end_us))]
        months = self._archived_within(start_us, end_us)
        return sorted({*live, *self._archive().second(months, start_us, end_us)}) if months else live

    def archived(self) -> list[retention.Noted]:
        """The months that an archive holds events of."""
        return [retention.Noted(*row) for row in self._query(retention.noted_months())]

    def contents(self, query: Query) -> Iterator[tuple[ArchivedEvent, str]]:
        """Events that a query gives as `queries.event_fields` and whether each stands, with their hashes; each checked.

        Raises as `events` does.
        """
        with self._client() as client, client.query_row_block_stream(*query) as blocks:
            for block in blocks:
                for *row, standing in block:
                    yield ArchivedEvent(_event(row), bool(standing)), row[-1]

    def query(self, query: Query) -> list[tuple[Any, ...]]:
        """The rows of a statement that this package wrote."""
        return self._query(query)

    def command(self, query: Query) -> None:
        """Run a statement that this package wrote."""
        with self._client() as client:
            client.command(*query)

    def insert_rows(self, table: str, rows: Sequence[Sequence[Any]], columns: Mapping[str, str]) -> None:
        """Insert into a table other than the events'."""
        if rows:
            with self._client() as client:
                client.insert(
                    table,
                    rows,
                    column_names=list(columns),
                    column_type_names=list(columns.values()),
                    settings={"async_insert": 0},
                )

    def close(self, timeout: float = 30.0) -> None:
        """Close the clients. Calls that run end first, within `timeout` seconds; later ones raise `StoreError`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout
        free = sum(self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(MAX_CLIENTS))
        for client in self._idle:
            _discard(client)
        self._idle.clear()
        for _ in range(free):  # who waits for one learns that the store is closed
            self._slots.release()

    # -- inside ----------------------------------------------------------------------------------

    def _query(self, query: queries.Query) -> list[tuple[Any, ...]]:
        with self._client() as client:
            rows: list[tuple[Any, ...]] = client.query(*query).result_rows
            return rows

    def _live_events(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        settled_from_us: int | None,
        settled_to_us: int | None,
    ) -> Iterator[UsageEvent]:
        settled = settled_from_us, settled_to_us
        counts: list[tuple[Any, ...]] = []
        if end_us - start_us > HOUR_US:
            counts = self._query(queries.event_counts(tenant, start_us, end_us, *settled))
        for span in _slices(counts, start_us, end_us):
            yield from self._stored_events(queries.events(tenant, *span, *settled))

    def _stored_events(self, query: Query) -> Iterator[UsageEvent]:
        with self._client() as client, client.query_column_block_stream(*query) as blocks:
            for columns in blocks:
                for row in zip(*columns, strict=True):
                    yield _event(row)

    def _archived_within(self, start_us: int, end_us: int) -> list[int]:
        """The months that an archive holds events of, and that the range touches."""
        return within([noted.month for noted in self.archived()], start_us, end_us)

    def moving(self) -> list[int]:
        """The months that are moved out of the events, and neither dropped nor put back yet."""
        return [] if self.cluster else [month for (month,) in self._query(retention.moving_months())]

    def _whole_archive_within(self, start_us: int, end_us: int) -> list[int]:
        """`_archived_within`. Raises `StoreUnavailable` where what is moved out of the store is not all archived."""
        months = self._archived_within(start_us, end_us)
        for month in within(self.moving(), start_us, end_us):
            noted = {one.month: (one.events, one.digest) for one in self.archived()}.get(month)
            if noted is None or noted not in [tuple(row) for row in self._query(retention.moved_digest())]:
                raise StoreUnavailable("a month is being archived: read it again later")
        return months

    def _steadily(
        self,
        start_us: int,
        end_us: int,
        of_sums: Callable[[int, int], list[T]],
        of_events: Callable[[int, int], list[T]],
        cut: Callable[[Sequence[int]], list[tuple[int, int]]],
    ) -> list[list[T]]:
        """[start, end) in parts, read while nothing moved.

        By events where a month is on its way to the archive, and where `cut` says that dropped months' sums do not do.
        """
        for _ in range(STEADY_ATTEMPTS):
            before = archived, moving = self.archived(), self.moving()
            spans = _clipped(moving, start_us, end_us)
            spans += cut([noted.month for noted in archived if noted.dropped and noted.month not in moving])
            parts = [
                of_events(*span) if by_events else of_sums(*span)
                for span, by_events in _split(start_us, end_us, sorted(spans))
            ]
            if (self.archived(), self.moving()) == before:
                return parts
        raise StoreUnavailable("months are being archived: read them again later")

    def _dropped_months(self) -> list[int]:
        """The months whose sums are the archive's: what the store still has of them came later."""
        return [noted.month for noted in self.archived() if noted.dropped]

    def outdated_months(self) -> list[int]:
        """The dropped months whose sums lack something that is summed now."""
        dropped = self._dropped_months()
        return sorted(month for (month,) in self._query(hourly.outdated_months(dropped))) if dropped else []

    def _archive(self) -> Archive:
        if self.archive is None:
            raise StoreDamaged("events of this time were archived, and the archive is not at hand")
        return self.archive

    def _not_archived(self, events: Sequence[UsageEvent]) -> Sequence[UsageEvent]:
        """The events but those that the archive counts. Another content of an archived id is set aside in advance."""
        running = month_of(time.time_ns() // 1000)
        if all(month_of(event.ts_us) >= running for event in events):
            return events  # no month is archived before it is over
        known: dict[str, str] = {}
        by_month: dict[int, dict[str, int]] = defaultdict(dict)
        for event in events:
            by_month[month_of(event.ts_us)][event.event_id] = event.ts_us
        for month in by_month.keys() & set(self._dropped_months()):
            known |= self._archive().known(month, by_month[month])
        second = [
            [event.event_id, content_hash(event)]
            for event in events
            if known.get(event.event_id, content_hash(event)) != content_hash(event)
        ]
        if second:
            self._set_aside(second)
        return [event for event in events if known.get(event.event_id) != content_hash(event)]

    def _set_aside(self, second: list[list[str]]) -> None:
        """Contents that came second under their ids: kept, and counted nowhere."""
        self.insert_rows(queries.CONFLICTS, second, {"event_id": "String", "content_hash": "String"})
        self.conflicts_total += len(second)
        ids = ", ".join(event_id for event_id, _ in second[:10])
        log.error("usage store: %d contents came second, the first under their ids stand: %s", len(second), ids)

    def _unsummed(self, start_us: int, end_us: int, dropped: Sequence[int]) -> Sequence[int]:
        """The hours that have, or may have, events of [start, end) and whose sums do not stand for them all."""
        first_us, last_us, count = self._query(hourly.span())[0]
        if not count:
            return []
        clean = {row[0] * 1_000_000 for row in self._query(hourly.clean_hours(start_us, hour_of(end_us)))}
        hours = range(hour_of(max(start_us, first_us)), min(end_us, last_us + 1), HOUR_US)
        if dropped:
            clean = {hour_us for hour_us in clean if month_of(hour_us) not in dropped}
        return [hour_us for hour_us in hours if hour_us not in clean] if clean else hours

    def _record_conflicts(self, client: Any, events: Sequence[UsageEvent]) -> None:
        """Which of the ids have another content too; the later ones are set aside before anything can bill them."""
        hours = sorted({hour_of(event.ts_us) for event in events})
        ids: list[str] = []
        for at in range(0, len(events), _CHECKED_AT_ONCE):
            sent = [event.event_id for event in events[at : at + _CHECKED_AT_ONCE]]
            ids += [row[0] for row in client.query(*queries.insert_check(sent, hours)).result_rows]
        if not ids:
            return
        stored: dict[str, list[str]] = defaultdict(list)
        for event_id, digest, *_ in client.query(*queries.contents(ids, hours[0], hours[-1] + HOUR_US)).result_rows:
            stored[event_id].append(digest)
        second = [[event_id, digest] for event_id, digests in stored.items() for digest in digests[1:]]
        self._set_aside(second)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """A client of one's own. One whose use failed or was broken off is not used again."""
        if not self._slots.acquire(timeout=_SLOT_WAIT_S):
            raise StoreUnavailable("every client of the usage store is busy")
        client, sound = None, False
        try:
            client = self._take()
            yield client
            sound = True
        except Exception as error:
            raise _translated(error) from error
        finally:
            self._give_back(client, sound)
            self._slots.release()

    def _take(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreError("the usage store is closed")
            if self._idle:
                return self._idle.pop()
        return clickhouse_connect.get_client(**self._options)

    def _give_back(self, client: Any, sound: bool) -> None:
        with self._lock:
            if sound and not self._closed:
                self._idle.append(client)
                return
        if client is not None:
            _discard(client)


def _discard(client: Any) -> None:
    try:
        client.close()
    except Exception as error:  # it is broken already, which is why it goes
        log.debug("usage store: closing a failed client: %s", error)


def _translated(error: Exception) -> Exception:
    if isinstance(error, StoreError | Rejected | ValueError):
        return error
    code = getattr(error, "code", None)
    text = str(error).split("\n", 1)[0][:500]
    if isinstance(error, DataError) or code == _VIOLATED_CONSTRAINT:
        return Rejected(f"the store rejects the data: {text}")
    if isinstance(error, ClickHouseError | OSError):
        return StoreUnavailable(f"the store does not answer as it should: {text}")
    return error


def _unstorable(event: UsageEvent) -> list[str]:
    """Why the table cannot hold the event exactly; empty when it can."""
    reasons = event.faults()
    values = msgspec.structs.asdict(event)
    values["ts"], values["settled"] = event.ts_us, event.settled_us
    for name, limit in _LIMITS.items():
        floor = -limit if queries.EVENT_COLUMNS[name].startswith("Int") else 0
        if not floor <= values[name] < limit:
            reasons.append(f"{name} is out of range")
    if event.ts_us >= _TS_LIMIT_US:
        reasons.append("ts_us is past the year 2105")
    return reasons


def _row(event: UsageEvent) -> tuple[Any, ...]:
    return msgspec.structs.astuple(event)


def _usage_row(row: Sequence[Any], names: Sequence[str]) -> UsageRow:
    group = dict(zip(names, row[1 : 1 + len(names)], strict=True))
    return UsageRow(row[0] * 1_000_000, group, *(int(value) for value in row[1 + len(names) :]))


def _clipped(months: Sequence[int], start_us: int, end_us: int) -> list[tuple[int, int]]:
    """What of [start, end) is of these months."""
    spans = map(month_us, within(months, start_us, end_us))
    return [(max(start_us, first_us), min(end_us, last_us)) for first_us, last_us in spans]


def _split(start_us: int, end_us: int, spans: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], bool]]:
    """[start, end) in parts, in order, and whether each is one of the spans, which are ascending and apart."""
    parts: list[tuple[tuple[int, int], bool]] = []
    for first_us, last_us in spans:
        if start_us < first_us:
            parts.append(((start_us, first_us), False))
        parts.append(((first_us, last_us), True))
        start_us = last_us
    return [*parts, ((start_us, end_us), False)] if start_us < end_us or not parts else parts


def _slices(counts: Sequence[Sequence[int]], start_us: int, end_us: int) -> list[tuple[int, int]]:
    """[start, end) in parts that begin with an hour and have at most `SLICE_EVENTS`, or are one hour's.

    `counts`: (hour in seconds, how many events) of each hour that has any, ascending.
    """
    parts: list[tuple[int, int]] = []
    held = 0
    for hour_s, count in counts:
        if held and held + count > SLICE_EVENTS:
            parts.append((start_us, hour_s * 1_000_000))
            start_us, held = hour_s * 1_000_000, 0
        held += count
    return [*parts, (start_us, end_us)]


def _at_most(events: Iterator[UsageEvent], most: int) -> Iterator[UsageEvent]:
    for number, event in enumerate(events):
        if number == most:
            raise StoreTooMuch(f"reads more than {most} requests one by one")
        yield event


def _once(events: Iterator[UsageEvent]) -> Iterator[UsageEvent]:
    """Each event once, of a month that is both in the store and in the archive."""
    before = ""
    for event in events:
        if event.event_id != before:
            yield event
        before = event.event_id


_FIELDS = UsageEvent.__struct_fields__
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


def _event(row: Sequence[Any]) -> UsageEvent:
    fields = dict(zip(_FIELDS, row, strict=False))  # behind them stands the hash
    if fields["v"] > VERSION:
        raise StoreNewer(f"event {fields['event_id']} was stored by a newer version of Meterhouse")
    outcome = _OUTCOMES.get(fields["outcome"])
    if outcome is None:
        raise StoreDamaged(f"event {fields['event_id']} is not what was inserted")
    fields["outcome"] = outcome
    event = UsageEvent(**fields)  # the columns have these types
    try:
        sound = content_hash(event) == row[-1]
    except VersionError:  # a column has something that the event's version does not have
        sound = False
    if not sound:
        raise StoreDamaged(f"event {event.event_id} is not what was inserted")
    return event
