"""Meter events that were put aside: what Stripe never takes, what waits for its time, what nobody knows.

Knows: the table, and that an event put aside for good is an alert: both are written in one transaction, so whatever is
killed or broken off behind it, somebody is told of each of them. Does not know: Stripe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from billing.alerts import AlertKind, Alerts
from billing.errors import NotFound
from billing.meter_events import Unit
from billing.store import EventStore

WAITING, REFUSED, UNSURE, LEFT = "waiting", "refused", "unsure", "left"
ALARMING = frozenset({REFUSED, UNSURE})  # a person has to look
TOLD = 20  # events named in one alert

_table = sa.Table(
    "meter_rejects",
    sa.MetaData(),
    sa.Column("identifier", sa.Text, primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("quantity", sa.Text, nullable=False),
    sa.Column("ts_us", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("tried_us", sa.BigInteger),
)


class Reject(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that was put aside. `state`: waiting for its time, refused by Stripe, unsure whether it was delivered, or
    left, when a person decided that it is not to be sent."""

    unit: Unit
    state: str
    reason: str
    tried_us: int | None = None


class Rejects:
    """The table. Thread-safe. `alerts`: who is told. Raises `LedgerUnavailable`."""

    def __init__(self, store: EventStore, alerts: Alerts | None) -> None:
        self._store = store
        self._alerts = alerts

    def page(self, limit: int = 100, after: str | None = None) -> list[Reject]:
        """By identifier, behind the one that is `after`."""
        query = sa.select(_table).order_by(_table.c.identifier).limit(limit)
        return self._read(query if after is None else query.where(_table.c.identifier > after))

    def all(self, state: str | None = None) -> list[Reject]:
        """By identifier, where asked for those in one state."""
        query = sa.select(_table).order_by(_table.c.identifier)
        return self._read(query if state is None else query.where(_table.c.state == state))

    def count(self, state: str | None = None) -> int:
        query = sa.select(sa.func.count()).select_from(_table)
        with self._store.connected() as connection:
            found = connection.execute(query if state is None else query.where(_table.c.state == state))
            return int(found.scalar() or 0)

    def find(self, identifier: str) -> Reject:
        """Raises `NotFound`."""
        found = self._read(sa.select(_table).where(_table.c.identifier == identifier))
        if not found:
            raise NotFound("meter event", identifier)
        return found[0]

    def keep(self, rejects: Sequence[Reject], now_us: int) -> None:
        """Durable when it returns, told of as well; again takes the place of what was kept before."""
        if not rejects:
            return
        with self._store.connected(write=True) as connection:
            new = [one for one in rejects if one.state in ALARMING and not _stands(connection, one)]
            for one in rejects:
                connection.execute(_table.delete().where(_table.c.identifier == one.unit.identifier))
            connection.execute(_table.insert(), [_row(one) for one in rejects])
            if new and self._alerts is not None:
                self._alerts.tell_in(connection, AlertKind.EXPORT_FAILED, _cause(new), _told(new), now_us)

    def drop(self, identifiers: Sequence[str]) -> None:
        """They were delivered."""
        with self._store.connected(write=True) as connection:
            connection.execute(_table.delete().where(_table.c.identifier.in_(identifiers)))

    def _read(self, query: sa.Select[Any]) -> list[Reject]:
        with self._store.connected() as connection:
            return [_reject(row) for row in connection.execute(query)]


def _stands(connection: sa.Connection, reject: Reject) -> bool:
    """Whether it is there in this state."""
    query = sa.select(_table.c.state).where(_table.c.identifier == reject.unit.identifier)
    return bool(connection.execute(query).scalar() == reject.state)


def _cause(rejects: Sequence[Reject]) -> str:
    names = sorted(f"{one.unit.identifier}:{one.state}" for one in rejects)
    return f"meters-aside:{hashlib.sha256(repr(names).encode()).hexdigest()}"


def _told(rejects: Sequence[Reject]) -> dict[str, Any]:
    events = [
        {"identifier": one.unit.identifier, "event": one.unit.event_id, "state": one.state, "reason": one.reason}
        for one in rejects[:TOLD]
    ]
    return {"put_aside": len(rejects), "events": events}


def _row(reject: Reject) -> dict[str, Any]:
    unit = msgspec.structs.asdict(reject.unit)
    unit["quantity"] = str(reject.unit.quantity)
    return {**unit, "state": reject.state, "reason": reject.reason, "tried_us": reject.tried_us}


def _reject(row: sa.Row[Any]) -> Reject:
    values = row._asdict()
    unit = Unit(
        **{name: values[name] for name in ("identifier", "seq", "event_id", "tenant", "model", "kind", "ts_us")},
        quantity=int(values["quantity"]),
    )
    return Reject(unit=unit, state=values["state"], reason=values["reason"], tried_us=values["tried_us"])
