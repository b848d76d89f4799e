"""Replay: invoices rebuilt from the log and the usage store, compared byte by byte with what was cut."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get
from litestar.params import QueryParameter
from msgspec import Meta

from billing.service.replaying import Replay
from gateway.admin.body import refuse
from gateway.admin.ranges import DAY_US, parse_range
from gateway.admin.state import Admin
from gateway.admin.times import format_time

MAX_DAYS = 366


class ReplayView(msgspec.Struct, kw_only=True):
    """One invoice. `difference` is the first between what was cut and what is rebuilt."""

    invoice: str
    tenant: str
    status: str
    period_start: str
    period_end: str
    equal: bool
    content_hash: str
    rebuilt_hash: Annotated[str | None, Meta(description="null: it cannot be rebuilt; `difference` says why")]
    difference: str | None


class ReplayReport(msgspec.Struct, kw_only=True):
    """`ok` where every invoice is rebuilt to the same bytes."""

    ok: bool
    data: list[ReplayView]


def _show(replay: Replay) -> ReplayView:
    invoice = replay.invoice
    return ReplayView(
        invoice=invoice.id,
        tenant=invoice.tenant,
        status=invoice.status,
        period_start=format_time(invoice.period_start_us),
        period_end=format_time(invoice.period_end_us),
        equal=replay.equal,
        content_hash=replay.content_hash,
        rebuilt_hash=replay.rebuilt_hash or None,
        difference=replay.difference or None,
    )


@get("/replay")
async def get_replay(
    admin: Admin,
    invoice: Annotated[str | None, QueryParameter(description="Only this one, final or not.")] = None,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: a month ago.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
) -> ReplayReport:
    """Rebuild an invoice, or all that were made final for periods in a range, and compare them with what was cut."""
    if invoice is not None:
        if start is not None or end is not None:
            refuse([("invoice", "is asked for instead of start and end")])
        found = [await admin.read(admin.billing.replay_invoice, invoice, admin.usage)]
    else:
        start_us, end_us = parse_range(
            start,
            end,
            default_start=lambda end_us: max(0, end_us - 31 * DAY_US),
            default_end_us=admin.clock_us(),
            max_days=MAX_DAYS,
        )
        found = await admin.read(admin.billing.replay_invoices, start_us, end_us, admin.usage)
    return ReplayReport(ok=all(replay.equal for replay in found), data=[_show(replay) for replay in found])


router = Router("/", route_handlers=[get_replay], tags=["replay"])
