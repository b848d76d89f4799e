"""Prices that are not linear: exact against fractions, whatever the order of usage, cuts and voids."""

from __future__ import annotations

import itertools
import random as randoms
from collections import defaultdict
from fractions import Fraction

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.accounts import Tenant
from billing.charges import agrees, move, rate
from billing.invoice import Invoice, InvoiceLine, InvoiceStatus
from billing.ledger import UsageRated
from billing.lines import Charge, PeriodRule, again, close, cut_lines, true_up
from billing.money import exact_text, format_exact, parse_exact, round_half_even
from billing.offers import ClassOffer, TierOffer, check_price, offer_of
from billing.periods import Period, period_at
from billing.positions import Positions
from billing.prices import PriceBook, PriceSet, PriceVersion, TokenClass, rate_of
from billing.tariff import Tariff, Tariffs
from billing.tiers import UNITS, Component, PriceModel, cost_femto, dearest_femto, dearest_once_femto
from metering.events import Outcome, UsageEvent, content_hash
from tests.slow_rating import ceiling_femto, charge_femto, priced_quantities

amounts = st.integers(0, 10**9).map(lambda nano: format_exact(Fraction(nano * 10**6)))
MONTH_US = 31 * 86_400_000_000
FIRST_US = MONTH_US


@st.composite
def offers(draw: st.DrawFn, minimum: bool = True) -> ClassOffer:
    model = draw(st.sampled_from(PriceModel))
    allowance = draw(st.sampled_from([0, 0, 1, 7]))
    least = draw(st.sampled_from([None, None, "0.000002", "1.5"])) if minimum else None
    if model in (PriceModel.FLAT, PriceModel.PACKAGE):
        size = draw(st.integers(1, 9)) if model is PriceModel.PACKAGE else None
        return ClassOffer(model=model, price=draw(amounts), package_size=size, allowance=allowance, minimum=least)
    ends = sorted(draw(st.sets(st.integers(1, 30), max_size=3)))
    tiers = tuple(TierOffer(price=draw(amounts), up_to=end) for end in [*ends, None])
    return ClassOffer(model=model, tiers=tiers, allowance=allowance, minimum=least)


def components(classes: dict[str, ClassOffer]) -> tuple[Component, ...]:
    flat = {name: "1" for name in ("prompt", "cached", "completion") if name not in classes}
    return check_price("*", 0, "usd", flat, classes)


def oracle(offer: ClassOffer, token_class: TokenClass, position: int, quantity: int) -> Fraction:
    """Unit by unit, in fractions of the currency; units as people count them."""
    per = {"token": 10**6}.get(UNITS[token_class].base, 1)
    billable = [at for at in range(position + 1, position + quantity + 1) if at > offer.allowance]
    if offer.model is PriceModel.PACKAGE:
        size, first = offer.package_size or 1, offer.allowance
        begun = [at for at in billable if (at - first - 1) % size == 0]
        return len(begun) * Fraction(offer.price or "")
    if offer.model is PriceModel.FLAT:
        return len(billable) * Fraction(offer.price or "") / per
    tiers = [(tier.up_to, Fraction(tier.price)) for tier in offer.tiers]

    def price(at: int) -> Fraction:
        return next(price for up_to, price in tiers if up_to is None or at - offer.allowance <= up_to)

    last = position + quantity
    return sum((price(last if offer.model is PriceModel.VOLUME else at) for at in billable), Fraction(0)) / per


classes = st.sampled_from([TokenClass.COMPLETION, TokenClass.TOOL_CALL, TokenClass.IMAGE])


@given(offers(), classes, st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_an_amount_is_what_its_units_cost_one_by_one(
    offer: ClassOffer, token_class: TokenClass, position: int, first: int, second: int
) -> None:
    (component,) = [one for one in components({token_class.value: offer}) if one.token_class is token_class]
    scaled = [count * UNITS[token_class].scale for count in (position, first, second)]
    cost = cost_femto(component, scaled[0], scaled[1])
    assert Fraction(cost, 10**15) == oracle(offer, token_class, position, first)
    assert 0 <= cost <= first * dearest_femto(component, position) + dearest_once_femto(component) * (first > 0)
    if component.model is not PriceModel.VOLUME:
        whole = cost_femto(component, position, first + second)
        assert cost + cost_femto(component, position + first, second) == whole
    told = offer_of(component)
    assert components({token_class.value: told}) == components({token_class.value: offer})


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**12))
def test_an_exact_amount_comes_back_from_its_text(numerator: int, denominator: int) -> None:
    value = Fraction(numerator, denominator)
    assert parse_exact(exact_text(value)) == value
    assert Fraction(format_exact(value)) == value / 10**15


