"""The admin API over real stores (SQLite ledger, spool, journal, chDB), a Stripe double and the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.fake import FakeEngine
from gateway.app import create_admin_app
from gateway.ids import uuid7
from gateway.lifecycle import admin_state
from gateway.settings import Settings
from gateway.stores import Stores
from metering.events import Outcome, UsageEvent
from metering.journal import OpenedRecord
from tests.doubles.stripe import StripeDouble
from tests.fixtures.clickhouse import empty

ADMIN_KEY = "the-admin-key"
START_US = 1_795_000_000_000_000  # 2026-11-18T11:06:40Z
PRICE = {"prompt": "1.00", "cached": "0.10", "completion": "3.00"}


class Clock:
    """A time that stands until it is moved."""

    def __init__(self) -> None:
        self.us = START_US

    def __call__(self) -> int:
        return self.us


class World:
    """The API as a client has it, and the parts behind it."""

    def __init__(self, settings: Settings, stores: Stores, engine: FakeEngine, clock: Clock) -> None:
        self.settings, self.stores, self.engine, self.clock = settings, stores, engine, clock
        self.state = admin_state(settings, stores, engine, "base", clock)
        self.app = create_admin_app(settings, self.state)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://test/admin/v1",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
        )

    async def call(self, method: str, path: str, body: Any = None, *, expect: int = 200, **options: Any) -> Any:
        """One call whose status is what it must be; the decoded body."""
        answer = await self.client.request(method, path, json=body, **options)
        assert answer.status_code == expect, f"{answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    async def post(self, path: str, body: Any = None, *, expect: int = 201, **options: Any) -> Any:
        return await self.call("POST", path, body, expect=expect, **options)

    async def get(self, path: str, *, expect: int = 200, **query: Any) -> Any:
        return await self.call("GET", path, expect=expect, params=query)

    async def tenant(self, id: str = "acme", *, price: dict[str, str] | None = PRICE, **fields: Any) -> str:
        """A tenant with a price of its own."""
        await self.post("/tenants", {"id": id, "name": id.title(), **fields})
        if price is not None:
            await self.price(tenant=id, per_million=price)
        return id

    async def price(self, **fields: Any) -> Any:
        entry = {"model": "*", "effective_at": 0, "currency": "usd", "per_million": PRICE}
        found = await self.post("/prices", entry | fields)
        self.clock.us += 1  # a price is for requests that begin after it
        return found

    def opened(self, tenant: str, **fields: Any) -> OpenedRecord:
        """A request let in now."""
        record = OpenedRecord(
            event_id=uuid7(self.clock.us),
            ts_us=self.clock.us,
            tenant=tenant,
            key_id=fields.pop("key_id", "key-1"),
            model=fields.pop("model", "base"),
            base_model="base",
            endpoint="chat.completions",
            gateway="gw0",
            **fields,
        )
        self.stores.journal.opened(record)
        return record

    def settled(self, record: OpenedRecord, prompt: int, cached: int, completion: int) -> UsageEvent:
        """The same request ended, by the steps that the gateway takes."""
        counts = (prompt, cached, completion, 0, 0, 0)
        self.stores.journal.step([(record.event_id, counts)])
        event = record.event(counts, outcome=Outcome.FINISHED, settled_us=self.clock.us, finish_reason="stop")
        self.stores.spool.settle(event).result(5)
        self.stores.billing.settle(event)
        self.stores.journal.settled(event.event_id)
        return event

    def request(self, tenant: str, prompt: int = 10, cached: int = 0, completion: int = 5, **fields: Any) -> UsageEvent:
        """One whole request, at the clock's time; a millisecond passes."""
        event = self.settled(self.opened(tenant, **fields), prompt, cached, completion)
        self.clock.us += 1000
        return event

    def later(self, seconds: float) -> None:
        self.clock.us += int(seconds * 1_000_000)


@pytest.fixture
async def world(tmp_path: Path, chdb_url: str, stripe_double: StripeDouble) -> AsyncIterator[World]:
    await asyncio.to_thread(empty, chdb_url)
    settings = Settings(
        data_dir=tmp_path / "data",
        clickhouse_url=chdb_url,
        admin_key=ADMIN_KEY,
        stripe_api_key=stripe_double.api_key,
        stripe_api_base=stripe_double.url,
    )
    clock, engine = Clock(), FakeEngine(name="base")
    stores = Stores(settings, clock)
    await asyncio.to_thread(stores.open, "base")
    stores.billing._price_lead_us = 0  # this clock stands while a price waits until it counts
    await engine.start()
    made = World(settings, stores, engine, clock)
    try:
        yield made
    finally:
        await made.client.aclose()
        await made.state.close()
        await engine.stop()
        await asyncio.to_thread(stores.close)


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    """A folder that the fake engine takes for an adapter."""
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder
