"""Credit notes: what is taken back of an invoice that is final."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from billing.money import format_minor
from billing.notes import CreditNote, NoteStatus, Way
from gateway.admin.body import Fault
from gateway.admin.fields import MoneyText, Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time

LINES_MAX = 1000


class NoteLineBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`amount` is without tax."""

    line: Text
    amount: MoneyText


class CreditNoteCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of `amount` (with its tax), `lines` (without, it is added) and `all`: what is left of the invoice."""

    reason: Text
    amount: MoneyText | None = None
    lines: Annotated[list[NoteLineBody], Meta(max_length=LINES_MAX)] | None = None
    all: bool = False
    way: Annotated[
        Way,
        Meta(
            description="where it goes what was paid already: to the customer's balance in Stripe, back, or elsewhere"
        ),
    ] = Way.BALANCE

    def faults(self) -> list[Fault]:
        given = [self.amount is not None, self.lines is not None, self.all]
        faults = [] if sum(given) == 1 else [("amount", "or lines or all must be given, one of the three")]
        ids = [line.line for line in self.lines or []]
        return faults + ([("lines", "name a line twice")] if len(set(ids)) != len(ids) else [])


class CreditNoteView(msgspec.Struct, kw_only=True):
    """`amount` has `tax` in it."""

    id: str
    number: str
    invoice: str
    tenant: str
    currency: str
    status: Annotated[str, Meta(description=", ".join(NoteStatus))]
    amount: str
    tax: str
    lines: list[NoteLineBody]
    reason: str
    way: Way
    stripe_credit_note_id: str | None
    created_at: str
    exported_at: str | None
    voided_at: str | None


def show_credit_note(note: CreditNote) -> CreditNoteView:
    return CreditNoteView(
        id=note.id,
        number=note.number,
        invoice=note.invoice_id,
        tenant=note.tenant,
        currency=note.currency,
        status=note.status,
        amount=format_minor(note.amount_minor, note.currency),
        tax=format_minor(note.tax_minor, note.currency),
        lines=[
            NoteLineBody(line=line.line_id, amount=format_minor(line.amount_minor, note.currency))
            for line in note.lines
        ],
        reason=note.reason,
        way=note.way,
        stripe_credit_note_id=note.stripe_credit_note_id,
        created_at=format_time(note.created_us),
        exported_at=None if note.exported_us is None else format_time(note.exported_us),
        voided_at=None if note.voided_us is None else format_time(note.voided_us),
    )


@post("/invoices/{invoice_id:str}/credit-notes", sync_to_thread=True)
def issue_credit_note(
    invoice_id: FromPath[str], data: JSONBody[CreditNoteCreate], admin: Admin, idempotency: Once
) -> CreditNoteView:
    """Take back all, an amount, or amounts of lines of a final invoice. The balance has it at once; Stripe has it when
    the note is exported.
    """
    note = admin.billing.issue_credit_note(
        invoice_id,
        reason=data.reason,
        amount=data.amount,
        lines=None if data.lines is None else {line.line: line.amount for line in data.lines},
        way=data.way,
        idempotency=idempotency,
    )
    return show_credit_note(note)


@get("/credit-notes", sync_to_thread=True)
def list_credit_notes(
    admin: Admin,
    tenant: Annotated[str | None, QueryParameter(description="Only this tenant's.")] = None,
    invoice: Annotated[str | None, QueryParameter(description="Only this invoice's.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Page[CreditNoteView]:
    """List credit notes in the order in which they were issued."""
    found = admin.billing.credit_notes(tenant_id=tenant, invoice_id=invoice, limit=limit + 1, after=after)
    return page(found, limit, show_credit_note, lambda note: note.id)


@get("/credit-notes/{note_id:str}", sync_to_thread=True)
def get_credit_note(note_id: FromPath[str], admin: Admin) -> CreditNoteView:
    """Show one credit note."""
    return show_credit_note(admin.billing.credit_note(note_id))


@post("/credit-notes/{note_id:str}/export", status_code=200, sync_to_thread=True)
def export_credit_note(note_id: FromPath[str], admin: Admin, idempotency: Once) -> CreditNoteView:
    """Send a credit note to Stripe, which has its invoice; safe to repeat after any failure."""
    return show_credit_note(admin.billing.export_credit_note(note_id, admin.exporter, idempotency=idempotency))


@post("/credit-notes/{note_id:str}/void", status_code=200, sync_to_thread=True)
def void_credit_note(note_id: FromPath[str], admin: Admin, idempotency: Once) -> CreditNoteView:
    """Void a credit note, in Stripe first if its export has begun: Stripe allows that while the invoice is open."""
    return show_credit_note(admin.billing.void_credit_note(note_id, admin.exporter, idempotency=idempotency))


router = Router(
    "/",
    route_handlers=[issue_credit_note, list_credit_notes, get_credit_note, export_credit_note, void_credit_note],
    tags=["credit notes"],
)
