"""The demo of a first start, killed after each of its calls and run again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway import demo
from tests.unit.admin.conftest import ADMIN_KEY, World


class Killed(BaseException):
    """Nothing in the demo catches it."""


@pytest.fixture(autouse=True)
def adapters(adapter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        shutil.copytree(adapter_folder, tmp_path / "adapters" / name)
    monkeypatch.setattr(demo, "ADAPTERS", tmp_path / "adapters")


async def prepare(world: World) -> list[str]:
    return await demo.prepare(world.app, ADMIN_KEY, "http://test", "base")


async def state(world: World) -> dict[str, Any]:
    """What there is, without ids and times."""
    found: dict[str, Any] = {"prices": len((await world.get("/prices"))["data"])}
    for id, _ in demo.TENANTS:
        balance = await world.get(f"/tenants/{id}/balance")
        adapters = (await world.get(f"/tenants/{id}/adapters"))["data"]
        keys = (await world.get(f"/tenants/{id}/keys"))["data"]
        found[id] = (balance["granted"], [one["name"] for one in adapters], [one["name"] for one in keys])
    return found


async def test_a_kill_after_any_call_is_made_good_by_the_next_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, left = demo._post, 0

    async def killed(*call: Any) -> Any:
        nonlocal left
        answer = await post(*call)
        left -= 1
        if left == 0:
            raise Killed
        return answer

    monkeypatch.setattr(demo, "_post", killed)
    kills = 0
    while True:
        left = kills + 1
        try:
            lines = await prepare(world)
        except Killed:
            kills += 1
        else:
            break
    assert kills >= 5
    whole = {"prices": 1, "acme": ("10.00", ["one"], ["demo"]), "globex": ("10.00", ["two"], ["demo"])}
    assert await state(world) == whole
    assert len(world.engine._adapters) == 2
    assert [line for line in lines if "is there from an earlier start" in line]
    assert await prepare(world) == [line for line in await prepare(world) if "is there from an earlier start" in line]
    assert await state(world) == whole


async def test_a_first_start_shows_both_keys_and_they_open(world: World) -> None:
    lines = "\n".join(await prepare(world))
    keys = [word for word in lines.split() if word.startswith("mh-")]
    owners = [world.state.billing.authenticate(key) for key in keys[:2]]
    assert [owner[1].id for owner in owners if owner is not None] == ["acme", "globex"]


async def test_a_tenant_that_has_a_key_is_left_alone(world: World) -> None:
    await world.tenant()
    await world.post("/tenants/acme/keys", {"name": "mine"})
    lines = await prepare(world)
    assert "acme is there" in lines[0]
    assert "--name another" in lines[0]
    assert not [line for line in lines[1:] if line.startswith("  acme")]
    assert (await state(world))["acme"] == ("0.00", [], ["mine"])
