"""Prepaid credit and the balance it leaves."""

from __future__ import annotations

import msgspec
from litestar import Router, get, post
from litestar.params import FromPath, JSONBody

from billing.money import format_amount
from gateway.admin.fields import Currency, MoneyText, Text
from gateway.admin.idempotency import Once
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class CreditGrant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Money put into a tenant's balance, and why."""

    amount: MoneyText
    currency: Currency
    reason: Text


class CreditView(msgspec.Struct, kw_only=True):
    """One grant. A repeated call gets the same one; the balance it led to is asked for apart."""

    id: str
    tenant: str
    amount: str
    currency: str
    reason: str
    created_at: str


class BalanceView(msgspec.Struct, kw_only=True):
    """A tenant's prepaid money, live: what is settled counts before it reaches the usage store."""

    tenant: str
    currency: str
    available: str
    held: str
    charged: str
    granted: str


@post("/tenants/{tenant_id:str}/credits", sync_to_thread=True)
def grant_credit(tenant_id: FromPath[str], data: JSONBody[CreditGrant], admin: Admin, idempotency: Once) -> CreditView:
    """Grant credit to a tenant."""
    grant = admin.billing.grant_credit(tenant_id, data.amount, data.currency, data.reason, idempotency=idempotency)
    return CreditView(
        id=grant.id,
        tenant=grant.tenant,
        amount=grant.amount,
        currency=grant.currency,
        reason=grant.reason,
        created_at=format_time(grant.created_us),
    )


@get("/tenants/{tenant_id:str}/balance", sync_to_thread=True)
def get_balance(tenant_id: FromPath[str], admin: Admin) -> BalanceView:
    """Show a tenant's balance."""
    balance = admin.billing.balance(tenant_id)
    return BalanceView(
        tenant=tenant_id,
        currency=balance.currency,
        available=format_amount(balance.available_femto),
        held=format_amount(balance.held_femto),
        charged=format_amount(balance.charged_femto),
        granted=format_amount(balance.granted_femto),
    )


router = Router("/", route_handlers=[grant_credit, get_balance], tags=["credits"])
