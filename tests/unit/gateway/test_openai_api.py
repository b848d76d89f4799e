"""The official SDK against a gateway over the deterministic engine."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.fixtures.server import RunningGateway


@pytest.fixture
def client(gateway: RunningGateway) -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.tenant(), max_retries=0)


def test_chat_whole(gateway: RunningGateway, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=5, user="u1", metadata={"job": "7"}
    )
    prompt = "user: hello\nassistant: "
    assert answer.choices[0].message.content == prompt[:5]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    (event,) = gateway.events()
    assert answer.id == f"chatcmpl-{event.event_id}"
    assert (event.outcome, event.finish_reason, event.user, event.metadata) == (
        "finished",
        "length",
        "u1",
        {"job": "7"},
    )
    assert (event.prompt_tokens, event.completion_tokens) == (len(prompt), 5)
    gateway.idle()


def test_chat_streamed(gateway: RunningGateway, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        n=2,
    )
    chunks = list(stream)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "user:", 1: "ser: "}
    (event,) = gateway.events()
    assert (event.prompt_tokens, event.completion_tokens, event.n, event.stream) == (23, 10, 2, True)
    assert (usage.prompt_tokens, usage.completion_tokens) == (23, 10)
    gateway.idle()
