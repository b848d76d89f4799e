"""Who may do what, who did what, and who was refused what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import httpx
import pytest
from litestar.routes import HTTPRoute

from billing.admins import Role
from billing.service import Billing
from gateway import paths
from gateway.admin import refusals
from gateway.admin.guard import READING_POSTS, READS, may
from tests.unit.admin.conftest import World


class As:
    """The API as one admin key has it."""

    def __init__(self, world: World, secret: str) -> None:
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(world.app),
            base_url="http://test/admin/v1",
            headers={"authorization": f"Bearer {secret}"},
        )

    async def status(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        return (await self.client.request(method, path, json=body, headers=headers)).status_code


async def made(world: World, name: str, role: str) -> tuple[dict[str, Any], As]:
    key = await world.post("/admin-keys", {"name": name, "role": role})
    return key, As(world, key["key"])


async def audit(world: World, **query: Any) -> list[dict[str, Any]]:
    await asyncio.gather(*world.state._tasks)  # what was refused is written down behind the answer
    found: list[dict[str, Any]] = (await world.get("/audit", **query))["data"]
    return found


PRICE = {"model": "*", "currency": "usd", "per_million": {"prompt": "1", "cached": "1", "completion": "1"}}
TENANT = {"id": "acme", "name": "Acme"}


async def test_roles_bound_what_a_key_may_change(world: World) -> None:
    await world.tenant("acme")
    owner, billing, reader = [(await made(world, role, role))[1] for role in Role]
    calls = [
        ("POST", "/tenants", {"name": "New"}),
        ("POST", "/admin-keys", {"name": "x", "role": "owner"}),
        ("POST", "/tenants/acme/keys", {"name": "k"}),
        ("POST", "/prices", PRICE),
        ("POST", "/tenants/acme/credits", {"amount": "1", "currency": "usd", "reason": "r"}),
        ("GET", "/audit", None),
        ("GET", "/tenants", None),
    ]
    assert [await owner.status(*call) for call in calls] == [201, 201, 201, 201, 201, 200, 200]
    assert [await billing.status(*call) for call in calls] == [403, 403, 403, 201, 201, 200, 200]
    assert [await reader.status(*call) for call in calls] == [403, 403, 403, 403, 403, 200, 200]


async def test_a_route_is_for_owners_until_somebody_opens_it(world: World) -> None:
    """The whole table: what the role billing may change, and nothing that only reads."""
    changes = {
        (method, route.path.removeprefix(paths.ADMIN))
        for route in world.app.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods
        if method not in READS
    }
    opened = {(method, path) for method, path in changes if may(Role.BILLING, method, path)}
    assert {path.split("/")[1] for _, path in opened} <= {
        *("prices", "invoices", "usage", "tenants", "alerts", "meters", "stripe", "margin", "budgets"),
        *("grants", "credits", "discounts", "credit-notes"),
    }
    for closed in ("/tenants", "/tenants/{tenant_id:str}", "/tenants/{tenant_id:str}/keys", "/admin-keys"):
        assert not [method for method, path in opened if path == closed]
    assert all(may(Role.OWNER, method, path) for method, path in changes)
    assert {path for method, path in changes if may(Role.READ_ONLY, method, path)} == READING_POSTS  # change nothing


@pytest.mark.parametrize(
    "path", ["/prices/../tenants", "/invoicesx", "/tenants/a/b/credits", "//prices", "/tenants/a/keys"]
)
def test_a_path_that_only_looks_like_money_is_closed(path: str) -> None:
    assert not may(Role.BILLING, "POST", path)


async def test_who_did_it_is_in_the_log_with_and_without_an_idempotency_key(world: World) -> None:
    key, anna = await made(world, "anna", "owner")
    await anna.status("POST", "/tenants", {"id": "one", "name": "One"})
    await anna.status("POST", "/tenants", {"id": "two", "name": "Two"}, **{"idempotency-key": "k1"})
    await world.post("/tenants", {"id": "three", "name": "Three"})
    found = await audit(world, kind="tenant.created")
    assert [(one["detail"]["tenant"]["id"], one["actor"], one["actor_name"]) for one in found] == [
        ("three", "admin", None),
        ("two", f"admin:{key['id']}", "anna"),
        ("one", f"admin:{key['id']}", "anna"),
    ]
    assert [one["detail"]["tenant"]["id"] for one in await audit(world, actor=f"admin:{key['id']}")] == ["two", "one"]
    assert await audit(world, actor="nobody") == []


async def test_what_was_refused_is_written_down_under_who_wanted_it(world: World) -> None:
    key, reader = await made(world, "eve", "read_only")
    await reader.status("POST", "/tenants", TENANT)
    await world.tenant("acme", price=None)
    await world.post("/tenants", TENANT, expect=409)
    await world.post("/prices", {"model": "*"}, expect=400)
    await reader.status("GET", "/tenants/nobody")  # reading is no command
    stranger = As(world, "mh-admin-nobody")
    assert await stranger.status("POST", "/tenants", TENANT) == 401  # nobody grows the ledger from outside
    found = await audit(world, kind="admin.refused")
    assert [(one["actor"], one["detail"]["status"], one["detail"]["path"]) for one in reversed(found)] == [
        (f"admin:{key['id']}", 403, "/admin/v1/tenants"),
        ("admin", 409, "/admin/v1/tenants"),
        ("admin", 400, "/admin/v1/prices"),
    ]
    assert "role" in found[-1]["detail"]["reason"]


async def test_who_is_refused_again_and_again_does_not_fill_the_ledger(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "AT_ONCE", 3)
    monkeypatch.setattr(refusals, "EVERY_S", 1e9)
    key, reader = await made(world, "eve", "read_only")
    for _ in range(20):
        assert await reader.status("POST", "/tenants", TENANT) == 403
    assert len(await audit(world, kind="admin.refused", actor=f"admin:{key['id']}")) == 3
    monkeypatch.setattr(refusals, "EVERY_S", 1e-9)
    assert await reader.status("POST", "/tenants", TENANT) == 403
    (last, *_) = await audit(world, kind="admin.refused", actor=f"admin:{key['id']}")
    assert last["detail"]["reason"].endswith("(and 17 more before it)")


async def test_a_key_is_shown_once_hashed_at_rest_and_revoked_for_good(world: World) -> None:
    key, anna = await made(world, "anna", "owner")
    rows = world.stores.events.read(0, 1000)
    assert not [row for row in rows if key["key"] in f"{row.payload}{row.result}"]
    (shown,) = (await world.get("/admin-keys"))["data"]
    assert (shown["key"], shown["prefix"], shown["role"]) == (None, key["key"][:13], "owner")
    assert not [one for one in await audit(world) if "secret" in str(one["detail"])]
    assert await anna.status("GET", "/tenants") == 200
    await world.call("DELETE", f"/admin-keys/{key['id']}", expect=204)
    assert await anna.status("GET", "/tenants") == 401
    await world.call("DELETE", f"/admin-keys/{key['id']}", expect=204)
    await world.call("DELETE", "/admin-keys/nobody", expect=404)
    await world.post("/admin-keys", {"name": "x", "role": "king"}, expect=400)
    replayed = [
        await world.post("/admin-keys", {"name": "a", "role": "billing"}, headers={"idempotency-key": "k"})
        for _ in range(2)
    ]
    assert (replayed[0]["id"], replayed[1]["key"]) == (replayed[1]["id"], None)


async def test_a_key_opens_the_next_server_too(world: World) -> None:
    key, _ = await made(world, "anna", "billing")
    from billing.service import Billing

    again = Billing(world.stores.events, base_model="base")
    found = again.admin_by_secret(key["key"])
    assert found is not None
    assert (found.name, found.role) == ("anna", Role.BILLING)
    assert again.admin_by_secret("mh-admin-\ud800") is None


async def test_the_audit_is_paged_by_time_type_and_actor_and_has_no_charges(world: World) -> None:
    await world.tenant("acme")
    world.request("acme")
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    for number in range(5):
        world.clock.us += 1_000_000
        await world.post("/tenants", {"id": f"t{number}", "name": "T"})
    everything = await audit(world)
    assert "usage.rated" not in {one["type"] for one in everything}
    first = await world.get("/audit", limit=3)
    second = await world.get("/audit", limit=100, after=first["next"])
    assert [one["event"] for one in first["data"] + second["data"]] == [one["event"] for one in everything]
    assert {one["type"] for one in await audit(world, kind="price.*")} == {"price.set"}
    late = await audit(world, start=everything[1]["at"])
    assert [one["event"] for one in late] == [one["event"] for one in everything[:2]]
    assert await audit(world, kind="tenant.%") == []
    await world.get("/audit", after="x", expect=400)
    await world.get("/audit", start="x", expect=400)
    plan = str(await asyncio.to_thread(_plan, world))
    assert "events_decided" in plan


def _plan(world: World) -> list[Any]:
    sql = (
        "EXPLAIN QUERY PLAN SELECT seq FROM events WHERE type NOT IN ('usage.rated', 'usage.unrated') "
        "ORDER BY seq DESC LIMIT 10"
    )
    with world.stores.events.connected() as connection:
        return list(connection.exec_driver_sql(sql))


CHANGES_NOTHING = {"simulate": "reads a body, changes nothing (READING_POSTS)"}


def test_every_route_that_changes_something_leaves_an_event(world: World) -> None:
    """By a command of the ledger, or by `begin`; what a handler reaches is read from its code."""
    commands = {name for name in dir(Billing) if reaches(getattr(Billing, name), {"_command"}, inside=Billing)}
    assert {"create_tenant", "release_exports", "note_begun"} <= commands
    assert not {"tenant", "admin_keys", "held_after_restore"} & commands
    handlers = {
        getattr(handler.fn, "func", handler.fn)  # litestar wraps what runs on a thread
        for route in world.app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        if not handler.http_methods <= READS
    }
    assert len(handlers) > 30
    silent = {fn.__name__ for fn in handlers if not reaches(fn, commands | {"begin"})}
    assert silent == set(CHANGES_NOTHING)


def reaches(fn: Any, wanted: set[str], inside: type | None = None, seen: frozenset[str] = frozenset()) -> bool:
    """Whether `fn` names one of `wanted`, itself or by what it calls: its module's functions, or `inside`'s methods."""
    if not isinstance(fn, FunctionType) or fn.__name__ in seen:
        return False
    named, codes = set[str](), [fn.__code__]
    while codes:
        code = codes.pop()
        named.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    if named & wanted:
        return True
    called = [getattr(inside, name, None) if inside else fn.__globals__.get(name) for name in named]
    ours = [one for one in called if getattr(one, "__module__", "").startswith(("gateway.admin", "billing.service"))]
    return any(reaches(one, wanted, inside, seen | {fn.__name__}) for one in ours)


async def test_an_act_beside_the_ledger_is_one_event_under_its_actor(world: World, tmp_path: Path) -> None:
    key, anna = await made(world, "anna", "owner")
    again = {"idempotency-key": "nightly"}
    world.stores.gateways.claim("lost", "elsewhere", world.clock.us, world.clock.us)
    world.later(60)
    hours = {"start": "2026-11-18T11:30:00Z", "end": "2026-11-18T11:30:01Z"}
    backup = {"path": str(tmp_path / "backup")}
    acts: list[tuple[str, str, Any, int, str]] = [
        ("PATCH", "/meters/events/e1:prompt", {"send": True}, 404, "meter_event.send"),
        ("PATCH", "/meters/events/e1:prompt", {"send": False}, 404, "meter_event.leave"),
        ("PATCH", "/stripe/invoices", None, 200, "stripe.catch_up"),
        ("PUT", "/gateways/lost/adoption", {"path": str(tmp_path)}, 409, "gateway.adopt"),
        ("DELETE", "/gateways/lost", None, 204, "gateway.remove"),
        ("PUT", "/archives/2026-09", None, 200, "archive.make"),
        ("PUT", "/rollups", hours, 200, "rollups.rebuild"),
        ("PATCH", "/alerts/a1", {"state": "pending"}, 409, "alert.send"),
        ("PATCH", "/invoices/due", {"mode": "draft"}, 200, "invoices.run_due"),
        ("POST", "/usage/rate", None, 200, "usage.rate"),
        ("POST", "/backups", backup, 201, "backup.take"),
    ]
    for method, path, body, status, act in acts:
        answer = await anna.client.request(method, path, json=body, headers=again if path == "/backups" else None)
        assert answer.status_code == status, (act, answer.text)
    assert await anna.status("POST", "/backups", backup, **again) == 201  # the same one
    found = (await audit(world, kind="admin.began"))[::-1]
    assert [(one["detail"]["act"], one["actor"]) for one in found] == [(act[-1], f"admin:{key['id']}") for act in acts]
    targets = {one["detail"]["act"]: one["detail"]["target"] for one in found}
    assert (targets["gateway.adopt"], targets["archive.make"], targets["alert.send"]) == ("lost", "2026-09", "a1")
    assert targets["rollups.rebuild"] == "2026-11-18T11:00:00Z/2026-11-18T12:00:00Z"
    assert str(tmp_path) not in str(found)
    await world.call("DELETE", "/gateways/gw0", expect=409)  # refused before it began
    assert len(await audit(world, kind="admin.began")) == len(acts)
