"""However a request ends: one event, with what was done; counters equal it; nothing is left held."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.fake import FakeEngine
from gateway.openai import render
from metering.events import UsageEvent
from metering.journal import Journal, JournalError, OpenedRecord, recover_orphans
from metering.spool import Spool, SpoolFull
from tests.fixtures.server import ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "ignore_eos": True}
PROMPT_TOKENS = len("user: hello\nassistant: ")


def slow_engine(step_s: float = 0.01, **options: Any) -> FakeEngine:
    return FakeEngine(ByteTokenizer(), step_s, **options)


def tokens_match(gateway: RunningGateway, events: list[UsageEvent]) -> None:
    """The counters a scrape shows are the sums of the events, to the token."""
    for kind, total in (
        ("prompt", sum(event.prompt_tokens for event in events)),
        ("cached", sum(event.cached_tokens for event in events)),
        ("completion", sum(event.completion_tokens for event in events)),
    ):
        assert gateway.metric("meterhouse_tokens_total", kind=kind) == total
        assert gateway.metric("meterhouse_settled_tokens_total", kind=kind) == total
    assert gateway.metric("vllm:prompt_tokens_total") == sum(event.prompt_tokens for event in events)
    assert gateway.metric("vllm:generation_tokens_total") == sum(event.completion_tokens for event in events)


def read_chunks(lines: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_client_leaves_after_five_tokens(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine())
    with (
        gateway.http(gateway.tenant()) as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        received = 0
        for line in response.iter_lines():
            if line.startswith("data: {"):
                received += len(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
            if received >= 5:
                break
    (event,) = gateway.wait_events(1)
    gateway.idle()
    assert event.outcome == "abort"
    assert event.prompt_tokens == PROMPT_TOKENS
    assert 5 <= event.completion_tokens < 300
    tokens_match(gateway, [event])
    assert gateway.metric("meterhouse_requests_total", outcome="abort") == 1
    assert gateway.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_client_leaves_while_it_waits_for_a_whole_answer(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine())
    key = gateway.tenant()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json=CHAT,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(5, read=0.2),
        )
    (event,) = gateway.wait_events(1)
    gateway.idle()
    assert event.outcome == "abort"
    assert 0 < event.completion_tokens < 300
    tokens_match(gateway, [event])


def test_client_leaves_in_the_middle_of_the_prompt(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine(0.05, prefill_tokens=4))
    with pytest.raises(httpx.ReadTimeout), gateway.http(gateway.tenant()) as client:
        client.post("/v1/completions", json={"prompt": "x" * 200}, timeout=httpx.Timeout(5, read=0.3))
    (event,) = gateway.wait_events(1)
    gateway.idle()
    assert event.outcome == "abort"
    assert 0 < event.prompt_tokens < 200
    assert event.completion_tokens == 0
    tokens_match(gateway, [event])


def test_client_leaves_while_queued(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine(0.02, max_num_seqs=1))
    key = gateway.tenant()
    first = threading.Thread(
        target=lambda: httpx.post(
            f"{gateway.url}/v1/completions",
            json={"prompt": "first", "max_tokens": 60, "ignore_eos": True},
            headers={"authorization": f"Bearer {key}"},
            timeout=20,
        )
    )
    first.start()
    while not gateway.engine.submitted:
        time.sleep(0.01)
    with pytest.raises(httpx.ReadTimeout), gateway.http(key) as client:
        client.post("/v1/completions", json={"prompt": "second"}, timeout=httpx.Timeout(5, read=0.2))
    queued = gateway.wait_events(1)[0]
    assert (queued.outcome, queued.prompt_tokens, queued.completion_tokens) == ("abort", 0, 0)
    first.join()
    tokens_match(gateway, gateway.wait_events(2))
    gateway.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_deadline(make_gateway: MakeGateway, stream: bool) -> None:
    gateway = make_gateway(engine=slow_engine(), request_timeout_s=0.2)
    with gateway.http(gateway.tenant()) as client:
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    (event,) = gateway.events()
    assert event.outcome == "deadline"
    assert 0 < event.completion_tokens < 300
    if stream:
        assert response.status_code == 200
        assert read_chunks(response.text.splitlines())[-1]["error"]["code"] == "deadline_exceeded"
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
    gateway.idle()
    tokens_match(gateway, [event])


def ask_behind_a_stream(gateway: RunningGateway, key: str, *, stream: bool) -> httpx.Response:
    """What a request is told that comes while a stream has the engine."""
    with (
        gateway.http(key) as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as busy,
    ):
        lines = busy.iter_lines()
        next(lines)
        return httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json={**CHAT, "stream": stream},
            headers={"authorization": f"Bearer {key}"},
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_too_long_in_the_queue(make_gateway: MakeGateway, stream: bool) -> None:
    gateway = make_gateway(engine=slow_engine(max_num_seqs=1, queue_timeout_s=0.05))
    key = gateway.tenant()
    late = ask_behind_a_stream(gateway, key, stream=stream)
    assert late.status_code == 503
    assert late.headers["retry-after"] == "5"
    assert late.json()["error"]["code"] == "queue_timeout"
    events = gateway.wait_events(2)
    gateway.idle()
    event = next(event for event in events if event.outcome == "expired")
    assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens, event.finish_reason) == (0, 0, 0, "")
    assert event.queue_us >= 50_000
    tokens_match(gateway, events)
    assert gateway.metric("meterhouse_requests_total", outcome="expired") == 1
    assert gateway.metric("meterhouse_holds_open") == 0
    others = sum(other.completion_tokens for other in events if other is not event)
    assert gateway.metric("meterhouse_settled_tokens_total", kind="completion") == others


def test_an_error_frame_ends_a_stream_that_waited_too_long_behind_keep_alives(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine(max_num_seqs=1, queue_timeout_s=0.3), keepalive_s=0.05)
    key = gateway.tenant()
    late = ask_behind_a_stream(gateway, key, stream=True)
    assert late.status_code == 200
    assert ": keep-alive" in late.text
    assert read_chunks(late.text.splitlines())[-1]["error"]["code"] == "queue_timeout"
    assert late.text.endswith("data: [DONE]\n\n")
    assert "expired" in {event.outcome for event in gateway.wait_events(2)}
    gateway.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_engine_dies(make_gateway: MakeGateway, stream: bool) -> None:
    gateway = make_gateway(engine=slow_engine())
    answers: list[httpx.Response] = []

    def ask() -> None:
        with gateway.http(key) as client:
            answers.append(client.post("/v1/chat/completions", json={**CHAT, "stream": stream}))

    key = gateway.tenant()
    asking = threading.Thread(target=ask)
    asking.start()
    while gateway.metric("vllm:generation_tokens_total") < 3:
        time.sleep(0.01)
    gateway.on_loop(gateway.engine.kill)
    asking.join()
    (event,) = gateway.events()
    assert event.outcome == "engine_died"
    assert event.completion_tokens >= 3
    tokens_match(gateway, [event])
    if stream:
        chunks = read_chunks(answers[0].text.splitlines())
        assert chunks[-1]["error"]["code"] == "engine_unavailable"
        assert answers[0].text.endswith("data: [DONE]\n\n")
        received = sum(len(chunk["choices"][0]["delta"].get("content", "")) for chunk in chunks[:-1])
        assert received <= event.completion_tokens
    else:
        assert answers[0].status_code == 503
    gateway.idle()
    time.sleep(0.1)  # it comes back by itself
    with gateway.http(key) as client:
        assert client.post("/v1/completions", json={"prompt": "again"}).status_code == 200
    assert gateway.metric("meterhouse_engine_restarts_total") == 1


def test_step_that_cannot_be_journalled_reaches_nobody(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine())
    key = gateway.tenant()
    steps = 0
    journal_step = gateway.journal.step

    def failing(progress: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise OSError("disk full")
        journal_step(progress)

    gateway.journal.step = failing  # type: ignore[method-assign]
    with gateway.http(key) as client:
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    chunks = read_chunks(response.text.splitlines())
    received = sum(len(chunk["choices"][0]["delta"].get("content", "")) for chunk in chunks if "choices" in chunk)
    (event,) = gateway.events()
    assert received == event.completion_tokens == 5
    assert event.outcome == "engine_died"
    assert "error" in chunks[-1]
    gateway.idle()


def test_shutdown_lets_streams_finish_and_cuts_the_rest(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine(), drain_s=0.5)
    key = gateway.tenant()
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, tokens: int) -> None:
        with gateway.http(key) as client:
            answers[name] = client.post(
                "/v1/completions",
                json={"prompt": name, "max_tokens": tokens, "ignore_eos": True, "stream": True},
            )

    threads = [threading.Thread(target=ask, args=one) for one in (("short", 20), ("long", 2000))]
    for thread in threads:
        thread.start()
    while len(gateway.engine.submitted) < 2:
        time.sleep(0.01)
    stopping = threading.Thread(target=lambda: gateway.await_(gateway.gateway.edge.drain(0.5)))
    gateway.gateway.admission.draining = True
    stopping.start()
    refused = httpx.post(
        f"{gateway.url}/v1/completions",
        json={"prompt": "late"},
        headers={"authorization": f"Bearer {key}"},
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 503
    for thread in (*threads, stopping):
        thread.join()
    by_length = sorted(gateway.events(), key=lambda event: event.completion_tokens)
    assert [event.outcome for event in by_length] == ["finished", "shutdown"]
    assert read_chunks(answers["long"].text.splitlines())[-1]["error"]["code"] == "shutting_down"
    assert "error" not in answers["short"].text
    gateway.idle()
    tokens_match(gateway, by_length)


class FullSpool(Spool):
    """A spool whose disk is full from the moment `full` is set, though it was writable at the door."""

    full = False

    def _commit(self, entries: Any, changes: Any) -> Any:
        if self.full and entries:
            raise SpoolFull("no space left")
        return super()._commit(entries, changes)


@pytest.mark.parametrize("stream", [False, True])
def test_disk_full_at_settlement(make_gateway: MakeGateway, stream: bool) -> None:
    gateway = make_gateway(engine=slow_engine(), spool=FullSpool)
    key = gateway.tenant()
    spool = gateway.spool
    assert isinstance(spool, FullSpool)
    spool.full = True
    before = gateway.billing.balance("acme").charged_femto
    with gateway.http(key) as client:
        response = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": stream})
        if stream:
            assert read_chunks(response.text.splitlines())[-1]["error"]["code"] == "no_spool"
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_spool")
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 503  # nothing new is let in
        assert gateway.events() == []
        assert gateway.journal.oldest_open_us() is not None  # a crash now would settle it from the journal
        assert gateway.billing.balance("acme").charged_femto > before
        spool.full = False
        (event,) = gateway.wait_events(1)
        assert (event.outcome, event.completion_tokens) == ("finished", 3)
        gateway.idle()
        while not spool.writable():
            time.sleep(0.01)
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_settled_before_the_last_frame_leaves(make_gateway: MakeGateway) -> None:
    gateway = make_gateway()
    key = gateway.tenant()
    for settled in range(20):
        with (
            gateway.http(key) as client,
            client.stream("POST", "/v1/completions", json={"prompt": "ab", "stream": True}) as response,
        ):
            assert "data: [DONE]" in (line for line in response.iter_lines())
            assert len(gateway.events()) == settled + 1
    gateway.idle()


def test_slow_reader_is_cut_and_settled(make_gateway: MakeGateway) -> None:
    reply = FakeEngine(ByteTokenizer(), 0.0, max_model_len=200_000)
    gateway = make_gateway(engine=reply, write_timeout_s=0.3)
    key = gateway.tenant()
    body = json.dumps({"prompt": "x" * 10, "max_tokens": 150_000, "ignore_eos": True, "stream": True, "n": 4}).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (key.encode(), len(body)) + body
        )
        (event,) = gateway.wait_events(1, timeout_s=20)
    assert event.outcome == "abort"
    assert 0 < event.completion_tokens < 600_000
    gateway.idle()


@pytest.mark.parametrize("where", ["__init__", "update", "ending"])
def test_crash_in_our_own_code_still_settles(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gateway = make_gateway(engine=slow_engine())
    key = gateway.tenant()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret detail /etc/passwd")

    monkeypatch.setattr(render.Renderer, where, broken)
    with gateway.http(key) as client:
        response = client.post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 20}, headers={"idempotency-key": "k"}
        )
        assert response.status_code == 500
        assert "passwd" not in response.text
        (event,) = gateway.events()
        assert event.outcome == "error"
        gateway.idle()
        tokens_match(gateway, [event])
        monkeypatch.undo()
        again = client.post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 20}, headers={"idempotency-key": "k"}
        )
        assert again.status_code == 200


def test_journal_that_cannot_be_written_refuses_at_the_door(gateway: RunningGateway) -> None:
    key = gateway.tenant()

    def failing(record: Any) -> None:
        raise JournalError("no space left on /secret/path")

    gateway.journal.opened = failing  # type: ignore[method-assign]
    with gateway.http(key) as client:
        response = client.post("/v1/completions", json={"prompt": "abc"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_journal")
    assert "secret" not in response.text
    assert gateway.engine.submitted == []
    gateway.idle()


def test_recovered_after_a_crash(make_gateway: MakeGateway, tmp_path: Path) -> None:
    """What a killed gateway leaves in its journal is settled once, as far as it had come."""
    record = OpenedRecord(
        event_id="0199-x",
        ts_us=1_700_000_000_000_000,
        tenant="acme",
        key_id="k",
        model="fake",
        base_model="fake",
        endpoint="completions",
        gateway="gw0",
    )
    journal = Journal(tmp_path / "journal")
    journal.opened(record)
    journal.step([("0199-x", (7, 0, 3, 0, 0, 0))])
    journal.close()
    spool = Spool(tmp_path / "spool.sqlite3")
    (event,) = recover_orphans(tmp_path / "journal", spool, 1_700_000_001_000_000, "gw0")
    spool.close()
    assert (event.outcome, event.prompt_tokens, event.completion_tokens) == ("interrupted", 7, 3)


def test_the_gauges_of_an_engine_that_died_fall_to_what_its_successor_does(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine())
    key = gateway.tenant()
    with gateway.http(key) as client, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.post, "/v1/chat/completions", json=CHAT)
        while gateway.metric("vllm:num_requests_running") < 1:
            time.sleep(0.01)
        gateway.on_loop(gateway.engine.kill)
        assert asking.result(20).status_code == 503
    assert gateway.metric("vllm:num_requests_running") == 0
    assert gateway.metric("vllm:num_requests_waiting") == 0
    assert gateway.metric("vllm:kv_cache_usage_perc") == 0
