"""From listed lines to what an invoice asks: discounts, the tenant's minimum, a carry, tax; in this order.

Discounts and minimum are of a *span*, the period of one invoice. What all standing invoices and this one list for the
span is discounted and raised to its minimum as a whole, and this invoice asks what the others have not asked yet. So
usage that turns up late gets the discount and counts towards the minimum of its own period, by the terms that its
period's invoice was cut by, and over standing invoices both are exact, in whatever order usage came and invoices were
cut or voided.

    discount    base = what earlier discounts left of the lines that it is for
                - base x rate / 100, or - min(base, fixed x share); less `booked`
    commitment  base = what discounts left of all listed lines of the span
                max(0, sum of the parts' targets - base); less `booked`
    carry       so that no invoice asks for less than nothing: what is below 0 is put off to the next one
    tax         base = the rounded sum of all lines before it; base x rate / 100, rounded half to even, each rate alone

An amount off is taken from the lines that it is for in the order of their model and class. Lines before tax are rounded
together (largest remainder), tax is of their rounded sum: so it is the tax of the net amount that the invoice shows.

Pure. Does not know: usage, prices, what time it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from billing.invoice import Invoice, InvoiceStatus
from billing.line import LISTED, InvoiceLine, LineKind
from billing.lines import close
from billing.money import exact_text, minor_femto, parse_amount, percent_of, round_half_even
from billing.periods import Period
from billing.terms import Discount, InvoiceTerms, Tax, TaxMode
from billing.tiers import TokenClass

ZERO = Fraction(0)
Cell = tuple[str, str]
"""Model and class: what a discount can be for."""


class Span(msgspec.Struct):
    """One invoice's period, and what stands and is new for it."""

    period: Period
    terms: InvoiceTerms
    late_of: str  # the invoice whose period it is; empty: this one's own
    standing: list[InvoiceLine] = []
    new: list[InvoiceLine] = []

    def had(self, kind: LineKind, term: str = "") -> Fraction:
        """What standing invoices have of it."""
        found = (line for line in self.standing if line.kind is kind and line.term == term)
        return sum((Fraction(line.amount_femto) for line in found), ZERO)


def ask(
    period: Period, listed: Sequence[InvoiceLine], terms: InvoiceTerms, earlier: Sequence[Invoice]
) -> list[InvoiceLine]:
    """The listed lines and what follows from them, tax apart, not rounded yet. `earlier`: all of the tenant's."""
    lines = list(listed)
    for span in spans_of(period, listed, terms, earlier):
        lines += _of_span(span)
    lines += _carry(period, lines, earlier)
    return lines


def sealed(
    invoice_id: str, currency: str, period: Period, lines: Sequence[InvoiceLine], tax: Tax
) -> tuple[InvoiceLine, ...]:
    """All lines with ids, rounded, the tax's too."""
    closed = close(invoice_id, currency, lines)
    net = minor_femto(sum(line.amount_minor for line in closed), currency)
    if net <= 0 or tax.mode is not TaxMode.FIXED:
        return closed
    taxes = []
    for number, rate in enumerate(tax.rates, start=len(closed) + 1):
        exact = percent_of(net, rate.percent)
        line = _line(period, LineKind.TAX, exact, name=rate.name, rate=rate.percent, base=exact_text(net))
        minor = round_half_even(exact, currency)
        taxes.append(msgspec.structs.replace(line, id=f"{invoice_id}-{number}", amount_minor=minor))
    return (*closed, *taxes)


def carried_femto(invoices: Sequence[Invoice]) -> Fraction:
    """What a tenant's standing invoices put off and no later one has taken off yet."""
    lines = (line for one in invoices if one.status is not InvoiceStatus.VOID for line in one.lines)
    return sum((Fraction(line.amount_femto) for line in lines if line.kind is LineKind.CARRY), ZERO)


# -- spans -----------------------------------------------------------------------------------------------------------


