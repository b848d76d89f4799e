"""What went to Stripe: how far its meters are, what was put aside, and invoices that moved there without a message."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, patch
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.meter_rejects import Reject
from gateway.admin.acts import begin
from gateway.admin.invoices import InvoiceView, show_invoice
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class MetersView(msgspec.Struct, kw_only=True):
    """How far the export to Stripe's meters is. `begun_at` is null where it never began."""

    begun_at: str | None
    from_event: Annotated[int | None, Meta(description="usage recorded up to here in the ledger is not the meters'")]
    done_event: Annotated[int | None, Meta(description="the ledger's event up to which all is delivered or put aside")]
    put_aside: int


class RejectView(msgspec.Struct, kw_only=True):
    """A meter event that was put aside."""

    identifier: str
    event_id: str
    tenant: str
    model: str
    kind: str
    quantity: int
    began_at: str
    state: Annotated[str, Meta(description="waiting, refused, unsure whether Stripe has it, or left")]
    reason: str


class Decision(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes of it: sent (again), or left for good."""

    send: bool


class Moved(msgspec.Struct, kw_only=True):
    """Invoices that caught up with Stripe."""

    data: list[InvoiceView]


def show_reject(reject: Reject) -> RejectView:
    unit = reject.unit
    return RejectView(
        identifier=unit.identifier,
        event_id=unit.event_id,
        tenant=unit.tenant,
        model=unit.model,
        kind=unit.kind,
        quantity=unit.quantity,
        began_at=format_time(unit.ts_us),
        state=reject.state,
        reason=reject.reason,
    )


@get("/meters", sync_to_thread=True)
def show_meters(admin: Admin) -> MetersView:
    """Show how far the export to Stripe's meters is."""
    position = admin.meters.position()
    return MetersView(
        begun_at=None if position is None else format_time(position.from_us),
        from_event=None if position is None else position.from_seq,
        done_event=None if position is None else position.done_seq,
        put_aside=admin.meters.reject_count(),
    )


@get("/meters/events", sync_to_thread=True)
def list_put_aside(admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[RejectView]:
    """List the meter events that were put aside, and why."""
    found = admin.meters.rejects(limit=limit + 1, after=after)
    return page(found, limit, show_reject, lambda reject: reject.unit.identifier)


@patch("/meters/events/{identifier:str}", sync_to_thread=True)
def decide_put_aside(identifier: FromPath[str], data: JSONBody[Decision], admin: Admin) -> RejectView:
    """Decide on one that was put aside: after a look at Stripe's own list of its events, when that is unsure."""
    begin(admin, "meter_event.send" if data.send else "meter_event.leave", identifier)
    return show_reject(admin.meters.resolve(identifier, send=data.send))


@patch("/stripe/invoices", sync_to_thread=True)
def sync_invoices(admin: Admin) -> Moved:
    """Let every exported invoice catch up with what Stripe has now, should a message of Stripe's have been lost."""
    begin(admin, "stripe.catch_up")
    return Moved(
        data=[show_invoice(invoice, admin.billing) for invoice in admin.billing.sync_invoices(admin.exporter.look)]
    )


router = Router("/", route_handlers=[show_meters, list_put_aside, decide_put_aside, sync_invoices], tags=["meters"])
