"""An invoice's canonical document: all that its tenant needs to compute it again, as one JSON object.

It says what never changes after the draft was cut: not the status, not what the payment provider made of it. Whole
numbers are numbers, amounts that may be fractions are text (`n` or `n/d` femto-units), nothing is a float. Its
canonical bytes are UTF-8, keys sorted, no spaces; `content_hash_of` is their SHA-256.

The bytes of a cut invoice are fixed for ever. What is added to a document later (a field of a line, a key at the top)
stands in it only where it has not its default, so that older invoices keep their bytes.

Pure. Does not know: where anything is kept, signatures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from billing.invoice import Invoice, InvoiceLine, InvoiceStatus
from billing.lines import Group, booked_lines
from billing.money import exact_text, minor_digits
from billing.prices import PriceBook, PriceVersion
from billing.terms import InvoiceTerms

Document = dict[str, Any]

VERSION = 1
LINE_FIELDS = frozenset(
    {
        *("id", "kind", "model", "adapter", "endpoint", "token_class", "price_id", "late_of", "quantity"),
        *("period_start_us", "period_end_us", "unit_price_nano", "amount_minor", "exact", "price_model", "tiers"),
        *("package_size", "allowance", "minimum", "position", "total", "booked", "base"),
    }
)
"""Of a line these always stand; those that came later only where they say something."""


def document(invoice: Invoice, prices: PriceBook, invoices: Sequence[Invoice]) -> Document:
    """The document of an invoice that has a basis.

    `prices` has every version that it names, and `invoices` are its tenant's in the order of their cuts; what was added
    to either since the cut does not show.
    """
    if invoice.basis is None:
        raise ValueError(f"{invoice.id} has no basis")
    basis = invoice.basis
    booked = _booked(invoice, prices, invoices)
    named = {*basis.price_ids, *(one.price_id for one in invoice.lines), *(line.price_id for _, line in booked)}
    said: Document = {
        "version": VERSION,
        "object": "meterhouse.invoice",
        "id": invoice.id,
        "tenant": invoice.tenant,
        "currency": invoice.currency,
        "period": {
            "start_us": invoice.period_start_us,
            "end_us": invoice.period_end_us,
            "anchor_day": basis.anchor_day,
            "timezone": basis.timezone,
        },
        "cut_us": invoice.cut_us,
        "lines": [_line(line) for line in invoice.lines],
        "rounding": {"digits": minor_digits(invoice.currency), "total": "half_even", "lines": "largest_remainder"},
        "exact_total": exact_text(invoice.total_femto),
        "total_minor": invoice.total_minor,
        "true_up": invoice.true_up,
        "prices": [_price(version) for id, version in prices.versions.items() if id in named],
        "priced_later": dict(basis.priced_later),
        "late": [msgspec.to_builtins(late) for late in basis.late],
        "counted": [msgspec.to_builtins(start) for start in basis.counted],
        "booked": [{"invoice_id": id, **_line(line)} for id, line in booked],
        "events": {"count": invoice.event_count, "root": basis.root, "digest": invoice.events_digest},
    }
    if invoice.terms != InvoiceTerms():
        said["terms"] = msgspec.to_builtins(invoice.terms)
    plain: Document = json.loads(canonical(said))  # lists where there were tuples: what everybody else reads
    return plain


def canonical(value: Any) -> bytes:
    """The canonical bytes of a JSON value without floats."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def content_hash_of(document: Document) -> str:
    """SHA-256 hex of the canonical bytes."""
    return hashlib.sha256(canonical(document)).hexdigest()


def _booked(invoice: Invoice, prices: PriceBook, invoices: Sequence[Invoice]) -> list[tuple[str, InvoiceLine]]:
    """The lines of invoices that stood at the cut and share tiers with this one's, each with its invoice's id."""
    standing = InvoiceStatus.FINALIZED  # then, whatever became of them
    earlier = [
        msgspec.structs.replace(one, status=standing)
        for one in invoices
        if one.id != invoice.id and one.stood_at(invoice.cut_seq)
    ]
    shared = {
        Group(line.period_start_us, prices.versions[line.price_id].slot, line.unit_class)
        for line in invoice.lines
        if line.tiers
    }
    invoice_of = {line.id: one.id for one in earlier for line in one.lines}
    lines = booked_lines(earlier, prices)
    found = {line.id: line for group, of_group in lines.items() if group in shared for line in of_group}
    return [(id, found[line_id]) for line_id, id in invoice_of.items() if line_id in found]


def _line(line: InvoiceLine) -> Mapping[str, Any]:
    plain = msgspec.to_builtins(line)
    defaults = {field.name: field.default for field in msgspec.structs.fields(InvoiceLine)}
    return {name: value for name, value in plain.items() if name in LINE_FIELDS or value != defaults[name]}


def _price(version: PriceVersion) -> Mapping[str, Any]:
    """With the component of each class that has a price."""
    return {
        "id": version.id,
        "tenant": version.tenant,
        "model": version.model,
        "endpoint": version.endpoint,
        "currency": version.rate.currency,
        "effective_at_us": version.effective_at_us,
        "recorded_us": version.recorded_us,
        "components": [msgspec.to_builtins(one) for one in version.by_class().values()],
    }
