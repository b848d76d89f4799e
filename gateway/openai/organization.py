"""`GET /v1/organization/usage/completions` and `/v1/organization/costs`: usage and costs as OpenAI's SDK reads them.

A project is a tenant, a user the `user` of the request, a line item a model. The admin key sees all tenants; a tenant's
key its own, whatever it filters by. Usage comes from the usage store, within about a second of the settlement; costs
are the ledger's recorded charges by UTC day, never tokens times a price anew. An amount is written as the exact
decimal number (and as text in `exact`): nothing is rounded here, and who reads it into a double has the nearest one.

Knows: the shapes. Does not know: how usage is kept or charged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from litestar import Request, Router, get
from litestar.di import NamedDependency, Provide

from billing.daily import DayCharge
from billing.money import format_amount
from gateway.admin.state import AdminState
from gateway.auth import authenticate, bearer
from gateway.errors import BadRequest, invalid
from gateway.openai.usage_query import COSTS, SECOND_US, USAGE, UsageQuery, parse_query
from metering.clickhouse import UsageRow
from metering.errors import StoreTooMuch

MAX_RESULTS = 50_000  # groups of one page

_GROUPS = {"project_id": "tenant", "user_id": "user", "api_key_id": "key", "model": "model"}
_FILTERS = {"project_ids": "tenant", "user_ids": "user", "api_key_ids": "key", "models": "model"}
_BUCKETS = {60: "minute", 3_600: "hour", 86_400: "day"}

Group = tuple[str | None, ...]


class UsageResult(msgspec.Struct, kw_only=True):
    """Tokens of one group in one bucket. Of the kinds that are not served, 0."""

    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
    input_tokens: int
    output_tokens: int
    num_model_requests: int
    input_cached_tokens: int
    input_uncached_tokens: int
    input_text_tokens: int
    input_cached_text_tokens: int
    output_text_tokens: int
    input_cache_write_tokens: int
    input_audio_tokens: int = 0
    input_cached_audio_tokens: int = 0
    output_audio_tokens: int = 0
    input_image_tokens: int = 0
    input_cached_image_tokens: int = 0
    output_image_tokens: int = 0
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    api_source: Literal["unlabeled"] | None = None


class Amount(msgspec.Struct, kw_only=True):
    """An exact amount of money; `value` is a JSON number with all its digits."""

    value: msgspec.Raw
    currency: str
    exact: str


class CostResult(msgspec.Struct, kw_only=True):
    """Charges of one group, in one currency, on one day."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: Amount
    line_item: str | None = None
    quantity: int | None = None
    quantity_unit: Literal["tokens"] | None = None
    project_id: str | None = None
    api_key_id: str | None = None
    user_id: None = None
    api_source: Literal["unlabeled"] | None = None


class UsageBucket(msgspec.Struct, kw_only=True):
    """What began in [start_time, end_time), in seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult]


class CostBucket(msgspec.Struct, kw_only=True):
    """What began in [start_time, end_time), in seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[CostResult]


class UsagePage(msgspec.Struct, kw_only=True):
    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class CostPage(msgspec.Struct, kw_only=True):
    object: Literal["page"] = "page"
    data: list[CostBucket]
    has_more: bool
    next_page: str | None


