from __future__ import annotations

import asyncio

import pytest

from gateway.admin import comparing
from gateway.telemetry import Telemetry
from gateway.watch import Watch
from metering.queries import Query
from tests.unit.admin.conftest import World

HOUR = "2026-11-18T11:00:00Z"  # that the world's clock stands in


async def test_sums_are_checked_and_made_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PAUSE_S", 0.0)
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
    watch = Watch(world.settings, world.stores, world.state, telemetry := Telemetry("m", "0"), world.clock)
    report = await world.get("/reconcile", start=HOUR)
    (told,) = [one for one in report["differences"] if one["between"] == "hourly sums and events"]
    assert (told["start"], told["left"], told["right"]) == (HOUR, "2 requests, 1 groups otherwise", "1 requests")
    assert "meterhouse_rollup_drift_hours 1.0" in telemetry.exposition().decode()
    world.later(3600)
    world.stores.publish(world.clock.us)
    await asyncio.to_thread(watch.comparison.run)
    assert "meterhouse_rollup_drift_hours 1.0" in telemetry.exposition().decode(), "by the clock too"
    body = {"start": "2026-11-18T11:30:00Z", "end": "2026-11-18T11:30:01Z"}
    assert await world.call("PUT", "/rollups", body) == {"hours": 1}
    assert (await world.get("/rollups/drift"))["data"] == []
    await asyncio.to_thread(watch.comparison.run)
    assert "meterhouse_rollup_drift_hours 0.0" in telemetry.exposition().decode()
    (row,) = await asyncio.to_thread(
        world.state.usage._query, Query("SELECT sum(requests) FROM usage_hourly FINAL", {})
    )
    assert row == (1,)


async def test_what_is_no_range_is_refused(world: World) -> None:
    for body in ({}, {"start": HOUR}, {"start": HOUR, "end": HOUR}, {"start": "x", "end": HOUR}):
        await world.call("PUT", "/rollups", body, expect=400)
    await world.get("/rollups/drift", expect=400, start=HOUR, end=HOUR)
