"""Tenants, their keys and their adapters: what they are, what can happen to them, who owns which name.

Pure: facts are folded in, lookups come out. Does not know: money, the store, the engine.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from billing.checks import AMOUNT_MAX_FEMTO, Faults
from billing.errors import Conflict, Invalid, NotFound, UnknownModel
from billing.money import parse_amount
from billing.periods import UTC_NAME, zone_names
from billing.steps import parse_steps
from billing.suspensions import OPERATOR, SuspensionFact, SuspensionLifted, SuspensionPlaced, Suspensions

KEYS_PER_TENANT = 10_000
ADAPTERS_PER_TENANT = 10_000
CHANGEABLE = (
    "name",
    "stripe_customer_id",
    "default_adapter",
    "limits",
    "status",
    "billing_mode",
    "monthly_cap",
    "top_up",
    "timezone",
    "billing_anchor_day",
    "dunning_steps",
)


class TenantStatus(StrEnum):
    """An operator's own word; an invoice in dunning may hold a tenant suspended that is `active` by it."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


class BillingMode(StrEnum):
    """A prepaid tenant spends what it was granted; a postpaid one what its monthly cap allows, if it has one."""

    PREPAID = "prepaid"
    POSTPAID = "postpaid"


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for `amount` when the balance falls below `threshold`; both exact decimal text."""

    threshold: str
    amount: str


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One customer of the house.

    `limits` may hold requests_per_minute, tokens_per_minute and concurrent, and weight: its share of the engine while
    others want it too, 1 where there is none. `monthly_cap` is exact decimal text; it and `timezone`, an IANA name,
    say how much a month of the tenant's calendar may cost (`billing/budgets.py`).
    """

    id: str
    name: str
    currency: str
    stripe_customer_id: str | None = None
    default_adapter: str | None = None
    limits: dict[str, int] = {}
    created_us: int
    status: TenantStatus = TenantStatus.ACTIVE
    billing_mode: BillingMode = BillingMode.PREPAID
    monthly_cap: str | None = None
    top_up: TopUp | None = None
    timezone: str = UTC_NAME
    billing_anchor_day: int = 1  # 1 to 31: the day of a month on which invoices' periods begin, in that zone
    dunning_steps: str | None = None  # as the setting of this name, in whose place it is

    def check(self) -> None:
        """Raise `Invalid` with every fault."""
        faults = Faults()
        faults.id("id", self.id)
        faults.text("name", self.name)
        faults.currency("currency", self.currency)
        if self.stripe_customer_id is not None:
            faults.stripe_id("stripe_customer_id", self.stripe_customer_id)
        if self.default_adapter is not None:
            faults.model("default_adapter", self.default_adapter)
        faults.limits("limits", self.limits)
        if self.status not in list(TenantStatus):
            faults.add("status", "must be active or suspended")
        self._check_billing(faults)
        faults.raise_if_any()

    def _check_billing(self, faults: Faults) -> None:
        if self.billing_mode not in list(BillingMode):
            faults.add("billing_mode", "must be prepaid or postpaid")
        if self.monthly_cap is not None:
            faults.money("monthly_cap", self.monthly_cap, parse_amount, AMOUNT_MAX_FEMTO)
            if self.billing_mode != BillingMode.POSTPAID:
                faults.add("monthly_cap", "is for postpaid tenants")
        if self.top_up is not None:
            faults.money("top_up.threshold", self.top_up.threshold, parse_amount, AMOUNT_MAX_FEMTO)
            if faults.money("top_up.amount", self.top_up.amount, parse_amount, AMOUNT_MAX_FEMTO) == 0:
                faults.add("top_up.amount", "must be more than 0")
            if self.billing_mode != BillingMode.PREPAID:
                faults.add("top_up", "is for prepaid tenants")
        if self.timezone not in zone_names():
            faults.add("timezone", "must be an IANA time zone, such as Europe/Berlin")
        faults.anchor_day("billing_anchor_day", self.billing_anchor_day)
        if self.dunning_steps is not None:
            try:
                parse_steps(self.dunning_steps)
            except ValueError as error:
                faults.add("dunning_steps", str(error))


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

    def check(self) -> None:
        """Raise `Invalid` with every fault."""
        faults = Faults()
        faults.model("name", self.name)
        faults.id("id", self.id)
        if self.name == self.base_model:
            faults.add("name", "is the base model's name")
        if self.name == "*":
            faults.add("name", "stands for every model")
        if not self.path:
            faults.add("path", "must not be empty")
        faults.raise_if_any()


class TenantCreated(msgspec.Struct, frozen=True, kw_only=True, tag="tenant.created"):
    tenant: Tenant


class TenantUpdated(msgspec.Struct, frozen=True, kw_only=True, tag="tenant.updated"):
    tenant: Tenant  # as it is afterwards


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True, tag="key.created"):
    key: Key
    secret_sha256: str


class KeyRevoked(msgspec.Struct, frozen=True, kw_only=True, tag="key.revoked"):
    key: Key  # as it is afterwards


class AdapterAdded(msgspec.Struct, frozen=True, kw_only=True, tag="adapter.added"):
    adapter: AdapterRecord


class AdapterRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="adapter.removed"):
    adapter: AdapterRecord


AccountFact = TenantCreated | TenantUpdated | KeyCreated | KeyRevoked | AdapterAdded | AdapterRemoved | SuspensionFact


