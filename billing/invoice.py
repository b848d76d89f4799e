"""Invoices: what a tenant owes for a period, line by line, exact before the one rounding.

Which invoice has an event: the one of the event's period, if the ledger recorded the event before that
invoice's cut; otherwise the event is late and belongs to the tenant's next invoice. The cut is a number in
the ledger's sequence, so no clock and no slow disk can drop an event between two invoices or put it on
both. What was on a voided invoice is free again. Charges that meters ask for are on none: an invoice names the
stretches of the ledger that it left out for that.

Pure. Does not know: where usage is kept, what the payment provider is, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Protocol

import msgspec

from billing.accounts import Tenant
from billing.errors import NotFound, PeriodOverlaps
from billing.line import InvoiceLine, LineKind
from billing.modes import Stretch, within
from billing.signing import SignedHead
from billing.terms import InvoiceTerms
from metering.events import UsageEvent

__all__ = ["InvoiceLine", "LineKind"]  # what a line is, `billing/line.py` says


class InvoiceStatus(StrEnum):
    """draft → finalized → exported → paid | uncollectible, which may still be paid; all but paid → void."""

    DRAFT = "draft"
    FINALIZED = "finalized"
    EXPORTED = "exported"
    VOID = "void"
    PAID = "paid"
    UNCOLLECTIBLE = "uncollectible"


AT_PROVIDER = frozenset({InvoiceStatus.EXPORTED, InvoiceStatus.PAID, InvoiceStatus.UNCOLLECTIBLE})
"""What the payment provider has, final, and not void."""


DUE = frozenset({InvoiceStatus.FINALIZED, InvoiceStatus.EXPORTED, InvoiceStatus.UNCOLLECTIBLE})
"""What is final and asks for money."""


class LatePeriod(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier invoice whose period has events that turned up too late for it."""

    invoice_id: str
    start_us: int
    end_us: int


class CountedFrom(msgspec.Struct, frozen=True, kw_only=True):
    """From this event on, in the order of time and id, what is not linear counts in the period that begins then."""

    event_id: str
    start_us: int


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes, beside the events, the lines and the price book, to compute the invoice again.

    `root` is that of the Merkle tree (`merkle.py`) over the events' leaves (`metering.receipts`), in the order of
    time and id; it has `Invoice.event_count` of them.
    """

    root: str  # hex
    anchor_day: int  # the tenant's at the cut
    timezone: str
    price_ids: tuple[str, ...] = ()  # that the events are priced by, sorted
    priced_later: dict[str, str] = {}  # event → price, of events that had none when they were settled
    late: tuple[LatePeriod, ...] = ()
    counted: tuple[CountedFrom, ...] = ()


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """A draft's content never changes; only status, times and the provider's ids do."""

    id: str
    tenant: str
    currency: str
    status: InvoiceStatus
    period_start_us: int  # inclusive
    period_end_us: int  # exclusive
    cut_us: int  # when it was cut; what turned up later is late and on a later invoice
    cut_seq: int  # the ledger's sequence at the cut: what decides, clocks do not
    lines: tuple[InvoiceLine, ...]
    total_minor: int  # = sum of the lines' amount_minor
    event_count: int
    events_digest: str  # sha256 over the ordered (event id, content hash)
    created_us: int
    finalized_us: int | None = None
    export_started_us: int | None = None
    exported_us: int | None = None
    voided_us: int | None = None
    voided_seq: int | None = None
    stripe_invoice_id: str | None = None
    stripe_ids: dict[str, str] = {}  # what an export made: our id (of invoice or line) → the provider's
    paid_us: int | None = None
    uncollectible_us: int | None = None
    payment_failures: int = 0  # attempts of the provider that failed
    payment_failed_us: int | None = None  # the last of them
    true_up: str = "0"  # femto-units, as n or n/d: what the lines book in the balance beyond their events' charges
    basis: Basis | None = None  # None: cut by a version that kept no tree
    content_hash: str = ""  # of its document (`document.py`), as it was when it was cut; empty where there is no basis
    signed: SignedHead | None = None  # when it was made final; None where there is no basis
    terms: InvoiceTerms = InvoiceTerms()  # discounts, minimum and tax that it was cut by
    automatic: bool = False  # cut by the clock, not because somebody asked
    provider_tax_minor: int = 0  # what the payment provider added as tax; not in `total_minor`
    left_out: tuple[Stretch, ...] = ()  # of the ledger up to the cut: charges that meters ask for (`modes.py`)

    @property
    def total_femto(self) -> int | Fraction:
        """The exact total; of it, the tax is that of the rounded subtotal."""
        return sum(line.amount_femto for line in self.lines)

    @property
    def tax_minor(self) -> int:
        """Of the total, by fixed rates; what Stripe Tax adds is in no total of ours."""
        return sum(line.amount_minor for line in self.lines if line.kind is LineKind.TAX)

    def due_minor(self, credited_minor: int) -> int:
        """What it asks for and was not paid yet, with the provider's tax and less what its credit notes took back.

        Nothing for a draft and a void one.
        """
        return self.total_minor + self.provider_tax_minor - credited_minor if self.status in DUE else 0

    def has(self, ts_us: int) -> bool:
        """Whether the instant lies in the period."""
        return self.period_start_us <= ts_us < self.period_end_us

    def stood_at(self, seq: int) -> bool:
        """Whether this invoice was cut before `seq` and not void then."""
        return self.cut_seq < seq and (self.voided_seq is None or self.voided_seq > seq)


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the payment provider holds now for our invoice."""

    stripe_invoice_id: str
    total_minor: int
    status: str  # the provider's word
    ids: dict[str, str] = {}  # our id (of invoice or line) → the provider's
    tax_minor: int = 0  # what the provider added as tax; not in `total_minor`


