"""Reconciliation: engine's journal = spool + usage store = ledger = invoice lines = Stripe, or where they part."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get
from litestar.params import QueryParameter
from msgspec import Meta

from billing.money import format_amount
from billing.reconcile import Difference, Missing, Report, Row, Tokens
from gateway.admin.body import refuse
from gateway.admin.comparing import MAX_EVENTS, compare_books
from gateway.admin.ranges import DAY_US, parse_range
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time
from metering.counts import hour_of

MAX_DAYS = 35
MAX_SLICES = 24  # one answer is of so many requests at most, `MAX_EVENTS` each


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


class MissingView(msgspec.Struct, kw_only=True):
    """A comparison that could not be made; whether the two agree is not known."""

    between: str
    reason: str


class ChainView(msgspec.Struct, kw_only=True):
    """The ledger's hash chain: which of its events were checked, and the first at which it does not hold."""

    ok: bool
    from_event: int
    to_event: int
    broken_at_event: int | None


class ReportView(msgspec.Struct, kw_only=True):
    """`ok` when all was compared and there is no difference. The range is widened to whole hours."""

    start: str
    end: str
    ok: bool
    chain: ChainView
    differences: list[DifferenceView]
    missing: list[MissingView]
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
        missing=[_show_missing(missing) for missing in report.missing],
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


def _show_missing(missing: Missing) -> MissingView:
    return MissingView(between=missing.between, reason=missing.reason)


def _day_before(end_us: int) -> int:
    return max(0, end_us - DAY_US)


@get("/reconcile")
async def get_reconcile(
    admin: Admin,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: a day ago.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
) -> ReportView:
    """Compare all books over a range of time, in slices where it has many requests.

    What could not be compared (Stripe is away, an hour has too many requests) is `missing`, and keeps nothing else from
    being compared.
    """
    start_us, end_us = parse_range(
        start, end, default_start=_day_before, default_end_us=admin.clock_us(), max_days=MAX_DAYS
    )
    return show_report(await admin.read(_compared, admin, start_us, end_us))


def _compared(admin: AdminState, start_us: int, end_us: int) -> Report:
    requests = sum(row.requests for row in admin.usage.counts(hour_of(start_us), end_us))
    if requests > MAX_SLICES * MAX_EVENTS:
        reason = f"there are {requests} requests in this range, and one answer is of {MAX_SLICES * MAX_EVENTS} at most"
        refuse([("start", f"{reason}: ask for less time")])
    return compare_books(admin, start_us, end_us)


router = Router("/", route_handlers=[get_reconcile], tags=["reconcile"])
