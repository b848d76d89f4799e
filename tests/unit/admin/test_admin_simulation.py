"""Simulating prices over the admin API: who may, what is shown, every fault named, and nothing written."""

from __future__ import annotations

import asyncio
from typing import Any

from billing.admins import Role
from gateway.admin import simulation
from gateway.admin.times import format_time
from tests.unit.admin.conftest import PRICE, START_US, World

TIERS = {"model": "graduated", "tiers": [{"price": "10.00", "up_to": 20}, {"price": "1.00"}]}


def ask(world: World, *prices: dict[str, Any], **more: Any) -> dict[str, Any]:
    ends = {"start": format_time(START_US), "end": format_time(world.clock.us)}
    return {**ends, "prices": list(prices), **more}


def candidate(**more: Any) -> dict[str, Any]:
    return {"model": "*", "currency": "usd", "per_million": PRICE, **more}


async def test_the_difference_is_shown_by_tenant_and_by_model_and_nothing_is_written(world: World) -> None:
    await world.tenant("acme")
    await world.tenant("other")
    for model in ("base", "base", "pirate"):
        world.request("acme", prompt=0, completion=20, model=model)
    world.request("other", prompt=0, completion=10)
    assert world.stores.recorder.flush(5)
    before = world.stores.events.read()
    tiered = candidate(tenant="acme", per_million={"prompt": "1", "cached": "1"}, classes={"completion": TIERS})
    found = await world.post("/prices/simulation", ask(world, tiered), expect=200)
    acme, other = found["data"]
    assert acme == {
        "tenant": "acme",
        "model": None,
        "currency": "usd",
        "requests": 3,
        "charged": "0.00018",
        "would_be": "0.00024",  # 20 at 10, 40 at 1
        "difference": "0.00006",
        "percent": "+33.33",
    }
    assert (other["requests"], other["charged"], other["would_be"], other["percent"]) == (
        1,
        "0.00003",
        "0.00003",
        "+0.00",
    )
    assert (found["missing"], found["uncharged"]) == ([], {})
    dear = candidate(tenant="acme", model="pirate", per_million={**PRICE, "completion": "0.00"})
    by_model = await world.post("/prices/simulation", ask(world, dear, by_model=True, tenant="acme"), expect=200)
    assert [(row["model"], row["requests"], row["difference"], row["percent"]) for row in by_model["data"]] == [
        ("base", 2, "0.00", "+0.00"),
        ("pirate", 1, "-0.00006", "-100.00"),
    ]
    none = await world.post("/prices/simulation", ask(world, candidate(model="pirate"), alone=True), expect=200)
    assert none["data"][0]["would_be"] is none["data"][0]["percent"] is None
    why = {"model": "base", "endpoint": "chat.completions", "reason": "no price in usd"}
    assert none["missing"] == [{"tenant": "acme", **why, "requests": 2}, {"tenant": "other", **why, "requests": 1}]
    assert world.stores.events.read() == before
    assert len((await world.get("/prices"))["data"]) == 2


async def test_every_fault_of_a_book_is_named_and_refusing_it_is_no_event(world: World) -> None:
    await world.tenant("acme")
    before = world.stores.events.read()
    standing = (await world.get("/prices"))["data"][0]["id"]
    world.later(5)

    async def told(*prices: Any, **more: Any) -> str:
        answer = await world.post("/prices/simulation", ask(world, *prices, **more), expect=400)
        return str(answer["error"]["message"])

    shape = await told(candidate(model=5), {"currency": "usd", "cost": "1"}, "price", start="soon")
    for field in ("prices[0].model", "prices[1].cost", "prices[2]"):
        assert f"{field}:" in shape
    rules = await told({"price": standing, "model": "*"}, {}, candidate(effective_at="soon"), end=0)
    for field in ("end", "prices[0].model", "prices[1].model", "prices[1].currency", "prices[2].effective_at"):
        assert f"{field}:" in rules
    book = await told({"price": "price-none"}, candidate(tenant="nobody", per_million={"prompt": "-1"}))
    for field in (
        "prices[0].price",
        "prices[1].per_million.prompt",
        "prices[1].per_million.cached",
        "prices[1].tenant",
    ):
        assert f"{field}:" in book
    assert "prices:" in await told()
    await asyncio.gather(*world.state._tasks)
    assert world.stores.events.read() == before


async def test_who_only_reads_may_ask_and_one_asks_at_a_time(world: World, monkeypatch: Any) -> None:
    await world.tenant("acme")
    world.request("acme")
    key = await world.post("/admin-keys", {"name": "reader", "role": Role.READ_ONLY})
    headers = {"authorization": f"Bearer {key['key']}"}
    await world.post("/prices/simulation", ask(world, candidate()), expect=200, headers=headers)
    await world.post("/prices", candidate(), expect=403, headers=headers)
    with simulation._simulating:
        busy = await world.post("/prices/simulation", ask(world, candidate()), expect=409)
    assert "another simulation" in busy["error"]["message"]
    monkeypatch.setattr(simulation, "MAX_EVENTS", 0)
    assert world.state.flush(5)
    much = await world.post("/prices/simulation", ask(world, candidate()), expect=400)
    assert "start: there are 1 requests" in much["error"]["message"]