def spans_of(
    period: Period, listed: Sequence[InvoiceLine], terms: InvoiceTerms, earlier: Sequence[Invoice]
) -> list[Span]:
    """This invoice's own, and each that it has late lines for, in order of time."""
    standing = [one for one in earlier if one.status is not InvoiceStatus.VOID]
    own = Span(period, terms, "")
    spans = {one.id: Span(_period(one), one.terms, one.id) for one in standing}
    by_id = {one.id: one for one in earlier}

    def home(line: InvoiceLine, on: Invoice | None) -> Span | None:
        """Whose period the line is for; a void invoice's is that of the one which has its period now."""
        of = by_id.get(line.late_of) if line.late_of else on
        if of is None:
            return own
        if of.id in spans:
            return spans[of.id]
        heirs = [span for span in (own, *spans.values()) if span.period.has(of.period_start_us)]
        return heirs[0] if heirs else None

    for line in listed:
        if (span := home(line, None)) is not None:
            span.new.append(line)
    touched = [own, *(span for span in spans.values() if span.new)]
    for invoice in standing:
        for line in invoice.lines:
            if (span := home(line, invoice)) is not None:
                span.standing.append(line)
    return sorted(touched, key=lambda span: span.period.start_us)


def _period(invoice: Invoice) -> Period:
    return Period(start_us=invoice.period_start_us, end_us=invoice.period_end_us)


def _of_span(span: Span) -> Iterator[InvoiceLine]:
    left: dict[Cell, Fraction] = defaultdict(Fraction)
    for line in [*span.standing, *span.new]:
        if line.kind in LISTED:
            left[line.model, line.unit_class.value] += line.amount_femto
    for discount in _discounts(span):
        base, taken = _take(discount, left, Fraction(span.terms.share))
        booked = span.had(LineKind.DISCOUNT, discount.id)
        if exact := -taken - booked:
            known = discount in span.terms.discounts
            yield _line(
                span.period,
                LineKind.DISCOUNT,
                exact,
                late_of=span.late_of,
                model=discount.model,
                token_class=TokenClass(discount.token_class) if discount.token_class else None,
                name=discount.name,
                term=discount.id,
                rate=discount.percent if known else "",
                fixed=discount.amount if known else "",
                share=span.terms.share,
                base=exact_text(base),
                booked=exact_text(booked),
            )
    base = sum(left.values(), ZERO)
    target = sum((part.target_femto for part in span.terms.commitment), ZERO)
    booked = span.had(LineKind.COMMITMENT)
    if exact := max(ZERO, target - base) - booked:
        yield _line(
            span.period,
            LineKind.COMMITMENT,
            exact,
            late_of=span.late_of,
            parts=span.terms.commitment,
            base=exact_text(base),
            booked=exact_text(booked),
        )


def _discounts(span: Span) -> Iterator[Discount]:
    """Those of the terms; then those of which something is booked, though the terms do not have them any more."""
    yield from span.terms.discounts
    gone = {line.term: line for line in span.standing if line.kind is LineKind.DISCOUNT}
    for discount in span.terms.discounts:
        gone.pop(discount.id, None)
    for term, line in sorted(gone.items()):
        yield Discount(id=term, tenant="", name=line.name, from_us=0, created_us=0)


def _take(discount: Discount, left: dict[Cell, Fraction], share: Fraction) -> tuple[Fraction, Fraction]:
    """Take a discount from what is left of each cell: what there was, and what it took."""
    cells = [cell for cell in sorted(left) if left[cell] > 0 and discount.is_for(*cell)]
    base = sum((left[cell] for cell in cells), ZERO)
    most = parse_amount(discount.amount) * share if discount.amount else ZERO
    taken = ZERO
    for cell in cells:
        part = percent_of(left[cell], discount.percent) if discount.percent else min(left[cell], most - taken)
        left[cell] -= part
        taken += part
    return base, taken


def _carry(period: Period, lines: Sequence[InvoiceLine], earlier: Sequence[Invoice]) -> Iterator[InvoiceLine]:
    """Nothing is asked below 0; what was put off before is taken off as far as there is something to take it from."""
    net = sum((Fraction(line.amount_femto) for line in lines), ZERO)
    carried = carried_femto(earlier)
    if exact := max(-carried, -net):
        yield _line(period, LineKind.CARRY, exact, base=exact_text(carried))


def _line(period: Period, kind: LineKind, exact: Fraction, **fields: object) -> InvoiceLine:
    empty = InvoiceLine(
        id="",
        kind=kind,
        model="",
        adapter="",
        token_class=None,
        price_id="",
        period_start_us=period.start_us,
        period_end_us=period.end_us,
        quantity=0,
        unit_price_nano=0,
        amount_minor=0,
        exact=exact_text(exact),
    )
    return msgspec.structs.replace(empty, **fields)
