"""The signatures of `Billing`, for the rooms that build against it while it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from billing.accounts import AdapterRecord, Key, Tenant
from billing.invoice import Exporter, Invoice, UsageSource
from billing.prices import PriceVersion, Rate
from metering.events import UsageEvent


class Idempotency(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's promise that equal keys mean one command. `payload_hash` covers the whole request."""

    key: str
    payload_hash: str
    actor: str = "admin"


class Hold(msgspec.Struct, frozen=True):
    """What of a request is covered: the whole prompt and so many completion tokens over all choices."""

    covered_tokens: int
    complete: bool  # all that was wanted is covered


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Credits given to a tenant; the amount is exact decimal text."""

    id: str
    tenant: str
    amount: str
    currency: str
    reason: str
    created_us: int


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Femto-units; available = granted - charged - held."""

    tenant: str
    currency: str
    granted_femto: int
    charged_femto: int
    held_femto: int
    available_femto: int


class Billing:
    def __init__(self, store: object, *, base_model: str = "", clock: Callable[[], int] | None = None) -> None: ...
    def refresh(self) -> None: ...
    def close(self) -> None: ...
    def alarms(self) -> dict[str, int]: ...
    def create_tenant(
        self,
        *,
        id: str | None = None,
        name: str,
        currency: str = "usd",
        stripe_customer_id: str | None = None,
        default_adapter: str | None = None,
        limits: dict[str, int] | None = None,
        idempotency: Idempotency | None = None,
    ) -> Tenant: ...
    def tenant(self, tenant_id: str) -> Tenant: ...
    def tenants(self, limit: int = 100, after: str | None = None) -> list[Tenant]: ...
    def update_tenant(self, tenant_id: str, *, idempotency: Idempotency | None = None, **changes: object) -> Tenant: ...
    def create_key(
        self, tenant_id: str, name: str, *, idempotency: Idempotency | None = None
    ) -> tuple[Key, str | None]: ...  # None: a replay, the secret is not shown again
    def keys(self, tenant_id: str, limit: int = 100, after: str | None = None) -> list[Key]: ...
    def revoke_key(self, key_id: str, *, idempotency: Idempotency | None = None) -> Key: ...
    def authenticate(self, secret: str) -> tuple[Key, Tenant] | None: ...
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
    ) -> AdapterRecord: ...
    def remove_adapter(self, tenant_id: str, name: str, *, idempotency: Idempotency | None = None) -> AdapterRecord: ...
    def adapters(
        self, tenant_id: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[AdapterRecord]: ...
    def resolve_model(self, tenant_id: str, model: str | None) -> tuple[str, AdapterRecord | None]: ...
    def set_price(
        self,
        *,
        model: str,
        effective_at_us: int,
        currency: str,
        per_million: Mapping[str, str],
        tenant: str | None = None,
        idempotency: Idempotency | None = None,
    ) -> PriceVersion: ...
    def prices(self, limit: int = 100, after: str | None = None) -> list[PriceVersion]: ...
    def quote(self, tenant_id: str, model: str, base_model: str, ts_us: int) -> Rate: ...
    def grant_credit(
        self, tenant_id: str, amount: str, currency: str, reason: str, *, idempotency: Idempotency | None = None
    ) -> Grant: ...
    def balance(self, tenant_id: str) -> Balance: ...
    def open_hold(self, tenant_id: str, request_id: str, rate: Rate, prompt_tokens: int, want_tokens: int) -> Hold: ...
    def extend_hold(self, request_id: str, want_tokens_total: int) -> Hold: ...
    def reprice_prompt(self, request_id: str, prompt: int, cached: int) -> None: ...
    def settle(self, event: UsageEvent) -> None: ...
    def release(self, request_id: str) -> None: ...
    def record(self, events: Sequence[UsageEvent]) -> None: ...
    def rate_unrated(
        self, *, idempotency: Idempotency | None = None
    ) -> int: ...  # usage that had no price and has one now
    def draft_invoice(
        self,
        tenant_id: str,
        start_us: int,
        end_us: int,
        *,
        usage: UsageSource,
        watermark_us: int,
        idempotency: Idempotency | None = None,
    ) -> Invoice: ...
    def finalize_invoice(self, invoice_id: str, *, idempotency: Idempotency | None = None) -> Invoice: ...
    def export_invoice(
        self, invoice_id: str, exporter: Exporter, *, idempotency: Idempotency | None = None
    ) -> Invoice: ...
    def void_invoice(self, invoice_id: str, *, idempotency: Idempotency | None = None) -> Invoice: ...
    def invoice(self, invoice_id: str) -> Invoice: ...
    def invoices(self, tenant_id: str | None = None, limit: int = 100, after: str | None = None) -> list[Invoice]: ...
    def reconcile(
        self,
        start_us: int,
        end_us: int,
        *,
        usage: UsageSource,
        spool_events: Iterable[UsageEvent] = (),  # settled here and not yet in `usage`
        journal_totals: Mapping[tuple[str, str, int], tuple[int, int, int]]
        | None = None,  # (tenant, model, hour_us) → prompt, cached, completion
        stripe: Callable[[Sequence[Invoice]], Mapping[str, int]] | None = None,  # our invoice id → total in minor units
    ) -> object: ...
