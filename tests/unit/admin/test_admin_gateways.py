"""Gateways that share a ledger: no invoice is cut past what another one still holds."""

from __future__ import annotations

from typing import Any

from gateway.admin.times import format_time
from tests.unit.admin.conftest import START_US, World

MINUTE_US = 60_000_000


async def draft(world: World, expect: int = 201) -> Any:
    body = {"tenant": "acme", "period_start": format_time(START_US), "period_end": format_time(world.clock.us)}
    return await world.post("/invoices", body, expect=expect)


async def test_a_gateway_is_listed_by_itself_and_cannot_be_removed_by_itself(world: World) -> None:
    world.later(60)
    found = await world.get("/gateways")
    assert found["data"] == [
        {
            "id": "gw0",
            "alive": False,
            "this": True,
            "stored_until": format_time(START_US),
            "seen_at": format_time(START_US),
            "started_at": format_time(START_US),
        }
    ]
    refused = await world.call("DELETE", "/gateways/gw0", expect=409)
    assert "removes itself" in refused["error"]["message"]
    assert len((await world.get("/gateways"))["data"]) == 1


async def test_an_invoice_waits_for_the_slowest_gateway_and_names_it(world: World) -> None:
    await world.tenant()
    world.request("acme")
    world.later(60)
    end_us = world.clock.us
    world.stores.gateways.claim("east", "elsewhere", end_us - 5_000_000, end_us)
    world.stores.gateways.claim("west", "elsewhere too", end_us - 1, end_us)
    refused = await draft(world, expect=409)
    assert refused["error"]["code"] == "period_not_closed"
    for told in ("'east'", format_time(end_us - 5_000_000), format_time(end_us)):
        assert told in refused["error"]["message"]
    answer = await world.client.post(
        "/invoices", json={"tenant": "acme", "period_start": START_US // 10**6, "period_end": end_us // 10**6}
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "5")
    world.stores.gateways.publish("east", "elsewhere", end_us, end_us)
    assert "'west'" in (await draft(world, expect=409))["error"]["message"]
    world.stores.gateways.publish("west", "elsewhere too", end_us, end_us)
    assert (await draft(world))["requests"] == 1


async def test_its_own_running_request_is_not_blamed_on_another_gateway(world: World) -> None:
    await world.tenant()
    world.opened("acme")
    world.later(60)
    world.stores.gateways.claim("east", "elsewhere", world.clock.us, world.clock.us)
    assert "east" not in (await draft(world, expect=409))["error"]["message"]


async def test_a_period_that_is_not_over_is_nobodys_fault(world: World) -> None:
    await world.tenant()
    world.later(60)
    world.stores.gateways.claim("east", "elsewhere", world.clock.us - 1, world.clock.us)
    body = {"tenant": "acme", "period_start": format_time(START_US), "period_end": format_time(world.clock.us + 1)}
    assert "east" not in (await world.post("/invoices", body, expect=409))["error"]["message"]


async def test_a_lost_gateway_is_removed_and_invoices_go_on(world: World) -> None:
    await world.tenant()
    world.request("acme")
    world.stores.gateways.claim("lost", "elsewhere", world.clock.us, world.clock.us)
    world.later(5)
    alive = await world.call("DELETE", "/gateways/lost", expect=409)
    assert "moment ago" in alive["error"]["message"]
    world.later(60)
    assert [(one["id"], one["alive"]) for one in (await world.get("/gateways"))["data"]] == [
        ("gw0", False),  # nothing beats here
        ("lost", False),
    ]
    await draft(world, expect=409)
    await world.call("DELETE", "/gateways/lost", expect=204)
    await world.call("DELETE", "/gateways/lost", expect=404)
    assert (await draft(world))["requests"] == 1
