"""Stripe's Billing Meters: each recorded charge's tokens, once, at the time they were used.

Where from: the ledger's sequence, not the spool. A charge is one row of the log, once and in one order for all
gateways, so the position is one number and one gateway at a time moves it; and Stripe being away for a week keeps no
settlement in anybody's spool and so turns no request away.

Exactly once: an event's identifier depends on nothing but the request and the class of tokens, and Stripe refuses a
second one for 24 hours, which means *delivered*. A batch is noted before it is sent and noted again when all of it was
taken. Begun again within `SURE_US` it is sent whole, and what was taken is refused. Begun again later than that,
nothing is sent blindly: what Stripe's hourly sums have is compared with what they should have. Where a sum is what it
was before the batch, the batch's events are sent; where it has them all, they were delivered; anything else is put
aside as `unsure`, with its name, for a person to look at.

What Stripe will never take (older than 35 days, a customer that is gone) is put aside as `refused`, with its name; what
is dated further ahead than five minutes is not sent: it waits until it may be.

https://docs.stripe.com/api/billing/meter-event/create
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import sqlalchemy as sa
import stripe
import structlog

from billing.books import fact_of
from billing.duties import Duties, Duty, DutyLost
from billing.errors import ExportError, NotFound
from billing.invoice import Invoice
from billing.ledger import UsageRated
from billing.line import LineKind
from billing.rating import quantities
from billing.service import Billing
from billing.store import EventStore, StoredEvent
from billing.stripe import StripeExporter
from billing.stripe_calls import StripeRefused, StripeUnavailable
from metering.counts import HOUR_US, hour_of

OLDEST_US = 35 * 86_400_000_000
NEWEST_US = 300_000_000
SLACK_US = 60_000_000  # nearer to an edge than that it is not tried: clocks part, calls take time
SURE_US = 20 * 3_600_000_000  # identifiers are unique for at least 24 hours
SETTLED_US = 3_600_000_000  # Stripe's sums may lag behind its answers
BATCH = 500  # rows of the log
WORKERS = 8
LEASE_US = 300_000_000
IDENTIFIER_MAX = 100
DUTY = "meters"
PREFIX = "meterhouse"
BATCH_MAX = 10_000  # rows of a batch that another process began with a larger setting
WAITING, REFUSED, UNSURE, LEFT = "waiting", "refused", "unsure", "left"
IN_FUTURE = "timestamp_in_future"
DUPLICATE = frozenset({"duplicate_meter_event", "meter_event_already_exists"})
OF_ALL = frozenset({"no_meter", "archived_meter"})  # not this event's fault alone: nothing is put aside for it

log = structlog.get_logger(__name__)

_rejects = sa.Table(
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


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far the export is. What the log had up to `from_seq` when meters were first used is not theirs."""

    from_seq: int
    from_us: int
    done_seq: int
    batch_to: int | None = None  # the batch under way is (done_seq, batch_to]
    batch_us: int | None = None  # when the first of its identifiers may have been used
    tried_us: int | None = None  # when it was last begun to be sent
    skip: tuple[str, ...] = ()  # identifiers of the batch that are decided


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One meter event: the tokens of one class of one request."""

    identifier: str
    seq: int
    event_id: str
    tenant: str
    model: str
    kind: str
    quantity: int
    ts_us: int


class Reject(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that was put aside. `state`: waiting for its time, refused by Stripe, unsure whether it was delivered, or
    left, when a person decided that it is not to be sent."""

    unit: Unit
    state: str
    reason: str
    tried_us: int | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass did: meter events that Stripe has now, and those that were put aside; rows of the log are through
    up to `done_seq`."""

    delivered: int
    put_aside: int
    done_seq: int


def identifier(event_id: str, kind: str) -> str:
    """The same for the same tokens, for ever; at most 100 characters."""
    plain = f"{event_id}:{kind}"
    return plain if len(plain) <= IDENTIFIER_MAX else hashlib.sha256(plain.encode()).hexdigest()


def units_of(seq: int, rated: UsageRated) -> list[Unit]:
    """A charge's units by class; nothing for a class of which it has none."""
    counted = rated.quantities or {token_class.value: tokens for token_class, tokens in quantities(rated).items()}
    return [
        Unit(
            identifier=identifier(rated.event_id, kind),
            seq=seq,
            event_id=rated.event_id,
            tenant=rated.tenant,
            model=rated.model,
            kind=kind,
            quantity=units,
            ts_us=rated.ts_us,
        )
        for kind, units in counted.items()
        if units
    ]


