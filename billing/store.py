"""The append-only event store: the one durable thing of billing.

Knows: rows, their order, the hash chain, idempotency keys. Does not know: what the events mean.

A writer takes the log for itself (`exclusive`), sees everything that stands, decides, and appends: a
decision never rests on an old state and no writer starves. On SQLite that is BEGIN IMMEDIATE (WAL,
synchronous=FULL: a commit is on the disk), on PostgreSQL a transaction-scoped advisory lock. Sequence
numbers have no gaps, and a reader that has seen `seq` has seen all before it.

Each row's hash covers the row and the hash before it, so a changed, removed or reordered row is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import sqlalchemy as sa

from billing.errors import Conflict, LedgerCorrupt, LedgerUnavailable

GENESIS = "0" * 64
PAGE = 1000
KEYS_PER_QUERY = 500  # below every database's limit on bound parameters
WRITER_LOCK = 0x6C6564676572  # "ledger": PostgreSQL's advisory lock of the log's one writer
BUSY_TIMEOUT_S = 30
CONNECT_TIMEOUT_S = 10

_table = sa.Table(
    "events",
    sa.MetaData(),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("stream", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("time_us", sa.BigInteger, nullable=False),
    sa.Column("idempotency_key", sa.Text),
    sa.Column("payload_hash", sa.Text),
    sa.Column("result", sa.Text),
    sa.Column("hash", sa.Text, nullable=False),
    sa.UniqueConstraint("stream", "version", name="events_stream_version"),
    sa.UniqueConstraint("idempotency_key", name="events_idempotency_key"),
)
_decided = sa.text("type NOT IN ('usage.rated', 'usage.unrated')")
sa.Index("events_decided", _table.c.seq, sqlite_where=_decided, postgresql_where=_decided)  # for `billing.audit`


class NewEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer wants to append. `key` is unique in the whole log and comes with its hash and result."""

    stream: str
    type: str
    payload: str  # JSON text
    key: str | None = None
    payload_hash: str | None = None
    result: str | None = None


class StoredEvent(msgspec.Struct, frozen=True):
    """One row, in the column order of the table."""

    seq: int
    stream: str
    version: int
    type: str
    payload: str
    actor: str
    time_us: int
    key: str | None
    payload_hash: str | None
    result: str | None
    hash: str

    def content(self) -> tuple[object, ...]:
        """What the hash covers beside the hash before it."""
        return (
            self.seq,
            self.stream,
            self.version,
            self.type,
            self.payload,
            self.actor,
            self.time_us,
            self.key,
            self.payload_hash,
            self.result,
        )


_encode = msgspec.json.Encoder().encode


def chained(previous: str, row: StoredEvent) -> str:
    """The hash of a row that follows the one whose hash is `previous` (`GENESIS` before the first)."""
    return hashlib.sha256(_encode((previous, *row.content()))).hexdigest()


