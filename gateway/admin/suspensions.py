"""Suspension: a tenant's requests are refused at the door, by an operator's word or for an unpaid invoice."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, post
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.accounts import TenantStatus
from billing.suspensions import Standing, Suspension
from gateway.admin.fields import Text
from gateway.admin.idempotency import Once
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class Suspend(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Why; the tenant can read it."""

    reason: Text


class Reactivate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Why."""

    reason: Text
    waive_dunning: Annotated[bool, Meta(description="end the tenant's dunnings, and what they hold, too")] = False


class SuspensionView(msgspec.Struct, kw_only=True):
    """One thing that holds a tenant suspended."""

    by: Annotated[str, Meta(description="operator or dunning")]
    invoice: Annotated[str | None, Meta(description="the invoice in dunning")]
    reason: str | None
    since: str


class StandingView(msgspec.Struct, kw_only=True):
    """A tenant is suspended while anything holds it."""

    tenant: str
    status: TenantStatus
    suspensions: list[SuspensionView]


def show_standing(standing: Standing) -> StandingView:
    return StandingView(
        tenant=standing.tenant,
        status=TenantStatus.SUSPENDED if standing.suspended else TenantStatus.ACTIVE,
        suspensions=[_show(one) for one in standing.suspensions],
    )


def _show(one: Suspension) -> SuspensionView:
    return SuspensionView(
        by="dunning" if one.invoice_id else "operator",
        invoice=one.invoice_id or None,
        reason=one.reason or None,
        since=format_time(one.since_us),
    )


@post("/tenants/{tenant_id:str}/suspend", status_code=200, sync_to_thread=True)
def suspend_tenant(tenant_id: FromPath[str], data: JSONBody[Suspend], admin: Admin, idempotency: Once) -> StandingView:
    """Suspend a tenant. What runs goes on to its end; nothing new is let in. Safe to repeat."""
    return show_standing(admin.billing.suspend_tenant(tenant_id, data.reason, idempotency=idempotency))


@post("/tenants/{tenant_id:str}/reactivate", status_code=200, sync_to_thread=True)
def reactivate_tenant(
    tenant_id: FromPath[str], data: JSONBody[Reactivate], admin: Admin, idempotency: Once
) -> StandingView:
    """Lift an operator's suspension. 409 where only dunning holds the tenant and is not waived. Safe to repeat."""
    return show_standing(
        admin.billing.reactivate_tenant(
            tenant_id, data.reason, waive_dunning=data.waive_dunning, idempotency=idempotency
        )
    )


router = Router("/", route_handlers=[suspend_tenant, reactivate_tenant], tags=["tenants"])
