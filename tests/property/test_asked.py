"""Discounts, minimums, carries and tax together: exact over all standing invoices, whatever is late or voided."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.asked import ask, carried_femto, sealed
from billing.invoice import Invoice, InvoiceStatus
from billing.line import LISTED, UNBOOKED, InvoiceLine, LineKind
from billing.lines import again
from billing.money import FEMTO, exact_text, format_amount, minor_femto, round_half_even
from billing.periods import Period
from billing.terms import CommitmentPart, Discount, InvoiceTerms, Tax, TaxMode, TaxRate
from billing.tiers import TokenClass

SPAN_US = 1000
CELLS = [("a", TokenClass.PROMPT), ("a", TokenClass.COMPLETION), ("b", TokenClass.PROMPT)]

percents = st.integers(1, 100 * 10**4).map(lambda n: f"{n // 10**4}.{n % 10**4:04}")
money = st.integers(1, 3 * FEMTO).map(format_amount)


@st.composite
def discounts(draw: st.DrawFn, id: str) -> Discount:
    percent = draw(st.one_of(st.just(""), percents))
    return Discount(
        id=id,
        tenant="t",
        name=id,
        percent=percent,
        amount="" if percent else draw(money),
        from_us=0,
        model=draw(st.sampled_from(["", "a", "b"])),
        token_class=draw(st.sampled_from(["", "prompt", "completion"])),
        created_us=0,
    )


@st.composite
def terms(draw: st.DrawFn) -> InvoiceTerms:
    ids = draw(st.lists(st.sampled_from(["d1", "d2", "d3"]), unique=True))
    parts = [
        CommitmentPart(amount=draw(money), start_us=0, end_us=draw(st.integers(1, 7)), period_us=7)
        for _ in range(draw(st.integers(0, 2)))
    ]
    rates = tuple(TaxRate(name=name, percent=draw(percents)) for name in draw(st.sampled_from(["", "v", "vw"])))
    return InvoiceTerms(
        discounts=tuple(draw(discounts(id)) for id in ids),
        share=draw(st.sampled_from(["1", "1/3", "5/7"])),
        commitment=tuple(parts),
        tax=Tax(mode=TaxMode.FIXED, rates=rates) if rates else Tax(),
    )


amounts = st.lists(st.tuples(st.sampled_from(CELLS), st.integers(-FEMTO // 2, 2 * FEMTO)), max_size=4)
drafts = st.tuples(
    st.just("draft"), st.integers(0, 3), amounts, st.lists(st.tuples(st.integers(0, 5), amounts)), terms()
)
steps = st.one_of(drafts, drafts, st.tuples(st.just("void"), st.integers(0, 5)))


def listed(period: Period, amounts: list[Any], late_of: str = "") -> list[InvoiceLine]:
    return [
        InvoiceLine(
            id="",
            model=model,
            adapter="",
            token_class=token_class,
            price_id="p",
            period_start_us=period.start_us,
            period_end_us=period.end_us,
            late_of=late_of,
            quantity=1,
            unit_price_nano=0,
            amount_minor=0,
            exact=exact_text(Fraction(femto, 3)),
        )
        for (model, token_class), femto in amounts
    ]


def drafted(number: int, period: Period, lines: list[InvoiceLine], terms: InvoiceTerms, all: list[Invoice]) -> Invoice:
    asked = sealed(f"i{number}", "usd", period, ask(period, lines, terms, all), terms.tax)
    return Invoice(
        id=f"i{number}",
        tenant="t",
        currency="usd",
        status=InvoiceStatus.DRAFT,
        period_start_us=period.start_us,
        period_end_us=period.end_us,
        cut_us=0,
        cut_seq=number,
        lines=asked,
        total_minor=sum(line.amount_minor for line in asked),
        event_count=0,
        events_digest="",
        created_us=0,
        terms=terms,
    )


def naive(terms: InvoiceTerms, lines: list[InvoiceLine]) -> tuple[dict[str, Fraction], Fraction]:
    """What each discount takes of the listed lines, and what is missing to the minimum; told once more, plainly."""
    cells: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for line in lines:
        cells[line.model, str(line.token_class)] += line.amount_femto
    taken: dict[str, Fraction] = {}
    for one in terms.discounts:
        mine = [
            cell
            for cell in sorted(cells)
            if cells[cell] > 0 and one.model in ("", cell[0]) and one.token_class in ("", cell[1])
        ]
        budget = Fraction(one.amount or "0") * FEMTO * Fraction(terms.share)
        taken[one.id] = Fraction(0)
        for cell in mine:
            part = cells[cell] * Fraction(one.percent) / 100 if one.percent else min(cells[cell], budget)
            budget -= part
            cells[cell] -= part
            taken[one.id] += part
    target = sum(
        (Fraction(one.amount) * FEMTO * (one.end_us - one.start_us) / one.period_us for one in terms.commitment),
        Fraction(0),
    )
    return taken, max(Fraction(0), target - sum(cells.values(), Fraction(0)))


def check_span(of: Invoice, invoices: list[Invoice]) -> None:
    """What standing invoices have for one's period is what all of its listed lines together come to."""
    by_id = {one.id: one for one in invoices}
    mine = [
        line
        for one in invoices
        if one.status is not InvoiceStatus.VOID
        for line in one.lines
        if (by_id[line.late_of] if line.late_of else one).period_start_us == of.period_start_us
    ]
    taken, missing = naive(of.terms, [line for line in mine if line.kind in LISTED])
    for kind, term, expected in [
        *((LineKind.DISCOUNT, id, -taken.get(id, Fraction(0))) for id in ("d1", "d2", "d3")),
        (LineKind.COMMITMENT, "", missing),
    ]:
        assert sum(Fraction(line.amount_femto) for line in mine if (line.kind, line.term) == (kind, term)) == expected


