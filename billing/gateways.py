"""Which gateways write to this ledger, and up to when the usage of each one is stored: no invoice is cut past it.

Knows: one row a gateway in the ledger's database. Does not know: how a watermark is found (`gateway/watermark.py`),
what an invoice is. An operational table: rows come, move and go, and no charge rests on them.

A gateway is its data folder: the spool and the journal in it hold what is not stored yet, and a lock gives the folder
one process at a time. So a row belongs to a folder, and only that folder's next server may take it over. No clock
decides who is alive: an id whose row belongs to another folder is refused, whether that one runs, has crashed with
usage to settle, or is lost with its disk. A row goes when its gateway stops with everything stored, or when an operator
removes it.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from billing.errors import Conflict, NotFound
from billing.leases import LeaseTable
from billing.store import EventStore

ALIVE_US = 15_000_000  # seen so lately: it runs, or did a moment ago
LOCK = 0x67617465776179  # "gateway": PostgreSQL's advisory lock of who changes which rows there are

_table = sa.Table(
    "gateways",
    sa.MetaData(),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("folder", sa.Text, nullable=False, unique=True),
    sa.Column("watermark_us", sa.BigInteger, nullable=False),
    sa.Column("seen_us", sa.BigInteger, nullable=False),
    sa.Column("started_us", sa.BigInteger, nullable=False),
)


class GatewayRow(msgspec.Struct, frozen=True):
    """One gateway, in the column order of the table. All its usage that began before `watermark_us` is stored."""

    id: str
    folder: str
    watermark_us: int
    seen_us: int
    started_us: int

    def alive(self, now_us: int) -> bool:
        """Whether it was seen lately, by the clocks of two machines."""
        return now_us - self.seen_us < ALIVE_US


class GatewayTaken(Conflict):
    """The id is another data folder's; `row` says whose."""

    def __init__(self, row: GatewayRow) -> None:
        self.row = row
        super().__init__(f"the gateway id {row.id!r} belongs to another data folder on this ledger")


class Gateways:
    """The table. Thread-safe. Raises `LedgerUnavailable` when the database cannot be used."""

    def __init__(self, store: EventStore) -> None:
        self._store = store

    def claim(self, id: str, folder: str, watermark_us: int, now_us: int) -> None:
        """Register before the first request is let in. Raises `GatewayTaken` with nothing changed.

        What the folder's last server left under this id or another is taken over: `watermark_us` covers all that the
        folder holds.
        """
        with self._store.connected(write=True) as connection:
            self._change(connection, GatewayRow(id, folder, watermark_us, now_us, now_us))

    def publish(self, id: str, folder: str, watermark_us: int, now_us: int) -> None:
        """Say how far this gateway is. One whose row was removed is there again. Raises `GatewayTaken`."""
        mine = (_table.c.id == id) & (_table.c.folder == folder)
        with self._store.connected(write=True) as connection:
            moved = connection.execute(
                _table.update().where(mine).values(watermark_us=watermark_us, seen_us=now_us)
            ).rowcount
            if not moved:
                self._change(connection, GatewayRow(id, folder, watermark_us, now_us, now_us))

    def leave(self, folder: str) -> None:
        """The folder holds nothing that is not stored, and nobody serves on it: it holds no invoice back."""
        with self._store.connected(write=True) as connection:
            connection.execute(_table.delete().where(_table.c.folder == folder))

    def remove(self, id: str, now_us: int) -> None:
        """An operator gives a gateway up for good: what its folder still holds will be late, and what it had leased is
        nobody's. Raises `NotFound`, and `Conflict` for one that is alive."""
        with self._store.exclusive() as log:
            connection = log.connection
            row = _find(connection, id)
            if row is None:
                raise NotFound("gateway", id)
            as_seen = (_table.c.id == id) & (_table.c.seen_us == row.seen_us)
            if row.alive(now_us) or not connection.execute(_table.delete().where(as_seen)).rowcount:
                raise Conflict(f"the gateway {id!r} was seen a moment ago: stop it, and it removes itself")
            LeaseTable(connection).leave(id)

    def all(self) -> list[GatewayRow]:
        """Every gateway that holds, or may hold, usage that is not stored yet; by id."""
        with self._store.connected() as connection:
            return [GatewayRow(*row) for row in connection.execute(sa.select(_table).order_by(_table.c.id))]

    @staticmethod
    def _change(connection: sa.Connection, row: GatewayRow) -> None:
        """Put a folder's row in, in place of any that it had."""
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
        standing = _find(connection, row.id)
        if standing is not None and standing.folder != row.folder:
            raise GatewayTaken(standing)
        connection.execute(_table.delete().where(_table.c.folder == row.folder))
        connection.execute(_table.insert().values(msgspec.structs.asdict(row)))


def _find(connection: sa.Connection, id: str) -> GatewayRow | None:
    found = connection.execute(sa.select(_table).where(_table.c.id == id)).one_or_none()
    return None if found is None else GatewayRow(*found)
