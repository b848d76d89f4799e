"""Signing keys over the admin API: listed and rotated, by an owner alone."""

from __future__ import annotations

from gateway.admin.times import format_time
from tests.unit.admin.conftest import START_US, World


async def test_the_key_is_published_from_the_start_and_a_rotation_retires_it(world: World) -> None:
    await world.tenant()
    world.request("acme")
    world.later(60)
    body = {"tenant": "acme", "period_start": format_time(START_US), "period_end": format_time(world.clock.us)}
    made = await world.post("/invoices", body)
    (first,) = (await world.get("/signing-keys"))["data"]
    await world.post(f"/invoices/{made['id']}/finalize", expect=200)
    assert (await world.get("/signing-keys"))["data"] == [first]
    assert (first["this"], first["retired_at"]) == (True, None)
    rotated = await world.post("/signing-keys", headers={"idempotency-key": "once"})
    assert await world.post("/signing-keys", headers={"idempotency-key": "once"}) == rotated
    old, new = (await world.get("/signing-keys"))["data"]
    assert (old["key_id"], new["key_id"]) == (first["key_id"], rotated["key_id"])
    assert (old["retired_at"], new["retired_at"]) == (rotated["published_at"], None)
    assert (world.settings.data_dir / "signing.key").is_file()
    assert "PRIVATE" not in str(await world.get("/audit"))


async def test_only_an_owner_rotates(world: World) -> None:
    for role, expect in (("billing", 403), ("read_only", 403), ("owner", 201)):
        key = (await world.post("/admin-keys", {"name": role, "role": role}))["key"]
        await world.post("/signing-keys", expect=expect, headers={"authorization": f"Bearer {key}"})
