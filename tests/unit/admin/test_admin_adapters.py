"""Adapters: checked before they are named, kept as the server's own copy, replaced and removed whole."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from engine.types import AdapterRef, AdapterRejected, Request, SamplingParams
from tests.unit.admin.conftest import World


def copies(world: World) -> list[str]:
    """Folders the server keeps."""
    folder = world.settings.adapters_dir
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


async def until(holds: object) -> None:
    for _ in range(200):
        if holds():  # type: ignore[operator]  # a callable that says whether
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come true")


async def test_an_adapter_is_loaded_copied_and_found_under_its_name(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    made = await world.post("/tenants/acme/adapters", {"name": "team/pirate", "path": str(adapter_folder)})
    assert (made["name"], made["tenant"], made["base_model"]) == ("team/pirate", "acme", "base")
    assert len(made["digest"]) == 64
    assert copies(world) == [made["id"]]
    assert str(adapter_folder) not in str(made)
    assert (await world.get("/tenants/acme/adapters"))["data"] == [made]
    name, record = world.stores.billing.resolve_model("acme", "team/pirate")
    assert record is not None
    assert (name, record.id) == ("team/pirate", made["id"])
    shutil.rmtree(adapter_folder)  # what is served no longer depends on it
    again = AdapterRef(id="again", name=name, path=record.path, digest=record.digest)
    assert (await world.engine.load_adapter(again)).digest == made["digest"]
    await world.call("DELETE", "/tenants/acme/adapters/team/pirate", expect=204)
    assert copies(world) == []
    assert (await world.get("/tenants/acme/adapters"))["data"] == []


async def test_a_quoted_slash_names_the_same_adapter(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    await world.post("/tenants/acme/adapters", {"name": "team/pirate", "path": str(adapter_folder)})
    await world.call("DELETE", "/tenants/acme/adapters/team%2Fpirate", expect=204)


async def test_a_folder_without_the_files_is_refused_and_its_path_not_repeated(world: World, tmp_path: Path) -> None:
    await world.tenant()
    secret = tmp_path / "a-telling-name"
    secret.mkdir()
    for path in (secret, secret / "missing", Path("/etc/passwd")):
        answer = await world.client.post("/tenants/acme/adapters", json={"name": "x", "path": str(path)})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "path"
        assert "a-telling-name" not in answer.text
        assert "/etc" not in answer.text
    assert copies(world) == []


@pytest.mark.parametrize("path", ["/" + "a/" * 2000, "a\0b"])
async def test_a_path_that_no_system_takes_is_refused(world: World, path: str) -> None:
    await world.tenant()
    answer = await world.client.post("/tenants/acme/adapters", json={"name": "x", "path": path})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert copies(world) == []


async def test_a_file_that_is_much_too_large_is_not_copied(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    with (adapter_folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(9 << 30)  # a hole: it takes no room
    answer = await world.client.post("/tenants/acme/adapters", json={"name": "x", "path": str(adapter_folder)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert copies(world) == []


async def test_what_the_engine_rejects_leaves_nothing_behind(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    (adapter_folder / "adapter_config.json").write_text("not json")
    answer = await world.client.post("/tenants/acme/adapters", json={"name": "x", "path": str(adapter_folder)})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "adapter_rejected"
    assert (copies(world), (await world.get("/tenants/acme/adapters"))["data"]) == ([], [])


async def test_what_the_ledger_refuses_is_unloaded_again(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    for name in ("no spaces allowed", "base"):
        answer = await world.client.post("/tenants/acme/adapters", json={"name": name, "path": str(adapter_folder)})
        assert answer.status_code in (400, 409), answer.text
    assert copies(world) == []
    assert world.engine.stats.adapters_loaded == 0
    unknown = await world.client.post("/tenants/nobody/adapters", json={"name": "x", "path": str(adapter_folder)})
    assert unknown.status_code == 404
    assert copies(world) == []


async def test_a_replaced_adapter_is_a_new_load_and_the_old_one_goes(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    body = {"name": "x", "path": str(adapter_folder)}
    first = await world.post("/tenants/acme/adapters", body)
    (adapter_folder / "adapter_model.safetensors").write_bytes(b"other weights")
    second = await world.post("/tenants/acme/adapters", body)
    assert first["id"] != second["id"]
    assert first["digest"] != second["digest"]
    await until(lambda: copies(world) == [second["id"]])
    assert [one["id"] for one in (await world.get("/tenants/acme/adapters"))["data"]] == [second["id"]]


async def test_a_repeated_load_is_one_load(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    body = {"name": "x", "path": str(adapter_folder)}
    headers = {"idempotency-key": "a"}
    first = await world.post("/tenants/acme/adapters", body, headers=headers)
    assert await world.post("/tenants/acme/adapters", body, headers=headers) == first
    assert copies(world) == [first["id"]]
    newer = await world.post("/tenants/acme/adapters", body)
    await until(lambda: copies(world) == [newer["id"]])
    assert await world.post("/tenants/acme/adapters", body, headers=headers) == first  # what was answered then
    assert copies(world) == [newer["id"]]  # and what is served now stays


async def test_removing_waits_for_the_request_that_runs(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    made = await world.post("/tenants/acme/adapters", {"name": "x", "path": str(adapter_folder)})
    ref = AdapterRef(id=made["id"], name="x", path="")
    running = world.engine.submit(
        Request(id="r", prompt=[1, 2], sampling=SamplingParams(max_tokens=9), adapter=ref, token_ceiling=1)
    )
    removal = asyncio.create_task(world.call("DELETE", "/tenants/acme/adapters/x", expect=204))
    await until(lambda: world.stores.billing.adapters("acme") == [])
    await asyncio.sleep(0.05)
    assert not removal.done()
    assert copies(world) == [made["id"]]
    world.engine.set_ceiling("r", 9, final=True)
    assert [update async for update in running][-1].counts.completion == 9
    await removal
    assert copies(world) == []


async def test_a_folder_that_was_not_copied_is_never_deleted(world: World, adapter_folder: Path) -> None:
    await world.tenant()
    world.stores.billing.add_adapter(
        "acme", name="x", path=str(adapter_folder), id="elsewhere", digest="0" * 64, base_model="base"
    )
    await world.call("DELETE", "/tenants/acme/adapters/x", expect=204)
    assert len(list(adapter_folder.iterdir())) == 2  # noqa: ASYNC240  # a look, in a test


async def test_without_an_engine_an_adapter_cannot_be_checked(
    world: World, adapter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.tenant()
    monkeypatch.setattr(world.state, "engine", None)
    answer = await world.client.post("/tenants/acme/adapters", json={"name": "x", "path": str(adapter_folder)})
    assert answer.status_code == 503
    assert "start the server" in answer.json()["error"]["message"]
    with pytest.raises(AdapterRejected):
        await world.engine.load_adapter(AdapterRef(id="x", name="x", path="/nowhere"))
