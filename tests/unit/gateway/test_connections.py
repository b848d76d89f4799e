"""What a connection may do before any key is asked for, and what happens when it ends in the middle of something."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.fake import FakeEngine
from gateway.server import MAX_HEAD_BYTES, Connection
from gateway.sse import Answer, Reply
from metering.events import Outcome
from tests.fixtures.server import ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"


def connect(gateway: RunningGateway) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def post(key: str, body: dict[str, Any], **more: str) -> bytes:
    raw = json.dumps(body).encode()
    headers = {"host": "x", "authorization": f"Bearer {key}", "content-type": "application/json", **more}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"content-length": str(len(raw)), **headers}.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + raw


def everything(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    pieces = []
    while piece := client.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def until(client: socket.socket, end: bytes) -> None:
    """Read on till `end` was said."""
    said = b""
    while end not in said:
        piece = client.recv(1 << 16)
        assert piece, said
        said += piece


def body_of(answer: bytes) -> dict[str, Any]:
    return dict(json.loads(answer.partition(b"\r\n\r\n")[2])["error"])


def test_a_head_without_end_is_refused_before_it_fills_the_memory(gateway: RunningGateway) -> None:
    with connect(gateway) as client:
        client.sendall(LIVE + b"x-padding: ")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            client.sendall(b"a" * (64 << 20))


def test_a_whole_head_that_is_too_large_is_told(gateway: RunningGateway) -> None:
    with connect(gateway) as client:
        client.sendall(LIVE + b"x-padding: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert body_of(answer)["code"] == "headers_too_large"
    with connect(gateway) as client:
        client.sendall(LIVE + b"x-padding: " + b"a" * (MAX_HEAD_BYTES - 100) + b"\r\nconnection: close\r\n\r\n")
        assert everything(client).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_gets_the_envelope(gateway: RunningGateway) -> None:
    with connect(gateway) as client:
        client.sendall(b"\x16\x03\x01\x02\x00" + b"a" * 100 + b"\r\n\r\n")
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert body_of(answer)["code"] == "invalid_http"


@pytest.mark.parametrize("begun", [b"", b"GET /health", b"\r\n"])
def test_who_says_nothing_is_cut(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.2)
    with connect(gateway) as client:
        client.sendall(begun)
        assert everything(client) == b""
    with connect(gateway) as client:  # the same behind an answer, whose keep-alive the piece has ended
        client.sendall(LIVE + b"\r\n")
        until(client, b"}")
        client.sendall(begun or b"\r\n")
        assert everything(client) == b""


def test_half_a_pipelined_request_does_not_cut_the_answer_before_it(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.1)
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.02))
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "ignore_eos": True, "stream": True}
    with connect(gateway) as client:
        client.sendall(post(gateway.tenant(), body) + b"GET /heal")
        until(client, b"[DONE]")
    (event,) = gateway.wait_events(1)
    assert (event.outcome, event.completion_tokens) == (Outcome.FINISHED, 30)


def test_a_cut_reaches_the_request_that_runs_although_another_was_pipelined_behind_it(
    make_gateway: MakeGateway,
) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.01))
    key = gateway.tenant()
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 900, "ignore_eos": True}
    with connect(gateway) as client:
        client.sendall(post(key, body) + post(key, body))  # no stream: nothing is written that could fail
        while gateway.gateway.capture.open_count == 0:
            time.sleep(0.01)
    events = gateway.wait_events(1)
    gateway.idle()
    assert [event.outcome for event in events] == [Outcome.ABORT]
    assert events[0].completion_tokens < 900


def test_a_client_that_leaves_before_its_body_is_no_fault_of_ours(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(gateway) as client:
        client.sendall(post(gateway.tenant(), {"messages": []}, **{"content-length": "1000"}))
    deadline = time.monotonic() + 5
    while not gateway.metric("meterhouse_http_responses_total", status="400"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert gateway.metric("meterhouse_http_responses_total", status="500") == 0
    assert "request_failed" not in caplog.text
    gateway.idle()


async def test_a_server_that_raises_on_a_closed_connection_is_a_client_that_left() -> None:
    left: list[bool] = []
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, str]:
        await gone
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        asyncio.get_running_loop().call_later(0.02, gone.set_result, None)
        raise RuntimeError("the handler is closed")  # uvloop's, some time before it tells of the end

    answer = Answer(stream=True, keep=False)
    answer.say([b"data: 1\n\n"])
    await Reply(answer, keepalive_s=1.0, on_gone=lambda: left.append(True))({}, receive, send)
    assert left == [True]


async def test_another_fault_while_sending_is_not_taken_for_a_client_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.sse.GONE_S", 0.01)

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    async def send(_: object) -> None:
        raise RuntimeError("ours")

    answer = Answer(stream=True, keep=False)
    answer.say([b"data: 1\n\n"])
    with pytest.raises(RuntimeError, match="ours"):
        await Reply(answer, keepalive_s=1.0)({}, receive, send)