class Accounts:
    """All tenants, keys and adapters that stand, and who is suspended. Insertion order is the order of creation."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.keys: dict[str, Key] = {}
        self.adapters: dict[str, AdapterRecord] = {}  # by id of the load
        self.suspensions = Suspensions()
        self._key_of_secret: dict[str, str] = {}
        self._keys_of: dict[str, dict[str, None]] = {}
        self._adapters_of: dict[str, dict[str, AdapterRecord]] = {}  # tenant → name

    def apply(self, fact: AccountFact, time_us: int = 0) -> None:
        """`time_us`: when the fact was written down."""
        match fact:
            case TenantCreated(tenant=tenant) | TenantUpdated(tenant=tenant):
                self.tenants[tenant.id] = tenant
                self.suspensions.follow(tenant.id, tenant.status is TenantStatus.SUSPENDED, time_us)
            case SuspensionPlaced(tenant=id, invoice_id=invoice_id):
                self.suspensions.apply(fact)
                if invoice_id == OPERATOR:
                    self.tenants[id] = msgspec.structs.replace(self.tenants[id], status=TenantStatus.SUSPENDED)
            case SuspensionLifted(tenant=id, invoice_id=invoice_id):
                self.suspensions.apply(fact)
                if invoice_id == OPERATOR:
                    self.tenants[id] = msgspec.structs.replace(self.tenants[id], status=TenantStatus.ACTIVE)
            case KeyCreated(key=key, secret_sha256=digest):
                self.keys[key.id] = key
                self._key_of_secret[digest] = key.id
                self._keys_of.setdefault(key.tenant, {})[key.id] = None
            case KeyRevoked(key=key):
                self.keys[key.id] = key
            case AdapterAdded(adapter=adapter):
                mine = self._adapters_of.setdefault(adapter.tenant, {})
                if before := mine.pop(adapter.name, None):
                    del self.adapters[before.id]
                mine[adapter.name] = self.adapters[adapter.id] = adapter
            case AdapterRemoved(adapter=adapter):
                self.adapters.pop(adapter.id, None)
                self._adapters_of.get(adapter.tenant, {}).pop(adapter.name, None)

    def tenant(self, tenant_id: str) -> Tenant:
        try:
            return self.tenants[tenant_id]
        except KeyError:
            raise NotFound("tenant", tenant_id) from None

    def key(self, key_id: str) -> Key:
        try:
            return self.keys[key_id]
        except KeyError:
            raise NotFound("key", key_id) from None

    def keys_of(self, tenant_id: str) -> list[Key]:
        return [self.keys[key_id] for key_id in self._keys_of.get(self.tenant(tenant_id).id, {})]

    def adapters_of(self, tenant_id: str) -> list[AdapterRecord]:
        return list(self._adapters_of.get(self.tenant(tenant_id).id, {}).values())

    def adapter(self, tenant_id: str, name: str) -> AdapterRecord:
        adapter = self._adapters_of.get(self.tenant(tenant_id).id, {}).get(name)
        if adapter is None:
            raise NotFound("adapter", name)
        return adapter

    def by_secret(self, secret_sha256: str) -> tuple[Key, Tenant] | None:
        """Who holds this secret, suspended or not; None for an unknown or revoked key."""
        key_id = self._key_of_secret.get(secret_sha256)
        if key_id is None:
            return None
        key = self.keys[key_id]
        return None if key.revoked_us is not None else (key, self.tenants[key.tenant])

    def resolve_model(self, tenant_id: str, model: str | None, base_model: str) -> tuple[str, AdapterRecord | None]:
        """The priced name and the adapter behind a model name; no name means the tenant's default."""
        name = model if model is not None else self.tenant(tenant_id).default_adapter or base_model
        if name == base_model:
            return name, None
        adapter = self._adapters_of.get(tenant_id, {}).get(name)
        if adapter is None:
            raise UnknownModel(name)
        return name, adapter

    def updated(self, tenant_id: str, changes: dict[str, Any]) -> Tenant:
        """The tenant with the changes, checked. Raises `Invalid` or `NotFound`."""
        tenant = self.tenant(tenant_id)
        unknown = [name for name in changes if name not in CHANGEABLE]
        if unknown:
            raise Invalid([(name, f"cannot be changed; {', '.join(CHANGEABLE)} can") for name in unknown])
        changed = msgspec.structs.replace(tenant, **{**changes, **_defaults(changes)})
        changed.check()
        default = changed.default_adapter
        if default not in (None, tenant.default_adapter) and default not in self._adapters_of.get(tenant_id, {}):
            raise Invalid([("default_adapter", "is not an adapter of this tenant")])
        return msgspec.structs.replace(
            changed, status=TenantStatus(changed.status), billing_mode=BillingMode(changed.billing_mode)
        )

    def check_new_adapter(self, adapter: AdapterRecord) -> None:
        """Raise `Conflict` where the load has a name already or the tenant has too many adapters."""
        mine = self._adapters_of.get(self.tenant(adapter.tenant).id, {})
        if adapter.id in self.adapters:
            raise Conflict("this load of an adapter has a name already")
        if adapter.name not in mine and len(mine) >= ADAPTERS_PER_TENANT:
            raise Conflict(f"a tenant has at most {ADAPTERS_PER_TENANT} adapters")


def _defaults(changes: dict[str, Any]) -> dict[str, Any]:
    """A cleared field goes back to what an absent one is."""
    return {"limits": {}} if "limits" in changes and changes["limits"] is None else {}
