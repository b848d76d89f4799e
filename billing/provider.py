"""What the payment provider says of our invoices, and which of our invoices' facts follow from it.

The provider's messages come late, twice and in any order, so no message moves an invoice: the provider's state does,
and only forwards. From `exported` an invoice goes to `paid`, `uncollectible` or `void`; from `uncollectible` to `paid`
or `void`; `paid` and `void` are ends. A state that is older than ours moves nothing.

Pure. Does not know: how the state is asked for, signatures, HTTP.
"""

from __future__ import annotations

import msgspec

from billing.invoice import (
    AT_PROVIDER,
    Invoice,
    InvoiceFact,
    InvoicePaid,
    InvoicePaymentFailed,
    InvoiceStatus,
    InvoiceUncollectible,
    InvoiceVoided,
)


class ProviderInvoice(msgspec.Struct, frozen=True, kw_only=True):
    """One invoice as the provider has it. `faults` are what it holds otherwise than we sent it, in words.

    `total_minor` is without the tax that the provider itself added.
    """

    id: str
    status: str  # the provider's word: draft, open, paid, uncollectible, void
    total_minor: int
    attempts: int = 0  # to collect it, those that failed and the one that did not
    faults: tuple[str, ...] = ()
    tax_minor: int = 0
    credited_minor: int = 0  # by its credit notes


class ProviderEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the provider, its signature checked."""

    id: str
    type: str
    created_s: int
    object_id: str = ""
    invoice_id: str = ""  # ours, where it is about one of ours
    ignored: str = ""  # why it is none of our business; empty: it may be
    snapshot: ProviderInvoice | None = None  # the invoice as it was when the message was made


class ProviderEventSeen(msgspec.Struct, frozen=True, kw_only=True, tag="provider.event"):
    """A message came, and what follows from it stands behind it in the log. Once for each id."""

    id: str
    kind: str  # the provider's type
    created_s: int
    object_id: str
    invoice_id: str
    outcome: str  # "moved", "unchanged", or why it was ignored


ENDS = frozenset({"paid", "void", "uncollectible"})


def moves(invoice: Invoice, theirs: ProviderInvoice, time_us: int) -> list[InvoiceFact]:
    """The facts by which ours catches up with theirs; none where it has, or where ours is further."""
    id, ours = invoice.id, invoice.status
    if ours not in AT_PROVIDER or ours is InvoiceStatus.PAID:
        return []
    found: list[InvoiceFact] = []
    if theirs.status in ("open", "uncollectible") and theirs.attempts > invoice.payment_failures:
        found.append(InvoicePaymentFailed(invoice_id=id, at_us=time_us, attempt=theirs.attempts))
    if theirs.status == "paid":
        found.append(InvoicePaid(invoice_id=id, at_us=time_us))
    elif theirs.status == "void":
        found.append(InvoiceVoided(invoice_id=id, at_us=time_us))
    elif theirs.status == "uncollectible" and ours is not InvoiceStatus.UNCOLLECTIBLE:
        found.append(InvoiceUncollectible(invoice_id=id, at_us=time_us))
    return found


def status_fault(invoice: Invoice, theirs: ProviderInvoice) -> str:
    """How the provider's status contradicts ours; empty where it does not."""
    expected = {
        InvoiceStatus.EXPORTED: "open",
        InvoiceStatus.PAID: "paid",
        InvoiceStatus.UNCOLLECTIBLE: "uncollectible",
    }[invoice.status]
    return "" if theirs.status == expected else f"status {theirs.status} instead of {expected}"
