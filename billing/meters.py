"""Stripe's Billing Meters: each charge of the meters' part of the ledger, once, at the time of its usage.

Where from: the ledger's sequence, not the spool. A charge is one row of the log, once and in one order for all
gateways, so the position is one number and one gateway at a time moves it; and Stripe being away for a week keeps no
settlement in anybody's spool and so turns no request away. Which charges: those of the stretches that `billing.modes`
says are the meters'; all others are on invoices. So switching to invoices ends nothing that is on its way: what was
recorded before the switch is delivered all the same, and what came behind it never is.

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

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import stripe
import structlog

from billing.alerts import Alerts
from billing.duties import Duties, Duty, DutyLost
from billing.errors import ExportError
from billing.invoice import Invoice
from billing.line import LineKind
from billing.meter_events import METERS, Unit, event_name, units
from billing.meter_rejects import LEFT, REFUSED, UNSURE, WAITING, Reject, Rejects
from billing.modes import ExportMode
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
DUTY = "meters"
BATCH_MAX = 10_000  # rows of a batch that another process began with a larger setting
IN_FUTURE = "timestamp_in_future"
DUPLICATE = frozenset({"duplicate_meter_event", "meter_event_already_exists"})
OF_ALL = frozenset({"no_meter", "archived_meter"})  # not this event's fault alone: nothing is put aside for it

log = structlog.get_logger(__name__)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far the export is: the meters' part of the log is through up to `done_seq`; it begins behind `from_seq`."""

    from_seq: int
    from_us: int
    done_seq: int
    batch_to: int | None = None  # the batch under way is (done_seq, batch_to]
    batch_us: int | None = None  # when the first of its identifiers may have been used
    tried_us: int | None = None  # when it was last begun to be sent
    skip: tuple[str, ...] = ()  # identifiers of the batch that are decided


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass did: meter events that Stripe has now, and those that were put aside; rows of the log are through
    up to `done_seq`."""

    delivered: int
    put_aside: int
    done_seq: int


class MeterExport:
    """Moves the meters' charges to Stripe. `run` may be called by several processes and killed anywhere.

    `mode` is what the first `run` of this process switches the ledger to; None: it stays as it is. `alerts` is told of
    what is put aside.
    """

    def __init__(
        self,
        store: EventStore,
        billing: Billing,
        exporter: StripeExporter,
        *,
        holder: str,
        mode: ExportMode | None = None,
        alerts: Alerts | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        batch: int = BATCH,
        workers: int = WORKERS,
    ) -> None:
        self._store = store
        self._billing = billing
        self._exporter = exporter
        self._duties = Duties(store)
        self._rejects = Rejects(store, alerts)
        self._holder = holder
        self._switch_to = mode
        self._clock_us = clock_us
        self._batch = batch
        self._workers = workers
        self._meters: dict[str, str] = {}  # event name → id of the meter
        self._customers: dict[str, str] = {}

    # -- what callers use -------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Progress | None:
        """Deliver what there is, until `stopping`; None while another process does. Raises `ExportError`, to be run
        again later."""
        if self._idle():
            return Progress(delivered=0, put_aside=0, done_seq=0)
        self._check_released()
        duty = self._duties.take(DUTY, self._holder, self._clock_us(), LEASE_US)
        if duty is None:
            return None
        delivered = aside = 0
        try:
            self._switch()
            duty, position = self._started(duty)
            delivered += self._retry_waiting()
            while (found := self._rows(position)) and not stopping():
                duty, position, sent, kept = self._next(duty, *found)
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
        return self._rejects.page(limit, after)

    def reject_count(self) -> int:
        return self._rejects.count()

    def resolve(self, identifier: str, *, send: bool) -> Reject:
        """A person decides on what was put aside: send it (again), or leave it for good. Raises `NotFound`,
        `ExportError`."""
        reject = self._rejects.find(identifier)
        if send:
            self._check_released()
            self._prepare([reject.unit])
            self._send(reject.unit)
            self._rejects.drop([identifier])
        else:
            self._keep([msgspec.structs.replace(reject, state=LEFT)])
        return reject

    def refusal(self, invoice: Invoice) -> str:
        """Why an invoice must not be exported: Stripe's meters ask for what is on it. Empty: it may be."""
        if charge := self._billing.metered_of(invoice):
            return (
                f"request {charge} on it is the meters' to ask for: void the invoice and draft it again, then it is "
                "cut without such usage"
            )
        if not invoice.left_out or self._billing.metered().mode is not ExportMode.METER:
            return ""
        if not invoice.lines:
            return "nothing is on it: usage is exported to Stripe's meters (export_mode)"
        kinds = dict.fromkeys(line.kind.value for line in invoice.lines if line.kind is not LineKind.USAGE)
        if kinds and not invoice.event_count:
            return (
                f"usage is exported to Stripe's meters (export_mode); its lines of the kind {', '.join(kinds)} are "
                "on no meter: they are agreed in Stripe"
            )
        if LineKind.COMMITMENT in kinds:
            return (
                "the tenant's minimum on it does not count what Stripe's meters ask for (export_mode): void it, take "
                "the minimum out of the tenant's terms and draft it again"
            )
        return ""

    # -- whose charges ----------------------------------------------------------------------------

    def _check_released(self) -> None:
        """Raise `ExportError` while nobody has looked since a restore at what had been sent."""
        if refusal := self._billing.meter_refusal():
            raise ExportError(refusal)

    def _idle(self) -> bool:
        """Whether there is nothing to deliver, to switch or to try again; asks the ledger's database, not Stripe."""
        if self._switch_to is not None:
            return False
        metered, position = self._billing.metered(), self.position()
        if metered.mode is ExportMode.METER or self._rejects.count(WAITING):
            return False
        through = position is None or (position.batch_to is None and not metered.next_after(position.done_seq))
        return through and (position is not None or not metered.stretches)

    def _switch(self) -> None:
        """Put down, once a process, how charges are asked for from now on; the duty is ours.

        What meters had taken when that was not put down yet is theirs, a batch that was under way with it.
        """
        if self._switch_to is None:
            return
        position = self.position()
        sent = () if position is None else ((position.from_seq, position.batch_to or position.done_seq),)
        self._billing.set_export_mode(self._switch_to, sent=tuple(one for one in sent if one[0] < one[1]))
        self._switch_to = None

    # -- one batch --------------------------------------------------------------------------------

    def _started(self, duty: Duty) -> tuple[Duty, Position]:
        if duty.state:
            return duty, msgspec.json.decode(duty.state, type=Position)
        metered = self._billing.metered()
        first = metered.stretches[0][0] if metered.stretches else metered.seq
        position = Position(from_seq=first, from_us=self._clock_us(), done_seq=first)
        return self._note(duty, position), position

    def _rows(self, position: Position) -> tuple[Position, list[StoredEvent]] | None:
        """The batch under way, else the next one, and the position before it; None where there is no more."""
        if position.batch_to is not None:
            rows = self._store.read(position.done_seq, BATCH_MAX)
            return position, [row for row in rows if row.seq <= (position.batch_to or 0)]
        stretch = self._billing.metered().next_after(position.done_seq)
        if stretch is None:
            return None
        rows = [row for row in self._store.read(stretch[0], self._batch) if row.seq <= stretch[1]]
        return msgspec.structs.replace(position, done_seq=stretch[0]), rows

    def _next(self, duty: Duty, position: Position, rows: Sequence[StoredEvent]) -> tuple[Duty, Position, int, int]:
        """Send one batch: how many of it were delivered and put aside. Raises `ExportError`, `DutyLost`."""
        events = units(rows)
        now_us = self._clock_us()
        begun = msgspec.structs.replace(
            position, batch_to=rows[-1].seq, batch_us=position.batch_us or now_us, tried_us=now_us
        )
        unsure = 0
        if position.batch_us is not None and now_us - position.batch_us > SURE_US:
            begun, unsure = self._made_sure(position, begun, events)
        if events:
            duty = self._note(duty, begun)
        sent, kept = self._deliver([unit for unit in events if unit.identifier not in begun.skip])
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
        display_name = next(meter.display_name for meter in METERS.values() if meter.event_name == name)
        try:
            made = self._exporter.call(
                lambda api: api.billing.meters.create(
                    {
                        "display_name": display_name,
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
        aside = {reject.unit.identifier for reject in self._rejects.all()}
        rows = self._store.scan(f"usage:{tenant}", recorded_from_us=max(0, hour_us - HOUR_US * 24))
        metered = self._billing.metered()
        known = units(row for row in rows if row.seq <= position.done_seq and metered.has(row.seq))
        return sum(
            unit.quantity
            for unit in known
            if unit.kind == kind and hour_of(unit.ts_us) == hour_us and unit.identifier not in aside
        )

    # -- what was put aside -----------------------------------------------------------------------

    def _retry_waiting(self) -> int:
        """Send what has waited for its time; how many. One that is broken off on the way is unsure after a day."""
        now_us = self._clock_us()
        sent = 0
        for reject in self._rejects.all(WAITING):
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
                self._keep([refused]) if refused else self._rejects.drop([reject.unit.identifier])
                sent += refused is None
        return sent

    def _keep(self, rejects: Sequence[Reject]) -> None:
        self._rejects.keep(rejects, self._clock_us())


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
