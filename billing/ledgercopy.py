"""A ledger in a portable form: every row of its log as it stands, and the tables beside the log.

Knows: one instant of the database (a transaction that sees no later change, beside any number of writers); how an
empty, migrated database becomes the same ledger, with the hash chain checked row by row, in one transaction. So a copy
taken from SQLite makes a ledger on PostgreSQL, and the reverse. Does not know: files, usage, migrations.

What gateways had of each other is not true of a copy: nobody holds a lease or a duty in it, and the gateway whose data
folder is copied with it is known by a new folder.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from billing.books import new_event
from billing.errors import Conflict, LedgerCorrupt
from billing.restorations import LedgerRestored
from billing.store import GENESIS, PAGE, EventStore, Log, StoredEvent, chained
from metering.batches import batched

_MANAGED = frozenset({"events", "alembic_version", "schema_checksums"})
_NOBODYS = frozenset({"lease_holders", "leases"})
KEYS_AT_ONCE = 500
RESTORER = "restore"  # the actor

_COLUMNS = ["idempotency_key" if name == "key" else name for name in StoredEvent.__struct_fields__]
_log = sa.table("events", *(sa.column(name) for name in _COLUMNS))

USAGE_KEY = "usage:"  # `billing.service.usage` writes it before an event's id


class Head(NamedTuple):
    """The last row: how many there are, and the hash that covers them all."""

    seq: int
    hash: str


class Table(NamedTuple):
    """A table beside the log; its values are those that JSON has (bytes: `{"base64": …}`)."""

    name: str
    columns: list[str]
    rows: list[list[Any]]


class Snapshot:
    """The ledger at one instant. Lives on one thread, inside `snapshot`."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self.head = _head(connection)
        self.revision = str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one())

    def events(self) -> Iterator[StoredEvent]:
        """Every row of the log, in order."""
        seq = 0
        while True:
            query = sa.select(_log).where(_log.c.seq > seq).order_by(_log.c.seq).limit(PAGE)
            rows = [StoredEvent(*row) for row in self._connection.execute(query)]
            if not rows:
                return
            yield from rows
            seq = rows[-1].seq

    def tables(self) -> list[Table]:
        """Everything beside the log, by name."""
        return [self._table(name) for name in _beside(self._connection)]

    def recorded(self, event_ids: Sequence[str]) -> set[str]:
        """Those of the usage events that have a charge, or a row that says why they have none."""
        found: set[str] = set()
        for at in range(0, len(event_ids), KEYS_AT_ONCE):
            keys = [USAGE_KEY + id for id in event_ids[at : at + KEYS_AT_ONCE]]
            query = sa.select(_log.c.idempotency_key).where(_log.c.idempotency_key.in_(keys))
            found.update(key.removeprefix(USAGE_KEY) for (key,) in self._connection.execute(query))
        return found

    def _table(self, name: str) -> Table:
        table = sa.Table(name, sa.MetaData(), autoload_with=self._connection)
        order = list(table.primary_key.columns) or list(table.columns)
        rows = [
            [_portable(value) for value in row] for row in self._connection.execute(sa.select(table).order_by(*order))
        ]
        return Table(name, [str(column.name) for column in table.columns], rows)


@contextmanager
def snapshot(store: EventStore) -> Iterator[Snapshot]:
    """The ledger as it is now, for as long as the context lasts. Raises `LedgerUnavailable`."""
    with store.connected(frozen=True) as connection:
        yield Snapshot(connection)


def checked(events: Iterable[StoredEvent]) -> Iterator[StoredEvent]:
    """The same rows, each against the chain. Raises `LedgerCorrupt`."""
    previous = GENESIS
    for seq, row in enumerate(events, 1):
        if row.seq != seq:
            raise LedgerCorrupt(seq, "a number is missing")
        if row.hash != chained(previous, row):
            raise LedgerCorrupt(seq, "content and hash differ")
        previous = row.hash
        yield row


def load(
    store: EventStore,
    events: Iterable[StoredEvent],
    tables: Sequence[Table],
    restored: LedgerRestored,
    head: Head,
    folders: dict[str, str],
) -> None:
    """Make an empty, migrated ledger the one that was copied: all of it or nothing. Done already, it does nothing.

    Its last row tells of the restore. `folders`: data folder of a gateway → the one that takes its place. Raises
    `Conflict` where another ledger stands, `LedgerCorrupt` where the rows are not those of `head`.
    """
    with store.exclusive() as log:
        connection = log.connection
        if log.seq:
            if _was_loaded(log, head):
                return
            raise Conflict("the ledger has events of its own")
        last = Head(0, GENESIS)
        for rows in batched(checked(events), PAGE):
            values = [dict(zip(_COLUMNS, msgspec.structs.astuple(row), strict=True)) for row in rows]
            connection.execute(_log.insert(), values)
            last = Head(rows[-1].seq, rows[-1].hash)
        if last != head:
            raise LedgerCorrupt(last.seq + 1, "the copy does not end with the row it was taken at")
        for table in tables:
            _fill(connection, _revived(table, folders))
        Log(connection).append([new_event("ledger", restored)], actor=RESTORER, time_us=restored.at_us)


def _was_loaded(log: Log, head: Head) -> bool:
    """Whether the copy is there, with the row that tells of it and nothing after that."""
    rows = log.read(head.seq - 1) if head.seq else log.read(0)[:1]
    copied = not head.seq or (bool(rows) and rows.pop(0).hash == head.hash)
    return copied and [row.actor for row in rows] == [RESTORER]


def _fill(connection: sa.Connection, copied: Table) -> None:
    table = sa.Table(copied.name, sa.MetaData(), autoload_with=connection)
    booleans = [i for i, name in enumerate(copied.columns) if isinstance(table.columns[name].type, sa.Boolean)]
    connection.execute(table.delete())
    rows = []
    for row in copied.rows:
        values = [base64.b64decode(value["base64"]) if isinstance(value, dict) else value for value in row]
        for i in booleans:  # one database's flags are another's numbers
            values[i] = None if values[i] is None else bool(values[i])
        rows.append(dict(zip(copied.columns, values, strict=True)))
    if rows:
        connection.execute(table.insert(), rows)


def _portable(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _revived(table: Table, folders: dict[str, str]) -> Table:
    """The table without what was true of the gateways that ran, and no longer is."""
    if table.name in _NOBODYS:
        return table._replace(rows=[])
    if table.name == "duties":
        at = table.columns.index("until_us")
        return table._replace(rows=[[*row[:at], 0, *row[at + 1 :]] for row in table.rows])
    if table.name == "gateways":
        at = table.columns.index("folder")
        return table._replace(rows=[[*row[:at], folders.get(row[at], row[at]), *row[at + 1 :]] for row in table.rows])
    return table


def _beside(connection: sa.Connection) -> list[str]:
    return sorted(set(sa.inspect(connection).get_table_names()) - _MANAGED)


def _head(connection: sa.Connection) -> Head:
    last = connection.execute(sa.select(_log.c.seq, _log.c.hash).order_by(_log.c.seq.desc()).limit(1)).one_or_none()
    return Head(0, GENESIS) if last is None else Head(*last)