def event(number: int, ts_us: int, counts: tuple[int, int, int, int, int]) -> UsageEvent:
    prompt, completion, reasoning, tool_calls, images = counts
    return UsageEvent(
        event_id=f"e{number:03}",
        ts_us=ts_us,
        settled_us=ts_us + 1,
        tenant="t",
        key_id="k",
        model="m",
        base_model="m",
        endpoint="completions",
        gateway="g",
        outcome=Outcome.FINISHED,
        prompt_tokens=prompt,
        completion_tokens=completion + reasoning,
        reasoning_tokens=reasoning,
        tool_calls=tool_calls,
        images=images,
    )


small = st.integers(0, 12)
books = st.lists(
    st.fixed_dictionaries(
        {"image": offers()},
        optional={name: offers() for name in ("prompt", "completion", "reasoning", "tool_call", "request")},
    ),
    min_size=1,
    max_size=3,
)
TENANT = Tenant(id="t", name="T", currency="usd", created_us=1, timezone="Europe/Berlin", billing_anchor_day=31)


def version(number: int, classes: dict[str, ClassOffer]) -> PriceVersion:
    made, id = components(classes), f"p{number}"
    bound = rate_of(id, "usd", {one.token_class: one for one in made})
    at = 1 if number == 0 else FIRST_US + number * MONTH_US // 2
    return PriceVersion(id=id, tenant=None, model="*", effective_at_us=at, recorded_us=at, rate=bound, components=made)


class House:
    """A ledger of one tenant, its invoices, and what is on each of them."""

    def __init__(self, offered: list[dict[str, ClassOffer]]) -> None:
        self.book = PriceBook()
        for number, classes in enumerate(offered):
            self.book.apply(PriceSet(price=version(number, classes)))
        self.tariffs = Tariffs(self.book)
        self.positions = Positions()
        self.rated: list[tuple[UsageEvent, UsageRated]] = []
        self.invoices: list[Invoice] = []
        self.on: dict[str, set[str]] = {}

    def price(self, event: UsageEvent) -> PriceVersion:
        return self.book.resolve("t", "m", "m", "usd", ts_us=event.ts_us, known_us=event.ts_us)

    def record(self, event: UsageEvent) -> None:
        price = self.price(event)
        tariff = self.tariffs.of(price.id)
        bound = price.bound(self.positions.of("t", tariff, period_at(event.ts_us, 31, "Europe/Berlin").start_us))
        found = rate(event, content_hash(event), TENANT, tariff, self.positions, later=False)
        assert agrees(found.rated, event, tariff)
        assert int(found.rated.amount_femto) <= found.ceiling_femto
        if not event.images:  # what is not known at the door is in no hold
            tokens = event.prompt_tokens * bound.dearest_prompt() + event.completion_tokens * bound.completion
            assert event.tool_calls > event.completion_tokens or found.ceiling_femto <= tokens + bound.fixed_femto
        move(self.positions, found.rated, tariff)
        self.rated.append((event, found.rated))

    def standing(self) -> list[Invoice]:
        return [one for one in self.invoices if one.status is not InvoiceStatus.VOID]

    def draft(self, period: Period) -> None:
        if any(one.period_start_us < period.end_us and period.start_us < one.period_end_us for one in self.standing()):
            return
        taken = set().union(*(self.on[one.id] for one in self.standing()))
        charges: list[Charge] = []
        on: set[str] = set()
        for event, rated in self.rated:
            late = next((one for one in self.standing() if one.has(event.ts_us)), None)
            if event.event_id not in taken and (period.has(event.ts_us) or late):
                price = self.book.versions[rated.price_id]
                on.add(event.event_id)
                charges.append(
                    Charge(
                        model=event.model,
                        adapter=event.adapter,
                        quantities=priced_quantities(event, price),
                        price=price,
                        late_of=late,
                        period_start_us=rated.period_start_us,
                        charged_femto=int(rated.amount_femto),
                    )
                )
        id = f"i{len(self.invoices)}"
        rule = PeriodRule(anchor_day=31, timezone="Europe/Berlin")
        asked = cut_lines(period, charges, book=self.book, earlier=self.invoices, rule=rule)
        mixed = charges[::-1]
        assert cut_lines(period, mixed, book=self.book, earlier=self.invoices, rule=rule) == asked
        lines = close(id, "usd", asked)
        self.check(charges, lines)
        self.invoices.append(invoice(id, period, lines, true_up(lines, charges)))
        self.on[id] = on

    def check(self, charges: list[Charge], lines: tuple[InvoiceLine, ...]) -> None:
        exact = sum((Fraction(line.amount_femto) for line in lines), Fraction(0))
        assert sum(charge.charged_femto for charge in charges) + parse_exact(true_up(lines, charges)) == exact
        assert sum(line.amount_minor for line in lines) == round_half_even(exact, "usd")
        assert all(again(line) in (None, line.amount_femto) for line in lines)

    def amounts(self) -> dict[tuple[int, str, str], Fraction]:
        """What the standing invoices' lines have, by period, class and price."""
        found: dict[tuple[int, str, str], Fraction] = defaultdict(Fraction)
        for one in self.standing():
            for line in one.lines:
                start = line.period_start_us if line.tiers else 0
                found[start, line.token_class.value, line.price_id] += Fraction(line.amount_femto)
        return {key: amount for key, amount in found.items() if amount}


