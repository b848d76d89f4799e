from __future__ import annotations

import asyncio

from metering.queries import Query
from tests.unit.admin.conftest import World

HOUR = "2026-11-18T11:00:00Z"  # that the world's clock stands in


async def test_sums_are_checked_and_made_anew(world: World) -> None:
    await world.tenant()
    world.request("acme")
    await asyncio.to_thread(world.state.flush, 5.0)
    rolled = await asyncio.to_thread(world.state.usage.rollups.roll)
    assert rolled == 1
    assert await world.get("/rollups/drift") == {"data": [], "has_more": False, "next": None}
    pollute = (
        "INSERT INTO usage_hourly SELECT * REPLACE (requests + 1 AS requests, version + 1 AS version) FROM usage_hourly"
    )
    await asyncio.to_thread(world.state.usage._query, Query(pollute, {}))
    (drift,) = (await world.get("/rollups/drift"))["data"]
    assert drift == {"start": HOUR, "groups": 1, "events": 1, "summed": 2}
    assert (await world.get("/rollups/drift", end=HOUR))["data"] == []
    body = {"start": "2026-11-18T11:30:00Z", "end": "2026-11-18T11:30:01Z"}
    assert await world.call("PUT", "/rollups", body) == {"hours": 1}
    assert (await world.get("/rollups/drift"))["data"] == []
    (row,) = await asyncio.to_thread(
        world.state.usage._query, Query("SELECT sum(requests) FROM usage_hourly FINAL", {})
    )
    assert row == (1,)


async def test_what_is_no_range_is_refused(world: World) -> None:
    for body in ({}, {"start": HOUR}, {"start": HOUR, "end": HOUR}, {"start": "x", "end": HOUR}):
        await world.call("PUT", "/rollups", body, expect=400)
    await world.get("/rollups/drift", expect=400, start=HOUR, end=HOUR)
