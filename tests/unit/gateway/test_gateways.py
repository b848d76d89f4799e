"""Two whole servers, but for the engine, on one PostgreSQL and one usage store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing.errors import LedgerUnavailable
from engine.fake import FakeEngine
from gateway.lifecycle import Runtime
from gateway.settings import Settings
from tests.fixtures.clickhouse import empty
from tests.fixtures.server import ADMIN_KEY, PRICE, ByteTokenizer

BEAT_S = 0.05


class Server:
    """A runtime without sockets, and a client of it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(runtime.gateway.app), base_url="http://test")

    async def admin(self, method: str, path: str, body: Any = None, *, expect: int = 201) -> Any:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = await self.client.request(method, f"/admin/v1{path}", json=body, headers=headers)
        assert answer.status_code == expect, f"{answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    async def ask(self, key: str) -> int:
        """The status of a completion."""
        body = {"model": "fake", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        answer = await self.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        return answer.status_code

    async def customer(self) -> dict[str, Any]:
        """A tenant with a price and credit; its key."""
        await self.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
        price = {"model": "*", "effective_at": 0, "currency": "usd", "per_million": PRICE}
        await self.admin("POST", "/prices", price)
        await self.admin("POST", "/tenants/acme/credits", {"amount": "10", "currency": "usd", "reason": "test"})
        made: dict[str, Any] = await self.admin("POST", "/tenants/acme/keys", {"name": "x"})
        return made


async def within(check: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + timeout_s
    while not await check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Server]:
    runtime = Runtime(
        settings, engine=FakeEngine(ByteTokenizer()), tokenizer=ByteTokenizer(), base_model="fake", beat_s=BEAT_S
    )
    await runtime.start()
    server = Server(runtime)
    try:
        yield server
    finally:
        await server.client.aclose()
        await runtime.drain(0.0)
        await runtime.stop()


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start(tmp_path: Path, chdb_url: str, ledger_url: str) -> AsyncIterator[Start]:
    """Start one more server on the same ledger and usage store; all are stopped at the end, the last one first."""
    await asyncio.to_thread(empty, chdb_url)
    async with AsyncExitStack() as stack:

        async def make(name: str, **settings: Any) -> Server:
            common = {"clickhouse_url": chdb_url, "ledger_url": ledger_url, "admin_key": ADMIN_KEY, "gateway_id": name}
            return await stack.enter_async_context(running(Settings(data_dir=tmp_path / name, **common, **settings)))

        yield make


async def test_a_key_made_on_one_opens_the_other_and_a_revoked_one_does_not(start: Start) -> None:
    one, other = await start("gw1"), await start("gw2")
    key = await one.customer()

    async def opens() -> bool:
        return await other.ask(key["key"]) == 200

    async def refused() -> bool:
        return await other.ask(key["key"]) == 401

    await within(opens)
    assert await one.ask(key["key"]) == 200
    await one.admin("DELETE", f"/keys/{key['id']}", expect=204)
    await within(refused)


async def test_what_one_charged_the_other_knows(start: Start) -> None:
    one, other = await start("gw1"), await start("gw2")
    key = await one.customer()
    assert await one.ask(key["key"]) == 200
    charged = (await one.admin("GET", "/tenants/acme/balance", expect=200))["charged"]
    assert charged != "0.00"

    async def known() -> bool:
        answer = await other.client.get(
            "/admin/v1/tenants/acme/balance", headers={"authorization": f"Bearer {ADMIN_KEY}"}
        )
        return answer.status_code == 200 and answer.json()["charged"] == charged

    await within(known)


async def test_a_ledger_that_is_away_stops_nothing_and_is_seen_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = await start("gw1"), await start("gw2")
    first = await one.customer()

    async def opens() -> bool:
        return await other.ask(first["key"]) == 200

    await within(opens)
    beats = 0
    read = other.runtime.stores.billing._store.read

    def away(*_: Any) -> Any:
        nonlocal beats
        beats += 1
        raise LedgerUnavailable("the ledger's database cannot be used now")

    monkeypatch.setattr(other.runtime.stores.billing._store, "read", away)
    second = await one.admin("POST", "/tenants/acme/keys", {"name": "later"})

    async def beaten() -> bool:
        return beats >= 3

    await within(beaten)
    assert (await other.ask(first["key"]), await other.ask(second["key"])) == (200, 401)
    monkeypatch.setattr(other.runtime.stores.billing._store, "read", read)

    async def opens_too() -> bool:
        return await other.ask(second["key"]) == 200

    await within(opens_too)
    assert capsys.readouterr().out.count("heartbeat_failed") == 1
