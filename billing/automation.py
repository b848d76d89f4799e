"""Invoices by the clock: each tenant's period drafted once it is over, made final and exported where that is asked.

A period is due when it ended longer ago than the grace: usage that turns up until then is on its own invoice, what
comes later is an adjustment on the next one. It is drafted when all its usage is stored (the watermark). Missed periods
are caught up in order of time; the first that fails holds up its tenant's later ones, and nobody else's. One in which
there was nothing is looked at again every hour: it gets its invoice when usage turns up.

One process at a time, a duty; killed anywhere it is begun again: a draft takes its period, finalizing and exporting are
safe to repeat, and only what was drafted here (`Invoice.automatic`) is carried on without being asked.

Knows: the order of the steps, what may fail without stopping the rest. Does not know: the clock's rhythm, alerts.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec
import structlog

from billing.duties import Duties, Duty, DutyLost
from billing.errors import BillingError, LedgerUnavailable, PeriodNotClosed, PeriodOverlaps
from billing.invoice import Exporter, Invoice, InvoiceStatus, UsageSource
from billing.periods import Period
from billing.service import Billing
from billing.service.crediting import NoteExporter
from billing.service.scheduling import Due
from billing.store import EventStore

DUTY = "invoices"
RECHECK_US = 3_600_000_000  # how often a period is cut again in which there was nothing
LEASE_US = 300_000_000
OVERDUE_US = 6 * 3_600_000_000  # how long after it is due a period may wait for usage before that is a failure

log = structlog.get_logger(__name__)


class Automation(StrEnum):
    """How far invoices go by themselves; each includes those before it."""

    OFF = "off"
    DRAFT = "draft"
    FINALIZE = "finalize"
    EXPORT = "export"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A step that did not come through; it is tried again the next time."""

    step: str  # draft, finalize, export, credit
    tenant: str
    period: Period
    reason: str
    invoice_id: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one run did: ids of invoices, and what failed."""

    drafted: list[str] = []
    finalized: list[str] = []
    exported: list[str] = []
    credited: list[str] = []  # credit notes that the provider has now
    failures: list[Failure] = []


class FullExporter(Exporter, NoteExporter, Protocol):
    """Of invoices and credit notes."""


class InvoiceAutomation:
    """`run` may be called by several processes and killed anywhere."""

    def __init__(
        self,
        store: EventStore,
        billing: Billing,
        usage: UsageSource,
        exporter: FullExporter,
        *,
        holder: str,
        grace_us: int,
        clock_us: Callable[[], int],
    ) -> None:
        self._billing = billing
        self._usage = usage
        self._exporter = exporter
        self._duties = Duties(store)
        self._holder = holder
        self._grace_us = grace_us
        self._clock_us = clock_us
        self._empty: dict[Due, int] = {}  # when there was nothing in it

    @property
    def due_until_us(self) -> int:
        """Periods that ended by then are due."""
        return self._clock_us() - self._grace_us

    def run(self, mode: Automation, watermark_us: int, stopping: Callable[[], bool] = lambda: False) -> Outcome | None:
        """Do all that is due, until `stopping`; None while another process does. `watermark_us`: as for a draft.

        Raises `LedgerUnavailable`, and what the usage store raises when it cannot be read.
        """
        duty = self._duties.take(DUTY, self._holder, self._clock_us(), LEASE_US)
        if duty is None:
            return None
        outcome = Outcome()
        try:
            duty = self._drafts(duty, outcome, watermark_us, stopping)
            if mode in (Automation.FINALIZE, Automation.EXPORT):
                duty = self._each(duty, outcome, "finalize", InvoiceStatus.DRAFT, stopping)
            if mode is Automation.EXPORT:
                duty = self._each(duty, outcome, "export", InvoiceStatus.FINALIZED, stopping)
                duty = self._credits(duty, outcome, stopping)
        except DutyLost:
            log.warning("invoices_taken_over")
            return outcome
        except BaseException:
            self._duties.leave(duty)
            raise
        self._duties.leave(duty)
        return outcome

    def _drafts(self, duty: Duty, outcome: Outcome, watermark_us: int, stopping: Callable[[], bool]) -> Duty:
        held_up: set[str] = set()
        now_us = self._clock_us()
        self._empty = {due: at_us for due, at_us in self._empty.items() if now_us - at_us < RECHECK_US}
        for due in self._billing.due(self.due_until_us):
            if stopping():
                break
            if due.tenant in held_up or due in self._empty:
                continue
            duty = self._kept(duty)
            try:
                invoice = self._billing.draft_due(due, usage=self._usage, watermark_us=watermark_us)
            except PeriodNotClosed as error:  # its usage is on its way; if that lasts, somebody has to look
                held_up.add(due.tenant)
                if self.due_until_us - due.period.end_us > OVERDUE_US:
                    self._failed(outcome, "draft", due.tenant, due.period, error)
            except PeriodOverlaps:  # somebody drafted it just now
                continue
            except LedgerUnavailable:
                raise
            except BillingError as error:
                held_up.add(due.tenant)
                self._failed(outcome, "draft", due.tenant, due.period, error)
            else:
                if invoice is None:
                    self._empty[due] = now_us
                else:
                    outcome.drafted.append(invoice.id)
        return duty

    def _each(
        self, duty: Duty, outcome: Outcome, step: str, status: InvoiceStatus, stopping: Callable[[], bool]
    ) -> Duty:
        for invoice in self._billing.automatic_invoices(status):
            if stopping():
                break
            duty = self._kept(duty)
            period = Period(start_us=invoice.period_start_us, end_us=invoice.period_end_us)
            try:
                self._step(step, invoice, outcome)
            except LedgerUnavailable:
                raise
            except BillingError as error:
                self._failed(outcome, step, invoice.tenant, period, error, invoice.id)
        return duty

    def _credits(self, duty: Duty, outcome: Outcome, stopping: Callable[[], bool]) -> Duty:
        """Credit notes that people issued, of invoices that the provider has."""
        for note in self._billing.pending_credit_notes():
            if stopping():
                break
            duty = self._kept(duty)
            invoice = self._billing.invoice(note.invoice_id)
            period = Period(start_us=invoice.period_start_us, end_us=invoice.period_end_us)
            try:
                self._billing.export_credit_note(note.id, self._exporter)
                outcome.credited.append(note.id)
            except LedgerUnavailable:
                raise
            except BillingError as error:
                self._failed(outcome, "credit", note.tenant, period, error, invoice.id)
        return duty

    def _step(self, step: str, invoice: Invoice, outcome: Outcome) -> None:
        if step == "finalize":
            self._billing.finalize_invoice(invoice.id)
            outcome.finalized.append(invoice.id)
        else:
            self._billing.export_invoice(invoice.id, self._exporter)
            outcome.exported.append(invoice.id)

    def _kept(self, duty: Duty) -> Duty:
        """The lease, renewed. Raises `DutyLost`."""
        return self._duties.note(duty, duty.state, self._clock_us() + LEASE_US)

    @staticmethod
    def _failed(
        outcome: Outcome, step: str, tenant: str, period: Period, error: BillingError, invoice_id: str = ""
    ) -> None:
        log.error("invoice_step_failed", step=step, tenant=tenant, invoice=invoice_id, reason=str(error))
        outcome.failures.append(
            Failure(step=step, tenant=tenant, period=period, reason=str(error), invoice_id=invoice_id)
        )
