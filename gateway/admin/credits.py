"""Credit: grants, what is left of each, and the balance that they leave."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Router, get, post
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.accounts import BillingMode
from billing.grants import PRIORITY, PRIORITY_MAX, Grant, GrantState
from billing.money import format_amount
from billing.service import Balance, Billing
from gateway.admin.body import Fault
from gateway.admin.fields import Currency, MoneyText, Text, TimeText, time_fault
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time, parse_time

Priority = Annotated[int, Meta(ge=0, le=PRIORITY_MAX, description="of several grants the lowest is used first")]


class CreditGrant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Money put into a tenant's balance, and why. Used by priority, then by expiry, then by age."""

    amount: MoneyText
    currency: Currency
    reason: Text
    priority: Priority = PRIORITY
    expires_at: TimeText | None = None
    top_up: Annotated[str, Meta(max_length=64, description="the request for a top-up that it answers")] | None = None

    def faults(self) -> list[Fault]:
        return [] if self.expires_at is None else time_fault("expires_at", self.expires_at)


class CreditView(msgspec.Struct, kw_only=True):
    """One grant. A repeated call gets the same one; the balance it led to is asked for apart."""

    id: str
    tenant: str
    amount: str
    currency: str
    reason: str
    created_at: str
    priority: Priority
    expires_at: str | None
    top_up: str | None


class GrantView(CreditView, kw_only=True):
    """A grant and what became of it by the charges that are recorded: amount = used + expired + left."""

    used: str
    expired: str
    left: str


class BalanceView(msgspec.Struct, kw_only=True):
    """A tenant's money, live: what is settled counts before it reaches the usage store.

    A postpaid tenant's charges beyond its grants are `owed`, and take nothing from what is available.
    """

    tenant: str
    currency: str
    billing_mode: BillingMode
    available: str
    held: str
    charged: str
    granted: str
    expired: str
    owed: str
    grants: list[GrantView]


def show_grant(grant: Grant) -> CreditView:
    return CreditView(**_fields(grant))


def _fields(grant: Grant) -> dict[str, Any]:
    return {
        "id": grant.id,
        "tenant": grant.tenant,
        "amount": grant.amount,
        "currency": grant.currency,
        "reason": grant.reason,
        "created_at": format_time(grant.created_us),
        "priority": grant.priority,
        "expires_at": None if grant.expires_us is None else format_time(grant.expires_us),
        "top_up": grant.top_up or None,
    }


def show_state(state: GrantState) -> GrantView:
    return GrantView(
        **_fields(state.grant),
        used=format_amount(state.used),
        expired=format_amount(state.expired),
        left=format_amount(state.left),
    )


def show_balance(billing: Billing, tenant_id: str) -> BalanceView:
    """The balance and the grants that still pay, or wait to be booked as expired."""
    balance: Balance = billing.balance(tenant_id)
    return BalanceView(
        tenant=tenant_id,
        currency=balance.currency,
        billing_mode=billing.tenant(tenant_id).billing_mode,
        available=format_amount(balance.available_femto),
        held=format_amount(balance.held_femto),
        charged=format_amount(balance.charged_femto),
        granted=format_amount(balance.granted_femto),
        expired=format_amount(balance.expired_femto),
        owed=format_amount(balance.owed_femto),
        grants=[show_state(state) for state in billing.grants(tenant_id) if state.left],
    )


@post("/tenants/{tenant_id:str}/credits", sync_to_thread=True)
def grant_credit(tenant_id: FromPath[str], data: JSONBody[CreditGrant], admin: Admin, idempotency: Once) -> CreditView:
    """Grant credit to a tenant."""
    grant = admin.billing.grant_credit(
        tenant_id,
        data.amount,
        data.currency,
        data.reason,
        priority=data.priority,
        expires_us=None if data.expires_at is None else parse_time(data.expires_at),
        top_up=data.top_up or "",
        idempotency=idempotency,
    )
    return show_grant(grant)


@get("/tenants/{tenant_id:str}/credits", sync_to_thread=True)
def list_grants(
    tenant_id: FromPath[str], admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> Page[GrantView]:
    """List a tenant's grants by age, used up and expired ones too."""
    found = admin.billing.grants(tenant_id, limit=limit + 1, after=after)
    return page(found, limit, show_state, lambda state: state.grant.id)


@get("/tenants/{tenant_id:str}/balance", sync_to_thread=True)
def get_balance(tenant_id: FromPath[str], admin: Admin) -> BalanceView:
    """Show a tenant's balance, by grant."""
    return show_balance(admin.billing, tenant_id)


router = Router("/", route_handlers=[grant_credit, list_grants, get_balance], tags=["credits"])
