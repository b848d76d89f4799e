"""`meterhouse serve` as a whole (real engine, spool, chDB, ledger) with the official SDK as the client."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fixtures.server import ServerProcess, free_port, serve

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
PRICE = {"prompt": "1.00", "cached": "0.10", "completion": "2.00"}


def make_tenant(server: ServerProcess, name: str, credit: str = "10.00") -> str:
    with server.admin() as admin:
        price = {"model": "*", "effective_at": "2026-01-01T00:00:00Z", "currency": "usd", "per_million": PRICE}
        admin.post("/prices", json=price, headers={"idempotency-key": "the-price"}).raise_for_status()
        admin.post("/tenants", json={"id": name, "name": name}).raise_for_status()
        admin.post(
            f"/tenants/{name}/credits", json={"amount": credit, "currency": "usd", "reason": "test"}
        ).raise_for_status()
        key: str = admin.post(f"/tenants/{name}/keys", json={"name": "k"}).raise_for_status().json()["key"]
        return key


def around_now() -> dict[str, str]:
    """A period of whole days that holds everything this test does."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    first, last = today - timedelta(days=1), today + timedelta(days=2)
    return {"start": first.isoformat(), "end": last.isoformat()}


def usage(server: ServerProcess, tenant: str) -> dict[str, int]:
    with server.admin() as admin:
        rows = admin.get(
            "/usage",
            params={"tenant": tenant, "bucket": "day", **around_now()},
        )
        rows.raise_for_status()
        names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        return {name: sum(row[name] for row in rows.json()["data"]) for name in names}


def wait_usage(server: ServerProcess, tenant: str, requests: int) -> dict[str, int]:
    """The tenant's sums in ClickHouse, once so many requests are there."""
    deadline = time.monotonic() + 30
    while (found := usage(server, tenant))["requests"] < requests:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_from_request_to_usage_row(real_server: ServerProcess) -> None:
    key = make_tenant(real_server, "e2e-usage")
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=key, max_retries=0)
    model = model_name(client)
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    first, second = whole.usage, chunks[-1].usage
    assert first is not None
    assert second is not None
    assert second.prompt_tokens == first.prompt_tokens
    assert second.prompt_tokens_details is not None
    with httpx.Client(base_url=real_server.url, headers={"authorization": f"Bearer {key}"}) as raw:
        assert raw.post("/tokenize", json={"messages": MESSAGES}).json()["count"] == first.prompt_tokens
    found = wait_usage(real_server, "e2e-usage", 2)
    assert found == {
        "requests": 2,
        "prompt_tokens": first.prompt_tokens + second.prompt_tokens,
        "cached_tokens": second.prompt_tokens_details.cached_tokens or 0,
        "completion_tokens": first.completion_tokens + second.completion_tokens,
    }


def test_many_streams_and_one_cut(real_server: ServerProcess) -> None:
    key = make_tenant(real_server, "e2e-streams")

    async def run() -> tuple[int, int]:
        async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key=key, max_retries=0) as client:
            model = (await client.models.list()).data[0].id

            async def whole(number: int) -> int:
                stream = await client.completions.create(
                    model=model,
                    prompt=f"number {number}",
                    max_tokens=24,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                used = [chunk.usage async for chunk in stream][-1]
                assert used is not None
                return used.completion_tokens

            async def cut() -> int:
                stream = await client.completions.create(
                    model=model, prompt="cut", max_tokens=400, stream=True, logprobs=0, extra_body={"ignore_eos": True}
                )
                tokens = 0
                async for chunk in stream:
                    logprobs = chunk.choices[0].logprobs
                    tokens += len(logprobs.tokens or []) if logprobs else 0
                    if tokens >= 5:
                        break
                await stream.close()
                return tokens

            tokens, received = await asyncio.gather(asyncio.gather(*map(whole, range(7))), cut())
            return sum(tokens), received

    finished, received = asyncio.run(run())
    assert finished == 7 * 24
    found = wait_usage(real_server, "e2e-streams", 8)
    assert found["requests"] == 8
    assert finished + received <= found["completion_tokens"] < finished + 400


def test_402_and_404(real_server: ServerProcess) -> None:
    key = make_tenant(real_server, "e2e-poor", credit="0.000001")
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model_name(client), messages=MESSAGES)
    assert caught.value.status_code == 402
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES)


def test_taken_port_and_taken_folder_are_clear_sentences(real_server: ServerProcess, tmp_path: Path) -> None:
    for port, folder, words in (
        (real_server.port, tmp_path / "other", ["Port", str(real_server.port), "taken"]),
        (free_port(), real_server.data_dir, ["Another Meterhouse server", "--data-dir"]),
    ):
        with_model = real_server.process.args
        assert isinstance(with_model, list)
        model = next(part.partition("=")[2] for part in with_model if part.startswith("--model="))
        second = ServerProcess(folder, port=port, model=model)
        assert second.process.wait(60) == 1
        said = second.log.read_text()
        assert "Traceback" not in said
        for word in words:
            assert word in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    server = ServerProcess(tmp_path / "data", model=tiny_model)
    deadline = time.monotonic() + 60
    while "Starting the engine" not in server.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.process.send_signal(number)
    assert server.process.wait(20) == 0
    said = server.log.read_text()
    assert "Stopped before it served" in said
    assert "Traceback" not in said
    assert "Serving on" not in said


def receive_and_kill(server: ServerProcess, key: str, after: int) -> int:
    """Stream until `after` tokens came, then SIGKILL the server; how many tokens came in all."""
    received = 0
    body = {"prompt": "abc", "max_tokens": 6000, "ignore_eos": True, "stream": True, "logprobs": 0}
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=30) as client:
        try:
            with client.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    received += line.count('"token_logprobs":[')
                    if received == after:
                        server.kill()
        except httpx.TransportError:
            return received
    raise AssertionError("the stream ended as if nothing had happened")


def test_killed_server_settles_what_it_left(roomy_model: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a stream; after the restart one event, no less than what was received."""
    options: dict[str, Any] = {"model": roomy_model, "kv_cache_bytes": 64 << 20}
    with serve(tmp_path / "data", **options) as server:
        key = make_tenant(server, "t")
        received = receive_and_kill(server, key, after=5)
    with serve(tmp_path / "data", **options) as server:
        found = wait_usage(server, "t", 1)
        assert found["requests"] == 1
        assert received <= found["completion_tokens"] <= 6000
        with server.admin() as admin:
            balance = admin.get("/tenants/t/balance").json()
            assert balance["held"] == "0.00"
            report = admin.get("/reconcile", params=around_now())
            assert report.json()["ok"] is True, report.text
        assert server.stop() == 0
