"""`GET /v1/billing/invoices`: a tenant's own invoices, from when they were made final. A draft is still the house's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from billing.dunning import Dunning
from billing.invoice import Invoice, InvoiceStatus
from billing.money import format_exact, format_minor, minor_digits
from billing.notes import CreditNote
from billing.steps import StepKind
from gateway.admin.invoices import LineView, Rounding, show_line, show_time
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.times import format_time
from gateway.billing.views import Views

STATUSES = ", ".join(one for one in InvoiceStatus if one is not InvoiceStatus.DRAFT)


class OwnDunningView(msgspec.Struct, kw_only=True):
    """What follows while the invoice is not paid."""

    started_at: str
    next_step: Annotated[str | None, Meta(description=", ".join(StepKind))]
    next_at: str | None


class OwnInvoiceSummary(msgspec.Struct, kw_only=True):
    """An invoice. `due` is what is still to be paid: `total` and `provider_tax`, less `credited`."""

    id: str
    status: Annotated[str, Meta(description=STATUSES)]
    currency: str
    period_start: str
    period_end: str
    total: str
    provider_tax: Annotated[str, Meta(description="what Stripe added as tax; not in total")]
    credited: Annotated[str, Meta(description="what credit notes took back")]
    due: str
    finalized_at: str | None
    paid_at: str | None
    voided_at: str | None
    payment_failures: int
    payment_failed_at: Annotated[str | None, Meta(description="the last attempt to collect it that failed")]
    dunning: OwnDunningView | None


class OwnCreditNoteView(msgspec.Struct, kw_only=True):
    """What was taken back of the invoice; `amount` has `tax` in it."""

    number: str
    amount: str
    tax: str
    reason: str
    issued_at: str


class OwnInvoiceView(OwnInvoiceSummary, kw_only=True):
    """The same with its lines. `exact_total` is before the one rounding; `total` is the sum of the lines' amounts."""

    lines: list[LineView]
    rounding: Rounding
    exact_total: str
    credit_notes: list[OwnCreditNoteView]
    requests: int
    events_digest: Annotated[str, Meta(description="SHA-256 over the events the invoice is cut from")]


@get("/invoices", sync_to_thread=True)
def list_invoices(
    request: Request[Any, Any, Any], views: NamedDependency[Views], limit: Limit = DEFAULT_LIMIT, after: After = None
) -> Page[OwnInvoiceSummary]:
    """List the tenant's final invoices, the oldest first."""
    tenant = views.tenant(request).id
    found = views.billing.invoices(tenant, limit=limit + 1, after=after, final=True)
    dunned = {one.invoice_id: one for one in views.billing.dunnings(tenant, limit=10_000)}
    return page(found, limit, lambda one: OwnInvoiceSummary(**_summary(views, one, dunned)), lambda one: one.id)


@get("/invoices/{invoice_id:str}", sync_to_thread=True)
def get_invoice(
    request: Request[Any, Any, Any], views: NamedDependency[Views], invoice_id: FromPath[str]
) -> OwnInvoiceView:
    """Show one of the tenant's final invoices with its lines."""
    invoice = views.invoice(views.tenant(request), invoice_id)
    dunned = {one.invoice_id: one for one in views.billing.dunnings(invoice.tenant, limit=10_000)}
    return OwnInvoiceView(
        **_summary(views, invoice, dunned),
        lines=[show_line(line, invoice.currency) for line in invoice.lines],
        rounding=Rounding(digits=minor_digits(invoice.currency)),
        exact_total=format_exact(invoice.total_femto),
        credit_notes=[_show_note(note) for note in views.billing.notes_of(invoice.id)],
        requests=invoice.event_count,
        events_digest=invoice.events_digest,
    )


def _summary(views: Views, invoice: Invoice, dunned: Mapping[str, Dunning]) -> dict[str, Any]:
    dunning = dunned.get(invoice.id)
    credited = sum(note.amount_minor for note in views.billing.notes_of(invoice.id))
    return {
        "id": invoice.id,
        "status": invoice.status,
        "currency": invoice.currency,
        "period_start": format_time(invoice.period_start_us),
        "period_end": format_time(invoice.period_end_us),
        "total": format_minor(invoice.total_minor, invoice.currency),
        "provider_tax": format_minor(invoice.provider_tax_minor, invoice.currency),
        "credited": format_minor(credited, invoice.currency),
        "due": format_minor(invoice.due_minor(credited), invoice.currency),
        "finalized_at": show_time(invoice.finalized_us),
        "paid_at": show_time(invoice.paid_us),
        "voided_at": show_time(invoice.voided_us),
        "payment_failures": invoice.payment_failures,
        "payment_failed_at": show_time(invoice.payment_failed_us),
        "dunning": None if dunning is None else _show_dunning(dunning),
    }


def _show_note(note: CreditNote) -> OwnCreditNoteView:
    return OwnCreditNoteView(
        number=note.number,
        amount=format_minor(note.amount_minor, note.currency),
        tax=format_minor(note.tax_minor, note.currency),
        reason=note.reason,
        issued_at=format_time(note.created_us),
    )


def _show_dunning(dunning: Dunning) -> OwnDunningView:
    following = None if dunning.next_us is None else dunning.steps[len(dunning.taken)].kind
    return OwnDunningView(
        started_at=format_time(dunning.started_us), next_step=following, next_at=show_time(dunning.next_us)
    )