def event_name(kind: str) -> str:
    """The name of the meter that sums this class."""
    return f"{PREFIX}_{kind}"


class MeterExport:
    """Moves the ledger's charges to Stripe. `run` may be called by several processes and killed anywhere."""

    def __init__(
        self,
        store: EventStore,
        billing: Billing,
        exporter: StripeExporter,
        *,
        holder: str,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        batch: int = BATCH,
        workers: int = WORKERS,
    ) -> None:
        self._store = store
        self._billing = billing
        self._exporter = exporter
        self._duties = Duties(store)
        self._holder = holder
        self._clock_us = clock_us
        self._batch = batch
        self._workers = workers
        self._meters: dict[str, str] = {}  # event name → id of the meter
        self._customers: dict[str, str] = {}

    # -- what callers use -------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Progress | None:
        """Deliver what there is, until `stopping`; None while another process does. Raises `ExportError`, to be run
        again later."""
        duty = self._duties.take(DUTY, self._holder, self._clock_us(), LEASE_US)
        if duty is None:
            return None
        delivered = aside = 0
        try:
            duty, position = self._started(duty)
            delivered += self._retry_waiting()
            while (rows := self._rows(position)) and not stopping():
                duty, position, sent, kept = self._next(duty, position, rows)
                delivered, aside = delivered + sent, aside + kept
        except DutyLost:
            log.warning("meters_taken_over")
            return None
        except ExportError:
            self._duties.leave(duty)
            raise
        self._duties.leave(duty)
        return Progress(delivered=delivered, put_aside=aside, done_seq=position.done_seq)

    def position(self) -> Position | None:
        """How far it is; None when meters were never used on this ledger."""
        duty = self._duties.find(DUTY)
        return msgspec.json.decode(duty.state, type=Position) if duty is not None and duty.state else None

    def rejects(self, limit: int = 100, after: str | None = None) -> list[Reject]:
        """What was put aside, by identifier."""
        query = sa.select(_rejects).order_by(_rejects.c.identifier).limit(limit)
        if after is not None:
            query = query.where(_rejects.c.identifier > after)
        with self._store.connected() as connection:
            return [_reject(row) for row in connection.execute(query)]

    def reject_count(self) -> int:
        with self._store.connected() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(_rejects)).scalar() or 0)

    def resolve(self, identifier: str, *, send: bool) -> Reject:
        """A person decides on what was put aside: send it (again), or leave it for good. Raises `NotFound`,
        `ExportError`."""
        with self._store.connected() as connection:
            row = connection.execute(sa.select(_rejects).where(_rejects.c.identifier == identifier)).one_or_none()
        if row is None:
            raise NotFound("meter event", identifier)
        reject = _reject(row)
        if send:
            self._prepare([reject.unit])
            self._send(reject.unit)
            self._drop([identifier])
        else:
            self._keep([msgspec.structs.replace(reject, state=LEFT)])
        return reject

    def refusal(self, invoice: Invoice, *, metered: bool) -> str:
        """Why an invoice must not be exported: its charges are, in part, Stripe's to invoice. Empty: it may be."""
        position = self.position()
        if position is None:
            return f"usage is exported to Stripe's meters (export_mode){_beside(invoice)}" if metered else ""
        if invoice.cut_seq <= position.from_seq:
            return ""
        if metered or invoice.period_start_us <= self._last_metered_us(position):
            return f"usage of its period was exported to Stripe's meters, which invoice it{_beside(invoice)}"
        return ""

    # -- one batch --------------------------------------------------------------------------------

    def _started(self, duty: Duty) -> tuple[Duty, Position]:
        if duty.state:
            return duty, msgspec.json.decode(duty.state, type=Position)
        head = self._store.last_before(2**62)
        position = Position(from_seq=head, from_us=self._clock_us(), done_seq=head)
        return self._note(duty, position), position

    def _rows(self, position: Position) -> list[StoredEvent]:
        """The batch under way, else the next one; empty where the log ends."""
        rows = self._store.read(position.done_seq, self._batch if position.batch_to is None else BATCH_MAX)
        return rows if position.batch_to is None else [row for row in rows if row.seq <= position.batch_to]

    def _next(self, duty: Duty, position: Position, rows: Sequence[StoredEvent]) -> tuple[Duty, Position, int, int]:
        """Send one batch: how many of it were delivered and put aside. Raises `ExportError`, `DutyLost`."""
        units = _units(rows)
        now_us = self._clock_us()
        begun = msgspec.structs.replace(
            position, batch_to=rows[-1].seq, batch_us=position.batch_us or now_us, tried_us=now_us
        )
        unsure = 0
        if position.batch_us is not None and now_us - position.batch_us > SURE_US:
            begun, unsure = self._made_sure(position, begun, units)
        if units:
            duty = self._note(duty, begun)
        sent, kept = self._deliver([unit for unit in units if unit.identifier not in begun.skip])
        done = Position(from_seq=position.from_seq, from_us=position.from_us, done_seq=rows[-1].seq)
        return self._note(duty, done), done, sent, kept + unsure

    def _note(self, duty: Duty, position: Position) -> Duty:
        state = msgspec.json.encode(position).decode()
        return self._duties.note(duty, state, self._clock_us() + LEASE_US)

    def _deliver(self, units: Sequence[Unit]) -> tuple[int, int]:
        """Send all that may be sent, put aside what may not: how many of each. Raises `ExportError`."""
        now_us = self._clock_us()
        kept = [reject for unit in units if (reject := _out_of_time(unit, now_us))]
        aside = {reject.unit.identifier for reject in kept}
        sendable = [unit for unit in units if unit.identifier not in aside]
        self._prepare(sendable)
        with ThreadPoolExecutor(self._workers, "meters") as pool:
            try:
                kept += [reject for reject in pool.map(self._taken, sendable) if reject is not None]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        self._keep(kept)
        for reject in kept:
            log.error("meter_event_put_aside", event_id=reject.unit.event_id, state=reject.state, reason=reject.reason)
        return len(units) - len(kept), len(kept)

    def _taken(self, unit: Unit) -> Reject | None:
        """None when Stripe has it, else why it never will, or not yet. Raises `ExportError` where that is not known."""
        try:
            self._send(unit)
        except StripeRefused as refused:
            cause = refused.__cause__
            if not isinstance(cause, stripe.InvalidRequestError) or cause.code in OF_ALL:
                raise
            state = WAITING if cause.code == IN_FUTURE else REFUSED
            return Reject(unit=unit, state=state, reason=str(refused))
        return None

    def _send(self, unit: Unit) -> None:
        """Returns when Stripe has it. Raises `ExportError`."""
        customer = self._customers[unit.tenant]
        payload = {"stripe_customer_id": customer, "value": str(unit.quantity), "model": unit.model[:100]}
        try:
            self._exporter.call(
                lambda api: api.billing.meter_events.create(
                    {
                        "event_name": event_name(unit.kind),
                        "payload": payload,
                        "identifier": unit.identifier,
                        "timestamp": unit.ts_us // 1_000_000,
                    }
                )
            )
        except StripeRefused as refused:
            if not _delivered_before(refused.__cause__):
                raise

    def _prepare(self, units: Iterable[Unit]) -> None:
        """A meter for every class, a customer for every tenant."""
        for name in sorted({event_name(unit.kind) for unit in units} - set(self._meters)):
            self._meters[name] = self._meter(name)
        for id in sorted({unit.tenant for unit in units}):
            tenant = self._billing.tenant(id)
            if tenant.stripe_customer_id is not None:
                self._customers[id] = tenant.stripe_customer_id
            elif id not in self._customers:
                self._customers[id] = self._exporter.customer(tenant)

    def _meter(self, name: str) -> str:
        """The active meter of this event name, made where there is none: one, as a second is refused."""
        if (found := self._find_meter(name)) is not None:
            return found
        kind = name.removeprefix(f"{PREFIX}_")
        try:
            made = self._exporter.call(
                lambda api: api.billing.meters.create(
                    {
                        "display_name": f"Meterhouse {kind} tokens",
                        "event_name": name,
                        "default_aggregation": {"formula": "sum"},
                    }
                )
            )
        except StripeRefused:
            found = self._find_meter(name)
            if found is None:
                raise
            return found
        return str(made.id)

    def _find_meter(self, name: str) -> str | None:
        listed = self._exporter.call(
            lambda api: list(api.billing.meters.list({"status": "active", "limit": 100}).auto_paging_iter())
        )
        return next((str(meter.id) for meter in listed if meter.event_name == name), None)

    # -- a batch whose identifiers Stripe may have forgotten --------------------------------------

    def _made_sure(self, before: Position, begun: Position, units: Sequence[Unit]) -> tuple[Position, int]:
        """The batch as a fresh one, of which everything that may have been delivered is decided; how many were put
        aside because it could not be.

        Raises `StripeUnavailable` while Stripe's sums may not have what was sent last.
        """
        now_us = self._clock_us()
        if now_us - (before.tried_us or 0) < SETTLED_US:
            raise StripeUnavailable("Stripe's sums are waited for: a batch was broken off too long ago to be repeated")
        self._prepare(units)
        decided: list[str] = []
        unsure: list[Reject] = []
        cells: dict[tuple[str, str, int], list[Unit]] = defaultdict(list)
        for unit in units:
            if unit.identifier in before.skip:
                continue
            cells[unit.tenant, unit.kind, hour_of(unit.ts_us)].append(unit)
        for cell, of_cell in cells.items():
            there, known = self._sum_there(*cell), self._sum_known(*cell, before)
            if there == known + sum(unit.quantity for unit in of_cell):
                decided += [unit.identifier for unit in of_cell]
            elif there != known:
                reason = f"Stripe's sum of the hour is {there}: {known} without this batch's {len(of_cell)} events"
                unsure += [Reject(unit=unit, state=UNSURE, reason=reason) for unit in of_cell]
        self._keep(unsure)
        skip = (*before.skip, *decided, *(reject.unit.identifier for reject in unsure))
        return msgspec.structs.replace(begun, batch_us=now_us, skip=skip), len(unsure)

    def _sum_there(self, tenant: str, kind: str, hour_us: int) -> int:
        """Tokens that Stripe has of a tenant's hour."""
        start_s = hour_us // 1_000_000
        summaries = self._exporter.call(
            lambda api: list(
                api.billing.meters.event_summaries.list(
                    self._meters[event_name(kind)],
                    {"customer": self._customers[tenant], "start_time": start_s, "end_time": start_s + 3600},
                ).auto_paging_iter()
            )
        )
        return round(sum(summary.aggregated_value for summary in summaries))  # whole numbers, as a JSON number

    def _sum_known(self, tenant: str, kind: str, hour_us: int, position: Position) -> int:
        """Tokens of that hour that were certainly delivered before the batch."""
        aside = {reject.unit.identifier for reject in self._all_rejects()}
        rows = self._store.scan(f"usage:{tenant}", recorded_from_us=max(0, hour_us - HOUR_US * 24))
        units = _units(row for row in rows if position.from_seq < row.seq <= position.done_seq)
        return sum(
            unit.quantity
            for unit in units
            if unit.kind == kind and hour_of(unit.ts_us) == hour_us and unit.identifier not in aside
        )

    # -- what was put aside -----------------------------------------------------------------------

    def _retry_waiting(self) -> int:
        """Send what has waited for its time; how many. One that is broken off on the way is unsure after a day."""
        now_us = self._clock_us()
        sent = 0
        for reject in self._all_rejects(WAITING):
            late = reject.tried_us is not None and now_us - reject.tried_us > SURE_US
            verdict = _out_of_time(reject.unit, now_us)
            if late:
                self._keep([msgspec.structs.replace(reject, state=UNSURE, reason="broken off a day ago")])
            elif verdict is not None:
                self._keep([verdict] if verdict.state == REFUSED else [])
            else:
                self._keep([msgspec.structs.replace(reject, tried_us=reject.tried_us or now_us)])
                self._prepare([reject.unit])
                refused = self._taken(reject.unit)
                self._keep([refused]) if refused else self._drop([reject.unit.identifier])
                sent += refused is None
        return sent

    def _all_rejects(self, state: str | None = None) -> list[Reject]:
        query = sa.select(_rejects).order_by(_rejects.c.identifier)
        if state is not None:
            query = query.where(_rejects.c.state == state)
        with self._store.connected() as connection:
            return [_reject(row) for row in connection.execute(query)]

    def _keep(self, rejects: Sequence[Reject]) -> None:
        """Durable when it returns; again takes the place of what was kept before."""
        if not rejects:
            return
        values = [
            {
                **{name: getattr(reject.unit, name) for name in ("identifier", "seq", "event_id", "tenant", "model")},
                "kind": reject.unit.kind,
                "quantity": str(reject.unit.quantity),
                "ts_us": reject.unit.ts_us,
                "state": reject.state,
                "reason": reject.reason,
                "tried_us": reject.tried_us,
            }
            for reject in rejects
        ]
        with self._store.connected(write=True) as connection:
            for one in values:
                connection.execute(_rejects.delete().where(_rejects.c.identifier == one["identifier"]))
            connection.execute(_rejects.insert(), values)

    def _drop(self, identifiers: Sequence[str]) -> None:
        with self._store.connected(write=True) as connection:
            connection.execute(_rejects.delete().where(_rejects.c.identifier.in_(identifiers)))

    def _last_metered_us(self, position: Position) -> int:
        """When the last row that is through was recorded, and so no earlier than its usage."""
        rows = self._store.read(position.done_seq - 1, 1) if position.done_seq > position.from_seq else []
        return rows[0].time_us if rows else position.from_us