class Exporter(Protocol):
    """Obligations: safe to call again after a kill at any point, with no second invoice and no line twice.

    Raises `StripeNotConfigured` only when nothing was sent, any other `ExportError` when something may have been, and
    `Conflict` when the provider's state does not allow it.
    """

    def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult: ...

    def void(self, invoice: Invoice, previous_ids: Mapping[str, str]) -> None:
        """When it returns, the provider holds nothing for this invoice that anybody could be asked to pay."""
        ...


class UsageSource(Protocol):
    """Settled usage by time of request; `metering.clickhouse.UsageStore` is one."""

    def events(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        *,
        settled_from_us: int | None = None,
        settled_to_us: int | None = None,
    ) -> Iterator[UsageEvent]:
        """Events with start_us <= ts_us < end_us, each id and content once, ordered by (ts_us, event_id).

        Of these, where asked for, those with settled_from_us <= settled_us < settled_to_us.
        """
        ...


class InvoiceDrafted(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.drafted"):
    invoice: Invoice


class InvoiceFinalized(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.finalized"):
    invoice_id: str
    at_us: int


class InvoiceSigned(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.signed"):
    """What its seller says of it, in the transaction that made it final."""

    invoice_id: str
    signed: SignedHead


class InvoiceExportStarted(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.export_started"):
    """From here on the provider may hold something: a void begins there."""

    invoice_id: str
    at_us: int


class InvoiceExportAbandoned(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.export_abandoned"):
    """The export ended before anything was sent."""

    invoice_id: str
    reason: str


class InvoiceExported(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.exported"):
    invoice_id: str
    at_us: int
    result: ExportResult


class InvoiceVoided(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.voided"):
    invoice_id: str
    at_us: int


class InvoicePaid(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.paid"):
    invoice_id: str
    at_us: int


class InvoicePaymentFailed(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.payment_failed"):
    """One attempt of the provider to collect it failed; the invoice is owed as before."""

    invoice_id: str
    at_us: int
    attempt: int = 0  # the provider's count of them; 0: not known


class InvoiceUncollectible(msgspec.Struct, frozen=True, kw_only=True, tag="invoice.uncollectible"):
    """Given up; should it be paid all the same, that follows as its own fact."""

    invoice_id: str
    at_us: int


InvoiceFact = (
    InvoiceDrafted
    | InvoiceFinalized
    | InvoiceSigned
    | InvoiceExportStarted
    | InvoiceExportAbandoned
    | InvoiceExported
    | InvoiceVoided
    | InvoicePaid
    | InvoicePaymentFailed
    | InvoiceUncollectible
)


class Invoices:
    """Every invoice ever cut, in the order of their cuts."""

    def __init__(self) -> None:
        self.by_id: dict[str, Invoice] = {}
        self._ids_of: dict[str, list[str]] = {}
        self._invoiced_us: dict[str, int] = {}  # the latest end of a tenant's periods
        self._late_seq: dict[str, int] = {}  # the last charge of a tenant that began before that

    def apply(self, fact: InvoiceFact, seq: int) -> None:
        match fact:
            case InvoiceDrafted(invoice=invoice):
                self.by_id[invoice.id] = invoice
                self._ids_of.setdefault(invoice.tenant, []).append(invoice.id)
                self._invoiced_us[invoice.tenant] = max(
                    invoice.period_end_us, self._invoiced_us.get(invoice.tenant, invoice.period_end_us)
                )
            case InvoiceFinalized(invoice_id=id, at_us=at_us):
                self._change(id, status=InvoiceStatus.FINALIZED, finalized_us=at_us)
            case InvoiceSigned(invoice_id=id, signed=signed):
                self._change(id, signed=signed)
            case InvoiceExportStarted(invoice_id=id, at_us=at_us):
                self._change(id, export_started_us=at_us)
            case InvoiceExportAbandoned(invoice_id=id):
                self._change(id, export_started_us=None)
            case InvoiceExported(invoice_id=id, at_us=at_us, result=result):
                self._change(
                    id,
                    status=InvoiceStatus.EXPORTED,
                    exported_us=at_us,
                    stripe_invoice_id=result.stripe_invoice_id,
                    stripe_ids=result.ids,
                    provider_tax_minor=result.tax_minor,
                )
            case InvoiceVoided(invoice_id=id, at_us=at_us):
                self._change(id, status=InvoiceStatus.VOID, voided_us=at_us, voided_seq=seq)
            case InvoicePaid(invoice_id=id, at_us=at_us):
                self._change(id, status=InvoiceStatus.PAID, paid_us=at_us)
            case InvoicePaymentFailed(invoice_id=id, at_us=at_us, attempt=attempt):
                failures = attempt or self.by_id[id].payment_failures + 1
                self._change(id, payment_failures=failures, payment_failed_us=at_us)
            case InvoiceUncollectible(invoice_id=id, at_us=at_us):
                self._change(id, status=InvoiceStatus.UNCOLLECTIBLE, uncollectible_us=at_us)

    def charged(self, tenant: str, ts_us: int, seq: int) -> None:
        """Take note of a charge: one for a time that was invoiced already is to be on an invoice of its own accord."""
        if ts_us < self._invoiced_us.get(tenant, 0):
            self._late_seq[tenant] = seq

    def has_late(self, tenant: str) -> bool:
        """Whether a charge for a time that was invoiced already came after the tenant's last cut."""
        ids = self._ids_of.get(tenant, [])
        return any(self._late_seq.get(tenant, 0) > self.by_id[id].cut_seq for id in ids[-1:])

    def get(self, invoice_id: str) -> Invoice:
        try:
            return self.by_id[invoice_id]
        except KeyError:
            raise NotFound("invoice", invoice_id) from None

    def of(self, tenant: str) -> list[Invoice]:
        """All of one tenant's, void ones too, in the order of their cuts."""
        return [self.by_id[id] for id in self._ids_of.get(tenant, [])]

    def check_free(self, tenant: str, start_us: int, end_us: int) -> None:
        """Raise `PeriodOverlaps` where a standing invoice has part of the period."""
        for invoice in self.of(tenant):
            if invoice.status is not InvoiceStatus.VOID and _overlap(invoice, start_us, end_us):
                raise PeriodOverlaps(f"invoice {invoice.id} has part of this period")

    def _change(self, id: str, **changes: object) -> None:
        self.by_id[id] = msgspec.structs.replace(self.by_id[id], **changes)


def _overlap(invoice: Invoice, start_us: int, end_us: int) -> bool:
    return invoice.period_start_us < end_us and start_us < invoice.period_end_us


def owner(ts_us: int, seq: int, invoices: Sequence[Invoice]) -> Invoice | None:
    """The standing invoice that has the event of this time, recorded as this number; None: it is on none.

    `invoices` are all of the tenant's in the order of their cuts. Each of them took what it covers (its own
    period, and those of the invoices that stood at its cut) and no invoice that stood then had taken.
    """
    if not invoices or seq > invoices[-1].cut_seq:
        return None
    return next((one for one in takers(ts_us, seq, invoices) if one.status is not InvoiceStatus.VOID), None)


def takers(ts_us: int, seq: int, invoices: Sequence[Invoice]) -> list[Invoice]:
    """All invoices that were cut with this event, void ones too: of each pair the earlier was void when the later
    was cut."""
    covering = [invoice for invoice in invoices if invoice.has(ts_us)]
    found: list[Invoice] = []
    for invoice in invoices:
        covers = invoice.has(ts_us) or any(earlier.stood_at(invoice.cut_seq) for earlier in covering)
        taken = any(earlier.stood_at(invoice.cut_seq) for earlier in found)
        if seq <= invoice.cut_seq and covers and not taken and not within(seq, invoice.left_out):
            found.append(invoice)
    return found
