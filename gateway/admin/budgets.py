"""Budgets: what a tenant, one of its keys or one of its adapters may spend in a day, a week or a month."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, delete, get, patch, post
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, Meta, UnsetType

from billing.budgets import PERCENT_MAX, THRESHOLDS, Budget, BudgetPeriod, BudgetScope
from billing.money import format_amount
from billing.service.budgeting import BudgetState
from gateway.admin.fields import Currency, MoneyText, Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time

Thresholds = Annotated[
    list[Annotated[int, Meta(ge=1, le=PERCENT_MAX)]], Meta(description="percents of the amount of which is told")
]
Subject = Annotated[Text, Meta(description="a key's id or an adapter's name; absent for the whole tenant")]
Hard = Annotated[bool, Meta(description="refuse and stop at the amount; otherwise only tell")]


class BudgetCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new budget. It counts what is charged from now on, in windows of the tenant's own time zone."""

    name: Text
    scope: BudgetScope
    period: BudgetPeriod
    amount: MoneyText
    currency: Currency = "usd"
    subject: Subject | None = None
    hard: Hard = True
    thresholds: Thresholds = msgspec.field(default_factory=lambda: list(THRESHOLDS))


class BudgetUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is to change; an absent field stays. What was spent stays counted."""

    name: Text | UnsetType = UNSET
    amount: MoneyText | UnsetType = UNSET
    hard: Hard | UnsetType = UNSET
    thresholds: Thresholds | UnsetType = UNSET


class BudgetView(msgspec.Struct, kw_only=True):
    """A budget and its window of now: spent + held + left = amount. `held`: what runs on this gateway may cost yet."""

    id: str
    tenant: str
    name: str
    scope: BudgetScope
    subject: str | None
    period: BudgetPeriod
    amount: str
    currency: str
    hard: bool
    thresholds: list[int]
    created_at: str
    window_start: str
    window_end: str
    spent: str
    held: str
    left: str


def show_budget(state: BudgetState) -> BudgetView:
    budget: Budget = state.budget
    return BudgetView(
        id=budget.id,
        tenant=budget.tenant,
        name=budget.name,
        scope=budget.scope,
        subject=budget.subject or None,
        period=budget.period,
        amount=budget.amount,
        currency=budget.currency,
        hard=budget.hard,
        thresholds=list(budget.thresholds),
        created_at=format_time(budget.created_us),
        window_start=format_time(state.window.start_us),
        window_end=format_time(state.window.end_us),
        spent=format_amount(state.spent_femto),
        held=format_amount(state.held_femto),
        left=format_amount(state.left_femto),
    )


@post("/tenants/{tenant_id:str}/budgets", sync_to_thread=True)
def set_budget(tenant_id: FromPath[str], data: JSONBody[BudgetCreate], admin: Admin, idempotency: Once) -> BudgetView:
    """Set a budget for a tenant, one of its keys or one of its adapters."""
    budget = admin.billing.set_budget(
        tenant_id,
        name=data.name,
        scope=data.scope,
        period=data.period,
        amount=data.amount,
        currency=data.currency,
        subject=data.subject or "",
        hard=data.hard,
        thresholds=tuple(data.thresholds),
        idempotency=idempotency,
    )
    return show_budget(admin.billing.budget(budget.id))


@get("/tenants/{tenant_id:str}/budgets", sync_to_thread=True)
def list_budgets(
    tenant_id: FromPath[str], admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> Page[BudgetView]:
    """List a tenant's budgets in the order they were set; a postpaid tenant's monthly cap comes first."""
    found = admin.billing.budgets(tenant_id, limit=limit + 1, after=after)
    return page(found, limit, show_budget, lambda state: state.budget.id)


@get("/budgets/{budget_id:str}", sync_to_thread=True)
def get_budget(budget_id: FromPath[str], admin: Admin) -> BudgetView:
    """Show one budget."""
    return show_budget(admin.billing.budget(budget_id))


@patch("/budgets/{budget_id:str}", sync_to_thread=True)
def change_budget(budget_id: FromPath[str], data: JSONBody[BudgetUpdate], admin: Admin) -> BudgetView:
    """Change a budget."""
    changes = {name: value for name in data.__struct_fields__ if (value := getattr(data, name)) is not UNSET}
    if "thresholds" in changes:
        changes["thresholds"] = tuple(changes["thresholds"])
    return show_budget(admin.billing.budget(admin.billing.change_budget(budget_id, **changes).id))


@delete("/budgets/{budget_id:str}", sync_to_thread=True)
def remove_budget(budget_id: FromPath[str], admin: Admin) -> None:
    """Take a budget away: it refuses nothing any more."""
    admin.billing.remove_budget(budget_id)


router = Router(
    "/", route_handlers=[set_budget, list_budgets, get_budget, change_budget, remove_budget], tags=["budgets"]
)
