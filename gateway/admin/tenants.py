"""Tenants: who is served and billed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, patch, post
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, Meta, UnsetType

from billing.accounts import BillingMode, Tenant, TenantStatus, TopUp
from billing.checks import LIMITS
from billing.periods import UTC_NAME
from billing.service import Billing
from gateway.admin.fields import Currency, MoneyText, Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.suspensions import SuspensionView, show_standing
from gateway.admin.times import format_time

Limits = Annotated[
    dict[str, int],
    Meta(description=f"{', '.join(LIMITS)}; an absent one does not limit; weight: share of the engine, 1 if absent"),
]


AnchorDay = Annotated[
    int, Meta(ge=1, le=31, description="on which day of a month billing periods begin; in a shorter one on its last")
]
TimeZone = Annotated[str, Meta(max_length=64, description="IANA time zone in whose days they do")]


class TopUpBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ask for `amount` of credit once when the balance falls below `threshold`."""

    threshold: MoneyText
    amount: MoneyText

    def asked(self) -> TopUp:
        return TopUp(threshold=self.threshold, amount=self.amount)


MonthlyCap = Annotated[
    str, Meta(max_length=64, description="the most that a postpaid tenant's month may cost; absent: no limit")
]


DunningSteps = Annotated[
    str, Meta(max_length=200, description="what follows its failed payments, as the setting of this name; null: that")
]


class TenantCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new tenant; without `id` one is made."""

    name: Text
    id: Text | None = None
    currency: Currency = "usd"
    stripe_customer_id: Text | None = None
    default_adapter: Text | None = None
    limits: Limits | None = None
    timezone: TimeZone = UTC_NAME
    billing_anchor_day: AnchorDay = 1
    billing_mode: BillingMode = BillingMode.PREPAID
    monthly_cap: MonthlyCap | None = None
    top_up: TopUpBody | None = None
    dunning_steps: DunningSteps | None = None


class TenantUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is to change; an absent field stays, null takes a value away.

    `status` is an operator's own word: what dunning holds suspended stays so.
    """

    name: Text | UnsetType = UNSET
    stripe_customer_id: Text | UnsetType | None = UNSET
    default_adapter: Text | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    status: TenantStatus | UnsetType = UNSET
    timezone: TimeZone | UnsetType = UNSET
    billing_anchor_day: AnchorDay | UnsetType = UNSET
    billing_mode: BillingMode | UnsetType = UNSET
    monthly_cap: MonthlyCap | UnsetType | None = UNSET
    top_up: TopUpBody | UnsetType | None = UNSET
    dunning_steps: DunningSteps | UnsetType | None = UNSET


class TenantView(msgspec.Struct, kw_only=True):
    """A tenant; it is suspended while anything holds it."""

    id: str
    name: str
    currency: str
    stripe_customer_id: str | None
    default_adapter: str | None
    limits: dict[str, int]
    status: TenantStatus
    created_at: str
    timezone: TimeZone
    billing_anchor_day: AnchorDay
    billing_mode: BillingMode
    monthly_cap: MonthlyCap | None
    top_up: TopUpBody | None
    dunning_steps: DunningSteps | None
    suspensions: list[SuspensionView]


def show_tenant(billing: Billing, tenant: Tenant) -> TenantView:
    standing = show_standing(billing.standing(tenant.id))
    return TenantView(
        id=tenant.id,
        name=tenant.name,
        currency=tenant.currency,
        stripe_customer_id=tenant.stripe_customer_id,
        default_adapter=tenant.default_adapter,
        limits=dict(tenant.limits),
        status=standing.status,
        created_at=format_time(tenant.created_us),
        timezone=tenant.timezone,
        billing_anchor_day=tenant.billing_anchor_day,
        billing_mode=tenant.billing_mode,
        monthly_cap=tenant.monthly_cap,
        top_up=None
        if tenant.top_up is None
        else TopUpBody(threshold=tenant.top_up.threshold, amount=tenant.top_up.amount),
        dunning_steps=tenant.dunning_steps,
        suspensions=standing.suspensions,
    )


@post("/", sync_to_thread=True)
def create_tenant(data: JSONBody[TenantCreate], admin: Admin, idempotency: Once) -> TenantView:
    """Create a tenant."""
    return show_tenant(
        admin.billing,
        admin.billing.create_tenant(
            id=data.id,
            name=data.name,
            currency=data.currency,
            stripe_customer_id=data.stripe_customer_id,
            default_adapter=data.default_adapter,
            limits=data.limits,
            timezone=data.timezone,
            billing_anchor_day=data.billing_anchor_day,
            billing_mode=data.billing_mode,
            monthly_cap=data.monthly_cap,
            top_up=None if data.top_up is None else data.top_up.asked(),
            dunning_steps=data.dunning_steps,
            idempotency=idempotency,
        ),
    )


@get("/", sync_to_thread=True)
def list_tenants(admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[TenantView]:
    """List tenants in order of creation."""
    found = admin.billing.tenants(limit=limit + 1, after=after)
    return page(found, limit, lambda tenant: show_tenant(admin.billing, tenant), lambda tenant: tenant.id)


@get("/{tenant_id:str}", sync_to_thread=True)
def get_tenant(tenant_id: FromPath[str], admin: Admin) -> TenantView:
    """Show one tenant."""
    return show_tenant(admin.billing, admin.billing.tenant(tenant_id))


@patch("/{tenant_id:str}", sync_to_thread=True)
def update_tenant(tenant_id: FromPath[str], data: JSONBody[TenantUpdate], admin: Admin) -> TenantView:
    """Change a tenant."""
    changes = {name: value for name in data.__struct_fields__ if (value := getattr(data, name)) is not UNSET}
    if isinstance(data.top_up, TopUpBody):
        changes["top_up"] = data.top_up.asked()
    return show_tenant(admin.billing, admin.billing.update_tenant(tenant_id, **changes))


router = Router("/tenants", route_handlers=[create_tenant, list_tenants, get_tenant, update_tenant], tags=["tenants"])