def check_invoice(invoice: Invoice) -> None:
    net = [line for line in invoice.lines if line.kind is not LineKind.TAX]
    exact = sum((Fraction(line.amount_femto) for line in net), Fraction(0))
    subtotal = sum(line.amount_minor for line in net)
    assert exact >= 0
    assert subtotal == round_half_even(exact, "usd")
    taxes = [line for line in invoice.lines if line.kind is LineKind.TAX]
    rates = invoice.terms.tax.rates if subtotal else ()
    assert [line.amount_minor for line in taxes] == [round(subtotal * Fraction(rate.percent) / 100) for rate in rates]
    assert {line.base for line in taxes} <= {str(minor_femto(subtotal, "usd"))}
    assert invoice.total_minor == subtotal + sum(line.amount_minor for line in taxes)
    assert len({line.id for line in invoice.lines}) == len(invoice.lines)
    for line in invoice.lines:
        if line.kind not in LISTED | {LineKind.CARRY}:
            assert again(line) == line.amount_femto


@given(st.lists(steps, min_size=1, max_size=10))
@settings(max_examples=150, deadline=None)
def test_all_kinds_together_are_exact_over_standing_invoices(history: list[Any]) -> None:
    invoices: list[Invoice] = []
    for number, step in enumerate(history):
        standing = [one for one in invoices if one.status is not InvoiceStatus.VOID]
        if step[0] == "void":
            if standing:
                gone = standing[step[1] % len(standing)]
                invoices[invoices.index(gone)] = msgspec.structs.replace(gone, status=InvoiceStatus.VOID)
            continue
        _, place, own, late, agreed = step
        period = Period(start_us=place * SPAN_US, end_us=(place + 1) * SPAN_US)
        if any(one.period_start_us == period.start_us for one in standing):
            continue
        lines = listed(period, own)
        touched = []
        for which, found in late if standing else []:
            home = standing[which % len(standing)]
            lines += listed(Period(start_us=home.period_start_us, end_us=home.period_end_us), found, home.id)
            touched += [home] if found else []
        made = drafted(number, period, lines, agreed, invoices)
        assert drafted(number, period, lines, agreed, list(invoices)) == made
        before = carried_femto(invoices)
        invoices.append(made)
        check_invoice(made)
        for one in (made, *touched):
            check_span(one, invoices)
        booked = sum((Fraction(line.amount_femto) for line in made.lines if line.kind not in UNBOOKED), Fraction(0))
        net = sum((Fraction(line.amount_femto) for line in made.lines if line.kind is not LineKind.TAX), Fraction(0))
        assert net == booked + carried_femto(invoices) - before


@given(amounts, terms(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_of_listed_lines_moves_nothing_that_follows_from_them(
    own: list[Any], agreed: InvoiceTerms, random: Any
) -> None:
    period = Period(start_us=0, end_us=SPAN_US)
    first = drafted(0, period, listed(period, own), agreed, [])
    random.shuffle(own)
    second = drafted(0, period, listed(period, own), agreed, [])
    followed = [
        [(line.kind, line.term, line.exact) for line in one.lines if line.kind not in LISTED] for one in (first, second)
    ]
    assert followed[0] == followed[1]
    assert first.total_minor == second.total_minor
