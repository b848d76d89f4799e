"""Usage: tokens and what they cost, by time and by what the requests were.

The usage store knows no prices and the price book no usage; they meet here. Between two entries of the price book
one model has one price for one tenant, and money is linear in tokens; so a range is cut where the book changed, and
in each stretch the store's sums are priced as they are. An amount is exact and equals the sum of what the ledger
charged for the same requests, however many they were.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
from litestar import Router, get
from litestar.params import FromQuery, QueryParameter
from msgspec import UNSET, Meta, UnsetType

from billing.errors import NoPrice, NotFound
from billing.money import format_amount
from billing.prices import Rate
from billing.rating import amount_femto
from billing.service import Billing
from gateway.admin.body import refuse
from gateway.admin.paging import MAX_LIMIT, After, Limit, Page, page
from gateway.admin.ranges import parse_range
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time, month_start
from gateway.admin.watermark import FLUSH_S
from gateway.errors import BadRequest, invalid
from metering import queries
from metering.clickhouse import UsageRow as StoredSums
from metering.clickhouse import UsageStore
from metering.errors import StoreTooMuch

MAX_DAYS = 366
MAX_STRETCHES = 500  # one query each
MAX_ROWS = 100_000
MAX_SUMS = 3 * MAX_ROWS  # what one stretch's rows are made of: apart by what prices depend on
PRICES_PAGE = 10_000
DIMENSIONS = tuple(queries.GROUPS)

_CURSOR = re.compile(r"(\d{1,9})\.(\d{1,18})", re.ASCII)


class Bucket(StrEnum):
    """The stretches of time rows are made for, in UTC."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


