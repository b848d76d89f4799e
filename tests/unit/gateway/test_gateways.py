"""Two whole servers, but for the engine, on one PostgreSQL and one usage store."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from billing.errors import LedgerUnavailable
from engine.fake import FakeEngine
from gateway.admin.times import format_time
from gateway.app import now_us
from gateway.ids import uuid7
from gateway.lifecycle import Runtime
from gateway.settings import Settings
from gateway.stores import StartError, Stores, folder_id
from metering.errors import StoreUnavailable
from metering.events import Outcome
from metering.journal import OpenedRecord
from metering.shipper import Drain
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


class Start:
    """Starts servers on one ledger and one usage store: `start(id)` until the test's end, or `start.one(id)`."""

    def __init__(self, folder: Path, stack: AsyncExitStack, **settings: Any) -> None:
        self._folder, self._stack, self._settings = folder, stack, settings

    def one(self, id: str, folder: str | None = None) -> AbstractAsyncContextManager[Server]:
        return running(Settings(data_dir=self._folder / (folder or id), gateway_id=id, **self._settings))

    async def __call__(self, id: str, folder: str | None = None) -> Server:
        return await self._stack.enter_async_context(self.one(id, folder))


@pytest.fixture
async def start(tmp_path: Path, chdb_url: str, ledger_url: str) -> AsyncIterator[Start]:
    await asyncio.to_thread(empty, chdb_url)
    async with AsyncExitStack() as stack:
        yield Start(tmp_path, stack, clickhouse_url=chdb_url, ledger_url=ledger_url, admin_key=ADMIN_KEY)


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

    async def recorded() -> bool:
        return other.runtime.stores.spool.count("ledger") == 0

    await within(opens)
    await within(recorded)  # to record is to see all that stands, too
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
    assert (await other.ask(second["key"]), await other.ask(first["key"])) == (401, 200)
    monkeypatch.setattr(other.runtime.stores.billing._store, "read", read)

    async def opens_too() -> bool:
        return await other.ask(second["key"]) == 200

    await within(opens_too)
    assert capsys.readouterr().out.count("heartbeat_failed") == 1


# -- invoices over several gateways -----------------------------------------------------------------------------------


async def draft(server: Server, end_us: int, expect: int = 201) -> Any:
    """An invoice for everything up to a time."""
    body = {"tenant": "acme", "period_start": 0, "period_end": format_time(end_us)}
    return await server.admin("POST", "/invoices", body, expect=expect)


async def drafted(server: Server, end_us: int) -> Any:
    """The same, as soon as it is not refused."""
    made: list[Any] = []

    async def done() -> bool:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        body = {"tenant": "acme", "period_start": 0, "period_end": format_time(end_us)}
        answer = await server.client.post("/admin/v1/invoices", json=body, headers=headers)
        made[:] = [answer.json()]
        return answer.status_code == 201

    await within(done)
    return made[0]


async def listed(server: Server) -> list[str]:
    return [one["id"] for one in (await server.admin("GET", "/gateways", expect=200))["data"]]


def opened(server: Server, ts_us: int) -> OpenedRecord:
    """A request that was let in on this server, and runs."""
    record = OpenedRecord(
        event_id=uuid7(ts_us),
        ts_us=ts_us,
        tenant="acme",
        key_id="k",
        model="fake",
        base_model="fake",
        endpoint="completions",
        gateway=server.runtime.settings.gateway_id,
    )
    server.runtime.stores.journal.opened(record)
    server.runtime.stores.journal.step([(record.event_id, (7, 0, 3, 0, 0, 0))])
    return record


async def test_an_invoice_has_what_ran_on_every_gateway(start: Start) -> None:
    one, other = await start("gw1"), await start("gw2")
    key = (await one.customer())["key"]

    async def opens() -> bool:
        return await other.ask(key) == 200

    await within(opens)
    assert await one.ask(key) == 200
    assert await listed(one) == await listed(other) == ["gw1", "gw2"]
    assert (await drafted(one, now_us()))["requests"] == 2


