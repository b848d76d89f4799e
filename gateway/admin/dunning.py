"""Dunning: the invoices whose payment failed, and how far each has come."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from billing.dunning import Dunning, Outcome
from billing.steps import StepKind
from gateway.admin.fields import Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class Waive(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Why."""

    reason: Text


class StepView(msgspec.Struct, kw_only=True):
    """So many days after the beginning; `taken_at` is null while it has not been taken."""

    day: int
    kind: Annotated[str, Meta(description=", ".join(StepKind))]
    taken_at: str | None


class DunningView(msgspec.Struct, kw_only=True):
    """The steps are those of the beginning, whatever the setting says now."""

    invoice: str
    tenant: str
    started_at: str
    steps: list[StepView]
    next_at: Annotated[str | None, Meta(description="when the next step is due")]
    outcome: Annotated[str | None, Meta(description=f"{', '.join(Outcome)}; null: it goes on")]
    ended_at: str | None
    reason: Annotated[str | None, Meta(description="why it was waived")]


def show_dunning(dunning: Dunning) -> DunningView:
    taken = [*(format_time(us) for us in dunning.taken), *([None] * (len(dunning.steps) - len(dunning.taken)))]
    return DunningView(
        invoice=dunning.invoice_id,
        tenant=dunning.tenant,
        started_at=format_time(dunning.started_us),
        steps=[
            StepView(day=step.day, kind=step.kind, taken_at=at) for step, at in zip(dunning.steps, taken, strict=True)
        ],
        next_at=None if dunning.next_us is None else format_time(dunning.next_us),
        outcome=dunning.outcome or None,
        ended_at=None if dunning.ended_us is None else format_time(dunning.ended_us),
        reason=dunning.reason or None,
    )


@get("/dunning", sync_to_thread=True)
def list_dunning(
    admin: Admin,
    tenant: Annotated[str | None, QueryParameter(description="Only this tenant's.")] = None,
    ended: Annotated[bool, QueryParameter(description="Those that have ended too.")] = False,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Page[DunningView]:
    """List invoices in dunning, in the order in which it began."""
    found = admin.billing.dunnings(tenant, ended=ended, limit=limit + 1, after=after)
    return page(found, limit, show_dunning, lambda one: one.invoice_id)


@get("/invoices/{invoice_id:str}/dunning", sync_to_thread=True)
def get_dunning(invoice_id: FromPath[str], admin: Admin) -> DunningView:
    """Show an invoice's dunning. 404 where its payment never failed, or nothing follows from that."""
    return show_dunning(admin.billing.dunning(invoice_id))


@post("/invoices/{invoice_id:str}/dunning/waive", status_code=200, sync_to_thread=True)
def waive_dunning(invoice_id: FromPath[str], data: JSONBody[Waive], admin: Admin, idempotency: Once) -> DunningView:
    """End an invoice's dunning though it is owed, and the suspension it holds; none begins for it again."""
    return show_dunning(admin.billing.waive_dunning(invoice_id, data.reason, idempotency=idempotency))


router = Router("/", route_handlers=[list_dunning, get_dunning, waive_dunning], tags=["dunning"])
