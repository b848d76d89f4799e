"""The rest of what the official SDK can ask for, and the routes around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.fake import FakeEngine
from engine.types import AdapterRef
from tests.fixtures.server import ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant: "


def sdk(gateway: RunningGateway, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key or gateway.tenant(), max_retries=0)


def add_adapter(gateway: RunningGateway, tenant: str, name: str, folder: Path, content: bytes = b"weights") -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(content)
    info = gateway.await_(gateway.engine.load_adapter(AdapterRef(id=f"{tenant}-{name}", name=name, path=str(folder))))
    gateway.billing.add_adapter(tenant, name=name, path=str(folder), id=info.id, digest=info.digest, base_model="fake")


def test_async_client_streams(gateway: RunningGateway) -> None:
    key = gateway.tenant()

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:

            async def one(n: int) -> str:
                stream = await client.chat.completions.create(
                    model="fake", messages=MESSAGES, max_tokens=n, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(n) for n in range(1, 9)))

    assert asyncio.run(run()) == [PROMPT[:n] for n in range(1, 9)]
    assert sum(event.completion_tokens for event in gateway.events()) == sum(range(1, 9))
    gateway.idle()


def test_stop_string_is_trimmed_and_its_tokens_count(gateway: RunningGateway) -> None:
    answer = sdk(gateway).chat.completions.create(model="fake", messages=MESSAGES, stop=["hel", "zzz"])
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("user: ", "stop")
    assert choice.model_extra == {"stop_reason": "hel"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("user: hel")


def test_stop_string_streamed_never_leaks(gateway: RunningGateway) -> None:
    stream = sdk(gateway).chat.completions.create(
        model="fake", messages=MESSAGES, stop="hel", stream=True, logprobs=True
    )
    text, tokens = "", 0
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        logprobs = chunk.choices[0].logprobs
        tokens += len(logprobs.content or []) if logprobs else 0
    assert text == "user: "
    assert tokens == len("user: hel")


def test_end_of_sequence(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), eos_after=4))
    answer = sdk(gateway).chat.completions.create(model="fake", messages=MESSAGES)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("user", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_chat_logprobs(gateway: RunningGateway) -> None:
    answer = sdk(gateway).chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["u", "s", "e"]
    assert logprobs.content[0].bytes == [ord("u")]
    assert all(entry.logprob <= 0 for entry in logprobs.content)
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)


def test_completion_logprobs(gateway: RunningGateway) -> None:
    answer = sdk(gateway).completions.create(model="fake", prompt="abc", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_shapes_of_prompt_and_echo(gateway: RunningGateway, stream: bool) -> None:
    client = sdk(gateway)
    shapes: list[tuple[Any, list[str]]] = [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ]
    for prompt, texts in shapes:
        answer = client.completions.create(
            model="fake", prompt=prompt, max_tokens=1, echo=True, n=2, stream=stream, extra_body={"ignore_eos": True}
        )
        found: dict[int, str] = {}
        for part in answer if stream else [answer]:
            for choice in part.choices:
                found[choice.index] = found.get(choice.index, "") + choice.text
        expected = [text + (text * 2)[index] for text in texts for index in range(2)]
        assert [found[index] for index in sorted(found)] == expected
    assert [event.n for event in gateway.events()] == [2] * len(shapes)
    gateway.idle()


def test_sampling_fields_reach_the_engine(gateway: RunningGateway) -> None:
    sdk(gateway).chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_completion_tokens=2,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 3},
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "stop_token_ids": [9],
            "bad_words": ["no", "never again"],
            "allowed_token_ids": [97, 98],
            "cache_salt": "s",
        },
    )
    request = gateway.engine.submitted[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (2, 0.5, 0.9, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (1, -1, {5: 3})
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.1, 1.1)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (1, (9,))
    assert (sampling.bad_words, sampling.allowed_token_ids) == (("no", "never again"), (97, 98))
    assert (request.cache_salt, request.tenant) == ("s", "acme")


def test_an_echoed_prompt_has_its_logprobs_before_the_choices(gateway: RunningGateway) -> None:
    """How evaluations score a text (OpenAI's completions): nothing is said of the first token."""
    client = sdk(gateway)
    answer = client.completions.create(
        model="fake", prompt=["xyz", "ab"], max_tokens=1, echo=True, logprobs=1, extra_body={"ignore_eos": True}
    )
    first, second = answer.choices
    assert (first.text, second.text) == ("xyzx", "aba")
    assert first.logprobs is not None
    assert first.logprobs.tokens == ["x", "y", "z", "x"]
    assert first.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert first.logprobs.top_logprobs == [None, {"y": -0.5}, {"z": -0.5}, {"x": -0.5}]
    assert first.logprobs.text_offset == [0, 1, 2, 3]
    assert second.logprobs is not None
    assert second.logprobs.tokens == ["a", "b", "a"]
    assert not hasattr(first, "prompt_logprobs")


def test_prompt_logprobs_stand_where_vllm_has_them(gateway: RunningGateway) -> None:
    """A chat's in the body, a text's in each of its choices; by token id, with rank and text, null for the first."""
    client = sdk(gateway)
    asked = {"prompt_logprobs": 1, "ignore_eos": True}
    answer = client.completions.create(model="fake", prompt=["ab", "xyz"], max_tokens=1, n=2, extra_body=asked)
    told = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    found = [choice.prompt_logprobs for choice in answer.choices]  # type: ignore[attr-defined]
    assert found[0] == found[1] == [None, {"98": told}]
    assert (
        found[2]
        == found[3]
        == [
            None,
            {
                "121": told | {"decoded_token": "y"},
            },
            {"122": told | {"decoded_token": "z"}},
        ]
    )
    long = client.completions.create(model="fake", prompt="x" * 400, max_tokens=1, extra_body=asked)
    assert len(long.choices[0].prompt_logprobs) == 400  # type: ignore[attr-defined]
    chat = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1, extra_body=asked)
    listed = chat.prompt_logprobs  # type: ignore[attr-defined]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert len(listed) == chat.usage.prompt_tokens
    assert listed[0] is None
    plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1)
    assert plain.usage is not None
    assert not hasattr(plain, "prompt_logprobs")