def invoice(id: str, period: Period, lines: tuple[InvoiceLine, ...], difference: str) -> Invoice:
    return Invoice(
        id=id,
        tenant="t",
        currency="usd",
        status=InvoiceStatus.DRAFT,
        period_start_us=period.start_us,
        period_end_us=period.end_us,
        cut_us=0,
        cut_seq=0,
        lines=lines,
        total_minor=sum(line.amount_minor for line in lines),
        event_count=0,
        events_digest="",
        created_us=0,
        true_up=difference,
    )


def expected(house: House) -> dict[tuple[int, str, str], Fraction]:
    """What all usage costs by its final quantity: the rule written the slow way, from the events alone."""
    units: dict[tuple[int, TokenClass], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    found: dict[tuple[int, str, str], Fraction] = defaultdict(Fraction)
    for event, rated in house.rated:
        price = house.book.versions[rated.price_id]
        by_class = price.by_class()
        for token_class, count in priced_quantities(event, price).items():
            if by_class[token_class].linear:
                found[0, token_class.value, price.id] += Fraction(charge_femto(price, {token_class: count}))
            elif count:
                units[rated.period_start_us, token_class][int(price.id[1:])] += count
    for (start_us, token_class), by_version in units.items():
        position, total = 0, Fraction(0)
        for number in sorted(by_version):
            offer = offer_of(house.book.versions[f"p{number}"].by_class()[token_class])
            amount = oracle(offer, token_class, position, by_version[number]) * 10**15
            found[start_us, token_class.value, f"p{number}"] += amount
            position += by_version[number]
            total += amount
        missing = Fraction(offer.minimum or "0") * 10**15 - total
        found[start_us, token_class.value, f"p{number}"] += max(missing, Fraction(0))
    return {key: amount for key, amount in found.items() if amount}


steps = st.one_of(
    st.tuples(st.just("event"), st.integers(0, 99), st.tuples(small, small, small, st.integers(0, 2), small)),
    st.tuples(st.just("event"), st.integers(0, 99), st.tuples(small, small, small, st.integers(0, 2), small)),
    st.tuples(st.just("draft"), st.integers(0, 8), st.integers(1, 4)),
    st.tuples(st.just("void"), st.integers(0, 9), st.just(0)),
)


@given(books, st.lists(steps, max_size=24), st.randoms())
@settings(deadline=None, max_examples=120)
def test_whatever_comes_late_or_is_voided_the_invoices_ask_what_the_final_quantity_costs(
    offered: list[dict[str, ClassOffer]], history: list[tuple[str, int, object]], random: randoms.Random
) -> None:
    house, numbers = House(offered), itertools.count()
    end_us = FIRST_US + 100 * MONTH_US // 33
    for what, at, more in history:
        if what == "event":
            house.record(event(next(numbers), FIRST_US + at * MONTH_US // 33, more))  # type: ignore[arg-type]
        elif what == "draft":
            start_us = FIRST_US + at * MONTH_US // 3
            house.draft(Period(start_us=start_us, end_us=start_us + int(str(more)) * MONTH_US // 3))
        elif house.invoices:
            number = at % len(house.invoices)
            house.invoices[number] = msgspec.structs.replace(house.invoices[number], status=InvoiceStatus.VOID)
    _draft_the_rest(house, end_us)
    assert house.amounts() == expected(house)
    again_ = House(offered)  # the same usage in another order, on one invoice
    mixed = [one for one, _ in house.rated]
    random.shuffle(mixed)
    for one in mixed:
        again_.record(one)
    again_.draft(Period(start_us=0, end_us=end_us + 2 * MONTH_US))
    assert again_.amounts() == house.amounts()


def _draft_the_rest(house: House, end_us: int) -> None:
    """Every stretch that no standing invoice has, past the end of the last period too; then what came late."""
    last = end_us + 2 * MONTH_US
    edges = sorted({0, last, *(edge for one in house.standing() for edge in (one.period_start_us, one.period_end_us))})
    for start_us, stop_us in itertools.pairwise(edges):
        house.draft(Period(start_us=start_us, end_us=stop_us))
    house.draft(Period(start_us=last, end_us=last + MONTH_US))


def test_a_volume_tier_that_a_late_event_crosses_books_the_difference_alone() -> None:
    offer = ClassOffer(model=PriceModel.VOLUME, tiers=(TierOffer(price="10", up_to=100), TierOffer(price="5")))
    house = House([{"image": ClassOffer(price="0"), "completion": offer}])
    house.record(event(0, FIRST_US, (0, 90, 0, 0, 0)))
    month = period_at(FIRST_US, 31, "Europe/Berlin")
    house.draft(month)
    house.record(event(1, FIRST_US + 1, (0, 20, 0, 0, 0)))
    house.draft(Period(start_us=month.end_us, end_us=month.end_us + MONTH_US))
    first, second = ([line for line in one.lines if line.token_class == "completion"] for one in house.invoices)
    assert [(line.quantity, line.amount_femto) for line in first] == [(90, 900 * 10**9)]
    (line,) = second
    assert (line.quantity, line.total, line.late_of) == (20, 110, "i0")
    assert (parse_exact(line.booked), line.amount_femto) == (900 * 10**9, (550 - 900) * 10**9)


@given(books, st.tuples(small, small, small, st.integers(0, 2), small), st.integers(0, 50))
def test_a_hold_is_never_less_than_the_charge_wherever_it_comes_to_stand(
    offered: list[dict[str, ClassOffer]], counts: tuple[int, int, int, int, int], position: int
) -> None:
    price = version(0, offered[0])
    one = event(0, FIRST_US, counts)
    counted = priced_quantities(one, price)
    before = dict.fromkeys(TokenClass, position)
    later = dict.fromkeys(TokenClass, position + 5)
    for at in (before, later):
        assert charge_femto(price, counted, at) <= ceiling_femto(price, counted, before)


@given(
    books, st.tuples(small, small, small, st.integers(0, 2), small), st.dictionaries(st.sampled_from(TokenClass), small)
)
def test_a_tariff_says_what_the_rule_says(
    offered: list[dict[str, ClassOffer]], counts: tuple[int, int, int, int, int], at: dict[TokenClass, int]
) -> None:
    price = version(0, offered[0])
    one, tariff = event(0, FIRST_US, counts), Tariff(price)
    counted = priced_quantities(one, price)
    assert tariff.counted(one) == counted
    names = {token_class.value: position for token_class, position in at.items()}
    amount, ceiling = tariff.amounts_femto(tariff.counted(one), names)
    assert amount == tariff.charge_femto(tariff.counted(one), names) == charge_femto(price, counted, at)
    assert ceiling == ceiling_femto(price, counted, at)
    assert set(tariff.tiered) == {one.token_class for one in price.components if not one.linear}
    if tariff.flat:
        assert tariff.flat_femto(one) == amount
