"""Duties of which one process at a time takes care, for all that share a ledger: who has one, until when, how far.

Knows: one row a duty in the ledger's database, a lease by the clock, the state as text. Does not know: what a duty is.
A lease only keeps two from doing the same at once where that would be a waste: whoever was stopped for longer than its
lease may go on beside the next one, so what a duty does must be right when it is done twice. Its state is not taken
from one that lost it.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from billing.store import EventStore

_table = sa.Table(
    "duties",
    sa.MetaData(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("until_us", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
)


class DutyLost(Exception):
    """The lease ran out and another process has the duty: what this one was about to note is not noted."""


class Duty(msgspec.Struct, frozen=True):
    """One row, in the column order of the table."""

    name: str
    holder: str
    until_us: int
    state: str


class Duties:
    """The table. Thread-safe. Raises `LedgerUnavailable` when the database cannot be used."""

    def __init__(self, store: EventStore) -> None:
        self._store = store

    def take(self, name: str, holder: str, now_us: int, lease_us: int) -> Duty | None:
        """The duty until then, with the state it is in; None while another has it."""
        with self._store.connected(write=True) as connection:
            standing = _find(connection, name)
            if standing is None:
                duty = Duty(name, holder, now_us + lease_us, "")
                connection.execute(_table.insert().values(msgspec.structs.asdict(duty)))
                return duty
            if standing.holder != holder and standing.until_us > now_us:
                return None
            duty = Duty(name, holder, now_us + lease_us, standing.state)
            taken = connection.execute(
                _table.update()
                .where(_table.c.name == name, _table.c.holder == standing.holder)
                .where(_table.c.until_us == standing.until_us)
                .values(holder=holder, until_us=duty.until_us)
            ).rowcount
            return duty if taken else None

    def note(self, duty: Duty, state: str, until_us: int) -> Duty:
        """Put down how far it is, and keep it until then. Raises `DutyLost` with nothing changed."""
        with self._store.connected(write=True) as connection:
            return self.note_in(connection, duty, state, until_us)

    def note_in(self, connection: sa.Connection, duty: Duty, state: str, until_us: int) -> Duty:
        """The same in a transaction of the ledger's database that is under way: what else it wrote stands with it."""
        mine = (_table.c.name == duty.name) & (_table.c.holder == duty.holder) & (_table.c.state == duty.state)
        noted = msgspec.structs.replace(duty, state=state, until_us=until_us)
        changed = connection.execute(_table.update().where(mine).values(msgspec.structs.asdict(noted))).rowcount
        if not changed:
            raise DutyLost(duty.name)
        return noted

    def leave(self, duty: Duty) -> None:
        """Let another have it at once; nothing happens where another has it already."""
        with self._store.connected(write=True) as connection:
            mine = (_table.c.name == duty.name) & (_table.c.holder == duty.holder)
            connection.execute(_table.update().where(mine).values(until_us=0))

    def find(self, name: str) -> Duty | None:
        """As it stands; None when nobody ever took it."""
        with self._store.connected() as connection:
            return _find(connection, name)


def _find(connection: sa.Connection, name: str) -> Duty | None:
    found = connection.execute(sa.select(_table).where(_table.c.name == name)).one_or_none()
    return None if found is None else Duty(*found)
