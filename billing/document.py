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

from billing.asked import Span, spans_of
from billing.invoice import Invoice, InvoiceStatus
from billing.line import LISTED, InvoiceLine, LineKind
from billing.lines import Group, booked_lines
from billing.money import exact_text, minor_digits
from billing.periods import Period
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

AGREED = (LineKind.DISCOUNT, LineKind.COMMITMENT)
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(InvoiceLine)}


def document(invoice: Invoice, prices: PriceBook, invoices: Sequence[Invoice]) -> Document:
    """The document of an invoice that has a basis.

    `prices` has every version that it names, and `invoices` are its tenant's in the order of their cuts; what was added
    to either since the cut does not show.
    """
    if invoice.basis is None:
        raise ValueError(f"{invoice.id} has no basis")
    basis = invoice.basis
    earlier = _as_it_stood(invoice, invoices)
    spans = _spans(invoice, earlier)
    booked = _booked(invoice, prices, earlier, spans)
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
    if spans:
        said["spans"] = [_span(span) for span in spans]
    plain: Document = json.loads(canonical(said))  # lists where there were tuples: what everybody else reads
    return plain


def canonical(value: Any) -> bytes:
    """The canonical bytes of a JSON value without floats."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def content_hash_of(document: Document) -> str:
    """SHA-256 hex of the canonical bytes."""
    return hashlib.sha256(canonical(document)).hexdigest()


def _as_it_stood(invoice: Invoice, invoices: Sequence[Invoice]) -> list[Invoice]:
    """The tenant's earlier invoices with the states that they had at the cut, as far as they matter: void or not."""
    return [
        msgspec.structs.replace(
            one, status=InvoiceStatus.FINALIZED if one.stood_at(invoice.cut_seq) else InvoiceStatus.VOID
        )
        for one in invoices
        if one.id != invoice.id and one.cut_seq < invoice.cut_seq
    ]


def _spans(invoice: Invoice, earlier: Sequence[Invoice]) -> list[Span]:
    """The periods that discounts and minimums are computed for; none where there are no such terms."""
    period = Period(start_us=invoice.period_start_us, end_us=invoice.period_end_us)
    spans = spans_of(period, [line for line in invoice.lines if line.kind in LISTED], invoice.terms, earlier)
    agreed = any(
        span.terms.discounts or span.terms.commitment or any(line.kind in AGREED for line in span.standing)
        for span in spans
    )
    return spans if agreed else []


def _span(span: Span) -> Document:
    said: Document = {
        "late_of": span.late_of,
        "start_us": span.period.start_us,
        "end_us": span.period.end_us,
        "terms": msgspec.to_builtins(span.terms),
        "new": [line.id for line in span.new],
        "standing": [line.id for line in span.standing],
    }
    return said


def _booked(
    invoice: Invoice, prices: PriceBook, earlier: Sequence[Invoice], spans: Sequence[Span]
) -> list[tuple[str, InvoiceLine]]:
    """The lines of invoices that stood at the cut which this one's hang on, each with its invoice's id: those that
    share tiers, those of a span with terms, and what was put off."""
    shared = {
        Group(line.period_start_us, prices.versions[line.price_id].slot, line.unit_class)
        for line in invoice.lines
        if line.tiers
    }
    tiered = booked_lines(earlier, prices)
    wanted = {line.id for group, of_group in tiered.items() if group in shared for line in of_group}
    wanted |= {line.id for span in spans for line in span.standing}
    return [
        (one.id, line)
        for one in earlier
        if one.status is not InvoiceStatus.VOID
        for line in one.lines
        if line.id in wanted or line.kind is LineKind.CARRY
    ]


def _line(line: InvoiceLine) -> Mapping[str, Any]:
    plain = msgspec.to_builtins(line)
    return {name: value for name, value in plain.items() if name in LINE_FIELDS or value != _DEFAULTS[name]}


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
