"""The audit: who did what, read from the log itself. What is charged is left out; everything that a person or a part of
the system decided is there, with who it was.

Knows: the log's table, and an index that leaves the charges out. Does not know: what the events mean.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from billing.store import EventStore

# Written out, not as parameters: it is the condition of the index `events_decided`, and has to look like it.
_DECIDED = sa.text("type NOT IN ('usage.rated', 'usage.unrated')")

_table = sa.Table(
    "events",
    sa.MetaData(),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("type", sa.Text),
    sa.Column("payload", sa.Text),
    sa.Column("actor", sa.Text),
    sa.Column("time_us", sa.BigInteger),
    sa.Column("idempotency_key", sa.Text),
)
HIDDEN = frozenset({"secret_sha256"})


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event that somebody decided. `seq` is its number in the log."""

    seq: int
    time_us: int
    actor: str
    type: str
    key: str | None
    payload: dict[str, Any]  # without what could be tried as a secret


class Audit:
    """Reads the log. Thread-safe. Raises `LedgerUnavailable`."""

    def __init__(self, store: EventStore) -> None:
        self._store = store

    def entries(
        self,
        *,
        actor: str | None = None,
        type: str | None = None,
        from_us: int = 0,
        to_us: int = 2**62,
        before: int | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        """The newest first, those with a number below `before`. `type` may end in `.*`, as `invoice.*`."""
        query = sa.select(_table).where(_DECIDED, _table.c.time_us >= from_us, _table.c.time_us < to_us)
        if actor is not None:
            query = query.where(_table.c.actor == actor)
        if type is not None:
            wanted = _table.c.type.startswith(type[:-1], autoescape=True) if type.endswith(".*") else None
            query = query.where(_table.c.type == type if wanted is None else wanted)
        if before is not None:
            query = query.where(_table.c.seq < before)
        with self._store.connected() as connection:
            return [_entry(row) for row in connection.execute(query.order_by(_table.c.seq.desc()).limit(limit))]


def _entry(row: sa.Row[Any]) -> Entry:
    payload: dict[str, Any] = msgspec.json.decode(row.payload)
    shown = {name: value for name, value in payload.items() if name != "type" and name not in HIDDEN}
    return Entry(
        seq=row.seq, time_us=row.time_us, actor=row.actor, type=row.type, key=row.idempotency_key, payload=shown
    )
