"""`Idempotency-Key`: generated once, billed once, the same answer (CASE: a client retries after its timeout)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.fake import FakeEngine
from gateway.idempotency import Store
from tests.fixtures.server import ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
BODY = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}


def ask(gateway: RunningGateway, key: str, idempotency: str, **body: Any) -> httpx.Response:
    with gateway.http(key) as client:
        return client.post("/v1/completions", json={**BODY, **body}, headers={"idempotency-key": idempotency})


@pytest.mark.parametrize("stream", [False, True])
def test_retry_after_the_end_gets_the_same_bytes(gateway: RunningGateway, stream: bool) -> None:
    key = gateway.tenant()
    first, second = (ask(gateway, key, "k1", stream=stream) for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert first.headers["content-type"] == second.headers["content-type"]
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert len(gateway.events()) == 1
    assert len(gateway.engine.submitted) == 1
    gateway.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_retry_while_the_first_runs_joins_it(make_gateway: MakeGateway, stream: bool) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.01))
    key = gateway.tenant()
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(gateway, key, "k", stream=stream))) for _ in range(5)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert len({answer.content for answer in answers}) == 1
    assert len(gateway.events()) == 1
    assert len(gateway.engine.submitted) == 1
    gateway.idle()


def test_other_body_is_refused_running_and_ended(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.02))
    key = gateway.tenant()
    running = threading.Thread(target=ask, args=(gateway, key, "k"))
    running.start()
    while not gateway.engine.submitted:
        time.sleep(0.01)
    assert ask(gateway, key, "k", prompt="other").status_code == 409
    running.join()
    refused = ask(gateway, key, "k", prompt="other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert len(gateway.events()) == 1


def test_client_that_timed_out_gets_the_finished_answer(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.02))
    key = gateway.tenant()
    with pytest.raises(httpx.ReadTimeout), gateway.http(key) as client:
        client.post("/v1/completions", json=BODY, headers={"idempotency-key": "k"}, timeout=httpx.Timeout(5, read=0.1))
    answer = ask(gateway, key, "k")
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 20
    (event,) = gateway.events()
    assert (event.outcome, event.completion_tokens) == ("finished", 20)
    gateway.idle()


def test_keys_of_two_api_keys_do_not_meet(gateway: RunningGateway) -> None:
    acme, globex = gateway.tenant("acme"), gateway.tenant("globex")
    first, second = ask(gateway, acme, "same"), ask(gateway, globex, "same", prompt="other")
    assert first.status_code == second.status_code == 200
    assert len(gateway.events()) == 2


def test_refused_leaves_the_key_free(gateway: RunningGateway) -> None:
    key = gateway.tenant(credit=None)
    assert ask(gateway, key, "k").status_code == 402
    gateway.billing.grant_credit("acme", "1.00", "usd", "now it can pay")
    assert ask(gateway, key, "k").status_code == 200
    assert ask(gateway, key, "k", max_tokens=0).status_code == 409


def test_cut_short_leaves_the_key_free(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.02))
    key = gateway.tenant()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(gateway, key, "k")))
    asking.start()
    while gateway.metric("vllm:generation_tokens_total") < 2:
        time.sleep(0.01)
    gateway.on_loop(gateway.engine.kill)
    asking.join()
    assert answers[0].status_code == 503
    time.sleep(0.1)
    assert ask(gateway, key, "k").status_code == 200
    assert [event.outcome for event in gateway.events()] == ["engine_died", "finished"]
    gateway.idle()


@pytest.mark.parametrize("bad", ["", "x" * 256])
def test_bad_key(gateway: RunningGateway, bad: str) -> None:
    response = ask(gateway, gateway.tenant(), bad)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "idempotency-key")


def test_store_outlives_a_restart_forgets_in_time_and_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite3"
    second_us = 1_000_000
    store = Store(path, max_bytes=100_000, ttl_s=10)
    store.put(b"a", b"digest", True, b"body", 5 * second_us)
    store.close()
    store = Store(path, max_bytes=100_000, ttl_s=10)
    assert store.get(b"a", 6 * second_us) == (b"digest", True, b"body")
    assert store.get(b"a", 16 * second_us) is None
    for number in range(50):
        store.put(b"%d" % number, b"d", False, b"x" * 10_000, (20 + number) * 1000)
    kept = [number for number in range(50) if store.get(b"%d" % number, 1_000_000) is not None]
    assert kept == list(range(kept[0], 50))  # the oldest went first
    assert 5 <= len(kept) <= 10
    store.close()
