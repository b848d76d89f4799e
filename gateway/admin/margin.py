"""Margin: cost rates, and what is left of what was charged."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, post
from litestar.params import JSONBody, QueryParameter

from billing.margin import DIMENSIONS, CostRate, Spent, grouped, whole_femto
from billing.money import format_amount
from gateway.admin.body import Fault, refuse
from gateway.admin.fields import Currency, MoneyText, TimeText, time_fault
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.ranges import DAY_US, parse_range
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time, parse_time

MAX_DAYS = 35
MAX_EVENTS = 500_000


class CostRateCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the house pays from a time on."""

    currency: Currency
    compute_second: MoneyText
    kv_block_second: MoneyText
    hour: MoneyText
    effective_at: TimeText | None = None

    def faults(self) -> list[Fault]:
        return [] if self.effective_at is None else time_fault("effective_at", self.effective_at)


class CostRateView(msgspec.Struct, kw_only=True):
    """One entry of the cost rates."""

    id: str
    currency: str
    compute_second: str
    kv_block_second: str
    hour: str
    effective_at: str
    recorded_at: str


class MarginRow(msgspec.Struct, kw_only=True):
    """What was charged, what it cost, what is left; a dimension that was not asked for is null, and so are those of
    hours in which nobody computed."""

    tenant: str | None
    model: str | None
    adapter: str | None
    hour: str | None
    currency: str
    requests: int
    compute_seconds: str
    kv_block_seconds: str
    charged: str
    cost: str
    margin: str


class MarginView(msgspec.Struct, kw_only=True):
    """The range is widened to whole hours."""

    start: str
    end: str
    data: list[MarginRow]


def show_rate(rate: CostRate) -> CostRateView:
    return CostRateView(
        id=rate.id,
        currency=rate.currency,
        compute_second=rate.compute_second,
        kv_block_second=rate.kv_block_second,
        hour=rate.hour,
        effective_at=format_time(rate.effective_at_us),
        recorded_at=format_time(rate.recorded_us),
    )


@post("/margin/rates", sync_to_thread=True)
def set_cost_rate(data: JSONBody[CostRateCreate], admin: Admin, idempotency: Once) -> CostRateView:
    """Enter cost rates: of a second of compute, of a second of a KV-cache block, and of an hour whatever runs."""
    rate = admin.billing.set_cost_rate(
        currency=data.currency,
        compute_second=data.compute_second,
        kv_block_second=data.kv_block_second,
        hour=data.hour,
        effective_at_us=admin.clock_us() if data.effective_at is None else parse_time(data.effective_at),
        idempotency=idempotency,
    )
    return show_rate(rate)


@get("/margin/rates", sync_to_thread=True)
def list_cost_rates(admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[CostRateView]:
    """List every cost rate ever entered."""
    return page(admin.billing.cost_rates(limit=limit + 1, after=after), limit, show_rate, lambda rate: rate.id)


@get("/margin")
async def get_margin(
    admin: Admin,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: a day ago.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
    group_by: Annotated[
        str | None, QueryParameter(description=f"Some of {', '.join(sorted(DIMENSIONS))}, by commas.")
    ] = None,
) -> MarginView:
    """Show what was charged less what it cost."""
    by = ["tenant"] if group_by is None else [name.strip() for name in group_by.split(",") if name.strip()]
    strange = [name for name in by if name not in DIMENSIONS]
    refuse([("group_by", f"{name[:50]!r} is none of {', '.join(DIMENSIONS)}") for name in strange])
    start_us, end_us = parse_range(
        start,
        end,
        default_start=lambda end_us: max(0, end_us - DAY_US),
        default_end_us=admin.clock_us(),
        max_days=MAX_DAYS,
    )
    rows = grouped(await admin.read(_margin, admin, start_us, end_us), by)
    return MarginView(
        start=format_time(start_us),
        end=format_time(end_us),
        data=[_show(row, cost, by) for row, cost in zip(rows, whole_femto(rows), strict=True)],
    )


def _day_before(end_us: int) -> int:
    return max(0, end_us - DAY_US)


def _margin(admin: AdminState, start_us: int, end_us: int) -> list[Spent]:
    events = sum(row.requests for row in admin.usage.counts(start_us, end_us))
    if events > MAX_EVENTS:
        refuse([("start", f"there are {events} requests in this range, and at most {MAX_EVENTS} are read at once")])
    return admin.billing.margin(start_us, end_us, usage=admin.usage)


def _show(row: Spent, cost_femto: int, by: list[str]) -> MarginRow:
    return MarginRow(
        tenant=(row.tenant or None) if "tenant" in by else None,
        model=(row.model or None) if "model" in by else None,
        adapter=row.adapter if "adapter" in by and row.tenant else None,
        hour=format_time(row.hour_us) if "hour" in by else None,
        currency=row.currency,
        requests=row.requests,
        compute_seconds=_seconds(row.compute_us),
        kv_block_seconds=_seconds(row.kv_block_us),
        charged=format_amount(row.charged_femto),
        cost=format_amount(cost_femto),
        margin=format_amount(row.charged_femto - cost_femto),
    )


def _seconds(us: int) -> str:
    return f"{us // 1_000_000}.{us % 1_000_000:06d}"


router = Router("/", route_handlers=[set_cost_rate, list_cost_rates, get_margin], tags=["margin"])
