"""Invoices: every charge on at most one standing invoice, none forgotten, lines exact to the digit."""

from __future__ import annotations

import itertools
from fractions import Fraction

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.invoice import Invoice, InvoiceDrafted, InvoiceLine, Invoices, InvoiceStatus, InvoiceVoided, owner
from billing.lines import Charge, Period, again, close, cut_lines
from billing.money import round_half_even
from billing.owners import Owners
from billing.prices import PriceBook, PriceSet, PriceVersion, Rate
from billing.tiers import REQUIRED


def version(id: str, prompt: int, cached: int, completion: int) -> PriceVersion:
    rate = Rate(price_id=id, currency="usd", prompt=prompt, cached=cached, completion=completion)
    return PriceVersion(id=id, tenant=None, model="*", effective_at_us=0, recorded_us=0, rate=rate)


prices = st.integers(0, 10**15)
books = st.lists(st.tuples(prices, prices, prices), min_size=1, max_size=3).map(
    lambda rows: [version(f"p{number}", *row) for number, row in enumerate(rows)]
)
counts = st.integers(0, 10**7)


@st.composite
def charges(draw: st.DrawFn) -> list[Charge]:
    book = draw(books)
    rows = draw(st.lists(st.tuples(st.sampled_from(["base", "pirate"]), counts, counts, counts), max_size=40))
    return [
        Charge(
            model=model,
            adapter="",
            quantities=dict(zip(REQUIRED, row, strict=True)),
            price=draw(st.sampled_from(book)),
            late_of=None,
        )
        for model, *row in rows
    ]


def cut(currency: str, found: list[Charge]) -> tuple[InvoiceLine, ...]:
    book = PriceBook()
    for price in {charge.price.id: charge.price for charge in found}.values():
        book.apply(PriceSet(price=price))
    return close("i", currency, cut_lines(Period(start_us=0, end_us=100), found, book=book))


@given(charges(), st.sampled_from(["usd", "jpy", "kwd"]), st.randoms())
def test_lines_hold_every_token_once_at_its_price(found: list[Charge], currency: str, random: object) -> None:
    lines = cut(currency, found)
    exact = sum(
        (
            Fraction(charge.price.rate.of(kind) * tokens)
            for charge in found
            for kind, tokens in charge.quantities.items()
        ),
        Fraction(0),
    )
    assert sum(line.amount_femto for line in lines) == exact
    assert sum(line.amount_minor for line in lines) == round_half_even(exact, currency)
    assert all(again(line) == line.amount_femto for line in lines)
    for kind in REQUIRED:
        on_lines = sum(line.quantity for line in lines if line.token_class is kind)
        assert on_lines == sum(charge.quantities[kind] for charge in found)
    assert len({line.id for line in lines}) == len(lines)
    assert len({(line.model, line.token_class, line.price_id) for line in lines}) == len(lines)
    assert all(line.quantity > 0 for line in lines)
    random.shuffle(found)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert cut(currency, found) == lines


@given(charges())
def test_units_that_no_line_tells_apart_may_be_added_up_before(found: list[Charge]) -> None:
    sums: dict[tuple[str, str], Charge] = {}
    for charge in found:
        key = charge.model, charge.price.id
        before = sums.get(key, msgspec.structs.replace(charge, quantities=dict.fromkeys(REQUIRED, 0)))
        added = {one: units + charge.quantities[one] for one, units in before.quantities.items()}
        sums[key] = msgspec.structs.replace(before, quantities=added)
    assert cut("usd", list(sums.values())) == cut("usd", found)


def draft(number: int, start_us: int, end_us: int, seq: int) -> Invoice:
    return Invoice(
        id=f"i{number}",
        tenant="t",
        currency="usd",
        status=InvoiceStatus.DRAFT,
        period_start_us=start_us,
        period_end_us=end_us,
        cut_us=0,
        cut_seq=seq,
        lines=(),
        total_minor=0,
        event_count=0,
        events_digest="",
        created_us=0,
    )


steps = st.one_of(
    st.tuples(st.just("event"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("draft"), st.integers(0, 11), st.integers(1, 6)),
    st.tuples(st.just("void"), st.integers(0, 20), st.just(0)),
)


@given(st.lists(steps, max_size=30))
@settings(max_examples=400, deadline=None)
def test_every_charge_is_on_at_most_one_standing_invoice_and_none_is_forgotten(
    history: list[tuple[str, int, int]],
) -> None:
    """Events, drafts and voids in any order; what each draft took is kept beside and compared with `owner`."""
    invoices = Invoices()
    numbers = itertools.count(1)
    events: dict[int, int] = {}  # number in the ledger → time
    taken: dict[str, set[int]] = {}
    for seq, (what, at, length) in zip(numbers, history, strict=False):
        if what == "event":
            events[seq] = at
        elif what == "draft":
            _draft(invoices, events, taken, seq, at, at + length)
        elif what == "void" and taken:
            id = sorted(taken)[at % len(taken)]
            if invoices.get(id).status is not InvoiceStatus.VOID:
                invoices.apply(InvoiceVoided(invoice_id=id, at_us=0), seq)
        _check(invoices, events, taken)


def _standing(invoices: Invoices) -> list[Invoice]:
    return [one for one in invoices.of("t") if one.status is not InvoiceStatus.VOID]


def _draft(
    invoices: Invoices, events: dict[int, int], taken: dict[str, set[int]], seq: int, start_us: int, end_us: int
) -> None:
    standing = _standing(invoices)
    if any(one.period_start_us < end_us and start_us < one.period_end_us for one in standing):
        return
    on_others = set().union(*(taken[one.id] for one in standing)) if standing else set()
    covered = {
        number for number, at in events.items() if start_us <= at < end_us or any(one.has(at) for one in standing)
    }
    owners = Owners(invoices.of("t"))
    for number in sorted(events):
        assert owners.of(events[number], number) is owner(events[number], number, invoices.of("t"))
    by_rule = {number for number in covered if owner(events[number], number, invoices.of("t")) is None}
    assert by_rule == covered - on_others
    made = draft(seq, start_us, end_us, seq - 1)
    invoices.apply(InvoiceDrafted(invoice=made), seq)
    taken[made.id] = by_rule


def _check(invoices: Invoices, events: dict[int, int], taken: dict[str, set[int]]) -> None:
    for number, at in events.items():
        on = [one.id for one in _standing(invoices) if number in taken[one.id]]
        assert len(on) <= 1
        found = owner(at, number, invoices.of("t"))
        assert [found.id] == on if found else on == []
