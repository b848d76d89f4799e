"""`GET /v1/billing/balance`: what a tenant has, owes and may still spend."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.di import NamedDependency
from msgspec import Meta

from billing.accounts import BillingMode, TenantStatus
from billing.budgets import CAP, BudgetScope
from billing.grants import GrantState
from billing.money import format_amount, format_minor
from billing.service.budgeting import BudgetState
from gateway.admin.budgets import BudgetView, show_budget
from gateway.admin.suspensions import SuspensionView, show_standing
from gateway.admin.times import format_time
from gateway.auth import Principal
from gateway.billing.views import Views


class OwnGrantView(msgspec.Struct, kw_only=True):
    """Credit that still pays, or waits to be booked as expired: amount = used + expired + left."""

    id: str
    amount: str
    used: str
    expired: str
    left: str
    priority: Annotated[int, Meta(description="of several grants the lowest is used first, then the first to expire")]
    created_at: str
    expires_at: str | None


class OwnBalanceView(msgspec.Struct, kw_only=True):
    """A tenant's money, live: what is settled counts at once.

    Prepaid: `available` = granted - expired - used - held. Postpaid: `owed` is what was used beyond the grants, and
    `cap` says what the month may cost. `due` is what final invoices ask for and was not paid yet.
    """

    tenant: str
    currency: str
    billing_mode: BillingMode
    status: TenantStatus
    suspensions: Annotated[list[SuspensionView], Meta(description="all that holds it suspended, and why")]
    granted: str
    expired: str
    used: str
    held: Annotated[str, Meta(description="what runs on this gateway may cost yet")]
    available: str
    owed: str
    due: str
    grants: list[OwnGrantView]
    cap: Annotated[BudgetView | None, Meta(description="a postpaid tenant's month")]
    budgets: Annotated[
        list[BudgetView], Meta(description="the tenant's, its adapters', and those of the key that asks")
    ]


@get("/balance", sync_to_thread=True)
def get_balance(request: Request[Any, Any, Any], views: NamedDependency[Views]) -> OwnBalanceView:
    """Show the tenant's balance, by grant, and the budgets that apply to this key."""
    principal = views.principal(request)
    id = principal.tenant.id
    balance, standing = views.billing.balance(id), show_standing(views.billing.standing(id))
    budgets = [one for one in views.billing.budgets(id, limit=1000) if _applies(one, principal)]
    own = [show_budget(one) for one in budgets if not one.budget.id.startswith(CAP)]
    cap = [show_budget(one) for one in budgets if one.budget.id.startswith(CAP)]
    return OwnBalanceView(
        tenant=id,
        currency=balance.currency,
        billing_mode=principal.tenant.billing_mode,
        status=standing.status,
        suspensions=standing.suspensions,
        granted=format_amount(balance.granted_femto),
        expired=format_amount(balance.expired_femto),
        used=format_amount(balance.charged_femto),
        held=format_amount(balance.held_femto),
        available=format_amount(balance.available_femto),
        owed=format_amount(balance.owed_femto),
        due=format_minor(views.billing.due_minor(id), balance.currency),
        grants=[_show_grant(state) for state in views.billing.grants(id) if state.left],
        cap=cap[0] if cap else None,
        budgets=own,
    )


def _applies(state: BudgetState, principal: Principal) -> bool:
    """Another key's budget says nothing to this one."""
    return state.budget.scope is not BudgetScope.KEY or state.budget.subject == principal.key.id


def _show_grant(state: GrantState) -> OwnGrantView:
    """Without the reason, which is the house's own."""
    grant = state.grant
    return OwnGrantView(
        id=grant.id,
        amount=grant.amount,
        used=format_amount(state.used),
        expired=format_amount(state.expired),
        left=format_amount(state.left),
        priority=grant.priority,
        created_at=format_time(grant.created_us),
        expires_at=None if grant.expires_us is None else format_time(grant.expires_us),
    )
