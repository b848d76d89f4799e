"""Receipts: each answer tells its event and the hash of its leaf, and never before the event is on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from metering.receipts import encode_receipt, receipt_of
from metering.spool import SpoolBroken
from tests.fixtures.server import RunningGateway

MakeGateway = Callable[..., RunningGateway]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
HEADER = "x-meterhouse-receipt"


def sdk(gateway: RunningGateway, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key or gateway.tenant(), max_retries=0)


def expected(gateway: RunningGateway, number: int = 0) -> Any:
    return json.loads(encode_receipt(receipt_of(gateway.events()[number])))


def test_a_whole_answer_has_it_in_a_header(gateway: RunningGateway) -> None:
    client = sdk(gateway)
    chat = client.chat.completions.with_raw_response.create(model="fake", messages=MESSAGES, max_tokens=5)
    assert json.loads(chat.headers[HEADER]) == expected(gateway)
    text = client.completions.with_raw_response.create(model="fake", prompt="hello", max_tokens=5, n=2)
    receipt = json.loads(text.headers[HEADER])
    assert receipt == expected(gateway, 1)
    assert receipt["completion_tokens"] == 10


@pytest.mark.parametrize("options", [{"include_receipt": True}, {"include_receipt": True, "include_usage": True}])
def test_a_stream_that_asks_has_it_beside_the_usage(gateway: RunningGateway, options: Any) -> None:
    stream = sdk(gateway).chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
    )
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert last.choices == []
    assert last.model_extra is not None
    assert last.model_extra["receipt"] == expected(gateway)


def test_a_stream_that_does_not_ask_is_what_it_was(gateway: RunningGateway) -> None:
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "stream": True}
    with gateway.http(gateway.tenant()) as http:
        plain = http.post("/v1/chat/completions", json=body)
        usage = http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}})
    assert "receipt" not in plain.text + usage.text
    assert HEADER not in plain.headers


def test_a_refusal_has_none(gateway: RunningGateway) -> None:
    with gateway.http(gateway.tenant()) as http:
        refused = http.post("/v1/chat/completions", json={"model": "other", "messages": MESSAGES})
    assert (refused.status_code, HEADER in refused.headers) == (404, False)


def test_it_does_not_leave_before_the_event_is_on_disk(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = gateway.spool.settle

    def broken(event: Any) -> Any:
        future = settle(event)
        future.result(5)
        raise SpoolBroken("no")

    key = gateway.tenant()
    monkeypatch.setattr(gateway.spool, "settle", broken)
    with gateway.http(key) as http:
        answer = http.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES, "max_tokens": 5})
    monkeypatch.undo()
    assert answer.status_code >= 500
    assert HEADER not in answer.headers
    assert "receipt" not in answer.text


def test_an_answer_that_is_kept_is_replayed_without_it(gateway: RunningGateway) -> None:
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 5}
    streamed = body | {"stream": True, "stream_options": {"include_receipt": True}}
    with gateway.http(gateway.tenant()) as http:
        for number, asked in enumerate((body, streamed)):
            headers = {"idempotency-key": f"k{number}"}
            first = http.post("/v1/chat/completions", json=asked, headers=headers)
            again = http.post("/v1/chat/completions", json=asked, headers=headers)
            told = [HEADER in answer.headers or '"receipt"' in answer.text for answer in (first, again)]
            assert told == [True, False]
            assert first.json() == again.json() if number == 0 else again.text.count('"usage"') == 1
    assert len(gateway.events()) == 2
