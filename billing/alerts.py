"""Alerts for the operator: what is worth waking somebody for, written down first and then sent until it arrived.

Knows: which facts of the log are alerts, the outbox in the ledger's database, when a try that failed is made again.
Does not know: how it is sent (`gateway/alerting.py`), what a spool or a reconciliation is.

An alert has a cause, and one cause is one alert however often it is told: its id is made of the cause. What the log
says is followed by its sequence, and the position moves in the transaction that writes the alerts, so none is lost and
none comes twice into the outbox. Sending is at least once, under the same id: https://www.standardwebhooks.com
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from billing.duties import Duties, Duty
from billing.errors import Conflict, NotFound
from billing.store import EventStore, StoredEvent

RETRIES_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""After so many seconds it is tried again: ten times in three days and a half, as Standard Webhooks proposes."""

KEPT_US = 90 * 86_400_000_000  # how long alerts that arrived, or went nowhere, can be looked at
FEED = "alert_feed"
LEASE_US = 60_000_000
ERROR_MAX = 300


class AlertKind(StrEnum):
    """What an alert can be; also the `type` of the message."""

    THRESHOLD = "budget.threshold_reached"
    EXHAUSTED = "balance.exhausted"
    BUDGET_EXHAUSTED = "budget.exhausted"
    SPOOL_LAG = "spool.lag"
    RECONCILE = "reconcile.difference"
    EXPORT_FAILED = "export.failed"
    INVOICE_FAILED = "invoice.failed"
    PAYMENT_FAILED = "payment.failed"
    SUSPENDED = "tenant.suspended"
    TOP_UP = "balance.top_up_requested"
    DUNNING = "dunning.step"
    REACTIVATED = "tenant.reactivated"
    NOT_COMPARED = "reconcile.incomplete"


class AlertState(StrEnum):
    """pending → delivered | dead; kept: there was nowhere to send it."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"
    KEPT = "kept"


OF_LOG = {
    "budget.reached": AlertKind.THRESHOLD,
    "quota.exhausted": AlertKind.EXHAUSTED,
    "top_up.requested": AlertKind.TOP_UP,
    "invoice.payment_failed": AlertKind.PAYMENT_FAILED,
    "dunning.step": AlertKind.DUNNING,
}
"""Facts of the log that are alerts, whole. A tenant's suspension is a change of its row: see `Alerts.follow`."""

