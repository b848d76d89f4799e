"""Invoices: what a tenant owes for a period, line by line, exact before the one rounding.

Knows: the shape of an invoice and how rated usage becomes its lines. Does not know: where usage is kept,
what the payment provider is, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from billing.accounts import Tenant
from billing.prices import TokenClass
from metering.events import UsageEvent


class InvoiceStatus(StrEnum):
    """draft → finalized → exported; draft or finalized → void."""

    DRAFT = "draft"
    FINALIZED = "finalized"
    EXPORTED = "exported"
    VOID = "void"


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one class of one model at one price.

    `id` is unique for ever and the same on every export. `late_of` names the earlier invoice whose
    period these tokens belong to when they turned up after its cut; empty for the period's own.
    """

    id: str
    model: str
    adapter: str
    token_class: TokenClass
    price_id: str
    period_start_us: int
    period_end_us: int
    late_of: str = ""
    quantity: int  # tokens
    unit_price_nano: int  # nano-units of currency per million tokens
    amount_minor: int  # rounded; the lines' sum is the rounded exact total

    @property
    def amount_femto(self) -> int:
        """The exact amount: quantity x unit price."""
        return self.quantity * self.unit_price_nano


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """A draft's content never changes; only status, times and the provider's ids do."""

    id: str
    tenant: str
    currency: str
    status: InvoiceStatus
    period_start_us: int  # inclusive
    period_end_us: int  # exclusive
    cut_us: int  # when it was cut; what turned up later is late and on a later invoice
    cut_seq: int  # the ledger's sequence at the cut: what decides, clocks do not
    yields_to: tuple[str, ...] = ()  # invoices that stood when this one was cut: what is theirs is not on it
    lines: tuple[InvoiceLine, ...]
    total_minor: int  # = sum of the lines' amount_minor
    event_count: int
    events_digest: str  # sha256 over the ordered (event id, content hash)
    created_us: int
    finalized_us: int | None = None
    export_started_us: int | None = None
    exported_us: int | None = None
    voided_us: int | None = None
    stripe_invoice_id: str | None = None
    stripe_ids: dict[str, str] = {}  # what an export made: our id (of invoice or line) → the provider's

    @property
    def total_femto(self) -> int:
        """The exact total, before the one rounding."""
        return sum(line.amount_femto for line in self.lines)


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the payment provider holds now for our invoice."""

    stripe_invoice_id: str
    total_minor: int
    status: str  # the provider's word
    ids: dict[str, str] = {}  # our id (of invoice or line) → the provider's


class Exporter(Protocol):
    """Obligations: safe to call again after a kill at any point, with no second invoice and no line twice.

    Raises `StripeNotConfigured` only when nothing was sent, any other `ExportError` when something may have been.
    """

    def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult: ...


class UsageSource(Protocol):
    """Settled usage by time of request; `metering.clickhouse.UsageStore` is one."""

    def events(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        *,
        settled_from_us: int | None = None,
        settled_to_us: int | None = None,
    ) -> Iterator[UsageEvent]:
        """Events with start_us <= ts_us < end_us, each id and content once, ordered by (ts_us, event_id)."""
        ...
