"""Taking a backup over the admin API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from billing.books import new_event
from billing.restorations import LedgerRestored
from gateway.admin.times import format_time
from gateway.backup.restore import check
from tests.unit.admin.conftest import START_US, World


async def done(world: World, begun: dict[str, Any]) -> Any:
    while begun["state"] == "running":
        await asyncio.sleep(0.01)
        begun = await world.get(f"/backups/{begun['id']}")
    return begun


async def test_a_backup_is_begun_and_asked_for_until_it_is_done(world: World, tmp_path: Path) -> None:
    await world.tenant()
    world.request("acme")
    assert await asyncio.to_thread(world.state.flush, 5.0)
    folder = tmp_path / "backup"
    headers = {"idempotency-key": "nightly"}
    begun = await world.post("/backups", {"path": str(folder)}, headers=headers)
    found = await done(world, begun)
    assert (found["state"], found["requests"], found["open"], found["lacking"]) == ("done", 1, 0, 0)
    assert (found["fault"], found["other_gateways"]) == (None, [])
    again = await world.post("/backups", {"path": str(folder)}, headers=headers)
    assert again == found
    whole = check(folder)
    assert (whole.id, whole.nbytes) == (found["id"], found["nbytes"])
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert whole.ledger.seq == found["ledger_events"] == len(world.stores.events.read())
    other = {"path": str(tmp_path / "other")}
    refused = await world.post("/backups", other, headers=headers, expect=409)
    assert refused["error"]["code"] == "idempotency_conflict"
    refused = await world.post("/backups", {"path": str(folder)}, expect=409)
    assert "must be empty" in refused["error"]["message"]
    await world.get("/backups/unknown", expect=404)


async def test_what_is_held_back_after_a_restore_is_let_go(world: World) -> None:
    nothing = {"held": False, "backup": None, "instant": None, "restored_at": None}
    assert await world.get("/stripe/hold") == nothing
    await world.call("DELETE", "/stripe/hold", expect=204)
    restored = LedgerRestored(backup_id="backup-1", instant_us=START_US, seq=1, at_us=START_US + 1_000_000)
    with world.stores.events.exclusive() as log:
        log.append([new_event("ledger", restored)], actor="restore", time_us=START_US)
    await asyncio.to_thread(world.stores.billing.refresh)
    held = await world.get("/stripe/hold")
    assert (held["held"], held["backup"], held["instant"]) == (True, "backup-1", format_time(START_US))
    for _ in range(2):
        await world.call("DELETE", "/stripe/hold", expect=204)
    assert await world.get("/stripe/hold") == nothing
    told = await world.get("/audit", kind="exports.released")
    assert [one["actor"] for one in told["data"]] == ["admin"]


async def test_who_only_reads_takes_no_backup(world: World, tmp_path: Path) -> None:
    made = await world.post("/admin-keys", {"name": "reader", "role": "read_only"})
    headers = {"authorization": f"Bearer {made['key']}"}
    await world.post("/backups", {"path": str(tmp_path / "backup")}, headers=headers, expect=403)
    assert not (tmp_path / "backup").exists()