def _beside(invoice: Invoice) -> str:
    """What of an invoice no meter has."""
    kinds = dict.fromkeys(line.kind.value for line in invoice.lines if line.kind is not LineKind.USAGE)
    return f"; its lines of the kind {', '.join(kinds)} are on no meter: they are agreed in Stripe" if kinds else ""


def _units(rows: Iterable[StoredEvent]) -> list[Unit]:
    """The meter events of the charges among some rows, in their order."""
    return [
        unit
        for row in rows
        if row.type == "usage.rated" and isinstance(fact := fact_of(row), UsageRated)
        for unit in units_of(row.seq, fact)
    ]


def _out_of_time(unit: Unit, now_us: int) -> Reject | None:
    """Why it is not sent now; None where it may be."""
    if unit.ts_us < now_us - OLDEST_US + SLACK_US:
        return Reject(unit=unit, state=REFUSED, reason="older than the 35 days that Stripe takes")
    if unit.ts_us > now_us + NEWEST_US:
        return Reject(unit=unit, state=WAITING, reason="dated more than five minutes ahead")
    return None


def _delivered_before(cause: BaseException | None) -> bool:
    """Whether a refusal means that Stripe has the identifier: https://docs.stripe.com/billing/subscriptions/usage-based"""
    if not isinstance(cause, stripe.InvalidRequestError):
        return False
    text = (cause.user_message or "").lower()
    return cause.code in DUPLICATE or ("already exists" in text and "identifier" in text)


def _reject(row: sa.Row[Any]) -> Reject:
    values = row._asdict()
    unit = Unit(
        **{name: values[name] for name in ("identifier", "seq", "event_id", "tenant", "model", "kind", "ts_us")},
        quantity=int(values["quantity"]),
    )
    return Reject(unit=unit, state=values["state"], reason=values["reason"], tried_us=values["tried_us"])