class Organization:
    """The reports over one gateway's state, and who may see what of them."""

    def __init__(self, state: AdminState) -> None:
        self._state = state
        self._admin_key = hashlib.sha256(state.admin_key.encode()).digest()
        self._turns: dict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)

    def tenant_of(self, request: Request[Any, Any, Any]) -> str | None:
        """Whose usage the key may see; None: everybody's. Raises `Unauthorized`, `TenantSuspended`."""
        given = bearer(request)
        if hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self._admin_key):
            return None
        return authenticate(request, self._state.billing).tenant.id

    def now_s(self) -> int:
        return self._state.clock_us() // SECOND_US

    @asynccontextmanager
    async def turn(self, tenant: str | None) -> AsyncIterator[None]:
        """One report of a tenant at a time: the threads that read are few, and everybody's."""
        async with self._turns[tenant]:
            yield

    async def usage(self, tenant: str | None, query: UsageQuery) -> UsagePage:
        async with self.turn(tenant):
            rows = await self._state.read(self._usage_rows, tenant, query)
        found: dict[int, list[UsageResult]] = defaultdict(list)
        for row in rows:
            found[row.start_us // SECOND_US].append(_usage_result(row, query.group_by))
        data = [
            UsageBucket(start_time=start_s, end_time=end_s, results=found[start_s - start_s % query.width_s])
            for start_s, end_s in query.buckets()
        ]
        following = query.next_page()
        return UsagePage(data=data, has_more=following is not None, next_page=following)

    async def costs(self, tenant: str | None, query: UsageQuery) -> CostPage:
        async with self.turn(tenant):
            days = await self._state.read(self._cost_days, tenant, query)
        data = [
            CostBucket(start_time=start_s, end_time=end_s, results=results)
            for (start_s, end_s), results in zip(query.buckets(), days, strict=True)
        ]
        following = query.next_page()
        return CostPage(data=data, has_more=following is not None, next_page=following)

    def _usage_rows(self, tenant: str | None, query: UsageQuery) -> list[UsageRow]:
        buckets = query.buckets()
        if query.batch or not buckets:  # no request is a batch job
            return []
        try:
            return self._state.usage.usage(
                tenant=tenant,
                start_us=buckets[0][0] * SECOND_US,
                end_us=buckets[-1][1] * SECOND_US,
                bucket=_BUCKETS[query.width_s],
                group_by=[_GROUPS[name] for name in query.group_by if name in _GROUPS],
                only={_FILTERS[name]: values for name, values in query.filters.items()},
                most=MAX_RESULTS,
            )
        except StoreTooMuch as error:
            raise _too_much(str(error)) from None

    def _cost_days(self, tenant: str | None, query: UsageQuery) -> list[list[CostResult]]:
        days: list[list[CostResult]] = []
        for start_s, _ in query.buckets():
            costs = self._state.billing.charges_of_day(start_s * SECOND_US, tenant)
            days.append(self._cost_results(costs, query))
            _check_size(sum(map(len, days)))
        return days

    def _cost_results(self, costs: list[DayCharge], query: UsageQuery) -> list[CostResult]:
        sums: dict[tuple[str, Group], list[int]] = defaultdict(lambda: [0, 0])
        for cost in costs:
            if _taken(cost, query.filters):
                sum = sums[self._state.billing.tenant(cost.tenant).currency, _cost_group(cost, query.group_by)]
                sum[0] += cost.amount_femto
                sum[1] += cost.tokens
        return [
            _cost_result(currency, group, amount_femto, tokens, query.group_by)
            for (currency, group), (amount_femto, tokens) in sorted(sums.items(), key=_in_order)
        ]


def _in_order(item: tuple[tuple[str, Group], list[int]]) -> tuple[str, list[str]]:
    (currency, group), _ = item
    return currency, [name or "" for name in group]


def _check_size(results: int) -> None:
    if results > MAX_RESULTS:
        raise _too_much(f"gives more than {MAX_RESULTS} results")


def _too_much(reason: str) -> BadRequest:
    return invalid("group_by", f"{reason} on one page: ask for fewer buckets or groups")


def _usage_result(row: UsageRow, group_by: tuple[str, ...]) -> UsageResult:
    uncached = row.prompt_tokens - row.cached_tokens - row.cache_write_tokens  # as OpenAI counts it
    result = UsageResult(
        input_tokens=row.prompt_tokens,
        output_tokens=row.completion_tokens,
        num_model_requests=row.requests,
        input_cached_tokens=row.cached_tokens,
        input_uncached_tokens=uncached,
        input_text_tokens=uncached,
        input_cached_text_tokens=row.cached_tokens,
        output_text_tokens=row.completion_tokens,
        input_cache_write_tokens=row.cache_write_tokens,
    )
    for name in group_by:
        if name in _GROUPS:
            setattr(result, name, row.group[_GROUPS[name]])
    if "batch" in group_by:
        result.batch = False
    if "api_source" in group_by:
        result.api_source = "unlabeled"
    return result


def _taken(cost: DayCharge, filters: dict[str, list[str]]) -> bool:
    values = {"project_ids": cost.tenant, "api_key_ids": cost.key_id, "line_items": cost.model}
    return all(values[name] in wanted for name, wanted in filters.items())


def _cost_group(cost: DayCharge, group_by: tuple[str, ...]) -> Group:
    values = {"project_id": cost.tenant, "api_key_id": cost.key_id, "line_item": cost.model, "api_source": None}
    return tuple(values[name] for name in group_by)


def _cost_result(currency: str, group: Group, amount_femto: int, tokens: int, group_by: tuple[str, ...]) -> CostResult:
    exact = format_amount(amount_femto)
    named: dict[str, Any] = {name: value for name, value in zip(group_by, group, strict=True) if name != "api_source"}
    by_item = "line_item" in group_by
    return CostResult(
        amount=Amount(value=msgspec.Raw(exact.encode()), currency=currency, exact=exact),
        quantity=tokens if by_item else None,
        quantity_unit="tokens" if by_item else None,
        api_source="unlabeled" if "api_source" in group_by else None,
        **named,
    )


@get("/usage/completions", operation_id="GetOrganizationUsageCompletions")
async def get_usage(request: Request[Any, Any, Any], organization: NamedDependency[Organization]) -> UsagePage:
    """Show tokens by time: all tenants' to the admin key, its own to a tenant's."""
    tenant = organization.tenant_of(request)
    now_s = organization.now_s()
    return await organization.usage(tenant, parse_query(list(request.query_params.multi_items()), USAGE, now_s))


@get("/costs", operation_id="GetOrganizationCosts")
async def get_costs(request: Request[Any, Any, Any], organization: NamedDependency[Organization]) -> CostPage:
    """Show what was charged by day: all tenants' to the admin key, its own to a tenant's."""
    tenant = organization.tenant_of(request)
    now_s = organization.now_s()
    return await organization.costs(tenant, parse_query(list(request.query_params.multi_items()), COSTS, now_s))


def organization_router(state: AdminState) -> Router:
    """Both routes over `state`; each finds out itself whose key it was asked with."""
    organization = Organization(state)
    return Router(
        "/v1/organization",
        route_handlers=[get_usage, get_costs],
        dependencies={"organization": Provide(lambda: organization, sync_to_thread=False)},
        signature_types=[Organization],
        tags=["OpenAI"],
    )