class UsageRow(msgspec.Struct, kw_only=True):
    """Sums over the requests that began in one bucket and agree in what was grouped by.

    `amount` is exact and not rounded. It is null, never less, while a request in it has no price, and where its price
    is not three flat ones: what tiers or an image come to is on the invoice.
    """

    start: str
    tenant: str
    model: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    base_model: str | UnsetType = UNSET
    endpoint: str | UnsetType = UNSET
    user: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    requests: int
    prompt_tokens: Annotated[int, Meta(description="cached ones among them")]
    cached_tokens: int
    completion_tokens: int
    currency: str | None
    amount: str | None


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /usage` asks for. Times in microseconds, the end excluded and never in the future."""

    tenant: str | None
    start_us: int
    end_us: int
    bucket: Bucket
    group_by: tuple[str, ...]  # dimensions of a row beside its tenant


class Key(NamedTuple):
    """What the sums of one row have in common."""

    start_us: int
    tenant: str
    group: tuple[str, ...]


class Sums:
    """What is added up for one row."""

    __slots__ = ("amount_femto", "cached", "completion", "currency", "prompt", "rated", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt = self.cached = self.completion = self.amount_femto = 0
        self.currency: str | None = None
        self.rated = True

    def add(self, part: StoredSums, rate: Rate | None) -> None:
        self.requests += part.requests
        self.prompt += part.prompt_tokens
        self.cached += part.cached_tokens
        self.completion += part.completion_tokens
        if rate is None or not rate.exact:  # what tiers and other classes come to, the ledger alone knows
            self.rated = False
            return
        self.currency = rate.currency
        self.amount_femto += amount_femto(part, rate)


class Cursor(NamedTuple):
    """The `next` of a page: how many rows came before, and the end that all pages of a report have in common.

    A report whose end moves would have other rows, and other sums, on every page.
    """

    rows: int
    end_us: int

    def __str__(self) -> str:
        return f"{self.rows}.{self.end_us}"

    @classmethod
    def parse(cls, after: str) -> Cursor:
        """Raises `BadRequest`."""
        parts = _CURSOR.fullmatch(after)
        if parts is None:
            raise BadRequest("after: is not the `next` of a page before", param="after")
        return cls(int(parts[1]), int(parts[2]))


def parse_query(
    tenant: str | None, start: str | None, end: str | None, bucket: Bucket, group_by: str | None, now_us: int
) -> Query:
    """Check what was asked for; without times it is this month. Raises `BadRequest` with every fault."""
    names = tuple(dict.fromkeys(name.strip() for name in (group_by or "model").split(",") if name.strip()))
    strange = [name for name in names if name not in DIMENSIONS]
    refuse([("group_by", f"{name!r} is unknown; known are {', '.join(DIMENSIONS)}") for name in strange])
    start_us, end_us = parse_range(start, end, default_start=_month_of, default_end_us=now_us + 1, max_days=MAX_DAYS)
    return Query(
        tenant=tenant,
        start_us=start_us,
        end_us=max(start_us, min(end_us, now_us + 1)),
        bucket=bucket,
        group_by=tuple(name for name in names if name != "tenant"),
    )


def _month_of(end_us: int) -> int:
    return month_start(end_us - 1)


def usage_rows(query: Query, usage: UsageStore, billing: Billing) -> list[UsageRow]:
    """All rows, in order of time, tenant and group. Raises `BadRequest` when they would be too many."""
    rows: dict[Key, Sums] = {}
    wanted = ("tenant", "model", "base_model", "endpoint", *query.group_by)
    for start_us, end_us in stretches(query, price_changes(billing, query.tenant)):
        rate = _rater(billing, start_us)
        for part in _sums(usage, query, start_us, end_us, wanted):
            group = part.group
            key = Key(part.start_us, group["tenant"], tuple(group[name] for name in query.group_by))
            rows.setdefault(key, Sums()).add(part, rate(group))
            if len(rows) > MAX_ROWS:
                refuse([("group_by", f"gives more than {MAX_ROWS} rows: ask for less time or fewer dimensions")])
    return [_row(key, query.group_by, rows[key]) for key in sorted(rows)]


def _sums(usage: UsageStore, query: Query, start_us: int, end_us: int, group_by: tuple[str, ...]) -> list[StoredSums]:
    try:
        return usage.usage(
            tenant=query.tenant,
            start_us=start_us,
            end_us=end_us,
            bucket=query.bucket,
            group_by=group_by,
            most=MAX_SUMS,
        )
    except StoreTooMuch as error:
        raise invalid("group_by", f"{error}: ask for less time or fewer dimensions") from None


def price_changes(billing: Billing, tenant: str | None) -> Iterator[int]:
    """The times from which the price book says something else: a price counts once it is effective and recorded."""
    after: str | None = None
    while versions := billing.prices(limit=PRICES_PAGE, after=after):
        for version in versions:
            if tenant is None or version.tenant in (None, tenant):
                yield max(version.effective_at_us, version.recorded_us)
        after = versions[-1].id


def stretches(query: Query, changes: Iterable[int]) -> list[tuple[int, int]]:
    """The range cut where the price book changed. Raises `BadRequest` past `MAX_STRETCHES`."""
    inside = {change for change in changes if query.start_us < change < query.end_us}
    if len(inside) >= MAX_STRETCHES:
        refuse([("start", f"prices changed more than {MAX_STRETCHES} times in this range: ask for less time")])
    return list(itertools.pairwise(sorted({query.start_us, *inside, query.end_us})))


def _rater(billing: Billing, ts_us: int) -> Callable[[Mapping[str, str]], Rate | None]:
    """The price of a group's requests in the stretch that begins at `ts_us`, or None: the rule of the door."""

    def rate(group: Mapping[str, str]) -> Rate | None:
        try:
            return billing.quote(group["tenant"], group["model"], group["base_model"], ts_us, group["endpoint"])
        except (NoPrice, NotFound):
            return None

    return rate


def _row(key: Key, names: tuple[str, ...], sums: Sums) -> UsageRow:
    return UsageRow(
        start=format_time(key.start_us),
        tenant=key.tenant,
        **dict(zip(names, key.group, strict=True)),
        requests=sums.requests,
        prompt_tokens=sums.prompt,
        cached_tokens=sums.cached,
        completion_tokens=sums.completion,
        currency=sums.currency,
        amount=format_amount(sums.amount_femto) if sums.rated else None,
    )


def _work(admin: AdminState, query: Query, begin: int, end: int) -> list[UsageRow]:
    if query.tenant is not None:
        admin.billing.tenant(query.tenant)  # an unknown one is told, not answered with nothing
    return admin.reports.rows(query, begin, end, partial(_compute, admin, query))


def _compute(admin: AdminState, query: Query) -> list[UsageRow]:
    admin.flush(FLUSH_S)
    return usage_rows(query, admin.usage, admin.billing)


@get("/usage")
async def get_usage(
    admin: Admin,
    tenant: Annotated[str | None, QueryParameter(description="Only this tenant's.")] = None,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: this month.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
    bucket: FromQuery[Bucket] = Bucket.DAY,
    group_by: Annotated[
        str | None, QueryParameter(description=f"Comma-separated: {', '.join(DIMENSIONS)}; default: model.")
    ] = None,
    limit: Limit = MAX_LIMIT,
    after: After = None,
) -> Page[UsageRow]:
    """Tokens and exact amounts of the requests that began in a range of time."""
    cursor = Cursor(0, admin.clock_us() + 1) if after is None else Cursor.parse(after)
    query = parse_query(tenant, start, end, bucket, group_by, cursor.end_us - 1)
    following = Cursor(cursor.rows + limit, query.end_us)
    rows = await admin.read(_work, admin, query, cursor.rows, following.rows)
    return page(rows, limit, lambda row: row, lambda _: str(following))


router = Router("/", route_handlers=[get_usage], tags=["usage"])
