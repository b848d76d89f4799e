"""What a quantity of a class costs, and what people may type as a price."""

from __future__ import annotations

from typing import Any

import pytest

from billing.errors import Invalid
from billing.offers import ClassOffer, TierOffer, check_price
from billing.tiers import Component, PriceModel, Tier, TokenClass, cost_femto, dearest_femto

MICRO = 10**9  # femto-units of a millionth of a unit

GRADUATED = ClassOffer(model=PriceModel.GRADUATED, tiers=(TierOffer(price="3", up_to=10), TierOffer(price="1")))
VOLUME = ClassOffer(model=PriceModel.VOLUME, tiers=(TierOffer(price="3", up_to=10), TierOffer(price="1")))
PACKAGE = ClassOffer(model=PriceModel.PACKAGE, price="0.000005", package_size=10)


def component(offer: ClassOffer, name: str = "completion") -> Component:
    others = {one: "1" for one in ("prompt", "cached", "completion") if one != name}
    return {one.token_class.value: one for one in check_price("*", 0, "usd", others, {name: offer})}[name]


@pytest.mark.parametrize(
    ("offer", "position", "quantity", "micros"),
    [
        (ClassOffer(price="2"), 7, 5, 10),
        (ClassOffer(price="2", allowance=10), 0, 10, 0),
        (ClassOffer(price="2", allowance=10), 8, 5, 6),
        (ClassOffer(price="2", allowance=10), 11, 5, 10),
        (GRADUATED, 0, 10, 30),
        (GRADUATED, 0, 11, 31),
        (GRADUATED, 9, 3, 3 + 2),
        (GRADUATED, 10, 3, 3),
        (VOLUME, 0, 10, 30),
        (VOLUME, 0, 11, 11),
        (VOLUME, 9, 3, 3),
        (PACKAGE, 0, 1, 5),
        (PACKAGE, 1, 9, 0),
        (PACKAGE, 9, 2, 5),
        (PACKAGE, 0, 31, 20),
        (PACKAGE, 5, 0, 0),
        (ClassOffer(model=PriceModel.PACKAGE, price="0.000005", package_size=10, allowance=4), 0, 14, 5),
    ],
)
def test_an_amount(offer: ClassOffer, position: int, quantity: int, micros: int) -> None:
    assert cost_femto(component(offer), position, quantity) == micros * MICRO


def test_each_class_is_priced_in_its_own_unit() -> None:
    for name, quantity, femto in [
        ("image", 3, 3 * 10**13),
        ("audio_second", 1500, 15 * 10**12),  # milliseconds
        ("compute_second", 2_500_000, 25 * 10**12),  # microseconds
        ("request", 1, 10**13),
        ("tool_call", 2, 2 * 10**13),
        ("reasoning", 10**6, 10**13),  # per million
    ]:
        assert cost_femto(component(ClassOffer(price="0.01"), name), 0, quantity) == femto
    second = component(ClassOffer(price="1", allowance=2), "audio_second")
    assert cost_femto(second, 0, 2000) == 0
    assert cost_femto(second, 0, 2001) == 10**12
    assert component(ClassOffer(price="0.000000001"), "compute_second").tiers[0].price_nano == 1
    assert cost_femto(component(ClassOffer(price="0.000000001"), "compute_second"), 0, 1) == 1


def test_what_is_past_is_not_the_dearest_any_more() -> None:
    assert dearest_femto(component(GRADUATED), 9) == 3 * MICRO
    assert dearest_femto(component(GRADUATED), 10) == MICRO
    free = Component(
        token_class=TokenClass.COMPLETION,
        model=PriceModel.GRADUATED,
        allowance=100,
        tiers=(Tier(price_nano=9, up_to=10), Tier(price_nano=1)),
    )
    assert [dearest_femto(free, at) for at in (0, 100, 109, 110)] == [9, 9, 9, 1]


@pytest.mark.parametrize(
    ("classes", "fields"),
    [
        ({"gpu": ClassOffer(price="1")}, ["classes.gpu"]),
        ({"image": ClassOffer()}, ["classes.image.price"]),
        ({"image": ClassOffer(price="-1")}, ["classes.image.price"]),
        ({"image": ClassOffer(price="1001")}, ["classes.image.price"]),
        ({"image": ClassOffer(price="1", allowance=-1)}, ["classes.image.allowance"]),
        ({"image": ClassOffer(price="1", minimum="x")}, ["classes.image.minimum"]),
        ({"image": ClassOffer(price="1", package_size=3)}, ["classes.image.package_size"]),
        ({"image": ClassOffer(model=PriceModel.PACKAGE, price="1")}, ["classes.image.package_size"]),
        ({"image": ClassOffer(model=PriceModel.PACKAGE, price="1", package_size=0)}, ["classes.image.package_size"]),
        ({"image": ClassOffer(price="1", tiers=(TierOffer(price="1"),))}, ["classes.image.tiers"]),
        ({"image": ClassOffer(model=PriceModel.VOLUME)}, ["classes.image.tiers"]),
        (
            {"image": ClassOffer(model=PriceModel.VOLUME, price="1", tiers=(TierOffer(price="1"),))},
            ["classes.image.price"],
        ),
        (
            {"image": ClassOffer(model=PriceModel.GRADUATED, tiers=(TierOffer(price="1"), TierOffer(price="1")))},
            ["classes.image.tiers[0].up_to"],
        ),
        (
            {
                "image": ClassOffer(
                    model=PriceModel.GRADUATED,
                    tiers=(TierOffer(price="1", up_to=5), TierOffer(price="x", up_to=5), TierOffer(price="1", up_to=9)),
                )
            },
            ["classes.image.tiers[1].price", "classes.image.tiers[1].up_to", "classes.image.tiers[2].up_to"],
        ),
        ({"prompt": ClassOffer(price="1")}, ["per_million.prompt"]),
        ({"adapter_month": ClassOffer(price="1", allowance=1)}, ["classes.adapter_month"]),
        ({"adapter_month": ClassOffer(price="1000001")}, ["classes.adapter_month.price"]),
    ],
)
def test_every_fault_of_an_offer_is_told(classes: dict[str, Any], fields: list[str]) -> None:
    per_million = {"prompt": "1", "cached": "1", "completion": "1"}
    with pytest.raises(Invalid) as caught:
        check_price("*", 0, "usd", per_million, classes)
    assert [field for field, _ in caught.value.faults] == fields


def test_the_order_of_faults_of_tiers_is_theirs() -> None:
    with pytest.raises(Invalid) as caught:
        check_price("a b", -1, "?", {"reasoning": "1"}, {}, endpoint="a b")
    assert [field for field, _ in caught.value.faults] == [
        "model",
        "effective_at",
        "currency",
        "endpoint",
        "per_million.reasoning",
        "per_million.prompt",
        "per_million.cached",
        "per_million.completion",
    ]
