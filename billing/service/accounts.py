"""Tenants, keys, adapters: the commands and the look-ups."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec

from billing.accounts import (
    KEYS_PER_TENANT,
    AdapterAdded,
    AdapterRecord,
    AdapterRemoved,
    BillingMode,
    Key,
    KeyCreated,
    KeyRevoked,
    Tenant,
    TenantCreated,
    TenantUpdated,
    TopUp,
)
from billing.books import new_event
from billing.checks import Faults
from billing.errors import Conflict
from billing.periods import UTC_NAME
from billing.service.shell import Idempotency, page
from billing.service.suspending import SuspensionService
from billing.store import NewEvent

SECRET_BYTES = 32  # 43 characters of URL-safe base64
PREFIX_LENGTH = 7  # "mh-" and four more: enough to know a key by, nothing to guess it from


class AccountService(SuspensionService):
    """Who may ask, and for which names."""

    def create_tenant(
        self,
        *,
        id: str | None = None,
        name: str,
        currency: str = "usd",
        stripe_customer_id: str | None = None,
        default_adapter: str | None = None,
        limits: dict[str, int] | None = None,
        timezone: str = UTC_NAME,
        billing_anchor_day: int = 1,
        billing_mode: BillingMode = BillingMode.PREPAID,
        monthly_cap: str | None = None,
        top_up: TopUp | None = None,
        dunning_steps: str | None = None,
        idempotency: Idempotency | None = None,
    ) -> Tenant:
        """Raises `Invalid`, or `Conflict` for an id that is taken."""

        def decide(time_us: int) -> tuple[list[NewEvent], Tenant]:
            tenant = Tenant(
                id=self._new_id("tenant") if id is None else id,
                name=name,
                currency=currency,
                stripe_customer_id=stripe_customer_id,
                default_adapter=default_adapter,
                limits={} if limits is None else limits,
                created_us=time_us,
                timezone=timezone,
                billing_anchor_day=billing_anchor_day,
                billing_mode=billing_mode,
                monthly_cap=monthly_cap,
                top_up=top_up,
                dunning_steps=dunning_steps,
            )
            tenant.check()
            if tenant.id in self._books.accounts.tenants:
                raise Conflict(f"a tenant {tenant.id!r} exists already")
            return [new_event(f"tenant:{tenant.id}", TenantCreated(tenant=tenant))], tenant

        return self._command("create_tenant", idempotency, Tenant, decide)[0]

    def update_tenant(self, tenant_id: str, *, idempotency: Idempotency | None = None, **changes: Any) -> Tenant:
        """Change what `accounts.CHANGEABLE` names. Raises `Invalid`, `NotFound`."""

        def decide(_: int) -> tuple[list[NewEvent], Tenant]:
            tenant = self._books.accounts.updated(tenant_id, changes)
            if tenant == self._books.accounts.tenant(tenant_id):
                return [], tenant
            return [new_event(f"tenant:{tenant_id}", TenantUpdated(tenant=tenant))], tenant

        return self._command("update_tenant", idempotency, Tenant, decide)[0]

    def tenant(self, tenant_id: str) -> Tenant:
        """Raises `NotFound`."""
        with self._state:
            return self._books.accounts.tenant(tenant_id)

    def tenants(self, limit: int = 100, after: str | None = None) -> list[Tenant]:
        """In the order of creation."""
        with self._state:
            return page(list(self._books.accounts.tenants.values()), lambda tenant: tenant.id, limit, after)

    def create_key(
        self, tenant_id: str, name: str, *, idempotency: Idempotency | None = None
    ) -> tuple[Key, str | None]:
        """The key and its secret, which is shown this once: a replay gives the key and None."""
        secret = f"mh-{secrets.token_urlsafe(SECRET_BYTES)}"

        def decide(time_us: int) -> tuple[list[NewEvent], Key]:
            faults = Faults()
            faults.text("name", name, 64)
            faults.raise_if_any()
            if len(self._books.accounts.keys_of(tenant_id)) >= KEYS_PER_TENANT:
                raise Conflict(f"a tenant has at most {KEYS_PER_TENANT} keys")
            key = Key(
                id=self._new_id("key"),
                tenant=tenant_id,
                name=name,
                prefix=secret[:PREFIX_LENGTH],
                created_us=time_us,
            )
            return [new_event(f"tenant:{tenant_id}", KeyCreated(key=key, secret_sha256=_sha256(secret)))], key

        key, fresh = self._command("create_key", idempotency, Key, decide)
        return key, secret if fresh else None

    def keys(self, tenant_id: str, limit: int = 100, after: str | None = None) -> list[Key]:
        """A tenant's keys, revoked ones too, in the order of creation. Raises `NotFound`."""
        with self._state:
            return page(self._books.accounts.keys_of(tenant_id), lambda key: key.id, limit, after)

    def revoke_key(self, key_id: str, *, idempotency: Idempotency | None = None) -> Key:
        """From now on the key opens nothing; revoking it again changes nothing. Raises `NotFound`."""

        def decide(time_us: int) -> tuple[list[NewEvent], Key]:
            key = self._books.accounts.key(key_id)
            if key.revoked_us is not None:
                return [], key
            revoked = msgspec.structs.replace(key, revoked_us=time_us)
            return [new_event(f"tenant:{key.tenant}", KeyRevoked(key=revoked))], revoked

        return self._command("revoke_key", idempotency, Key, decide)[0]

    def authenticate(self, secret: str) -> tuple[Key, Tenant] | None:
        """Who may use what is sold by this secret; None for an unknown or revoked one and for a suspended tenant."""
        found = self.key_holder(secret)
        return None if found is None or self.standing(found[1].id).suspended else found

    def key_holder(self, secret: str) -> tuple[Key, Tenant] | None:
        """Who holds the secret, suspended or not; None for an unknown or revoked one.

        The secret is hashed before it is looked up, so the time that takes tells nothing about any secret.
        """
        try:
            digest = _sha256(secret)
        except UnicodeEncodeError:
            return None
        with self._state:
            return self._books.accounts.by_secret(digest)

    def add_adapter(
        self,
        tenant_id: str,
        *,
        name: str,
        path: str,
        id: str,
        digest: str,
        base_model: str,
        idempotency: Idempotency | None = None,
    ) -> AdapterRecord:
        """Give a loaded adapter a name of the tenant's; from now on the name means this load and no earlier one.

        Raises `Invalid`, `NotFound`, `Conflict`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], AdapterRecord]:
            adapter = AdapterRecord(
                tenant=tenant_id,
                name=name,
                id=id,
                path=path,
                digest=digest,
                base_model=base_model,
                created_us=time_us,
            )
            adapter.check()
            self._books.accounts.check_new_adapter(adapter)
            return [new_event(f"tenant:{tenant_id}", AdapterAdded(adapter=adapter))], adapter

        return self._command("add_adapter", idempotency, AdapterRecord, decide)[0]

    def remove_adapter(self, tenant_id: str, name: str, *, idempotency: Idempotency | None = None) -> AdapterRecord:
        """The adapter that went. Raises `NotFound`, and `Conflict` while it is the tenant's default."""

        def decide(_: int) -> tuple[list[NewEvent], AdapterRecord]:
            adapter = self._books.accounts.adapter(tenant_id, name)
            if self._books.accounts.tenant(tenant_id).default_adapter == name:
                raise Conflict(f"{name!r} is the tenant's default adapter; choose another default first")
            return [new_event(f"tenant:{tenant_id}", AdapterRemoved(adapter=adapter))], adapter

        return self._command("remove_adapter", idempotency, AdapterRecord, decide)[0]

    def adapters(
        self, tenant_id: str | None = None, limit: int = 10_000, after: str | None = None
    ) -> list[AdapterRecord]:
        """One tenant's adapters, or all; `after` is the id of a load. Raises `NotFound`."""
        with self._state:
            accounts = self._books.accounts
            found = list(accounts.adapters.values()) if tenant_id is None else accounts.adapters_of(tenant_id)
            return page(found, lambda adapter: adapter.id, limit, after)

    def resolve_model(self, tenant_id: str, model: str | None) -> tuple[str, AdapterRecord | None]:
        """The priced name and the adapter behind it; None asks for the tenant's default.

        Raises `UnknownModel`, also and in the same words for another tenant's adapter.
        """
        with self._state:
            return self._books.accounts.resolve_model(tenant_id, model, self.base_model)


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
