"""The usage store: events in ClickHouse, by clickhouse-connect.

Knows: how events become rows and rows the same events, which errors mean "never" and which mean "not now".
Does not know: prices, the spool; the tables are made by `migrations.runner`. Insertion is at-least-once,
counting is exactly-once: see `migrations/clickhouse/0001_usage_events.sql`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
import msgspec
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError

from metering import hourly, queries
from metering.counts import HOUR_US, CountRow, hour_of
from metering.errors import Rejected, StoreDamaged, StoreError, StoreNewer, StoreUnavailable
from metering.events import VERSION, UsageEvent, VersionError, content_hash, encode
from metering.rollups import Rollups

log = logging.getLogger(__name__)

MAX_CLIENTS = 8
_SLOT_WAIT_S = 60.0
_CHECKED_AT_ONCE = 1000  # ids in one query: ClickHouse takes at most 128 KiB in a parameter
_DATABASE = "meterhouse"  # inside a chDB folder; `migrations.runner`, which may not be imported here, has the same
_VIOLATED_CONSTRAINT = 469  # the one server error that speaks of the rows alone: nothing else may bury an event
_TS_LIMIT_US = (1 << 32) * 1_000_000  # toStartOfHour of the sort key is 32 bits wide
_LIMITS = {
    "v": 1 << 16,
    "n": 1 << 32,
    **{name: 1 << 63 for name, kind in queries.EVENT_COLUMNS.items() if "64" in kind},
}


class UsageRow(msgspec.Struct, frozen=True):
    """Sums of one bucket and group. `group` has the names that were asked for."""

    start_us: int
    group: dict[str, str]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


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

    def __init__(self, url: str, writer: str | None = None) -> None:
        """Connects nothing yet. `writer`: see `metering.rollups`. Raises `ValueError` for a URL that names no store."""
        self._options = client_options(url)
        self.conflicts_total = 0  # contents that came second, as found when they were inserted
        self._idle: list[Any] = []
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._lock = threading.Lock()
        self._closed = False
        self.rollups = Rollups(self._client, writer or uuid.uuid4().hex)

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
        """The events of [start, end) that stand, by time and id, equal to what was inserted.

        A client is held until the iterator ends. Raises `StoreDamaged` at an event whose bytes are not its hash's, and
        `StoreNewer` at one whose version this code does not know.
        """
        query = queries.events(tenant, start_us, end_us, settled_from_us, settled_to_us)
        with self._client() as client, client.query_row_block_stream(*query) as blocks:
            for block in blocks:
                for row in block:
                    yield _event(row)

    def usage(
        self,
        *,
        tenant: str | None,
        start_us: int,
        end_us: int,
        bucket: str = "day",
        group_by: Sequence[str] = (),
        only: Mapping[str, Sequence[str]] | None = None,
    ) -> list[UsageRow]:
        """Requests and token sums of [start, end) per UTC bucket and group, by the sums of hours where they stand.

        `only`: group → the values that are taken. Raises `ValueError` for an unknown name.
        """
        names, filters = queries.checked_groups(bucket, group_by, only)
        query = queries.usage(tenant, start_us, end_us, bucket, names, filters)
        if hourly.can_answer(bucket, [*names, *filters]):
            raw = self._unsummed(start_us, end_us)
            if hourly.can_list(raw):  # else they are scattered over centuries, and few
                query = hourly.usage(tenant, start_us, end_us, bucket, names, filters, raw_hours_us=raw)
        return [
            UsageRow(
                row[0] * 1_000_000,
                dict(zip(names, row[1 : 1 + len(names)], strict=True)),
                *(int(value) for value in row[1 + len(names) :]),
            )
            for row in self._query(query)
        ]

    def counts(self, start_us: int, end_us: int) -> list[CountRow]:
        """Sums per tenant, model and hour, for hours that begin in [start, end)."""
        rows = self._query(queries.counts(start_us, end_us))
        return [CountRow(row[0], row[1], row[2] * 1_000_000, *(int(value) for value in row[3:])) for row in rows]

    def conflicts(self, start_us: int, end_us: int) -> list[str]:
        """Ids of events in [start, end) that are stored with more than one content. The first stands; look why."""
        return [row[0] for row in self._query(queries.conflicts(start_us, end_us))]

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

    def _unsummed(self, start_us: int, end_us: int) -> Sequence[int]:
        """The hours that have, or may have, events of [start, end) and whose sums do not stand for them all."""
        first_us, last_us, count = self._query(hourly.span())[0]
        if not count:
            return []
        clean = {row[0] * 1_000_000 for row in self._query(hourly.clean_hours(start_us, hour_of(end_us)))}
        hours = range(hour_of(max(start_us, first_us)), min(end_us, last_us + 1), HOUR_US)
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
        client.insert(
            queries.CONFLICTS,
            second,
            column_names=["event_id", "content_hash"],
            column_type_names=["String", "String"],
            settings={"async_insert": 0},
        )
        self.conflicts_total += len(second)
        log.error("usage store: %d ids have a second content, the first stands: %s", len(ids), ", ".join(ids[:10]))

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


_FIELDS = UsageEvent.__struct_fields__


def _event(row: Sequence[Any]) -> UsageEvent:
    *values, digest = row
    fields = dict(zip(_FIELDS, values, strict=True))
    if fields["v"] > VERSION:
        raise StoreNewer(f"event {fields['event_id']} was stored by a newer version of Meterhouse")
    event = msgspec.convert(fields, UsageEvent)
    try:
        sound = content_hash(event) == digest
    except VersionError:  # a column has something that the event's version does not have
        sound = False
    if not sound:
        raise StoreDamaged(f"event {event.event_id} is not what was inserted")
    return event
