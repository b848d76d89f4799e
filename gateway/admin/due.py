"""Invoices that are due: which periods ended and have none yet; cut, and carried on, for all tenants at once."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from litestar import Router, get, patch
from litestar.params import JSONBody
from msgspec import Meta

from billing.automation import Automation, Failure
from billing.errors import Conflict
from billing.service.scheduling import Due
from gateway.admin.acts import begin
from gateway.admin.paging import Page
from gateway.admin.state import Admin
from gateway.admin.times import format_time
from gateway.admin.watermark import FLUSH_S, watermark


class DueView(msgspec.Struct, kw_only=True):
    """A period that is over for longer than the grace, in which there is something to ask for."""

    tenant: str
    period_start: str
    period_end: str


class DueRun(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["draft", "finalize", "export"], Meta(description="how far invoices go that were cut by the clock")
    ] = "draft"


class FailureView(msgspec.Struct, kw_only=True):
    """A step that did not come through; the others did."""

    step: str
    tenant: str
    period_start: str
    period_end: str
    invoice: str | None
    reason: str


class DueRunView(msgspec.Struct, kw_only=True):
    """Ids of the invoices that were drafted, made final, exported, of the credit notes exported; and what failed."""

    drafted: list[str]
    finalized: list[str]
    exported: list[str]
    credited: list[str]
    failures: list[FailureView]


def show_due(due: Due) -> DueView:
    return DueView(
        tenant=due.tenant,
        period_start=format_time(due.period.start_us),
        period_end=format_time(due.period.end_us),
    )


def show_failure(failure: Failure) -> FailureView:
    return FailureView(
        step=failure.step,
        tenant=failure.tenant,
        period_start=format_time(failure.period.start_us),
        period_end=format_time(failure.period.end_us),
        invoice=failure.invoice_id or None,
        reason=failure.reason,
    )


@get("/invoices/due", sync_to_thread=True)
def list_due(admin: Admin) -> Page[DueView]:
    """List the periods that are due and have no invoice, by tenant, the oldest first; all on one page."""
    return Page(data=[show_due(due) for due in admin.billing.due(admin.automation.due_until_us)])


@patch("/invoices/due")
async def run_due(data: JSONBody[DueRun], admin: Admin) -> DueRunView:
    """Draft an invoice for each period that is due, and carry on all that were cut by the clock, as far as `mode` says.

    May be repeated. One tenant's failure does not keep the others. 409 while another gateway does it.
    """
    await asyncio.to_thread(begin, admin, "invoices.run_due", data.mode)
    await admin.read(admin.flush, FLUSH_S)
    stored = await watermark(admin)
    outcome = await admin.read(admin.automation.run, Automation(data.mode), stored.us)
    if outcome is None:
        raise Conflict("another gateway is at it")
    return DueRunView(
        drafted=outcome.drafted,
        finalized=outcome.finalized,
        exported=outcome.exported,
        credited=outcome.credited,
        failures=[show_failure(failure) for failure in outcome.failures],
    )


router = Router("/", route_handlers=[list_due, run_due], tags=["invoices"])