def test_chat_default_reaches_to_the_end_of_the_context(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), max_model_len=200, reply=lambda *_: [65] * 500))
    answer = sdk(gateway).chat.completions.create(model="fake", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 200
    assert answer.choices[0].finish_reason == "length"


def test_models_of_a_tenant(gateway: RunningGateway, tmp_path: Path) -> None:
    acme, globex = gateway.tenant("acme"), gateway.tenant("globex")
    add_adapter(gateway, "acme", "pirate", tmp_path / "a")
    add_adapter(gateway, "globex", "pirate", tmp_path / "b", b"other weights")
    client = sdk(gateway, acme)
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {"fake", "pirate"}
    assert listed["pirate"].model_extra is not None
    assert (listed["pirate"].model_extra["parent"], listed["pirate"].model_extra["root"]) == ("fake", "fake")
    assert client.models.retrieve("pirate").id == "pirate"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("haiku")
    for key, adapter in ((acme, "acme-pirate"), (globex, "globex-pirate")):
        sdk(gateway, key).completions.create(model="pirate", prompt="x")
        sent = gateway.engine.submitted[-1].adapter
        assert sent is not None
        assert sent.id == adapter
    assert [(event.model, event.adapter, event.base_model) for event in gateway.events()] == [
        ("pirate", "pirate", "fake")
    ] * 2


def test_default_adapter(gateway: RunningGateway, tmp_path: Path) -> None:
    key = gateway.tenant()
    add_adapter(gateway, "acme", "pirate", tmp_path / "a")
    gateway.billing.update_tenant("acme", default_adapter="pirate")
    with gateway.http(key) as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).json()["model"] == "pirate"
        assert client.post("/v1/completions", json={"prompt": "x", "model": "fake"}).json()["model"] == "fake"


def test_unloaded_adapter_is_a_clear_error(gateway: RunningGateway) -> None:
    key = gateway.tenant()
    gateway.billing.add_adapter("acme", name="lost", path="/x", id="lost-1", digest="d", base_model="fake")
    with gateway.http(key) as client:
        response = client.post("/v1/completions", json={"prompt": "x", "model": "lost"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_unavailable")
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    gateway.idle()


def test_tokenize_equals_what_is_billed(gateway: RunningGateway) -> None:
    with gateway.http(gateway.tenant()) as client:
        tokens = client.post("/tokenize", json={"messages": MESSAGES, "model": "fake"}).json()
        billed = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()["usage"]
        assert tokens["count"] == len(tokens["tokens"]) == billed["prompt_tokens"]
        assert tokens["max_model_len"] == 4096
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}
        plain = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert plain["tokens"] == list("hé".encode())
        assert plain["token_strs"][0] == "h"
    assert len(gateway.events()) == 1  # tokenizing is not usage


def test_health_and_metrics(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), restart_s=5.0))
    assert httpx.get(f"{gateway.url}/health/live").json() == {"status": "ok", "product": "meterhouse"}
    for _ in range(20):
        assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
    assert len(gateway.engine.submitted) == 1  # asking often costs one probe
    assert gateway.metric("meterhouse_probe_tokens_total") == 2
    assert gateway.events() == []  # billed to nobody
    assert gateway.metric("vllm:generation_tokens_total") == 0
    assert gateway.metric("meterhouse_engine_up") == 1
    assert gateway.metric("meterhouse_build_info", model_name="fake") == 1
    gateway.on_loop(gateway.engine.kill)
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 503


def test_metrics_name_no_tenant(gateway: RunningGateway) -> None:
    sdk(gateway).completions.create(model="fake", prompt="x")
    assert "acme" not in httpx.get(f"{gateway.url}/metrics").text


def test_keep_alive_comments_while_silent(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.2), keepalive_s=0.05)
    with gateway.http(gateway.tenant()) as client:
        response = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True})
    assert ": keep-alive" in response.text
    assert response.text.endswith("data: [DONE]\n\n")
