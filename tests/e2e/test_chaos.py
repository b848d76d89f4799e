"""Kills in the middle of everything: no token is lost, none is billed twice.

Three tenants with eight streams each ask without a pause. One client hangs up after five tokens, the engine's process
is killed, then the gateway's; a new gateway starts on the same data folder. Then: every request that was let in has
exactly one event; what is billed is at least what its client received and at most what the engine had sampled, as the
journal tells, read between kill and restart by nobody but this test.

METERHOUSE_TEST_CHAOS_MODEL=default plays it on the real model, METERHOUSE_TEST_CHAOS_ROUNDS repeats it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from metering.counts import Counts
from tests.fixtures.server import ServerProcess
from tests.orphans import orphans_of

TENANTS, STREAMS, CUT_AFTER = ("red", "green", "blue"), 8, 5
SHORT_TOKENS = 3  # the last stream of each tenant asks for so few that its requests end by themselves
MAX_TOKENS = 6000  # long enough that kills find the engine at work, however slow the clients read
BETWEEN_KILLS = len(TENANTS) * STREAMS * 6  # tokens that clients receive before each kill
PRICE = {"prompt": "1000.000000001", "cached": "100", "completion": "3000"}
ROUNDS = int(os.environ.get("METERHOUSE_TEST_CHAOS_ROUNDS", "1"))
SETTLE_TIMEOUT_S = 60.0


@dataclass
class Ask:
    """One request as its client saw it. `label` is sent as `user`, so the event can be told."""

    label: str
    tenant: str
    max_tokens: int
    received: int = 0  # tokens
    ended: str = "open"  # finished, cut, error (told on the stream), refused (an HTTP status), broken
    told: tuple[int, int, int] | None = None  # usage of a finished one: prompt, cached, completion


@dataclass
class Crowd:
    """All clients and what they saw."""

    server: ServerProcess
    model: str
    keys: dict[str, str]
    asks: list[Ask] = field(default_factory=list)
    stopping: bool = False

    def received_since(self, first: int) -> int:
        """Tokens received for the requests from number `first` on."""
        return sum(ask.received for ask in self.asks[first:])

    async def run(self, during: Callable[[], Any]) -> None:
        """Let every stream ask again and again, until `during` has done its harm."""
        loops = [asyncio.create_task(self._stream(tenant, number)) for tenant in TENANTS for number in range(STREAMS)]
        try:
            await during()
        finally:
            self.stopping = True
            await asyncio.gather(*loops)

    async def _stream(self, tenant: str, number: int) -> None:
        client = openai.AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=60
        )
        async with client:
            while not self.stopping:
                tokens = SHORT_TOKENS if number == STREAMS - 1 else MAX_TOKENS
                ask = Ask(f"{tenant}-{number}-{len(self.asks)}", tenant, tokens)
                self.asks.append(ask)
                cut = (tenant, number) == (TENANTS[0], 0) and not any(one.ended == "cut" for one in self.asks)
                try:
                    await self._ask(client, ask, cut)
                except openai.APIConnectionError:
                    ask.ended = "broken"
                except openai.APIStatusError:
                    ask.ended = "refused"
                except openai.APIError:
                    ask.ended = "error"
                except Exception as error:  # the SDK lets some of httpx's own errors through
                    if not type(error).__module__.startswith("http"):
                        raise
                    ask.ended = "broken"
                if ask.ended in ("refused", "broken"):
                    await asyncio.sleep(0.05)

    async def _ask(self, client: openai.AsyncOpenAI, ask: Ask, cut: bool) -> None:
        stream = await client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": f"Tell {ask.tenant} a story."}],
            max_tokens=ask.max_tokens,
            temperature=0.0,
            user=ask.label,
            logprobs=True,  # one entry a token
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.logprobs and choice.logprobs.content:
                    ask.received += len(choice.logprobs.content)
            if cut and ask.received >= CUT_AFTER:
                ask.ended = "cut"
                await stream.close()
                return
            if chunk.usage:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0  # type: ignore[union-attr]  # always sent
                ask.told = (chunk.usage.prompt_tokens, cached, chunk.usage.completion_tokens)
                ask.ended = "finished"
        assert ask.ended == "finished", "a stream ended without usage and without an error"


def engine_pid(server: ServerProcess) -> int:
    """The engine's process: the server's child that runs the engine room's code."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        if parent == server.process.pid and b"engine." in command:
            return int(entry.name)
    raise AssertionError("the server has no engine process")


async def until(holds: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


def prepare(server: ServerProcess) -> Crowd:
    keys = {}
    with server.admin() as admin:
        for tenant in TENANTS:
            admin.post("/tenants", json={"id": tenant, "name": tenant}).raise_for_status()
            credit = {"amount": "1000.00", "currency": "usd", "reason": "chaos"}
            admin.post(f"/tenants/{tenant}/credits", json=credit).raise_for_status()
            keys[tenant] = admin.post(f"/tenants/{tenant}/keys", json={"name": "x"}).raise_for_status().json()["key"]
        price = {"model": "*", "effective_at": 0, "currency": "usd", "per_million": PRICE}
        admin.post("/prices", json=price).raise_for_status()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys[TENANTS[0]]) as client:
        model = client.models.list().data[0].id
    return Crowd(server, model, keys)