async def test_an_invoice_waits_for_a_request_that_runs_on_another_gateway(start: Start) -> None:
    one, other = await start("gw1"), await start("gw2")
    key = (await one.customer())["key"]
    assert await one.ask(key) == 200
    record = opened(other, now_us())
    end_us = now_us()
    await asyncio.sleep(4 * BEAT_S)
    assert "'gw2'" in (await draft(one, end_us, expect=409))["error"]["message"]
    event = record.event((7, 0, 3, 0, 0, 0), outcome=Outcome.FINISHED, settled_us=now_us(), finish_reason="stop")
    await asyncio.to_thread(other.runtime.stores.spool.settle(event).result, 5)
    other.runtime.stores.journal.settled(event.event_id)
    assert (await drafted(one, end_us))["requests"] == 2


async def test_a_gateway_that_stopped_with_all_stored_holds_nothing_back(start: Start) -> None:
    one = await start("gw1")
    key = (await one.customer())["key"]
    async with start.one("gw2") as other:

        async def opens() -> bool:
            return await other.ask(key) == 200

        await within(opens)
    end_us = now_us()
    assert await listed(one) == ["gw1"]
    assert (await drafted(one, end_us))["requests"] == 1


async def test_a_gateway_that_died_holds_invoices_back_until_it_has_settled_what_it_left(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await start("gw1")
    await one.customer()
    with monkeypatch.context() as dying:
        dying.setattr("gateway.stores.Stores._deregister", lambda *_: None)
        async with start.one("gw2") as other:
            opened(other, now_us())
            end_us = now_us()
            await asyncio.sleep(4 * BEAT_S)
    assert await listed(one) == ["gw1", "gw2"]
    assert "'gw2'" in (await draft(one, end_us, expect=409))["error"]["message"]
    async with start.one("gw2") as again:  # at once, whenever it was last seen
        assert again.runtime.stores.recovered == 1
        invoice = await drafted(one, end_us)
    assert {line["token_class"]: line["quantity"] for line in invoice["lines"]} == {"prompt": 7, "completion": 3}
    assert await listed(one) == ["gw1"]


async def test_a_gateway_that_stopped_without_its_usage_store_stays_listed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await start("gw1")
    key = (await one.customer())["key"]

    def away(*_: Any) -> None:
        raise StoreUnavailable("gone")

    async with start.one("gw2") as other:
        monkeypatch.setattr(other.runtime.stores.shipper, "_sink", away)
        monkeypatch.setattr(other.runtime.stores.shipper, "flush", lambda _: False)

        async def opens() -> bool:
            return await other.ask(key) == 200

        await within(opens)
        end_us = now_us()
    (row,) = [row for row in one.runtime.stores.gateways.all() if row.id == "gw2"]
    assert row.watermark_us < end_us
    await draft(one, end_us, expect=409)
    async with start.one("gw2"):
        assert (await drafted(one, end_us))["requests"] == 1


async def test_an_id_that_another_folder_has_is_refused_and_free_once_that_one_stopped(start: Start) -> None:
    await start("gw1")
    async with start.one("gw2"):
        with pytest.raises(StartError, match=r"'gw2' belongs to another data folder.*--gateway-id.*gateway remove gw2"):
            await start("gw2", folder="elsewhere")
        with pytest.raises(StartError):  # and leaves nothing behind that would keep it from another try
            await start("gw2", folder="elsewhere")
    assert await listed(await start("gw2", folder="elsewhere")) == ["gw1", "gw2"]


async def test_a_folder_that_was_given_another_id_leaves_none_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await start("gw1")
    with monkeypatch.context() as dying:
        dying.setattr("gateway.stores.Stores._deregister", lambda *_: None)
        async with start.one("gw2"):
            pass
    assert await listed(one) == ["gw1", "gw2"]
    async with start.one("renamed", folder="gw2"):
        assert await listed(one) == ["gw1", "renamed"]


async def died(start: Start, id: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """A gateway that dies with a request that ran and one that was settled and not delivered; a time after both."""
    with monkeypatch.context() as dying:
        dying.setattr("gateway.stores.Stores._deregister", lambda *_: None)
        dying.setattr(Drain, "start", lambda _: None)
        dying.setattr("gateway.stores.Stores._catch_up", lambda *_: None)
        async with start.one(id) as other:
            opened(other, now_us())
            settled = opened(other, now_us())
            event = settled.event((7, 0, 3, 0, 0, 0), outcome=Outcome.FINISHED, settled_us=now_us())
            await asyncio.to_thread(other.runtime.stores.spool.settle(event).result, 5)
            await asyncio.sleep(4 * BEAT_S)
    return now_us()


def at(start: Start, id: str) -> dict[str, str]:
    return {"path": str(start._folder / id)}


async def test_what_a_gateway_that_is_gone_left_is_taken_over_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await start("gw1")
    await one.customer()
    end_us = await died(start, "gw2", monkeypatch)
    assert "'gw2'" in (await draft(one, end_us, expect=409))["error"]["message"]
    left = await asyncio.to_thread(shutil.copytree, start._folder / "gw2", start._folder / "copy")
    adopted = await one.admin("PUT", "/gateways/gw2/adoption", at(start, "gw2"), expect=200)
    assert adopted == {"gateway": "gw2", "settled": 1, "delivered": 2}
    assert await listed(one) == ["gw1"]
    invoice = await drafted(one, end_us)
    assert {line["token_class"]: line["quantity"] for line in invoice["lines"]} == {"prompt": 14, "completion": 6}

    await one.admin("PUT", "/gateways/gw2/adoption", at(start, "gw2"), expect=404)  # it is nobody's any more
    one.runtime.stores.gateways.claim("gw2", folder_id(left), 1, now_us())  # as if it had been killed half way
    adopted = await one.admin("PUT", "/gateways/gw2/adoption", at(start, "copy"), expect=200)
    assert adopted["delivered"] == 2
    found = await one.admin("GET", "/tenants/acme/balance", expect=200)
    assert found["charged"] == invoice["exact_total"], "the ledger counts an event once"
    store = one.runtime.stores.usage
    (row,) = await asyncio.to_thread(lambda: store.usage(tenant="acme", start_us=0, end_us=now_us(), bucket="month"))
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (2, 14, 6), "and so does the usage store"


async def test_what_is_in_use_or_not_that_gateways_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await start("gw1")
    await one.customer()
    await start("gw2")

    async def refused(id: str, folder: str) -> str:
        answer = await one.admin("PUT", f"/gateways/{id}/adoption", at(start, folder), expect=409)
        message: str = answer["error"]["message"]
        assert str(start._folder) not in message
        return message

    assert "a server runs" in await refused("gw2", "gw2")
    assert "a server runs" in await refused("gw1", "gw1")
    assert "not the data folder" in await refused("gw2", "gw1")
    assert "no data folder" in await refused("gw2", "nowhere")
    assert await listed(one) == ["gw1", "gw2"]

    await died(start, "gw3", monkeypatch)
    with monkeypatch.context() as away:
        away.setattr("gateway.adopt.FLUSH_S", 0.2)
        away.setattr(one.runtime.stores.usage, "insert", lambda _: (_ for _ in ()).throw(StoreUnavailable("gone")))
        assert "try again" in await refused("gw3", "gw3")
    assert await listed(one) == ["gw1", "gw2", "gw3"]
    assert (await one.admin("PUT", "/gateways/gw3/adoption", at(start, "gw3"), expect=200))["settled"] == 0


async def test_the_command_line_settles_for_a_dead_server_and_holds_nothing_back_then(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the same folder, serves nothing, and need not know the id."""
    one = await start("gw1")
    await one.customer()
    with monkeypatch.context() as dying:
        dying.setattr("gateway.stores.Stores._deregister", lambda *_: None)
        async with start.one("gw2") as other:
            opened(other, now_us())
            end_us = now_us()
            settings = other.runtime.settings
    stores = Stores(msgspec.structs.replace(settings, gateway_id="gw1"), now_us)
    await asyncio.to_thread(stores.open, "fake", serves=False)
    assert stores.recovered == 1
    await asyncio.to_thread(stores.close)
    assert await listed(one) == ["gw1"]
    assert (await drafted(one, end_us))["requests"] == 1


def test_a_folder_keeps_its_id(tmp_path: Path) -> None:
    found = folder_id(tmp_path)
    assert folder_id(tmp_path) == found
    (tmp_path / "other").mkdir()
    assert folder_id(tmp_path / "other") != found
