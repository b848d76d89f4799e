"""Discounts, minimums, adapter months, carries and tax through the whole service."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from billing.accounts import BillingMode
from billing.errors import Conflict, IdempotencyConflict, Invalid, NotFound
from billing.invoice import Invoice, InvoiceDrafted
from billing.line import LineKind
from billing.lines import again
from billing.money import FEMTO, parse_exact
from billing.offers import ClassOffer, TierOffer
from billing.periods import period_at
from billing.service import Idempotency
from billing.terms import Tax, TaxMode, TaxRate
from billing.tiers import PriceModel
from billing.wording import describe

FOREVER = 2**62
VAT = Tax(mode=TaxMode.FIXED, rates=(TaxRate(name="VAT", percent="19"),))


def month(house: Any) -> tuple[int, int]:
    found = period_at(house.clock.now_us)
    return found.start_us, found.end_us


def draft(house: Any, span: tuple[int, int]) -> Invoice:
    house.clock.now_us = max(house.clock.now_us, span[1])
    made = house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)
    assert isinstance(made, Invoice)
    for line in made.lines:
        assert line.kind is LineKind.CARRY or again(line) == line.amount_femto
        assert describe(line, made.currency)
    return made


def final(house: Any, span: tuple[int, int]) -> Invoice:
    return house.billing.finalize_invoice(draft(house, span).id)  # type: ignore[no-any-return]  # a fixture is Any


def told(invoice: Invoice) -> list[tuple[str, str, int]]:
    return [(line.kind.value, line.name or line.model, line.amount_minor) for line in invoice.lines]


def charged(house: Any) -> int:
    return int(house.billing.balance("acme").charged_femto)


def dollars(house: Any, **more: Any) -> None:
    """One dollar for a prompt token, two for a completion."""
    house.set_price(prompt="1000000", cached="0", completion="2000000", **more)


def test_discounts_then_the_minimum_then_tax(either_house: Any) -> None:
    house = either_house
    dollars(house)
    span = month(house)
    house.billing.give_discount("acme", name="Spring", percent="12.50", from_us=0)
    house.billing.give_discount("acme", name="Output", amount="1", from_us=0, token_class="completion")
    house.billing.set_commitment("acme", "100", from_us=0)
    house.billing.set_tax("acme", VAT)
    house.use(prompt=40, completion=10)
    invoice = final(house, span)
    assert told(invoice) == [
        ("usage", "base", 2000),
        ("usage", "base", 4000),
        ("discount", "Spring", -750),
        ("discount", "Output", -100),
        ("commitment", "", 4850),
        ("tax", "VAT", 1900),
    ]
    assert (invoice.total_minor, invoice.tax_minor) == (11900, 1900)
    assert parse_exact(invoice.true_up) == 40 * FEMTO
    assert charged(house) == 100 * FEMTO == house.restart().balance("acme").charged_femto
    assert house.billing.reconcile(*span, usage=house.shelf).ok
    house.billing.void_invoice(invoice.id)
    assert charged(house) == 60 * FEMTO
    again_ = draft(house, span)
    assert told(again_) == told(invoice)
    assert house.restart().invoice(again_.id) == again_


def test_a_minimum_counts_the_time_in_which_it_was_in_force(house: Any) -> None:
    span = month(house)
    length = span[1] - span[0]
    house.billing.set_commitment("acme", "30", from_us=span[0] + length // 3)
    house.billing.set_commitment("acme", "90", from_us=span[0] + length // 2)
    house.billing.set_commitment("acme", "0", from_us=span[1])
    middle = span[0] + length // 2 + 1
    first, second = final(house, (span[0], middle)), final(house, (middle, span[1]))
    assert first.total_femto + second.total_femto == 30 * FEMTO * Fraction(1, 6) + 90 * FEMTO * Fraction(1, 2)
    assert first.total_femto == Fraction(30 * FEMTO * (length // 2 - length // 3) + 90 * FEMTO, length)
    assert draft(house, month(house)).lines == ()


def test_late_usage_gets_the_terms_of_its_own_period(house: Any) -> None:
    dollars(house)
    span = month(house)
    discount = house.billing.give_discount("acme", name="Ten", percent="10", from_us=0)
    house.billing.set_commitment("acme", "50", from_us=0)
    house.use(prompt=10, completion=0)
    late = house.event(prompt=20, completion=0)
    first = final(house, span)
    assert told(first) == [("usage", "base", 1000), ("discount", "Ten", -100), ("commitment", "", 4100)]
    house.billing.end_discount(discount.id)
    house.billing.set_commitment("acme", "0", from_us=span[1])
    house.shelf.kept.append(late)
    house.billing.record([late])
    second = final(house, month(house))
    assert told(second) == [
        ("usage", "base", 2000),
        ("discount", "Ten", -200),
        ("commitment", "", -1800),
    ]
    assert {line.late_of for line in second.lines} == {first.id}
    assert charged(house) == 50 * FEMTO
    words = describe(second.lines[1], "usd")
    assert words == ("Adjustment for 2026-09-01 to 2026-10-01, late usage: Ten: 10% off 30.00 USD of usage")
    assert house.billing.reconcile(span[0], second.period_end_us, usage=house.shelf).ok


def test_an_amount_off_takes_no_more_than_there_is_and_says_so(house: Any) -> None:
    dollars(house)
    span = month(house)
    house.billing.give_discount("acme", name="Voucher", amount="25.00", from_us=0, model="base")
    house.billing.give_discount("acme", name="Later", amount="1", from_us=span[1])
    house.use(prompt=7, completion=0)
    house.use(prompt=3, completion=0, model="pirate")
    invoice = draft(house, span)
    assert told(invoice)[-1] == ("discount", "Voucher", -700)
    assert invoice.total_minor == 300
    assert describe(invoice.lines[-1], "usd") == "Voucher: 25.00 USD off base, limited to the 7.00 USD that there are"


def test_what_would_be_below_nothing_is_carried_and_used_once(house: Any) -> None:
    volume = ClassOffer(
        model=PriceModel.VOLUME, tiers=(TierOffer(price="1000000", up_to=10), TierOffer(price="100000"))
    )
    house.billing.set_price(
        model="*",
        effective_at_us=0,
        currency="usd",
        per_million={"cached": "0", "completion": "1000000"},
        classes={"prompt": volume},
        tenant="acme",
    )
    house.billing.set_tax("acme", VAT)
    span = month(house)
    house.use(prompt=10, completion=0)
    late = house.event(prompt=10, completion=0)
    assert final(house, span).total_minor == 1190
    house.shelf.kept.append(late)
    house.billing.record([late])
    second = final(house, month(house))  # 20 at the lower price are 2, and 10 were asked
    assert (second.total_minor, told(second)[-1]) == (0, ("carry", "", 800))
    assert house.billing.terms("acme").carried == str(8 * FEMTO)
    assert charged(house) == 2 * FEMTO
    house.use(prompt=0, completion=3)
    third = final(house, month(house))
    assert (third.total_minor, told(third)[-1]) == (0, ("carry", "", -300))
    house.use(prompt=0, completion=9)
    fourth = final(house, month(house))
    assert told(fourth) == [("usage", "base", 900), ("carry", "", -500), ("tax", "VAT", 76)]
    assert (house.billing.terms("acme").carried, charged(house)) == ("0", 14 * FEMTO)
    assert house.billing.reconcile(span[0], fourth.period_end_us, usage=house.shelf).ok
    house.billing.void_invoice(third.id)
    assert house.billing.terms("acme").carried == str(3 * FEMTO)
    assert told(draft(house, (third.period_start_us, third.period_end_us))) == told(third)


@pytest.mark.parametrize("mode", list(BillingMode))
def test_an_adapter_costs_the_part_of_the_month_that_it_stood(either_house: Any, mode: BillingMode) -> None:
    house = either_house
    house.billing.update_tenant("acme", billing_mode=mode)
    house.set_price(classes={"adapter_month": ClassOffer(price="30")}, effective_at_us=0)
    house.clock.now_us = month(house)[1]
    span = month(house)
    length = span[1] - span[0]

    def at(part: Fraction) -> None:
        house.clock.now_us = span[0] + int(length * part)

    def load(name: str, id: str) -> None:
        house.billing.add_adapter("acme", name=name, path="/a", id=id, digest="d", base_model="base")

    at(Fraction(1, 2))
    load("pirate", "one")
    load("poet", "two")
    load("pirate", "three")  # other weights under its name: it stands on
    at(Fraction(3, 4))
    house.billing.remove_adapter("acme", "poet")
    house.set_price(classes={"adapter_month": ClassOffer(price="60")}, model="pirate", effective_at_us=0)
    invoice = final(house, span)
    assert told(invoice) == [("adapter", "pirate", 750), ("adapter", "pirate", 1500), ("adapter", "poet", 750)]
    assert describe(invoice.lines[2], "usd").endswith(" of a month at 30.00 USD per month")
    assert abs(Fraction(invoice.total_femto) - 30 * FEMTO) < FEMTO // 10**6
    assert charged(house) == round(Fraction(invoice.total_femto)) == house.restart().balance("acme").charged_femto
    assert house.billing.reconcile(*span, usage=house.shelf).ok
    house.billing.void_invoice(invoice.id)
    cuts = [span[0], span[0] + length // 7, span[0] + 6 * length // 7, span[1]]
    parts = [final(house, part) for part in pairwise(cuts)]
    assert sum(part.total_femto for part in parts) == invoice.total_femto
    (line,) = draft(house, month(house)).lines
    assert (line.amount_femto, describe(line, "usd")) == (
        60 * FEMTO,
        "pirate: adapter for a month at 60.00 USD per month",
    )


def test_an_adapter_without_a_price_for_it_costs_nothing(house: Any) -> None:
    span = month(house)
    house.billing.add_adapter("acme", name="pirate", path="/a", id="one", digest="d", base_model="base")
    house.set_price(classes={"adapter_month": ClassOffer(price="30")}, model="poet")
    assert draft(house, span).lines == ()


def test_terms_are_checked_and_every_fault_is_named(house: Any) -> None:
    billing = house.billing
    for fields, fault in [
        ({"name": "x"}, "percent"),
        ({"name": "x", "percent": "1", "amount": "1"}, "percent"),
        ({"name": "x", "percent": "100.1"}, "percent"),
        ({"name": "x", "percent": "0"}, "percent"),
        ({"name": "", "amount": "-1"}, "amount"),
        ({"name": "x", "amount": "1", "token_class": "gpu"}, "token_class"),
        ({"name": "x", "amount": "1", "from_us": 5, "to_us": 5}, "to"),
    ]:
        with pytest.raises(Invalid) as caught:
            billing.give_discount("acme", **fields)
        assert fault in [name for name, _ in caught.value.faults]
    for tax in (
        Tax(mode=TaxMode.FIXED),
        Tax(rates=VAT.rates),
        Tax(mode=TaxMode.FIXED, rates=(TaxRate(name="VAT", percent="-1"),)),
        Tax(mode=TaxMode.FIXED, rates=VAT.rates * 2),
    ):
        with pytest.raises(Invalid):
            billing.set_tax("acme", tax)
    with pytest.raises(Invalid):
        billing.set_commitment("acme", "1e99")
    for call in (lambda: billing.set_commitment("nobody", "1"), lambda: billing.end_discount("nothing")):
        with pytest.raises(NotFound):
            call()
    for _ in range(20):
        billing.give_discount("acme", name="x", percent="1")
    with pytest.raises(Conflict):
        billing.give_discount("acme", name="x", percent="1")


def test_a_repeated_command_gives_its_first_result(house: Any) -> None:
    key = Idempotency(key="k", payload_hash="h")
    one = house.billing.give_discount("acme", name="x", percent="1.50", idempotency=key)
    assert house.restart().give_discount("acme", name="x", percent="1.50", idempotency=key) == one
    assert (one.percent, house.billing.discounts("acme")) == ("1.5", [one])
    with pytest.raises(IdempotencyConflict):
        house.billing.set_commitment("acme", "1", idempotency=key)
    ended = house.billing.end_discount(one.id)
    assert house.billing.end_discount(one.id) == ended == house.restart().discounts("acme")[0]


def test_an_invoice_as_older_code_wrote_it_folds_to_the_same(house: Any) -> None:
    """Without terms, and with none of the fields of a line that came with them."""
    dollars(house)
    span = month(house)
    house.use(prompt=1, completion=1)
    invoice = draft(house, span)
    plain = msgspec.json.decode(msgspec.json.encode(InvoiceDrafted(invoice=invoice)))
    for field in ("terms", "automatic", "provider_tax_minor"):
        del plain["invoice"][field]
    for line in plain["invoice"]["lines"]:
        for field in ("term", "name", "rate", "fixed", "share", "parts"):
            del line[field]
    assert msgspec.json.decode(msgspec.json.encode(plain), type=InvoiceDrafted).invoice == invoice
