"""An invoice verified by its tenant: receipts of OpenAI's SDK, files over HTTP, the verifier in a process of its own.

Then each forgery that a seller, or somebody on the way, could try: every one is found and named.
"""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import billing.verify
from billing.document import content_hash_of
from billing.signer import Signer
from engine.fake import FakeEngine
from gateway.admin.times import format_time
from gateway.app import now_us
from gateway.lifecycle import Runtime
from gateway.server import bind, make_server
from gateway.settings import Settings
from tests.fixtures.clickhouse import empty
from tests.fixtures.server import ADMIN_KEY, ByteTokenizer

OURS = ("gateway", "engine", "kernels", "metering", "billing", "migrations", "msgspec")
ALONE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OURS!r}))  # importing any of them fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def url(tmp_path: Path, chdb_url: str) -> AsyncIterator[str]:
    """A whole gateway over the fake engine, on a socket."""
    await asyncio.to_thread(empty, chdb_url)
    settings = Settings(data_dir=tmp_path / "data", clickhouse_url=chdb_url, admin_key=ADMIN_KEY, drain_s=0.5)
    engine = FakeEngine(ByteTokenizer())
    runtime = Runtime(settings, engine=engine, tokenizer=ByteTokenizer(), base_model="fake", beat_s=0.05)
    await runtime.start()
    server = make_server(runtime.gateway.app, write_timeout_s=5)
    with bind("127.0.0.1", 0) as bound:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.001)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            await runtime.drain(1.0)
            server.should_exit = True
            await serving
            await runtime.stop()


