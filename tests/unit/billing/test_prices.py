"""Which price applies."""

from __future__ import annotations

from typing import Any

import pytest

from billing.errors import Invalid, NoPrice, NotFound
from billing.prices import PriceBook, PriceSet, PriceVersion, Rate

NOW = 1000


def version(
    id: str, model: str = "*", tenant: str | None = None, effective: int = 0, recorded: int = 0, currency: str = "usd"
) -> PriceVersion:
    rate = Rate(price_id=id, currency=currency, prompt=1, cached=1, completion=1)
    return PriceVersion(id=id, tenant=tenant, model=model, effective_at_us=effective, recorded_us=recorded, rate=rate)


def found(
    versions: list[PriceVersion], *, tenant: str = "acme", model: str = "pirate", ts_us: int = NOW, known_us: int = NOW
) -> str:
    book = PriceBook()
    for one in versions:
        book.apply(PriceSet(price=one))
    return book.resolve(tenant, model, "base", "usd", ts_us=ts_us, known_us=known_us).id


LADDER = [
    version("tenant and name", "pirate", "acme"),
    version("tenant and any", "*", "acme"),
    version("name", "pirate"),
    version("base", "base"),
    version("any", "*"),
]


@pytest.mark.parametrize("step", range(5))
def test_the_nearest_price_wins(step: int) -> None:
    assert found(LADDER[step:]) == LADDER[step].id
    assert found(LADDER[step:][::-1]) == LADDER[step].id


def test_another_tenants_price_is_nobodys() -> None:
    with pytest.raises(NoPrice):
        found([version("x", "pirate", "other"), version("y", "*", "other")])


def test_a_copy_of_the_book_does_not_see_what_is_set_later() -> None:
    book = PriceBook()
    book.apply(PriceSet(price=version("before")))
    copy = book.copy()
    book.apply(PriceSet(price=version("after")))
    for asked, name in ((copy, "before"), (book, "after")):
        assert asked.resolve("acme", "m", "base", "usd", ts_us=NOW, known_us=NOW).id == name
    assert list(copy.versions) == ["before"]


def test_the_newest_effective_version_wins() -> None:
    versions = [version("old", effective=1), version("new", effective=NOW), version("to come", effective=NOW + 1)]
    assert found(versions) == found(versions[::-1]) == "new"
    assert found(versions, ts_us=NOW - 1) == "old"


def test_of_two_effective_at_one_instant_the_later_recorded_wins() -> None:
    assert found([version("first", effective=5), version("second", effective=5)]) == "second"


def test_a_version_recorded_later_is_not_known_before() -> None:
    versions = [version("known", effective=1), version("set later", effective=2, recorded=NOW + 1)]
    assert found(versions) == "known"
    assert found(versions, known_us=NOW + 1) == "set later"


def test_a_price_in_another_currency_does_not_apply() -> None:
    assert found([version("near", "pirate", "acme", currency="eur"), version("any")]) == "any"
    assert found([version("usd", effective=1), version("eur", effective=2, currency="eur")]) == "usd"


def test_no_price_is_no_price() -> None:
    with pytest.raises(NoPrice):
        found([])
    with pytest.raises(NoPrice):
        found([version("to come", effective=NOW + 1)])


@pytest.mark.parametrize(
    ("bad", "fields"),
    [
        ({"prompt": "-1"}, ["per_million.prompt"]),
        ({"prompt": "1e-10"}, ["per_million.prompt"]),
        ({"prompt": "1000000001"}, ["per_million.prompt"]),
        ({"prompt": "NaN", "completion": "Infinity"}, ["per_million.prompt", "per_million.completion"]),
        ({"prompt": 0.5}, ["per_million.prompt"]),
        ({"reasoning": "1"}, ["per_million.reasoning"]),
        ({"prompt": None}, ["per_million.prompt"]),
    ],
)
def test_a_bad_price_is_refused(house: Any, bad: dict[str, Any], fields: list[str]) -> None:
    per_million = {"prompt": "1", "cached": "1", "completion": "1", **bad}
    with pytest.raises(Invalid) as caught:
        house.billing.set_price(model="m", effective_at_us=0, currency="usd", per_million=per_million)
    assert [field for field, _ in caught.value.faults] == fields
    assert len(house.billing.prices()) == 1


def test_every_class_must_have_a_price(house: Any) -> None:
    with pytest.raises(Invalid) as caught:
        house.billing.set_price(model="a b", effective_at_us=-1, currency="?", per_million={"prompt": "1"})
    assert [field for field, _ in caught.value.faults] == [
        "model",
        "effective_at",
        "currency",
        "per_million.cached",
        "per_million.completion",
    ]


def test_a_tenants_own_price_is_in_its_currency(house: Any) -> None:
    with pytest.raises(Invalid):
        house.set_price(tenant="acme", currency="eur")
    with pytest.raises(NotFound):
        house.set_price(tenant="nobody")
    id = house.set_price(tenant="acme", prompt="0.00000012" + "0")
    rate = house.restart().quote("acme", "base", "base", house.clock())
    assert (rate.price_id, rate.prompt) == (id, 120)
    assert [price.id for price in house.billing.prices()][-1] == id
