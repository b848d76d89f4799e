"""Tenants: who is served and billed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, patch, post
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, Meta, UnsetType

from billing.accounts import Tenant, TenantStatus
from billing.checks import LIMITS
from gateway.admin.fields import Currency, Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time

Limits = Annotated[
    dict[str, int],
    Meta(description=f"{', '.join(LIMITS)}; an absent one does not limit; weight: share of the engine, 1 if absent"),
]


class TenantCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new tenant; without `id` one is made."""

    name: Text
    id: Text | None = None
    currency: Currency = "usd"
    stripe_customer_id: Text | None = None
    default_adapter: Text | None = None
    limits: Limits | None = None


class TenantUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is to change; an absent field stays, null takes a value away."""

    name: Text | UnsetType = UNSET
    stripe_customer_id: Text | UnsetType | None = UNSET
    default_adapter: Text | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    status: TenantStatus | UnsetType = UNSET


class TenantView(msgspec.Struct, kw_only=True):
    id: str
    name: str
    currency: str
    stripe_customer_id: str | None
    default_adapter: str | None
    limits: dict[str, int]
    status: TenantStatus
    created_at: str


def show_tenant(tenant: Tenant) -> TenantView:
    return TenantView(
        id=tenant.id,
        name=tenant.name,
        currency=tenant.currency,
        stripe_customer_id=tenant.stripe_customer_id,
        default_adapter=tenant.default_adapter,
        limits=dict(tenant.limits),
        status=tenant.status,
        created_at=format_time(tenant.created_us),
    )


@post("/", sync_to_thread=True)
def create_tenant(data: JSONBody[TenantCreate], admin: Admin, idempotency: Once) -> TenantView:
    """Create a tenant."""
    return show_tenant(
        admin.billing.create_tenant(
            id=data.id,
            name=data.name,
            currency=data.currency,
            stripe_customer_id=data.stripe_customer_id,
            default_adapter=data.default_adapter,
            limits=data.limits,
            idempotency=idempotency,
        )
    )


@get("/", sync_to_thread=True)
def list_tenants(admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[TenantView]:
    """List tenants in order of creation."""
    found = admin.billing.tenants(limit=limit + 1, after=after)
    return page(found, limit, show_tenant, lambda tenant: tenant.id)


@get("/{tenant_id:str}", sync_to_thread=True)
def get_tenant(tenant_id: FromPath[str], admin: Admin) -> TenantView:
    """Show one tenant."""
    return show_tenant(admin.billing.tenant(tenant_id))


@patch("/{tenant_id:str}", sync_to_thread=True)
def update_tenant(tenant_id: FromPath[str], data: JSONBody[TenantUpdate], admin: Admin) -> TenantView:
    """Change a tenant."""
    changes = {name: value for name in data.__struct_fields__ if (value := getattr(data, name)) is not UNSET}
    return show_tenant(admin.billing.update_tenant(tenant_id, **changes))


router = Router("/tenants", route_handlers=[create_tenant, list_tenants, get_tenant, update_tenant], tags=["tenants"])
