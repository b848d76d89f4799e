"""Other prices over past usage: what they would have come to, to the last digit, and nothing is written."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from billing.errors import Invalid, NotFound
from billing.offers import ClassOffer, TierOffer
from billing.periods import period_at
from billing.service.simulating import Candidate
from billing.simulation import Missing
from billing.tiers import PriceModel
from migrations.runner import migrate_ledger

MICRO = 10**9
FOREVER = 2**62
FLAT = {"prompt": "1", "cached": "0.1", "completion": "2"}
GRADUATED = ClassOffer(model=PriceModel.GRADUATED, tiers=(TierOffer(price="10", up_to=60), TierOffer(price="4")))
VOLUME = ClassOffer(model=PriceModel.VOLUME, tiers=(TierOffer(price="10", up_to=60), TierOffer(price="5")), allowance=7)
PACKAGE = ClassOffer(model=PriceModel.PACKAGE, price="0.001", package_size=9, minimum="0.05")
MONTH = period_at(1_790_000_000_000_000)


def candidate(at_us: int = MONTH.start_us, **more: Any) -> Candidate:
    return Candidate(**{"effective_at_us": at_us, "model": "*", "currency": "usd", "per_million": FLAT, **more})


def simulate(house: Any, *candidates: Candidate, span: tuple[int, int] | None = None, **more: Any) -> Any:
    start_us, end_us = span or (MONTH.start_us, MONTH.end_us)
    return house.billing.simulate_prices(list(candidates), start_us, end_us, usage=house.shelf, **more)


def draft(house: Any) -> Any:
    house.clock.now_us = MONTH.end_us
    return house.billing.draft_invoice("acme", MONTH.start_us, MONTH.end_us, usage=house.shelf, watermark_us=FOREVER)


def amounts(found: Any) -> list[tuple[str, str, int, Any, Any]]:
    return [(row.tenant, row.model, row.requests, row.charged_femto, row.would_be_femto) for row in found.rows]


BOOKS: list[list[dict[str, Any]]] = [
    [{"model": "*", "per_million": {"prompt": "3", "cached": "1", "completion": "7"}}],
    [
        {"model": "*", "per_million": {"prompt": "3", "cached": "1"}, "classes": {"completion": GRADUATED}},
        {"model": "pirate", "per_million": {"prompt": "3", "completion": "1"}, "classes": {"cached": VOLUME}},
    ],
    [
        {"model": "*", "tenant": "acme", "per_million": FLAT, "classes": {"request": PACKAGE}},
        {"model": "base", "endpoint": "completions", "per_million": {"cached": "1", "completion": "7"},
         "classes": {"prompt": VOLUME}},
    ],
]  # fmt: skip


@pytest.mark.parametrize("book", BOOKS)
def test_it_is_what_the_candidate_book_would_have_invoiced(
    book: list[dict[str, Any]], open_house: Callable[[str], Any], sqlite_ledger_url: str, tmp_path: Path
) -> None:
    """The oracle: a second house that had these prices from the start, its charges and its invoice of the month."""
    other_url = f"sqlite:///{tmp_path / 'other.sqlite3'}"
    migrate_ledger(other_url)
    house, other = open_house(sqlite_ledger_url), open_house(other_url)
    for one in (house, other):
        one.set_price("pirate", completion="9")
    for entry in book:
        other.billing.set_price(effective_at_us=0, currency="usd", **entry)
    draw = random.Random(len(str(book)))  # the same events each time
    for _ in range(40):
        event = house.event(
            prompt=draw.randrange(40),
            completion=draw.randrange(20),
            model=draw.choice(("base", "pirate")),
            endpoint=draw.choice(("completions", "chat.completions")),
        )
        for one in (house, other):
            one.shelf.kept.append(event)
            one.billing.record([event])
    other.clock.now_us = house.clock.now_us = MONTH.end_us
    invoiced = other.billing.draft_invoice(
        "acme", MONTH.start_us, MONTH.end_us, usage=other.shelf, watermark_us=FOREVER
    )
    charged = house.billing.draft_invoice("acme", MONTH.start_us, MONTH.end_us, usage=house.shelf, watermark_us=FOREVER)
    candidates = [candidate(**one) for one in book]
    (whole,) = simulate(house, *candidates).rows
    assert (whole.would_be_femto, whole.charged_femto) == (invoiced.total_femto, charged.total_femto)
    by_model = simulate(house, *candidates, by_model=True).rows
    lines: dict[str, Any] = {}
    for line in invoiced.lines:
        lines[line.model] = lines.get(line.model, 0) + line.amount_femto
    assert {row.model: row.would_be_femto for row in by_model if row.would_be_femto} == {
        model: amount for model, amount in lines.items() if amount
    }
    assert sum(row.requests for row in by_model) == whole.requests == 40


@pytest.mark.parametrize("book", BOOKS)
def test_the_parts_of_a_month_come_to_the_month(book: list[dict[str, Any]], house: Any) -> None:
    flat = {"prompt": "1", "cached": "1"}
    house.billing.set_price(
        model="*", tenant="acme", effective_at_us=0, currency="usd", per_million=flat, classes={"completion": VOLUME}
    )
    for number in range(30):
        house.use(prompt=number, completion=number % 7)
    cuts = [MONTH.start_us, house.shelf.kept[11].ts_us, house.shelf.kept[12].ts_us, MONTH.end_us]
    candidates = [candidate(**one) for one in book]
    (whole,) = simulate(house, *candidates).rows
    parts = [simulate(house, *candidates, span=span).rows[0] for span in itertools.pairwise(cuts)]
    assert sum(part.would_be_femto for part in parts) == whole.would_be_femto
    assert sum(part.charged_femto for part in parts) == whole.charged_femto
    assert sum(part.requests for part in parts) == whole.requests == 30


def test_a_candidate_takes_the_place_of_what_stands_from_its_time_on(house: Any) -> None:
    house.use(prompt=1, completion=0)
    later = house.set_price(prompt="5")
    second = house.use(prompt=1, completion=0)
    house.set_price(prompt="9", currency="eur")
    assert amounts(simulate(house, candidate(second.ts_us, per_million={**FLAT, "prompt": "7"}))) == [
        ("acme", "", 2, 6 * MICRO, 8 * MICRO)
    ]
    assert amounts(simulate(house, candidate(per_million={**FLAT, "prompt": "7"}))) == [
        ("acme", "", 2, 6 * MICRO, 14 * MICRO)
    ]
    assert amounts(simulate(house, Candidate(price_id=later, effective_at_us=MONTH.start_us))) == [
        ("acme", "", 2, 6 * MICRO, 10 * MICRO)
    ]


def test_what_has_no_candidate_price_is_named_and_is_not_nothing(house: Any) -> None:
    house.billing.create_tenant(id="other", name="Other")
    house.use(prompt=1, completion=0)
    house.use(prompt=1, completion=0, model="pirate")
    house.use(prompt=1, completion=0, images=1)  # which nobody has a price for
    house.use(prompt=1, completion=0, tenant="other", model="pirate")
    found = simulate(house, candidate(model="pirate", endpoint="chat.completions"), alone=True, by_model=True)
    assert amounts(found) == [
        ("acme", "base", 2, MICRO, None),
        ("acme", "pirate", 1, MICRO, MICRO),
        ("other", "pirate", 1, MICRO, MICRO),
    ]
    assert found.missing == {
        Missing(tenant="acme", model="base", endpoint="chat.completions", reason="no price in usd"): 1,
        Missing(
            tenant="acme", model="base", endpoint="chat.completions", reason="no price, or none for what is no token"
        ): 1,
    }
    assert found.uncharged == {"acme": 1}
    assert amounts(simulate(house, candidate(model="pirate"), alone=True, tenant_id="other")) == [
        ("other", "", 1, MICRO, MICRO)
    ]
    with pytest.raises(NotFound):
        simulate(house, candidate(), tenant_id="nobody")


def test_every_fault_of_every_candidate_is_told_at_once(house: Any) -> None:
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    with pytest.raises(Invalid) as refused:
        simulate(
            house,
            Candidate(price_id="price-none", effective_at_us=0),
            candidate(per_million={"prompt": "-1"}, tenant="nobody"),
            candidate(tenant="euro"),
            candidate(),
            candidate(),
        )
    assert [field for field, _ in refused.value.faults] == [
        "prices[0].price",
        "prices[1].per_million.prompt",
        "prices[1].per_million.cached",
        "prices[1].per_million.completion",
        "prices[1].tenant",
        "prices[2].currency",
        "prices[4]",
    ]
    with pytest.raises(Invalid):
        simulate(house)


def test_nothing_is_written(house: Any) -> None:
    for _ in range(3):
        house.use()
    rows = house.billing._store.read()
    balance, prices = house.billing.balance("acme"), house.billing.prices()
    assert simulate(house, candidate(classes={"request": PACKAGE})).rows
    assert house.billing._store.read() == rows
    assert (house.billing.balance("acme"), house.billing.prices()) == (balance, prices)
    assert house.billing.alarms() == {}
