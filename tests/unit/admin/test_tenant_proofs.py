"""What a tenant verifies its invoices by: its events, the document, the proofs; nothing of anybody else's."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import httpx
import pytest
from litestar import Litestar

from billing import merkle
from gateway.admin.times import format_time
from gateway.billing.router import billing_router
from gateway.errors import handle
from metering.queries import Query
from tests.unit.admin.conftest import START_US, World

SECOND_US = 1_000_000


class Clients:
    """The routes as the keys of acme and globex have them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app = Litestar([billing_router(world.state)], exception_handlers={Exception: handle}, openapi_config=None)
        self.keys: dict[str, str] = {}

    async def get(self, path: str, who: str = "acme", expect: int = 200, **query: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test/v1") as client:
            headers = {"authorization": f"Bearer {self.keys.get(who, who)}"}
            answer = await client.get(path, params=query, headers=headers)
        assert answer.status_code == expect, answer.text
        return answer

    async def events(self, who: str = "acme", **query: Any) -> list[dict[str, Any]]:
        answer = await self.get("/usage/events", who, **query)
        return [json.loads(line) for line in answer.content.splitlines()]

    async def invoice(self, tenant: str = "acme", start_us: int = START_US) -> dict[str, Any]:
        self.world.later(60)
        body = {
            "tenant": tenant,
            "period_start": format_time(start_us),
            "period_end": format_time(self.world.clock.us),
        }
        made = await self.world.post("/invoices", body)
        found: dict[str, Any] = await self.world.post(f"/invoices/{made['id']}/finalize", expect=200)
        return found

    async def stored(self) -> None:
        assert await asyncio.to_thread(self.world.state.flush, 10.0)


@pytest.fixture
async def clients(world: World) -> Clients:
    clients = Clients(world)
    for tenant in ("acme", "globex"):
        await world.tenant(tenant)
        clients.keys[tenant] = str(world.stores.billing.create_key(tenant, "test")[1])
    return clients


async def test_events_are_the_tenants_own_by_time_whole_or_by_pages(clients: Clients) -> None:
    mine = [clients.world.request("acme", prompt=number + 1) for number in range(5)]
    clients.world.request("globex")
    await clients.stored()
    clients.world.later(60)
    whole = await clients.events(start=format_time(START_US))
    assert [one["event_id"] for one in whole] == [event.event_id for event in mine]
    assert {one["tenant"] for one in whole} == {"acme"}
    assert len(await clients.events("globex")) == 1
    paged: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        answer = await clients.get("/usage/events", **query)
        assert answer.headers["content-type"] == "application/jsonl"
        paged += [json.loads(line) for line in answer.content.splitlines()]
        if (following := answer.headers.get("x-next-cursor")) is None:
            break
        query["after"] = following
    assert paged == whole
    some = await clients.events(start=format_time(mine[1].ts_us), end=format_time(mine[3].ts_us))
    assert some == whole[1:3]


async def test_an_invoices_events_have_its_root_and_late_ones_are_on_the_next(clients: Clients) -> None:
    world = clients.world
    for _ in range(3):
        world.request("acme")
    late = world.opened("acme")
    world.stores.journal.settled(late.event_id)
    first = await clients.invoice()
    second_start_us = world.clock.us
    world.settled(late, 7, 0, 1)
    world.request("acme")
    second = await clients.invoice(start_us=second_start_us)
    counts = []
    for made in (first, second):
        events = await clients.get("/usage/events", invoice=made["id"])
        leaves = [merkle.leaf_hash(line) for line in events.content.splitlines()]
        found = (await clients.get(f"/invoices/{made['id']}", leaves=True)).json()
        assert merkle.root(leaves).hex() == found["document"]["events"]["root"] == found["signed"]["head"]["root"]
        assert [leaf for _, leaf in found["leaves"]] == [leaf.hex() for leaf in leaves]
        text = json.dumps(found["document"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert hashlib.sha256(text.encode()).hexdigest() == found["content_hash"]
        assert found["signed"]["head"]["content_hash"] == found["content_hash"]
        counts.append(len(leaves))
    assert counts == [3, 2]
    assert (await clients.get(f"/invoices/{first['id']}")).json()["leaves"] is None
    one_page = await clients.get("/usage/events", invoice=second["id"], limit=1)
    assert json.loads(one_page.content)["event_id"] == late.event_id
    assert one_page.headers["x-next-cursor"].endswith(late.event_id)


async def test_an_event_is_proven_to_be_on_its_invoice(clients: Clients) -> None:
    events = [clients.world.request("acme") for _ in range(5)]
    invoice = await clients.invoice()
    for number, event in enumerate(events):
        proof = (await clients.get(f"/invoices/{invoice['id']}/proof", event_id=event.event_id)).json()
        told = proof["inclusion"]
        assert (told["index"], proof["tree_size"]) == (number, 5)
        path = [bytes.fromhex(sibling) for sibling in told["path"]]
        root = merkle.root_of(bytes.fromhex(told["leaf"]), number, 5, path)
        assert root is not None
        assert root.hex() == proof["root"] == proof["signed"]["head"]["root"]
    assert (await clients.get(f"/invoices/{invoice['id']}/proof")).json()["inclusion"] is None
    await clients.get(f"/invoices/{invoice['id']}/proof", expect=404, event_id="another")


async def test_nobody_sees_anothers_invoice_nor_a_draft(clients: Clients) -> None:
    clients.world.request("acme")
    invoice = await clients.invoice()
    unknown = (await clients.get("/invoices/nothing", expect=404)).json()
    for path in (f"/invoices/{invoice['id']}", f"/invoices/{invoice['id']}/proof"):
        refused = (await clients.get(path, "globex", expect=404)).json()
        assert refused["error"]["message"] == unknown["error"]["message"].replace("nothing", invoice["id"])
        await clients.get(path, "mh-wrong", expect=401)
    await clients.get("/usage/events", "globex", expect=404, invoice=invoice["id"])
    start_us = clients.world.clock.us
    clients.world.later(60)
    body = {"tenant": "acme", "period_start": format_time(start_us), "period_end": format_time(clients.world.clock.us)}
    draft = await clients.world.post("/invoices", body)
    await clients.get(f"/invoices/{draft['id']}", expect=404)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"after": "x"}, "after"),
        ({"start": "yesterday"}, "start"),
        ({"start": "2026-01-01", "end": "2025-01-01"}, "end"),
        ({"begin": "2026-01-01"}, "begin"),
        ({"invoice": "i", "start": "2026-01-01"}, "invoice"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(clients: Clients, query: dict[str, Any], param: str) -> None:
    answer = await clients.get("/usage/events", expect=400, **query)
    assert answer.json()["error"]["param"] == param


async def test_events_that_are_not_those_invoiced_prove_nothing(clients: Clients) -> None:
    clients.world.request("acme")
    invoice = await clients.invoice()
    gone = Query("ALTER TABLE usage_events DELETE WHERE 1 SETTINGS mutations_sync = 1", {})
    await asyncio.to_thread(clients.world.state.usage.command, gone)
    refused = await clients.get(f"/invoices/{invoice['id']}", expect=409, leaves=True)
    assert "not those that were invoiced" in refused.json()["error"]["message"]
