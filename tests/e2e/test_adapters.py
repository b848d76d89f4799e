"""Adapters of a running server: over few slots, replaced, unloaded and broken while requests are served."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fixtures.server import ServerProcess, serve
from tests.peft_adapters import make_adapters

PROMPT = "the quick brown fox"
SLOTS = 2


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    configs: list[dict[str, Any]] = [
        {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]},
    ]
    return make_adapters(tiny_model, tmp_path_factory.mktemp("adapters"), configs, count=11, strength=1.5)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two slots, and no memory beside them: whoever is not resident is read from disk."""
    folder = tmp_path_factory.mktemp("server") / "data"
    sizes = {"adapter_slots": SLOTS, "adapter_cache_bytes": 0, "kv_cache_bytes": 16 << 20, "max_num_seqs": 8}
    with serve(folder, model=tiny_model, dtype="float32", threads=1, **sizes) as server:
        with server.admin() as admin:
            price = {"prompt": "1.00", "cached": "0.10", "completion": "2.00"}
            body = {"model": "*", "effective_at": "2026-01-01T00:00:00Z", "currency": "usd", "per_million": price}
            admin.post("/prices", json=body).raise_for_status()
        yield server


class Client:
    """A tenant of the server with a key."""

    def __init__(self, server: ServerProcess, tenant: str) -> None:
        self.server, self.tenant = server, tenant
        with server.admin() as admin:
            admin.post("/tenants", json={"id": tenant, "name": tenant}).raise_for_status()
            credit = {"amount": "10.00", "currency": "usd", "reason": "test"}
            admin.post(f"/tenants/{tenant}/credits", json=credit).raise_for_status()
            key = admin.post(f"/tenants/{tenant}/keys", json={"name": "k"}).raise_for_status().json()["key"]
        self.sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        self.base = self.sdk.models.list().data[0].id

    def load(self, name: str, folder: Path) -> dict[str, str]:
        with self.server.admin() as admin:
            made = admin.post(f"/tenants/{self.tenant}/adapters", json={"name": name, "path": str(folder)})
            found: dict[str, str] = made.raise_for_status().json()
            return found

    def unload(self, name: str) -> None:
        with self.server.admin() as admin:
            admin.delete(f"/tenants/{self.tenant}/adapters/{name}").raise_for_status()

    def say(self, model: str, prompt: str = PROMPT, tokens: int = 8) -> str:
        extra = {"ignore_eos": True}
        done = self.sdk.completions.create(
            model=model, prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == tokens
        return done.choices[0].text

    def stream(self, model: str, tokens: int) -> Iterator[str]:
        chunks = self.sdk.completions.create(
            model=model, prompt=PROMPT, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}, stream=True
        )
        return (chunk.choices[0].text for chunk in chunks)


def metric(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def test_ten_over_two_slots_at_once_are_ten_and_one_broken_file_is_one_error(
    server: ServerProcess, folders: list[Path]
) -> None:
    client = Client(server, "ten")
    made = {f"a{number}": client.load(f"a{number}", folder) for number, folder in enumerate(folders[:10])}
    alone = {name: client.say(name) for name in [*made, client.base]}
    assert len(set(alone.values())) == 11
    broken = server.data_dir / "adapters" / made["a4"]["id"] / "adapter_model.safetensors"
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    asked = [*made, client.base] * 3

    def ask(name: str) -> str | openai.APIStatusError:
        try:
            return client.say(name)
        except openai.APIStatusError as error:
            return error

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(ask, asked))
    for name, answer in zip(asked, answers, strict=True):
        if name == "a4":
            assert isinstance(answer, openai.APIStatusError)
            assert (answer.status_code, answer.code) == (503, "adapter_unavailable")
            assert "digest differs" in answer.message
            assert str(server.data_dir) not in str(answer.body)
        else:
            assert answer == alone[name]
    assert metric(server, "meterhouse_adapters_resident") <= SLOTS
    assert metric(server, "meterhouse_adapter_evictions_total") >= 10
    assert metric(server, "meterhouse_adapter_reads_total") >= 20
    with server.admin() as admin:
        listed = admin.get(f"/tenants/{client.tenant}/adapters").json()["data"]
    assert len(listed) == 10  # the broken one too: it is the tenant's to replace
    client.load("a4", folders[4])
    assert client.say("a4") == alone["a4"]


def test_an_adapter_is_replaced_and_unloaded_under_running_streams(server: ServerProcess, folders: list[Path]) -> None:
    client = Client(server, "swap")
    client.load("a", folders[0])
    first = client.say("a", tokens=60)
    stream = client.stream("a", 60)
    text = next(stream)
    client.load("a", folders[1])
    second = client.say("a", tokens=60)
    assert second != first
    assert client.say(client.base, tokens=60) not in (first, second)
    assert text + "".join(stream) == first  # begun with the old one, ended with it
    stream = client.stream("a", 60)
    text = next(stream)
    with ThreadPoolExecutor(1) as threads:
        unloading = threads.submit(client.unload, "a")
        deadline = time.monotonic() + 20
        while True:  # at once for new requests, though the answer comes with the stream's end
            try:
                client.say("a", tokens=1)
            except openai.NotFoundError:
                break
            assert time.monotonic() < deadline
        text += "".join(stream)
        unloading.result(30)
    assert text == second


def test_what_cannot_be_served_is_told_with_the_reason_and_leaves_nothing(
    server: ServerProcess, folders: list[Path], tmp_path: Path
) -> None:
    client = Client(server, "wrong")
    before = sorted((server.data_dir / "adapters").iterdir())
    (tmp_path / "adapter_config.json").write_bytes((folders[0] / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes((folders[0] / "adapter_model.safetensors").read_bytes()[:-40])
    with server.admin() as admin:
        refused = admin.post(f"/tenants/{client.tenant}/adapters", json={"name": "a", "path": str(tmp_path)})
    assert refused.status_code == 400
    assert "truncated or damaged" in refused.json()["error"]["message"]
    assert sorted((server.data_dir / "adapters").iterdir()) == before


def test_the_engines_death_costs_no_adapter(server: ServerProcess, folders: list[Path]) -> None:
    client = Client(server, "dead")
    for number in range(3):
        client.load(f"a{number}", folders[number])
    alone = {f"a{number}": client.say(f"a{number}") for number in range(3)}
    restarts = metric(server, "meterhouse_engine_restarts_total")
    for pid in children(server.process.pid):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while metric(server, "meterhouse_engine_restarts_total") == restarts:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.wait_ready()
    assert {name: client.say(name) for name in alone} == alone


def children(pid: int) -> list[int]:
    """Its engine: the processes that it started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
