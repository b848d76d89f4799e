from __future__ import annotations

import asyncio
from typing import Any

from metering.events import UsageEvent
from tests.unit.admin.conftest import START_US, World

OCTOBER_US = 1_790_812_800_000_000  # 2026-10-01


async def stored(world: World) -> list[UsageEvent]:
    assert await asyncio.to_thread(world.state.flush, 5.0)
    return await asyncio.to_thread(lambda: list(world.state.usage.events(None, 0, 1 << 61)))


async def test_a_month_is_archived_dropped_checked_and_still_invoiced(world: World) -> None:
    await world.tenant()
    world.clock.us = OCTOBER_US + 5
    await world.price(tenant="acme", effective_at=0)
    events = [world.request("acme", 1000 + i, 10, 100) for i in range(3)]
    assert "may still be on its way" in str(await world.call("PUT", "/archives/2026-10", expect=409))
    world.clock.us = START_US
    events.append(world.request("acme", 7, 0, 7))
    before = await stored(world)
    usage: dict[str, Any] = {"start": "2026-10-01", "end": "2026-11-20", "group_by": "model,user"}
    rows = await world.get("/usage", **usage)
    shown = {"month": "2026-10", "events": 3, "second_contents": 0, "files": 1, "dropped": True}
    for _ in range(2):
        made = await world.call("PUT", "/archives/2026-10")
        assert made.pop("nbytes") > 1000
        assert made == shown
    (listed,) = (await world.get("/archives"))["data"]
    assert {name: listed[name] for name in shown} == shown
    assert await world.get("/archives/2026-10/check") == {"month": "2026-10", "ok": True, "events": 3, "fault": None}
    assert await stored(world) == before == events
    assert await world.get("/usage", **usage) == rows
    report = await world.get("/reconcile", start="2026-10-01", end="2026-10-20")
    assert (report["ok"], sum(row["stored"]["requests"] for row in report["rows"])) == (True, 3)
    period = {"tenant": "acme", "period_start": "2026-10-01", "period_end": "2026-11-01"}
    assert (await world.post("/invoices", period))["requests"] == 3
    path = world.settings.archive / "2026-10" / "part-0001.parquet"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    found = await world.get("/archives/2026-10/check")
    assert (found["ok"], "part-0001.parquet" in found["fault"]) == (False, True)
    assert str(world.settings.data_dir) not in found["fault"]


async def test_what_is_no_month_is_refused(world: World) -> None:
    for month in ("2026-13", "2026-1", "202610", "x", "0001-01"):
        await world.call("PUT", f"/archives/{month}", expect=400)
        await world.get(f"/archives/{month}/check", expect=400)
    await world.get("/archives/2026-09/check", expect=404)
    assert (await world.get("/archives"))["data"] == []
    assert (await world.call("PUT", "/archives/2026-09"))["files"] == 0
