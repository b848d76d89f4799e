"""Reconciliation: engine's journal = spool + usage store = ledger = invoice lines = Stripe, or where they part."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from litestar import Router, get
from litestar.params import QueryParameter
from msgspec import Meta

from billing.money import format_amount
from billing.reconcile import Difference, Report, Row, Tokens
from gateway.admin.body import refuse
from gateway.admin.fields import time_fault
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time, parse_time
from gateway.admin.watermark import CONSUMER, FLUSH_S
from metering.counts import HOUR_US

DAY_US = 24 * HOUR_US
MAX_RANGE_US = 35 * DAY_US  # all events of the range are held side by side
ATTEMPTS = 4  # a request that ends between two of the reads looks like a difference, once
PAUSE_S = 0.25
SPOOL_MARGIN = 1000  # settled between counting and reading


class TokensView(msgspec.Struct, kw_only=True):
    """Sums as one of the books has them."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RowView(msgspec.Struct, kw_only=True):
    """One tenant, model and hour, side by side."""

    start: str
    tenant: str
    model: str
    journal: Annotated[TokensView | None, Meta(description="null: the hour still has requests under way")]
    stored: Annotated[TokensView, Meta(description="spool and usage store together")]
    rated: Annotated[TokensView, Meta(description="charged in the ledger")]
    invoiced: TokensView
    amount: str


class DifferenceView(msgspec.Struct, kw_only=True):
    """Where two books part, and the first requests that only one of them has."""

    between: str
    tenant: str
    model: str | None
    start: str | None
    invoice: str | None
    left: str
    right: str
    event_ids: list[str]


class ChainView(msgspec.Struct, kw_only=True):
    """The ledger's hash chain: which of its events were checked, and the first at which it does not hold."""

    ok: bool
    from_event: int
    to_event: int
    broken_at_event: int | None


class ReportView(msgspec.Struct, kw_only=True):
    """`ok` when there is no difference. The range is widened to whole hours."""

    start: str
    end: str
    ok: bool
    chain: ChainView
    differences: list[DifferenceView]
    rows: list[RowView]


def show_report(report: Report) -> ReportView:
    return ReportView(
        start=format_time(report.start_us),
        end=format_time(report.end_us),
        ok=report.ok,
        chain=ChainView(
            ok=report.chain.broken_at is None,
            from_event=report.chain.from_seq,
            to_event=report.chain.to_seq,
            broken_at_event=report.chain.broken_at,
        ),
        differences=[_show_difference(difference) for difference in report.differences],
        rows=[_show_row(row) for row in report.rows],
    )


def _show_row(row: Row) -> RowView:
    return RowView(
        start=format_time(row.hour_us),
        tenant=row.tenant,
        model=row.model,
        journal=None if row.journal is None else _show_tokens(row.journal),
        stored=_show_tokens(row.stored),
        rated=_show_tokens(row.rated),
        invoiced=_show_tokens(row.invoiced),
        amount=format_amount(row.amount_femto),
    )


def _show_tokens(tokens: Tokens) -> TokensView:
    return TokensView(
        requests=tokens.requests,
        prompt_tokens=tokens.prompt,
        cached_tokens=tokens.cached,
        completion_tokens=tokens.completion,
    )


def _show_difference(difference: Difference) -> DifferenceView:
    return DifferenceView(
        between=difference.between,
        tenant=difference.tenant,
        model=difference.model or None,
        start=None if difference.hour_us is None else format_time(difference.hour_us),
        invoice=difference.invoice_id or None,
        left=difference.left,
        right=difference.right,
        event_ids=difference.event_ids,
    )


def parse_range(start: str | None, end: str | None, now_us: int) -> tuple[int, int]:
    """The range in microseconds; by default the last day. Raises `BadRequest` with every fault."""
    refuse([fault for field, text in (("start", start), ("end", end)) if text for fault in time_fault(field, text)])
    end_us = parse_time(end) if end else now_us
    start_us = parse_time(start) if start else max(0, end_us - DAY_US)
    if not start_us < end_us <= start_us + MAX_RANGE_US:
        refuse([("end", "must be later than start, by at most 35 days")])
    return start_us, end_us


def _compare(admin: AdminState, start_us: int, end_us: int) -> Report:
    """Read the books in the order in which tokens pass through them, and compare."""
    admin.flush(FLUSH_S)
    before = admin.journal.oldest_open_us()
    totals = admin.journal.totals(start_us - start_us % HOUR_US, end_us)
    after = admin.journal.oldest_open_us()
    spooled = admin.spool.pending(CONSUMER, admin.spool.count(CONSUMER) + SPOOL_MARGIN)
    return admin.billing.reconcile(
        start_us,
        end_us,
        usage=admin.usage,
        spool_events=spooled,
        journal_totals=totals,
        open_from_us=min((time for time in (before, after) if time is not None), default=None),
        stripe=admin.exporter.totals if admin.stripe_configured else None,
    )


@get("/reconcile")
async def get_reconcile(
    admin: Admin,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: a day ago.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
) -> ReportView:
    """Compare all books over a range of time."""
    start_us, end_us = parse_range(start, end, admin.clock_us())
    report = await admin.read(_compare, admin, start_us, end_us)
    for _ in range(ATTEMPTS - 1):
        if report.ok:
            break
        await asyncio.sleep(PAUSE_S)
        report = await admin.read(_compare, admin, start_us, end_us)
    return show_report(report)


router = Router("/", route_handlers=[get_reconcile], tags=["reconcile"])
