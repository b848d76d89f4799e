"""Tenants, keys, who may call, and what every POST and every body has in common."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from litestar import Litestar
from litestar.openapi import OpenAPIConfig

from gateway.admin import admin_router
from gateway.admin.guard import READING_POSTS
from tests.unit.admin.conftest import ADMIN_KEY, World


def error(answer: httpx.Response) -> dict[str, str]:
    return answer.json()["error"]


def schema(world: World) -> dict[str, Any]:
    config = OpenAPIConfig(title="Meterhouse", version="0")
    return Litestar([admin_router(world.state)], openapi_config=config).openapi_schema.to_schema()


async def test_a_tenant_is_created_shown_listed_and_changed(world: World) -> None:
    made = await world.post("/tenants", {"name": "Acme", "limits": {"requests_per_minute": 60}})
    assert made["name"] == "Acme"
    assert made["currency"] == "usd"
    assert made["limits"] == {"requests_per_minute": 60}
    assert made["stripe_customer_id"] is made["default_adapter"] is None
    assert made["created_at"] == "2026-11-18T11:06:40Z"
    assert await world.get(f"/tenants/{made['id']}") == made
    assert await world.get("/tenants") == {"data": [made], "has_more": False, "next": None}
    changed = await world.call("PATCH", f"/tenants/{made['id']}", {"stripe_customer_id": "cus_1"})
    assert changed == made | {"stripe_customer_id": "cus_1"}
    back = await world.call("PATCH", f"/tenants/{made['id']}", {"stripe_customer_id": None})
    assert back == made
    suspended = await world.call("PATCH", f"/tenants/{made['id']}", {"status": "suspended"})
    assert suspended["status"] == "suspended"


async def test_lists_are_paged_without_gap_or_overlap(world: World) -> None:
    for number in range(5):
        await world.post("/tenants", {"id": f"t{number}", "name": "x"})
    pages, after = [], None
    while True:
        found = await world.get("/tenants", limit=2, **({"after": after} if after else {}))
        pages.append([tenant["id"] for tenant in found["data"]])
        assert found["has_more"] == (found["next"] is not None)
        if (after := found["next"]) is None:
            break
    assert pages == [["t0", "t1"], ["t2", "t3"], ["t4"]]


@pytest.mark.parametrize(
    ("query", "field"), [({"limit": 0}, "limit"), ({"limit": "x"}, "limit"), ({"after": "no"}, "after")]
)
async def test_a_bad_page_is_refused_by_name(world: World, query: dict[str, object], field: str) -> None:
    answer = await world.client.get("/tenants", params=query)  # type: ignore[arg-type]  # what a client may send
    assert answer.status_code == 400
    assert error(answer)["param"] == field


async def test_a_value_of_none_is_refused_with_those_that_there_are(world: World) -> None:
    answer = await world.client.get("/usage", params={"bucket": "week"})
    assert answer.status_code == 400
    assert error(answer)["message"] == "bucket: 'week' is unknown; known are hour, day, month"
    await world.get("/usage", bucket="month")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/usage?tennant=acme", "tennant"),
        ("/usage?tenant=acme&tenant=globex", "tenant"),
        ("/tenants?offset=3", "offset"),
        ("/invoices?tenant=acme&status=draft", "status"),
        ("/tenants/acme/balance?tenant=globex", "tenant"),
    ],
)
async def test_a_misspelt_or_doubled_parameter_is_refused_by_name(world: World, path: str, param: str) -> None:
    await world.post("/tenants", {"id": "acme", "name": "Acme"})
    assert (await world.call("GET", path, expect=400))["error"]["param"] == param


async def test_a_key_is_shown_once_and_opens_until_it_is_revoked(world: World) -> None:
    await world.tenant()
    made = await world.post("/tenants/acme/keys", {"name": "laptop"})
    assert made["key"].startswith("mh-")
    assert made["key"].startswith(made["prefix"])
    listed = await world.get("/tenants/acme/keys")
    assert listed["data"] == [{name: value for name, value in made.items() if name != "key"}]
    assert world.stores.billing.authenticate(made["key"]) is not None
    await world.call("DELETE", f"/keys/{made['id']}", expect=204)
    assert world.stores.billing.authenticate(made["key"]) is None
    assert (await world.get("/tenants/acme/keys"))["data"][0]["revoked_at"] is not None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tenants/nobody"),
        ("PATCH", "/tenants/nobody"),
        ("GET", "/tenants/nobody/keys"),
        ("POST", "/tenants/nobody/keys"),
        ("GET", "/tenants/nobody/balance"),
        ("GET", "/tenants/nobody/adapters"),
        ("DELETE", "/tenants/nobody/adapters/x"),
        ("DELETE", "/keys/nothing"),
        ("DELETE", "/gateways/nothing"),
        ("GET", "/usage?tenant=nobody"),
        ("GET", "/usage/unrated?tenant=nobody"),
        ("GET", "/invoices?tenant=nobody"),
        ("GET", "/invoices/nothing"),
        ("POST", "/invoices/nothing/finalize"),
        ("POST", "/invoices/nothing/export"),
        ("POST", "/invoices/nothing/void"),
    ],
)
async def test_what_does_not_exist_is_a_404(world: World, method: str, path: str) -> None:
    body = {"name": "x"} if method == "PATCH" or path.endswith("/keys") else None
    answer = await world.client.request(method, path, json=body if method in ("PATCH", "POST") else None)
    assert answer.status_code == 404, answer.text
    assert error(answer)["code"] == "not_found"


async def test_only_the_admin_key_opens(world: World) -> None:
    await world.tenant()
    tenants_key = (await world.post("/tenants/acme/keys", {"name": "x"}))["key"]
    statuses = {}
    for name, headers in {
        "none": {"authorization": ""},
        "wrong": {"authorization": "Bearer wrong"},
        "basic": {"authorization": f"Basic {ADMIN_KEY}"},
        "prefix": {"authorization": f"Bearer {ADMIN_KEY[:-1]}"},
        "tenant": {"authorization": f"Bearer {tenants_key}"},
        "admin": {"authorization": f"bearer {ADMIN_KEY}"},
    }.items():
        answer = await world.client.post("/tenants", json={"name": "Mine"}, headers=headers)
        statuses[name] = answer.status_code
        assert (answer.status_code == 201) == (name == "admin")
        assert name == "admin" or error(answer)["type"] == "invalid_request_error"
    assert statuses == {"none": 401, "wrong": 401, "basic": 401, "prefix": 401, "tenant": 403, "admin": 201}


async def test_every_fault_of_a_body_is_named_and_nothing_is_changed(world: World) -> None:
    answer = await world.client.post("/tenants", json={"currency": 5, "colour": "red", "limits": {"x": "many"}})
    assert answer.status_code == 400
    told = error(answer)["message"]
    for field in ("colour", "name", "currency", "limits"):
        assert f"{field}" in told
    assert (await world.get("/tenants"))["data"] == []


async def test_the_ledgers_own_faults_come_all_at_once(world: World) -> None:
    answer = await world.client.post("/tenants", json={"id": "no spaces", "name": " ", "limits": {"speed": 1}})
    assert answer.status_code == 400
    assert {field for field in ("id", "name", "limits.speed") if f"{field}:" in error(answer)["message"]} == {
        "id",
        "name",
        "limits.speed",
    }


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"name": NaN}'])
async def test_a_body_that_is_no_object_is_a_400(world: World, raw: bytes) -> None:
    answer = await world.client.post("/tenants", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert error(answer)["type"] == "invalid_request_error"


async def test_an_idempotency_key_means_one_command(world: World) -> None:
    headers = {"idempotency-key": "k1"}
    first = await world.post("/tenants", {"name": "Acme"}, headers=headers)
    again = await world.post("/tenants", {"name": "Acme"}, headers=headers)
    assert again == first
    spaced = await world.client.post(
        "/tenants", content=b'{ "name" :  "Acme" }', headers={**headers, "content-type": "application/json"}
    )
    assert spaced.json() == first
    other = await world.client.post("/tenants", json={"name": "Globex"}, headers=headers)
    assert other.status_code == 409
    assert error(other)["code"] == "idempotency_conflict"
    elsewhere = await world.client.post(f"/tenants/{first['id']}/keys", json={"name": "Acme"}, headers=headers)
    assert elsewhere.status_code == 409
    assert len((await world.get("/tenants"))["data"]) == 1


async def test_a_repeated_key_creation_does_not_show_the_secret_again(world: World) -> None:
    await world.tenant()
    headers = {"idempotency-key": "k1"}
    first = await world.post("/tenants/acme/keys", {"name": "x"}, headers=headers)
    again = await world.post("/tenants/acme/keys", {"name": "x"}, headers=headers)
    assert first["key"] is not None
    assert again == first | {"key": None}


async def test_every_post_route_honours_the_idempotency_key(world: World) -> None:
    paths = schema(world)["paths"]
    posts = [path for path, methods in paths.items() if "post" in methods]
    assert len(posts) >= 9
    for path in posts:
        names = [parameter["name"] for parameter in paths[path]["post"].get("parameters", [])]
        changes = path.removeprefix("/admin/v1") not in READING_POSTS
        assert ("Idempotency-Key" in names) is changes, path


async def test_the_schema_describes_every_route_of_the_contract(world: World) -> None:
    paths = schema(world)["paths"]
    wanted = {
        "/tenants": {"post", "get"},
        "/tenants/{tenant_id}": {"get", "patch"},
        "/tenants/{tenant_id}/keys": {"post", "get"},
        "/keys/{key_id}": {"delete"},
        "/tenants/{tenant_id}/adapters": {"post", "get"},
        "/tenants/{tenant_id}/adapters/{name}": {"delete"},
        "/prices": {"post", "get"},
        "/prices/simulation": {"post"},
        "/tenants/{tenant_id}/credits": {"post", "get"},
        "/tenants/{tenant_id}/budgets": {"post", "get"},
        "/budgets/{budget_id}": {"get", "patch", "delete"},
        "/tenants/{tenant_id}/balance": {"get"},
        "/usage": {"get"},
        "/usage/unrated": {"get"},
        "/usage/rate": {"post"},
        "/rollups": {"put"},
        "/rollups/drift": {"get"},
        "/archives": {"get"},
        "/archives/{month}": {"put"},
        "/archives/{month}/check": {"get"},
        "/backups": {"post"},
        "/backups/{backup_id}": {"get"},
        "/stripe/hold": {"get", "delete"},
        "/invoices": {"post", "get"},
        "/invoices/{invoice_id}": {"get"},
        "/invoices/{invoice_id}/finalize": {"post"},
        "/invoices/{invoice_id}/export": {"post"},
        "/invoices/{invoice_id}/void": {"post"},
        "/invoices/due": {"get", "patch"},
        "/invoices/{invoice_id}/credit-notes": {"post"},
        "/credit-notes": {"get"},
        "/credit-notes/{note_id}": {"get"},
        "/credit-notes/{note_id}/export": {"post"},
        "/credit-notes/{note_id}/void": {"post"},
        "/tenants/{tenant_id}/discounts": {"post", "get"},
        "/discounts/{discount_id}": {"delete"},
        "/tenants/{tenant_id}/commitment": {"put"},
        "/tenants/{tenant_id}/tax": {"put"},
        "/tenants/{tenant_id}/terms": {"get"},
        "/reconcile": {"get"},
        "/margin": {"get"},
        "/margin/rates": {"post", "get"},
        "/meters": {"get"},
        "/meters/events": {"get"},
        "/meters/events/{identifier}": {"patch"},
        "/replay": {"get"},
        "/signing-keys": {"post", "get"},
        "/stripe/invoices": {"patch"},
        "/alerts": {"get"},
        "/alerts/{alert_id}": {"patch"},
        "/audit": {"get"},
        "/admin-keys": {"post", "get"},
        "/admin-keys/{key_id}": {"delete"},
        "/dunning": {"get"},
        "/invoices/{invoice_id}/statement": {"get"},
        "/invoices/{invoice_id}/dunning": {"get"},
        "/invoices/{invoice_id}/dunning/waive": {"post"},
        "/tenants/{tenant_id}/suspend": {"post"},
        "/tenants/{tenant_id}/reactivate": {"post"},
        "/gateways": {"get"},
        "/gateways/{gateway_id}": {"delete"},
        "/gateways/{gateway_id}/adoption": {"put"},
    }
    assert {path.removeprefix("/admin/v1"): set(methods) for path, methods in paths.items()} == wanted