class Log:
    """The log as its one writer holds it; valid inside `EventStore.exclusive` only."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._head = _head(connection)

    @property
    def connection(self) -> sa.Connection:
        """The transaction, for what stands beside the log and changes together with it."""
        return self._connection

    @property
    def seq(self) -> int:
        """Number of events that stand."""
        return self._head.seq if self._head else 0

    def read(self, after_seq: int) -> list[StoredEvent]:
        """The next page of events after `after_seq`, in order."""
        return _page(self._connection, after_seq, PAGE)

    def find(self, keys: Sequence[str]) -> dict[str, StoredEvent]:
        """The events that stand under these idempotency keys."""
        return _find(self._connection, keys)

    def append(self, events: Sequence[NewEvent], *, actor: str, time_us: int) -> list[StoredEvent]:
        """Append in order; they stand when `exclusive` is left without an error.

        Time never runs backwards in the log: an earlier clock is lifted to the head's time.
        """
        versions: dict[str, int] = {}
        rows: list[StoredEvent] = []
        seq, previous = self.seq, self._head.hash if self._head else GENESIS
        time_us = max(time_us, self._head.time_us) if self._head else time_us
        for event in events:
            seq += 1
            version = self._next_version(event.stream, versions)
            row = StoredEvent(
                seq,
                event.stream,
                version,
                event.type,
                event.payload,
                actor,
                time_us,
                event.key,
                event.payload_hash,
                event.result,
                "",
            )
            previous = chained(previous, row)
            rows.append(msgspec.structs.replace(row, hash=previous))
        if rows:
            columns = [column.name for column in _table.columns]
            values = [dict(zip(columns, msgspec.structs.astuple(row), strict=True)) for row in rows]
            self._connection.execute(_table.insert(), values)
            self._head = rows[-1]
        return rows

    def _next_version(self, stream: str, versions: dict[str, int]) -> int:
        if stream not in versions:
            newest = sa.select(sa.func.max(_table.c.version)).where(_table.c.stream == stream)
            versions[stream] = self._connection.execute(newest).scalar() or 0
        versions[stream] += 1
        return versions[stream]


def _rows(result: sa.CursorResult[Any]) -> list[StoredEvent]:
    values: list[tuple[Any, ...]] = [tuple(row) for row in result]
    return [StoredEvent(*row) for row in values]


def _head(connection: sa.Connection) -> StoredEvent | None:
    rows = _rows(connection.execute(sa.select(_table).order_by(_table.c.seq.desc()).limit(1)))
    return rows[0] if rows else None


def _page(connection: sa.Connection, after_seq: int, limit: int) -> list[StoredEvent]:
    query = sa.select(_table).where(_table.c.seq > after_seq).order_by(_table.c.seq).limit(limit)
    return _rows(connection.execute(query))


def _find(connection: sa.Connection, keys: Sequence[str]) -> dict[str, StoredEvent]:
    found: dict[str, StoredEvent] = {}
    for first in range(0, len(keys), KEYS_PER_QUERY):
        some = keys[first : first + KEYS_PER_QUERY]
        rows = _rows(connection.execute(sa.select(_table).where(_table.c.idempotency_key.in_(some))))
        found.update((row.key, row) for row in rows if row.key is not None)
    return found


def _last_before(
    connection: sa.Connection, number: sa.Column[int], within: sa.ColumnElement[bool], time_us: int
) -> int:
    """The number of the last event recorded before a time, 0 where there is none.

    Found by halving, as numbers and times rise together: a look-up by `number` each, and no index on the time.
    """
    first, last = 0, connection.execute(sa.select(sa.func.max(number)).where(within)).scalar() or 0
    while first < last:
        middle = (first + last + 1) // 2
        before = sa.select(_table.c.time_us < time_us).where(within, number <= middle).order_by(number.desc()).limit(1)
        if connection.execute(before).scalar():
            first = middle
        else:
            last = middle - 1
    return first


class EventStore:
    """Thread-safe. `url` is sqlite:///path or postgresql+psycopg://…; the schema is `migrations/ledger`.

    Raises `LedgerUnavailable` when the database cannot be used or is not migrated.
    """

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        try:
            with self.connected() as connection:
                _head(connection)
        except LedgerUnavailable:
            self.close()
            raise

    def close(self) -> None:
        """Give back every connection; using the store again opens new ones."""
        self._engine.dispose()

    @contextmanager
    def exclusive(self) -> Iterator[Log]:
        """The log for one writer alone; commits on leaving, keeps nothing of it on an error."""
        with self.connected(write=True) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITER_LOCK)))
            yield Log(connection)

    def read(self, after_seq: int = 0, limit: int = PAGE) -> list[StoredEvent]:
        """At most `limit` events after `after_seq`, in order."""
        with self.connected() as connection:
            return _page(connection, after_seq, limit)

    def find(self, key: str) -> StoredEvent | None:
        """The event that stands under this idempotency key."""
        with self.connected() as connection:
            return _find(connection, [key]).get(key)

    def find_all(self, keys: Sequence[str]) -> dict[str, StoredEvent]:
        """The events that stand under these idempotency keys, by key."""
        with self.connected() as connection:
            return _find(connection, keys)

    def scan(self, stream: str, *, recorded_from_us: int = 0) -> Iterator[StoredEvent]:
        """One stream in order, from the first event recorded at or after a time."""
        of_stream = _table.c.stream == stream
        with self.connected() as connection:
            version = _last_before(connection, _table.c.version, of_stream, recorded_from_us)
        while True:
            query = (
                sa.select(_table).where(of_stream, _table.c.version > version).order_by(_table.c.version).limit(PAGE)
            )
            with self.connected() as connection:
                page = _rows(connection.execute(query))
            if not page:
                return
            yield from page
            version = page[-1].version

    def verify_chain(self, after_seq: int = 0, *, upto: tuple[int, str] | None = None) -> int:
        """Check every row's hash and number behind one; the last row's number. Raises `LedgerCorrupt`.

        With `upto`, the number and hash of a row that was checked before, that row is the last and must have that
        hash. It covers all rows before it, so a chain that was forged anew from some row on is found as well.
        """
        seq, previous = after_seq, self._hash(after_seq)
        while upto is None or seq < upto[0]:
            page = self.read(seq, PAGE if upto is None else min(PAGE, upto[0] - seq))
            if not page:
                break
            for row in page:
                seq += 1
                if row.seq != seq:
                    raise LedgerCorrupt(seq, "a number is missing")
                if row.hash != chained(previous, row):
                    raise LedgerCorrupt(seq, "content and hash differ")
                previous = row.hash
        if upto is not None and seq < upto[0]:
            raise LedgerCorrupt(seq + 1, "a number is missing")
        if upto is not None and previous != upto[1]:
            raise LedgerCorrupt(seq, "it, or one before it, was rewritten together with its hash")
        return seq

    def _hash(self, seq: int) -> str:
        """A row's hash as it is stored, `GENESIS` before the first. Raises `LedgerCorrupt`."""
        if seq == 0:
            return GENESIS
        row = next(iter(self.read(seq - 1, 1)), None)
        if row is None or row.seq != seq:
            raise LedgerCorrupt(seq, "a number is missing")
        return row.hash

    def last_before(self, time_us: int) -> int:
        """The number of the last event that was recorded before a time, 0 where there is none."""
        with self.connected() as connection:
            return _last_before(connection, _table.c.seq, sa.true(), time_us)

    @contextmanager
    def connected(self, *, write: bool = False, frozen: bool = False) -> Iterator[sa.Connection]:
        """A transaction on the ledger's database; `write` takes SQLite's one writer's place at once, `frozen` sees all
        as it was at its first statement, however long it lasts."""
        try:
            with self._engine.connect() as plain:
                connection = plain.execution_options(meterhouse_write=write)
                if frozen and connection.dialect.name == "postgresql":  # SQLite's transactions are so anyway
                    connection = connection.execution_options(isolation_level="REPEATABLE READ")
                with connection.begin():
                    yield connection
        except sa.exc.IntegrityError as error:
            raise Conflict("an event of this stream version or idempotency key stands already") from error
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            raise LedgerUnavailable(_reason(error)) from error


def _reason(error: Exception) -> str:
    """A text for people, without the SQL and the address that the driver's own has."""
    text = str(getattr(error, "orig", error))
    if "no such table" in text or ('relation "' in text and "does not exist" in text):
        return "the ledger is not migrated: run `meterhouse migrate`"
    return "the ledger's database cannot be used now"


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise LedgerUnavailable("the ledger's URL cannot be understood") from None
    if parsed.get_backend_name() == "postgresql":
        # Read committed: what is read after the advisory lock is what the last writer committed.
        limits = {"connect_timeout": CONNECT_TIMEOUT_S, "options": f"-c lock_timeout={BUSY_TIMEOUT_S * 1000}"}
        return sa.create_engine(parsed, isolation_level="READ COMMITTED", pool_pre_ping=True, connect_args=limits)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise LedgerUnavailable("the ledger lives in sqlite:///path or postgresql+psycopg://…")
    engine = sa.create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver must not open transactions by itself: it would begin them without the lock.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    write = connection.get_execution_options().get("meterhouse_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