class Files:
    """What a tenant has, and what becomes of it."""

    def __init__(self, folder: Path, invoice: Any, events: list[Any], receipts: list[Any], keys: Any) -> None:
        self.folder = folder
        self.invoice, self.events, self.receipts, self.keys = invoice, events, receipts, keys

    def verified(self) -> tuple[int, set[str], str]:
        """Exit code, what does not hold, and the first event that is named."""
        self.folder.mkdir(exist_ok=True)
        for name, lines in (("events", self.events), ("receipts", self.receipts)):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, value in (("invoice", self.invoice), ("keys", self.keys)):
            (self.folder / f"{name}.json").write_text(json.dumps(value))
        (self.folder / "verify.py").write_bytes(Path(str(billing.verify.__file__)).read_bytes())
        names = ["verify.py", "invoice.json", "events.jsonl", "receipts.jsonl", "--keys=keys.json", "--json"]
        done = subprocess.run(
            [sys.executable, "-I", "-c", ALONE, *names], cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""
        report = json.loads(done.stdout)
        findings = report["findings"]
        assert report["ok"] == (not findings)
        return done.returncode, {one["check"] for one in findings}, findings[0]["event_id"] if findings else ""


async def setup(url: str) -> str:
    """A tenant that can pay; its key."""
    async with httpx.AsyncClient(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {ADMIN_KEY}"}) as admin:
        for path, body in (
            ("/tenants", {"id": "acme", "name": "Acme"}),
            ("/prices", {"model": "*", "currency": "usd", "effective_at": 0, "per_million": PRICES}),
            ("/tenants/acme/credits", {"amount": "100.00", "currency": "usd", "reason": "test"}),
        ):
            assert (await admin.post(path, json=body)).status_code == 201
        key: str = (await admin.post("/tenants/acme/keys", json={"name": "test"})).json()["key"]
        return key


PRICES = {"prompt": "40000.00", "cached": "4000.00", "completion": "90000.00"}


async def receipts_of(url: str, key: str) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        receipts = []
        for tokens in (3, 9):
            answer = await client.chat.completions.with_raw_response.create(
                model="fake", messages=MESSAGES, max_tokens=tokens
            )
            receipts.append(json.loads(answer.headers["x-meterhouse-receipt"]))
            options: Any = {"include_receipt": True}
            stream = await client.chat.completions.create(
                model="fake", messages=MESSAGES, max_tokens=tokens, stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
            receipts.append((chunks[-1].model_extra or {})["receipt"])
        return receipts


async def invoiced(url: str, start_us: int) -> str:
    """Usage up to now, made final."""
    async with httpx.AsyncClient(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {ADMIN_KEY}"}) as admin:
        body = {"tenant": "acme", "period_start": format_time(start_us), "period_end": format_time(now_us())}
        deadline = time.monotonic() + 20
        while (made := await admin.post("/invoices", json=body, timeout=30)).status_code == 409:
            assert time.monotonic() < deadline, made.text
            await asyncio.sleep(0.05)
        assert (await admin.post(f"/invoices/{made.json()['id']}/finalize")).status_code == 200
        replayed = (await admin.get("/replay", params={"invoice": made.json()["id"]})).json()
        assert replayed["ok"]
        return str(made.json()["id"])


async def test_a_tenant_verifies_its_invoice_and_finds_each_forgery(url: str, tmp_path: Path) -> None:
    start_us = now_us()
    key = await setup(url)
    receipts = await receipts_of(url, key)
    invoice_id = await invoiced(url, start_us)
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as tenant:
        invoice = (await tenant.get(f"/v1/invoices/{invoice_id}", params={"leaves": "true"})).json()
        events = (await tenant.get("/v1/usage/events", params={"invoice": invoice_id})).text.splitlines()
    async with httpx.AsyncClient(base_url=url) as anybody:
        answer = await anybody.get("/.well-known/meterhouse-signing-keys.json")
    assert answer.headers["cache-control"] == "public, max-age=300"
    honest = Files(tmp_path / "files", invoice, [json.loads(line) for line in events], receipts, answer.json())
    assert invoice["document"]["total_minor"] > 0
    assert await asyncio.to_thread(honest.verified) == (0, set(), "")
    await asyncio.to_thread(forgeries, honest, tmp_path)


def forgeries(honest: Files, tmp_path: Path) -> None:
    """Dropped, doubled, edited event; receipt without its event; edited price, total, count; another's key."""
    ids = [event["event_id"] for event in honest.events]

    def tried() -> Files:
        return copy.deepcopy(honest)

    shuffled = tried()
    shuffled.events.reverse()
    assert shuffled.verified() == (0, set(), "")

    dropped = tried()
    del dropped.events[2]
    code, checks, event_id = dropped.verified()
    assert (code, event_id) == (1, ids[2])
    assert {"event missing", "number of events", "root", "receipt without its event"} <= checks

    doubled = tried()
    doubled.events.append(doubled.events[1])
    code, checks, event_id = doubled.verified()
    assert (code, event_id) == (1, ids[1])
    assert {"event doubled", "line"} <= checks

    edited = tried()
    edited.events[3]["completion_tokens"] += 1000
    code, checks, event_id = edited.verified()
    assert (code, event_id) == (1, ids[3])
    assert {"event changed", "line", "receipt"} <= checks

    unknown = tried()
    unknown.receipts.append(unknown.receipts[0] | {"event_id": ids[0][:-1] + ("0" if ids[0][-1] != "0" else "1")})
    assert unknown.verified()[:2] == (1, {"receipt without its event"})

    price = tried()
    price.invoice["document"]["prices"][0]["components"][0]["tiers"][0]["price_nano"] -= 1
    assert price.verified()[:2] == (1, {"content hash", "signed head", "line", "total"})

    total = tried()
    total.invoice["document"]["total_minor"] += 1
    assert total.verified()[:2] == (1, {"content hash", "signed head", "total"})

    count = tried()
    count.invoice["document"]["events"]["count"] += 1
    assert count.verified()[:2] == (1, {"content hash", "signed head", "number of events"})

    whole = tried()  # everything fits but whose word it is
    forger = Signer(tmp_path / "forger.key", "forger").key()
    whole.invoice["document"]["true_up"] = "1"
    whole.invoice["content_hash"] = content_hash_of(whole.invoice["document"])
    head = whole.invoice["signed"]["head"] | {"key_id": forger.id, "content_hash": whole.invoice["content_hash"]}
    statement = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    whole.invoice["signed"] = {"head": head, "signature": forger.sign(statement)}
    assert whole.verified()[:2] == (1, {"signature"})
