"""A statement: a final invoice for people and their spreadsheets, as words and exact text.

It says only what never changes after the invoice was made final, and of its tenant what was so when it was cut: the
same invoice gives the same bytes for ever, but for one mark when it is void. Whether it is paid is not on it, nor what
credit notes took back, nor the tax that the payment provider adds.

Pure. Does not know: HTTP; how it looks as a page (`statement_html.py`).
"""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import msgspec

from billing.accounts import Tenant
from billing.errors import Conflict
from billing.invoice import Invoice
from billing.line import InvoiceLine, LineKind
from billing.money import format_exact, format_minor, format_price
from billing.periods import zone
from billing.terms import TaxMode
from billing.tiers import UNITS
from billing.wording import amount_of, describe, noun, price_of

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FORMULA = frozenset("=+-@\t\r\n＝＋－＠")  # what makes a cell a formula where it begins with it


class StatementLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line in words. `quantity` counts as people do, `units` in base units of `unit`; `price` as it is told."""

    id: str
    kind: str
    description: str
    model: str
    adapter: str
    endpoint: str
    token_class: str
    quantity: str
    price: str
    units: int | None
    unit: str
    per: int | None
    unit_price: str
    exact: str
    amount: str
    late_of: str


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendering says. Times are text in the tenant's zone with their offset; amounts exact decimal text."""

    invoice: str
    tenant: str
    name: str
    currency: str
    period_start: str
    period_end: str
    timezone: str
    finalized_at: str
    void: bool
    lines: tuple[StatementLine, ...]
    exact_total: str
    subtotal: str
    tax: str
    total: str
    tax_elsewhere: bool  # the payment provider adds what tax there is
    requests: int
    digest: str
    root: str  # of the tree over the requests; empty: the invoice was cut by a version that kept none
    content_hash: str
    key_id: str  # that signed it; empty: it is not signed
    signature: str


def statement_of(invoice: Invoice, tenant: Tenant) -> Statement:
    """`tenant`: as it was when the invoice was cut. Raises `Conflict` for one that is not final."""
    if invoice.finalized_us is None:
        raise Conflict("a statement is of a final invoice; this one is a draft")
    basis, signed, currency = invoice.basis, invoice.signed, invoice.currency
    timezone = basis.timezone if basis is not None else tenant.timezone
    return Statement(
        invoice=invoice.id,
        tenant=invoice.tenant,
        name=tenant.name,
        currency=currency.upper(),
        period_start=_local(invoice.period_start_us, timezone),
        period_end=_local(invoice.period_end_us, timezone),
        timezone=timezone,
        finalized_at=_local(invoice.finalized_us, timezone),
        void=invoice.voided_us is not None,
        lines=tuple(_line(line, currency) for line in invoice.lines),
        exact_total=format_exact(invoice.total_femto),
        subtotal=format_minor(invoice.total_minor - invoice.tax_minor, currency),
        tax=format_minor(invoice.tax_minor, currency),
        total=format_minor(invoice.total_minor, currency),
        tax_elsewhere=invoice.terms.tax.mode is TaxMode.STRIPE,
        requests=invoice.event_count,
        digest=invoice.events_digest,
        root=basis.root if basis is not None else "",
        content_hash=invoice.content_hash,
        key_id=signed.head.key_id if signed is not None else "",
        signature=signed.signature if signed is not None else "",
    )


CSV_COLUMNS = (
    *("invoice", "status", "tenant", "tenant_name", "currency", "period_start", "period_end", "timezone"),
    *("finalized_at", "record", "line", "kind", "description", "model", "adapter", "endpoint", "token_class"),
    *("quantity", "unit", "unit_price", "per", "exact", "amount", "late_of", "requests", "events_digest"),
    *("events_root", "content_hash", "key_id", "signature"),
)


def as_csv(statement: Statement) -> bytes:
    """RFC 4180, UTF-8: a header, a row for each line, and last one for the total. Every row says whose it is.

    A text that a spreadsheet would take for a formula begins with an apostrophe; numbers stay numbers.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    whole = {
        "invoice": statement.invoice,
        "status": "void" if statement.void else "final",
        "tenant": statement.tenant,
        "tenant_name": _plain(statement.name),
        "currency": statement.currency,
        "period_start": statement.period_start,
        "period_end": statement.period_end,
        "timezone": statement.timezone,
        "finalized_at": statement.finalized_at,
    }
    for line in statement.lines:
        writer.writerow(whole | _csv_line(line))
    total = {
        "record": "total",
        "exact": statement.exact_total,
        "amount": statement.total,
        "requests": str(statement.requests),
        "events_digest": statement.digest,
        "events_root": statement.root,
        "content_hash": statement.content_hash,
        "key_id": statement.key_id,
        "signature": _plain(statement.signature),
    }
    writer.writerow(whole | total)
    return out.getvalue().encode()


def _csv_line(line: StatementLine) -> dict[str, str]:
    return {
        "record": "line",
        "line": line.id,
        "kind": line.kind,
        "description": _plain(line.description),
        "model": _plain(line.model),
        "adapter": _plain(line.adapter),
        "endpoint": _plain(line.endpoint),
        "token_class": line.token_class,
        "quantity": "" if line.units is None else str(line.units),
        "unit": line.unit,
        "unit_price": line.unit_price,
        "per": "" if line.per is None else str(line.per),
        "exact": line.exact,
        "amount": line.amount,
        "late_of": line.late_of,
    }


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in _FORMULA else text


def _line(line: InvoiceLine, currency: str) -> StatementLine:
    unit = None if line.token_class is None else UNITS[line.token_class]
    adapter = line.kind is LineKind.ADAPTER  # counted in microseconds of its period
    counted = unit is not None and line.kind in (LineKind.USAGE, LineKind.ADAPTER)
    return StatementLine(
        id=line.id,
        kind=line.kind,
        description=describe(line, currency),
        model=line.model,
        adapter=line.adapter,
        endpoint=line.endpoint,
        token_class=line.token_class or "",
        quantity=_quantity(line) if counted else "",
        price=_price(line, currency) if counted else "",
        units=line.quantity if counted else None,
        unit="microsecond" if adapter else unit.base if counted and unit else "",
        per=line.total if adapter else unit.per if counted and unit else None,
        unit_price=format_price(line.unit_price_nano) if counted and not line.tiers else "",
        exact=format_exact(line.amount_femto),
        amount=format_minor(line.amount_minor, currency),
        late_of=line.late_of,
    )


def _quantity(line: InvoiceLine) -> str:
    if line.kind is LineKind.ADAPTER:
        stood = Fraction(line.quantity, line.total)
        return "1 month" if stood == 1 else f"{stood} of a month"
    return f"{amount_of(line.unit_class, line.quantity)} {noun(line.unit_class)}"


def _price(line: InvoiceLine, currency: str) -> str:
    if line.kind is LineKind.ADAPTER:
        return f"{format_price(line.unit_price_nano)} {currency.upper()} per month"
    return price_of(line, currency).removeprefix("at ")


def _local(us: int, timezone: str) -> str:
    """An instant as the zone's clock shows it, with its offset."""
    return (_EPOCH + timedelta(microseconds=us)).astimezone(zone(timezone)).isoformat(sep=" ")