async def harm(server: ServerProcess, crowd: Crowd) -> None:
    """The engine, and when it is back and streams again, the gateway."""
    await until(lambda: crowd.received_since(0) >= BETWEEN_KILLS, "the first stretch of tokens")
    await until(lambda: {"cut", "finished"} <= {ask.ended for ask in crowd.asks}, "a cut and an ordinary end")
    os.kill(engine_pid(server), signal.SIGKILL)
    asked = len(crowd.asks)  # what comes now for earlier ones was sent before the kill
    await until(lambda: crowd.received_since(asked) >= BETWEEN_KILLS, "the second stretch of tokens")
    await asyncio.to_thread(kill_at_work, server)


def kill_at_work(server: ServerProcess, timeout_s: float = 120.0) -> None:
    """Kill the gateway when its engine has many streams in hand: clients lag behind, so it alone knows."""
    deadline = time.monotonic() + timeout_s
    with httpx.Client(base_url=server.url) as client:
        while True:
            shown = client.get("/metrics").raise_for_status().text
            running = re.search(r"^vllm:num_requests_running(?:\{.*\})? ([0-9.]+)$", shown, re.MULTILINE)
            assert running, "the gauge of running requests is not there"
            if float(running[1]) >= STREAMS + len(TENANTS):  # some may end before the signal arrives
                server.kill()
                return
            assert time.monotonic() < deadline, f"so many streams did not run at once within {timeout_s} s"


def settled(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """Usage by label, once everything is stored."""
    with server.admin() as admin:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not (report := admin.get("/reconcile").raise_for_status().json())["ok"]:
            assert time.monotonic() < deadline, report["differences"]
            time.sleep(0.2)
        query = {"group_by": "user,outcome", "bucket": "month"}
        rows = admin.get("/usage", params=query).raise_for_status().json()
    assert not rows["has_more"]
    labels = Counter(row["user"] for row in rows["data"])
    assert max(labels.values()) == 1, "a request has events of two outcomes"
    return {row["user"]: row for row in rows["data"]}


def check_one(ask: Ask, row: dict[str, Any] | None, sampled: Counts | None) -> None:
    """One request's bill against what its client received and what the engine did."""
    if row is None:  # it was never let in
        assert (ask.received, sampled) == (0, None), ask
        assert ask.ended in ("refused", "broken"), ask
        return
    assert row["requests"] == 1, ask
    billed = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
    assert billed[2] >= ask.received, (ask, row)
    assert billed[2] <= ask.max_tokens, (ask, row)
    if ask.told is not None:
        assert billed == ask.told, (ask, row)
    if sampled is None:
        assert row["outcome"] != "interrupted", (ask, row)
    else:  # the gateway died under it: the bill is what the journal says, also if it was in the spool by then
        assert billed == (sampled.prompt, sampled.cached, sampled.completion), (ask, row)


def check_money(server: ServerProcess, rows: dict[str, dict[str, Any]]) -> Decimal:
    """Each tenant is charged exactly what its events cost."""
    charged = Decimal(0)
    with server.admin() as admin:
        for tenant in TENANTS:
            found = admin.get(f"/tenants/{tenant}/balance").raise_for_status().json()
            own = sum(Decimal(row["amount"]) for row in rows.values() if row["tenant"] == tenant)
            assert Decimal(found["charged"]) == own > 0
            assert Decimal(found["held"]) == 0
            assert Decimal(found["available"]) == 1000 - own
            charged += own
    return charged


def tally(crowd: Crowd, rows: dict[str, dict[str, Any]], orphans: int, charged: Decimal) -> str:
    ends = Counter(ask.ended for ask in crowd.asks)
    outcomes = Counter(row["outcome"] for row in rows.values())
    received = crowd.received_since(0)
    billed = sum(row["completion_tokens"] for row in rows.values())
    return (
        f"\n  {len(crowd.asks)} requests: {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}"
        f"\n  {len(rows)} events: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}"
        f"\n  {orphans} of them open in the journal when the gateway was killed"
        f"\n  completion tokens: {received} received <= {billed} billed = journalled; charged {charged:f} usd\n"
    )


@pytest.fixture
def chaos_model(request: pytest.FixtureRequest) -> str:
    given = os.environ.get("METERHOUSE_TEST_CHAOS_MODEL")
    return given or str(request.getfixturevalue("roomy_model"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("round", range(ROUNDS))
def test_every_token_is_billed_once_whatever_is_killed(
    round: int, chaos_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess(tmp_path / "data", model=chaos_model)
    try:
        server.wait_ready()
        crowd = prepare(server)
        asyncio.run(crowd.run(lambda: harm(server, crowd)))
        orphans = {orphan.opened.user: orphan.counts for orphan in orphans_of(tmp_path / "data" / "journal")}
        assert len(orphans) >= STREAMS, "the gateway was to be killed under running streams"
        server = ServerProcess(tmp_path / "data", model=chaos_model)
        server.wait_ready()
        rows = settled(server)
        asks = {ask.label: ask for ask in crowd.asks}
        assert rows.keys() <= asks.keys(), "an event that nobody asked for"
        for label, ask in asks.items():
            check_one(ask, rows.get(label), orphans.get(label))
        outcomes = {row["outcome"] for row in rows.values()}
        assert outcomes == {"finished", "abort", "engine_died", "interrupted"}
        charged = check_money(server, rows)
        with capsys.disabled():
            sys.stdout.write(tally(crowd, rows, len(orphans), charged))
        assert server.stop() == 0
    finally:
        server.kill()
