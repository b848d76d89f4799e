"""Tenants, their keys and their adapters."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TenantStatus(StrEnum):
    """A suspended tenant's keys open nothing; its data and debts stay."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One customer of the house. `limits` may hold requests_per_minute, tokens_per_minute and concurrent."""

    id: str
    name: str
    currency: str
    stripe_customer_id: str | None = None
    default_adapter: str | None = None
    limits: dict[str, int] = {}
    created_us: int
    status: TenantStatus = TenantStatus.ACTIVE
    billing: str = "prepaid"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a tenant; the secret itself is nowhere kept."""

    id: str
    tenant: str
    name: str
    prefix: str  # the first characters of the secret, for people to know it by
    created_us: int
    revoked_us: int | None = None


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One load of an adapter under a tenant's name for it. A new load is a new `id`."""

    tenant: str
    name: str
    id: str
    path: str
    digest: str
    base_model: str
    created_us: int