_table = sa.Table(
    "alerts",
    sa.MetaData(),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("cause", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempts", sa.BigInteger, nullable=False),
    sa.Column("next_us", sa.BigInteger, nullable=False),
    sa.Column("last_error", sa.Text, nullable=False),
)


class Alert(msgspec.Struct, frozen=True):
    """One alert, in the column order of the table. `body` is what is sent and signed, to the byte."""

    id: str
    cause: str
    kind: str
    body: str
    created_us: int
    state: str
    attempts: int
    next_us: int  # when it is tried (again)
    last_error: str


class _Followed(msgspec.Struct, frozen=True):
    """How far the log is followed, and whom an operator had suspended there."""

    seq: int
    suspended: tuple[str, ...] = ()


def alert_id(cause: str) -> str:
    """The message's id: the same for the same cause, for ever."""
    return f"msg_{hashlib.sha256(cause.encode()).hexdigest()[:32]}"


def body_of(kind: AlertKind, data: dict[str, Any], at_us: int) -> str:
    """The payload in the form that Standard Webhooks proposes: type, timestamp, data."""
    time = datetime.fromtimestamp(at_us // 1_000_000, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"type": str(kind), "timestamp": time, "data": data}).decode()


def pause_us(attempts: int) -> int | None:
    """How long to wait after so many tries that failed, with jitter; None: it has been tried often enough."""
    if attempts > len(RETRIES_S):
        return None
    return int(RETRIES_S[attempts - 1] * 1_000_000 * random.uniform(0.8, 1.2))


class Alerts:
    """The outbox. Thread-safe. `sends`: there is somewhere to send to. Raises `LedgerUnavailable`."""

    def __init__(self, store: EventStore, *, sends: bool) -> None:
        self._store = store
        self._duties = Duties(store)
        self._sends = sends

    def tell(self, kind: AlertKind, cause: str, data: dict[str, Any], now_us: int) -> bool:
        """Write one alert down; whether it is new. Durable when it returns."""
        with self._store.connected(write=True) as connection:
            return self.tell_in(connection, kind, cause, data, now_us)

    def tell_in(
        self, connection: sa.Connection, kind: AlertKind, cause: str, data: dict[str, Any], now_us: int
    ) -> bool:
        """The same in a transaction of the ledger's database that is under way: it stands with what else it wrote."""
        id = alert_id(cause)
        state = AlertState.PENDING if self._sends else AlertState.KEPT
        alert = Alert(id, cause, str(kind), body_of(kind, data, now_us), now_us, state, 0, now_us, "")
        # Another may be telling the same at this moment: the first stands, and nobody's transaction ends with an error.
        make = postgresql_insert if connection.dialect.name == "postgresql" else sqlite_insert
        told = make(_table).values(msgspec.structs.asdict(alert)).on_conflict_do_nothing()
        return connection.execute(told.returning(_table.c.id)).one_or_none() is not None

    def follow(self, holder: str, now_us: int, suspended: Callable[[], Iterable[str]]) -> int:
        """Write down what the log says since the last time: how many. One process at a time; 0 while another does.

        The first time it begins at the log's end; `suspended` are the tenants that are suspended then.
        """
        duty = self._duties.take(FEED, holder, now_us, LEASE_US)
        if duty is None:
            return 0
        if not duty.state:
            start = _Followed(self._store.last_before(2**62), tuple(sorted(suspended())))
            duty = self._duties.note(duty, msgspec.json.encode(start).decode(), now_us + LEASE_US)
        told = 0
        while rows := self._store.read(self._followed(duty).seq):
            duty, new = self._follow(duty, rows, now_us)
            told += new
        self._duties.leave(duty)
        return told

    def due(self, now_us: int, limit: int = 100) -> list[Alert]:
        """Those to be sent now, the oldest first."""
        pending = (_table.c.state == AlertState.PENDING) & (_table.c.next_us <= now_us)
        query = sa.select(_table).where(pending).order_by(_table.c.created_us, _table.c.id).limit(limit)
        with self._store.connected() as connection:
            return [Alert(*row) for row in connection.execute(query)]

    def delivered(self, alert: Alert, now_us: int) -> None:
        """It arrived."""
        self._change(alert.id, state=AlertState.DELIVERED, attempts=alert.attempts + 1, next_us=now_us, last_error="")

    def failed(self, alert: Alert, error: str, now_us: int, *, wait_us: int = 0, gone: bool = False) -> AlertState:
        """It did not: it is tried again after a while, at least `wait_us`, or is a dead letter."""
        attempts = alert.attempts + 1
        pause = None if gone else pause_us(attempts)
        state = AlertState.DEAD if pause is None else AlertState.PENDING
        next_us = now_us + max(pause or 0, wait_us)
        self._change(alert.id, state=state, attempts=attempts, next_us=next_us, last_error=error[:ERROR_MAX])
        return state

    def again(self, id: str, now_us: int) -> Alert:
        """Send a dead letter, or one that arrived, anew under its id. Raises `NotFound`, `Conflict`."""
        if not self._sends:
            raise Conflict("there is nowhere to send alerts to: set alert_url")
        self._change(id, state=AlertState.PENDING, attempts=0, next_us=now_us, last_error="")
        return self.find(id)

    def find(self, id: str) -> Alert:
        """Raises `NotFound`."""
        with self._store.connected() as connection:
            row = connection.execute(sa.select(_table).where(_table.c.id == id)).one_or_none()
        if row is None:
            raise NotFound("alert", id)
        return Alert(*row)

    def list(self, state: str | None = None, limit: int = 100, after: str | None = None) -> list[Alert]:
        """The newest first, behind the one whose id is `after`. Raises `NotFound`."""
        query = sa.select(_table).order_by(_table.c.created_us.desc(), _table.c.id).limit(limit)
        if state is not None:
            query = query.where(_table.c.state == state)
        if after is not None:
            last = self.find(after)
            older = _table.c.created_us < last.created_us
            query = query.where(older | ((_table.c.created_us == last.created_us) & (_table.c.id > last.id)))
        with self._store.connected() as connection:
            return [Alert(*row) for row in connection.execute(query)]

    def counts(self) -> dict[str, int]:
        """How many there are of each state."""
        query = sa.select(_table.c.state, sa.func.count()).group_by(_table.c.state)
        with self._store.connected() as connection:
            found = {str(state): int(count) for state, count in connection.execute(query)}
        return {state.value: found.get(state, 0) for state in AlertState}

    def prune(self, now_us: int) -> None:
        """Forget what arrived, or went nowhere, long ago; a dead letter stays until it is sent."""
        over = _table.c.state.in_([AlertState.DELIVERED, AlertState.KEPT]) & (_table.c.created_us < now_us - KEPT_US)
        with self._store.connected(write=True) as connection:
            connection.execute(_table.delete().where(over))

    # -- within ---------------------------------------------------------------------------------

    def _followed(self, duty: Duty) -> _Followed:
        return msgspec.json.decode(duty.state, type=_Followed)

    def _follow(self, duty: Duty, rows: Iterable[StoredEvent], now_us: int) -> tuple[Duty, int]:
        """One page of the log: its alerts and the new position, in one transaction."""
        before = self._followed(duty)
        suspended, seq, told = set(before.suspended), before.seq, 0
        with self._store.connected(write=True) as connection:
            for row in rows:
                seq = row.seq
                for kind, cause, data in _alerts_of(row, suspended):
                    told += self.tell_in(connection, kind, cause, data, row.time_us)
            state = msgspec.json.encode(_Followed(seq, tuple(sorted(suspended)))).decode()
            noted = self._duties.note_in(connection, duty, state, now_us + LEASE_US)
        return noted, told

    def _change(self, id: str, **values: object) -> None:
        with self._store.connected(write=True) as connection:
            if not connection.execute(_table.update().where(_table.c.id == id).values(values)).rowcount:
                raise NotFound("alert", id)


def _alerts_of(row: StoredEvent, suspended: set[str]) -> list[tuple[AlertKind, str, dict[str, Any]]]:
    """What a row of the log is an alert of; `suspended` goes along."""
    if row.type in OF_LOG:
        fact = _payload(row)
        kind = AlertKind.BUDGET_EXHAUSTED if row.type == "quota.exhausted" and fact["budget"] else OF_LOG[row.type]
        return [(kind, f"event:{row.seq}", {"event": row.seq, **fact})]
    if row.type in ("suspension.placed", "suspension.lifted"):
        fact, placed = _payload(row), row.type == "suspension.placed"
        if not fact.get("invoice_id"):
            (suspended.add if placed else suspended.discard)(fact["tenant"])
        if placed or fact["active"]:
            kind = AlertKind.SUSPENDED if placed else AlertKind.REACTIVATED
            return [(kind, f"event:{row.seq}", {"event": row.seq, **fact, "by": row.actor})]
    if row.type in ("tenant.created", "tenant.updated"):
        tenant = _payload(row)["tenant"]
        was, now = tenant["id"] in suspended, tenant.get("status") == "suspended"
        (suspended.add if now else suspended.discard)(tenant["id"])
        if now and not was:
            data = {"event": row.seq, "tenant": tenant["id"], "name": tenant["name"], "by": row.actor}
            return [(AlertKind.SUSPENDED, f"event:{row.seq}", data)]
    return []


def _payload(row: StoredEvent) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(row.payload)
    found.pop("type", None)
    return found
