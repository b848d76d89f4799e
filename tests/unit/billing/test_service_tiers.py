"""Tiers and other classes through the whole service: quoted, held, charged, invoiced, trued up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from billing.errors import InsufficientCredits, LedgerDisagrees, NoPrice
from billing.invoice import Invoice
from billing.ledger import UsageRated
from billing.money import parse_exact
from billing.offers import ClassOffer, TierOffer
from billing.periods import period_at
from billing.prices import PriceSet
from billing.tiers import PriceModel

MICRO = 10**9
FOREVER = 2**62
GRADUATED = ClassOffer(model=PriceModel.GRADUATED, tiers=(TierOffer(price="10", up_to=100), TierOffer(price="4")))
VOLUME = ClassOffer(model=PriceModel.VOLUME, tiers=(TierOffer(price="10", up_to=100), TierOffer(price="5")))


def offer(house: Any, **classes: ClassOffer) -> str:
    flat = {name: "0" for name in ("prompt", "cached", "completion") if name not in classes}
    price = house.billing.set_price(
        model="*", effective_at_us=0, currency="usd", per_million=flat, tenant="acme", classes=classes
    )
    return str(price.id)


def month(house: Any) -> tuple[int, int]:
    found = period_at(house.clock.now_us)
    return found.start_us, found.end_us


def draft(house: Any, span: tuple[int, int]) -> Invoice:
    house.clock.now_us = max(house.clock.now_us, span[1])
    made = house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)
    assert isinstance(made, Invoice)
    return made


def charged(house: Any) -> int:
    return int(house.billing.balance("acme").charged_femto)


def amounts(invoice: Invoice) -> list[tuple[str, int, int | Any]]:
    return [(line.token_class.value, line.quantity, line.amount_femto) for line in invoice.lines]


def test_each_charge_stands_where_the_one_before_ended(house: Any) -> None:
    offer(house, completion=GRADUATED)
    span = month(house)
    for tokens, total in ((60, 600), (60, 1000 + 80), (10, 1000 + 120)):
        house.use(prompt=0, completion=tokens)
        assert charged(house) == total * MICRO
    house.restart()
    house.use(prompt=0, completion=1)
    assert charged(house) == (1000 + 124) * MICRO
    invoice = draft(house, span)
    assert amounts(invoice) == [("completion", 131, 1124 * MICRO)]
    assert (invoice.true_up, invoice.total_minor) == ("0", 0)
    assert house.billing.reconcile(*span, usage=house.shelf).ok


def test_events_of_one_batch_and_of_another_gateway_follow_each_other(house: Any) -> None:
    offer(house, completion=GRADUATED)
    house.billing.record([house.event(prompt=0, completion=60) for _ in range(3)])
    other = house.open()
    other.record([house.event(prompt=0, completion=1)])
    house.billing.refresh()
    assert charged(house) == (1000 + 80 * 4 + 4) * MICRO == other.balance("acme").charged_femto


def test_what_is_settled_counts_at_its_dearest_until_it_is_recorded(house: Any) -> None:
    offer(house, completion=GRADUATED)
    house.billing.grant_credit("acme", "1.00", "usd", "r")
    house.use(prompt=0, completion=90)
    one, two = (house.event(prompt=0, completion=20) for _ in range(2))
    for event in (one, two):
        house.billing.settle(event)
    assert charged(house) == (900 + 2 * 200) * MICRO
    house.billing.record([two])
    assert charged(house) == (900 + 100 + 10 * 4 + 200) * MICRO
    house.billing.record([one])
    assert charged(house) == (1000 + 30 * 4) * MICRO
    assert house.billing.alarms() == {}


def test_a_quote_is_the_dearest_that_can_still_apply(house: Any) -> None:
    offer(house, completion=GRADUATED, reasoning=ClassOffer(price="7"), request=ClassOffer(price="0.01"))
    quote = house.billing.quote("acme", "base", "base", house.clock())
    assert (quote.completion, quote.fixed_nano, quote.exact) == (10 * MICRO, 10**7, False)
    house.use(prompt=0, completion=100)
    quote = house.billing.quote("acme", "base", "base", house.clock())
    assert quote.completion == 7 * MICRO
    house.billing.grant_credit("acme", "0.010007", "usd", "r")
    with pytest.raises(InsufficientCredits):
        house.billing.open_hold("acme", "r1", quote, 0, 1)


def test_a_tier_crossed_by_late_usage_books_the_difference_against_what_was_booked(house: Any) -> None:
    offer(house, completion=VOLUME)
    span = month(house)
    house.use(prompt=0, completion=90)
    late = house.event(prompt=0, completion=20)
    first = house.billing.finalize_invoice(draft(house, span).id)
    assert amounts(first) == [("completion", 90, 900 * MICRO)]
    house.shelf.kept.append(late)
    house.billing.record([late])
    assert charged(house) == 1000 * MICRO  # the late ones at the tier that they reach
    second = draft(house, month(house))
    line, carry = second.lines  # the rest of what is given back is the next invoice's
    assert (second.total_minor, carry.amount_femto) == (0, 350 * MICRO)
    assert (line.late_of, line.quantity, line.total, parse_exact(line.booked)) == (first.id, 20, 110, 900 * MICRO)
    assert line.amount_femto == (550 - 900) * MICRO
    assert parse_exact(second.true_up) == -450 * MICRO
    assert charged(house) == 1000 * MICRO
    house.billing.finalize_invoice(second.id)
    assert charged(house) == 550 * MICRO == house.restart().balance("acme").charged_femto
    assert house.billing.reconcile(span[0], second.period_end_us, usage=house.shelf).ok
    house.billing.void_invoice(second.id)
    assert charged(house) == 1000 * MICRO == house.restart().balance("acme").charged_femto


def test_a_minimum_is_asked_once_and_moves_with_late_usage(house: Any) -> None:
    offer(house, completion=ClassOffer(price="1", minimum="0.000100", allowance=10))
    span = month(house)
    house.use(prompt=0, completion=30)
    late = house.event(prompt=0, completion=50)
    first = house.billing.finalize_invoice(draft(house, span).id)
    assert [(line.kind.value, line.amount_femto) for line in first.lines] == [
        ("usage", 20 * MICRO),
        ("minimum", 80 * MICRO),
    ]
    assert charged(house) == 100 * MICRO
    house.shelf.kept.append(late)
    house.billing.record([late])
    second = house.billing.finalize_invoice(draft(house, month(house)).id)
    assert [(line.kind.value, line.amount_femto) for line in second.lines] == [
        ("usage", 50 * MICRO),
        ("minimum", -50 * MICRO),
    ]
    assert charged(house) == 100 * MICRO
    assert house.billing.reconcile(span[0], second.period_end_us, usage=house.shelf).ok


def test_a_prepaid_tenant_gets_back_what_an_invoice_takes_less(house: Any) -> None:
    offer(house, completion=VOLUME)
    house.billing.grant_credit("acme", "0.001000", "usd", "r")
    span = month(house)
    for _ in range(2):
        house.use(prompt=0, completion=60)
    assert house.billing.balance("acme").available_femto < 0 or charged(house) == 900 * MICRO
    house.billing.finalize_invoice(draft(house, span).id)
    assert charged(house) == 600 * MICRO
    assert house.billing.balance("acme").available_femto == 400 * MICRO
    house.billing.grant_credit("acme", "0.000001", "usd", "r")
    assert house.restart().balance("acme").available_femto == 401 * MICRO


def test_a_new_version_goes_on_where_the_one_before_it_stood(house: Any) -> None:
    free = ClassOffer(price="1", allowance=100)
    offer(house, completion=free)
    span = month(house)
    house.use(prompt=0, completion=70)
    offer(house, completion=msgspec.structs.replace(free, price="2"))
    house.use(prompt=0, completion=70)
    assert charged(house) == 80 * MICRO
    invoice = draft(house, span)
    assert amounts(invoice) == [("completion", 70, 0), ("completion", 70, 80 * MICRO)]
    assert [line.position for line in invoice.lines] == [0, 70]


def test_the_next_period_begins_anew_in_the_tenants_own_zone(house: Any) -> None:
    house.billing.update_tenant("acme", timezone="Pacific/Kiritimati", billing_anchor_day=15)
    offer(house, completion=ClassOffer(price="1", allowance=100))
    first = period_at(house.clock.now_us, 15, "Pacific/Kiritimati")
    house.use(prompt=0, completion=100, ts_us=first.end_us - 1)
    house.use(prompt=0, completion=1, ts_us=first.end_us - 1)
    house.use(prompt=0, completion=100, ts_us=first.end_us)
    assert charged(house) == MICRO
    invoice = draft(house, (first.start_us, first.end_us + 1))
    assert [(line.quantity, line.period_start_us) for line in invoice.lines] == [
        (101, first.start_us),
        (100, first.end_us),
    ]


def test_every_class_is_charged_and_invoiced(house: Any) -> None:
    each = {name: ClassOffer(price="0.01") for name in ("image", "audio_second", "tool_call", "request")}
    tokens = {name: ClassOffer(price="1") for name in ("cache_write", "reasoning", "completion")}
    offer(house, **each, **tokens, compute_second=ClassOffer(price="0.5"))
    span = month(house)
    house.use(
        prompt=10,
        completion=9,
        cache_write_tokens=4,
        reasoning_tokens=3,
        images=2,
        audio_ms=1500,
        tool_calls=1,
        compute_us=2_000_000,
    )
    house.use(prompt=0, completion=0)  # cut in the queue: not even a request
    invoice = draft(house, span)
    assert {line.token_class.value: line.quantity for line in invoice.lines} == {
        **{"prompt": 6, "cache_write": 4, "completion": 6, "reasoning": 3},
        **{"image": 2, "audio_second": 1500, "tool_call": 1, "request": 1, "compute_second": 2_000_000},
    }
    assert invoice.total_femto == 13 * MICRO + (2 + 1 + 1) * 10**13 + 15 * 10**12 + 10**15
    assert (invoice.true_up, charged(house)) == ("0", invoice.total_femto)
    assert house.billing.reconcile(*span, usage=house.shelf).ok


def test_an_image_without_a_price_is_not_free(house: Any) -> None:
    event = house.event(images=1)
    house.billing.record([event])
    assert [one.reason for one in house.billing.unrated()] == ["no price"]
    assert house.billing.rate_unrated() == 0
    offer(house, image=ClassOffer(price="0.25"))
    assert house.billing.rate_unrated() == 1
    assert charged(house) == 25 * 10**13


def test_an_endpoints_own_price_goes_before_the_general_one_at_each_step(house: Any) -> None:
    house.set_price("base", completion="1")
    house.set_price("*", completion="2", endpoint="embeddings")
    assert house.billing.quote("acme", "base", "base", house.clock(), "embeddings").completion == MICRO
    house.set_price("base", completion="3", endpoint="embeddings")
    quoted = [
        house.billing.quote("acme", "base", "base", house.clock(), at).completion
        for at in ("embeddings", "completions")
    ]
    assert quoted == [3 * MICRO, MICRO]
    span = month(house)
    for endpoint in ("embeddings", "completions"):
        house.use(prompt=0, completion=1, endpoint=endpoint)
    assert charged(house) == 4 * MICRO
    assert sorted(line.endpoint for line in draft(house, span).lines) == ["", "embeddings"]
    with pytest.raises(NoPrice):
        house.billing.quote("acme", "base", "base", 1, "embeddings")


def test_a_charge_at_another_position_than_it_keeps_is_not_invoiced(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(house, completion=GRADUATED)
    span = month(house)
    house.use(prompt=0, completion=90)
    monkeypatch.setattr("billing.tariff.Tariff.charge_femto", lambda tariff, counted, at: 1)
    with pytest.raises(LedgerDisagrees):
        draft(house, span)


def test_rows_of_a_ledger_that_knew_three_flat_prices_mean_what_they_meant() -> None:
    price = msgspec.json.decode(
        '{"type":"price.set","price":{"id":"p","tenant":null,"model":"*","effective_at_us":1,"recorded_us":2,'
        '"rate":{"price_id":"p","currency":"usd","prompt":1,"cached":2,"completion":3}}}',
        type=PriceSet,
    ).price
    assert (price.rate.exact, price.rate.fixed_femto, price.endpoint, price.components) == (True, 0, "", ())
    assert [(one.value, priced.linear) for one, priced in price.by_class().items()] == [
        ("prompt", True),
        ("cached", True),
        ("completion", True),
    ]
    rated = msgspec.json.decode(
        '{"type":"usage.rated","event_id":"e","event_hash":"h","ts_us":1,"settled_us":2,"tenant":"t","model":"m",'
        '"adapter":"","prompt_tokens":1,"cached_tokens":0,"completion_tokens":1,"price_id":"p","amount_femto":"4"}',
        type=UsageRated,
    )
    assert (rated.quantities, rated.positions, rated.period_start_us) == ({}, {}, 0)


def test_an_invoice_of_a_ledger_that_knew_three_flat_prices_reads_as_it_was() -> None:
    old = msgspec.json.decode(
        '{"id":"i","tenant":"t","currency":"usd","status":"draft","period_start_us":1,"period_end_us":2,"cut_us":3,'
        '"cut_seq":4,"lines":[{"id":"i-1","model":"m","adapter":"","token_class":"prompt","price_id":"p",'
        '"period_start_us":1,"period_end_us":2,"late_of":"","quantity":3,"unit_price_nano":7,"amount_minor":0}],'
        '"total_minor":0,"event_count":1,"events_digest":"d","created_us":3}',
        type=Invoice,
    )
    assert (old.total_femto, old.true_up, old.lines[0].tiers, old.lines[0].kind.value) == (21, "0", (), "usage")
