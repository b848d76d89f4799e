"""What a request took of the engine is in its event, however it ends, and adds up to what the engine spent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.fake import STEP_US, TOKEN_US, FakeEngine
from engine.types import Cost, EngineStats, Finish, Request, StepOutput, TokenCounts, Update
from gateway.capture import Capture
from gateway.telemetry import Telemetry
from metering.events import VERSION, Outcome, UsageEvent
from metering.journal import Journal, OpenedRecord, recover_orphans
from metering.spool import Spool
from tests.fixtures.server import ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
LONG = {"prompt": "x" * 100, "max_tokens": 2000, "ignore_eos": True}


def slow_engine(step_s: float = 0.005, **options: Any) -> FakeEngine:
    return FakeEngine(ByteTokenizer(), step_s, **options)


def compute_us(event: UsageEvent) -> int:
    """What the fake engine says of so many tokens; those found in its cache took nothing."""
    return TOKEN_US * (event.prompt_tokens - event.cached_tokens + event.completion_tokens)


def micros(gateway: RunningGateway, metric: str, **labels: str) -> int:
    return round(gateway.metric(metric, **labels) * 1e6)


def adds_up(gateway: RunningGateway, events: list[UsageEvent]) -> None:
    """The engine's time is the events' and the probes', to the microsecond; so are the counters by outcome."""
    for outcome in {event.outcome for event in events}:
        mine = [event for event in events if event.outcome is outcome]
        spent = micros(gateway, "meterhouse_settled_compute_seconds_total", outcome=outcome)
        held = micros(gateway, "meterhouse_settled_kv_block_seconds_total", outcome=outcome)
        assert (spent, held) == (sum(e.compute_us for e in mine), sum(e.kv_block_us for e in mine))
    probes = micros(gateway, "meterhouse_probe_compute_seconds_total")
    busy = micros(gateway, "meterhouse_engine_busy_seconds_total")
    assert busy == probes + sum(event.compute_us for event in events)


def test_finished(gateway: RunningGateway) -> None:
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
    with gateway.http(gateway.tenant()) as client:
        for body in ({"prompt": "y" * 40, "n": 3}, {"prompt": ["a", "bc", "d" * 50]}, {"prompt": "y" * 40}):
            assert client.post("/v1/completions", json={**body, "max_tokens": 5}).status_code == 200
    events = gateway.events()
    assert [event.v for event in events] == [VERSION] * 3
    assert events[2].cached_tokens > 0
    for event in events:
        assert event.compute_us == compute_us(event) > 0
        assert event.preemptions == 0
    # Three prompts of 1, 1 and 4 blocks, each for the five steps that its tokens took, each step told once.
    assert events[1].kv_block_us == (1 + 1 + 4) * 5 * STEP_US
    adds_up(gateway, events)
    assert micros(gateway, "meterhouse_probe_compute_seconds_total") == 2 * TOKEN_US


@pytest.mark.parametrize("prefill_tokens", [512, 4])
def test_the_last_word_on_a_request_that_its_client_left_is_waited_for(
    make_gateway: MakeGateway, prefill_tokens: int
) -> None:
    gateway = make_gateway(engine=slow_engine(0.02, prefill_tokens=prefill_tokens))
    with pytest.raises(httpx.ReadTimeout), gateway.http(gateway.tenant()) as client:
        client.post("/v1/completions", json=LONG, timeout=httpx.Timeout(5, read=0.15))
    (event,) = gateway.wait_events(1)
    gateway.idle()
    assert event.outcome == "abort"
    assert event.compute_us == compute_us(event) > 0
    assert event.kv_block_us > 0
    adds_up(gateway, [event])


def test_every_part_of_a_deadline_counts(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine(), request_timeout_s=0.1)
    with gateway.http(gateway.tenant()) as client:
        assert client.post("/v1/completions", json={**LONG, "prompt": ["a", "b" * 90]}).status_code == 504
    (event,) = gateway.events()
    gateway.idle()
    assert event.outcome == "deadline"
    assert event.compute_us == compute_us(event) > 92 * TOKEN_US
    adds_up(gateway, [event])


def test_expired_in_the_queue(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=slow_engine(max_num_seqs=1, queue_timeout_s=0.05))
    key = gateway.tenant()
    with gateway.http(key) as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as busy:
        lines = busy.iter_lines()
        next(lines)
        with gateway.http(key) as late:
            assert late.post("/v1/completions", json=LONG).status_code == 503
    events = gateway.wait_events(2)
    gateway.idle()
    (expired,) = [event for event in events if event.outcome == "expired"]
    assert (expired.compute_us, expired.kv_block_us, expired.preemptions) == (0, 0, 0)
    assert expired.queue_us >= 50_000
    adds_up(gateway, events)


def test_of_a_dead_engine_it_is_known_what_the_parts_cost_that_had_ended(make_gateway: MakeGateway) -> None:
    def reply(request: Request, index: int) -> list[int]:
        return [97] * (2 if request.prompt == [97] else 2000)

    gateway = make_gateway(engine=slow_engine(reply=reply))
    key = gateway.tenant()

    def ask(prompt: Any) -> None:
        with gateway.http(key) as client:
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2000})
            assert answer.status_code == 503

    asking = [threading.Thread(target=ask, args=(prompt,)) for prompt in (["a", "b"], "c")]
    for thread in asking:
        thread.start()
    while gateway.metric("vllm:generation_tokens_total") < 20:
        time.sleep(0.01)
    gateway.on_loop(gateway.engine.kill)
    for thread in asking:
        thread.join()
    gateway.idle()
    events = sorted(gateway.wait_events(2), key=lambda event: event.prompt_tokens)
    assert [event.outcome for event in events] == ["engine_died"] * 2
    assert [(event.compute_us, event.preemptions) for event in events] == [(0, 0), (4 * TOKEN_US, 0)]
    assert all(event.completion_tokens > 2 for event in events)
    assert micros(gateway, "meterhouse_engine_busy_seconds_total") > 4 * TOKEN_US  # the difference is nobody's


class Deaf(FakeEngine):
    """Goes on with what was aborted, so that its last word comes too late."""

    def abort(self, request_id: str) -> None:
        pass


def test_a_last_word_that_comes_too_late_changes_nothing(make_gateway: MakeGateway) -> None:
    engine = Deaf(ByteTokenizer(), 0.005)
    gateway = make_gateway(engine=engine, request_timeout_s=0.1, abort_timeout_s=0.1)
    with gateway.http(gateway.tenant()) as client:
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 100}).status_code == 504
    (event,) = gateway.events()
    assert event.outcome == "deadline"
    assert event.completion_tokens > 0
    assert (event.compute_us, event.kv_block_us) == (0, 0)
    while engine.stats.running:
        time.sleep(0.01)
    gateway.idle()
    assert gateway.events() == [event]
    assert gateway.metric("meterhouse_settled_compute_seconds_total") == 0
    assert micros(gateway, "meterhouse_engine_busy_seconds_total") >= 100 * TOKEN_US


# -- capture by itself ---------------------------------------------------------------------------


class Charged:
    """Billing, as far as a settlement asks for it."""

    def __init__(self) -> None:
        self.events: list[UsageEvent] = []

    def settle(self, event: UsageEvent) -> None:
        self.events.append(event)


RECORD = OpenedRecord(
    event_id="0190aaaa-0000-7000-8000-000000000009",
    ts_us=1_764_000_000_000_000,
    tenant="acme",
    key_id="k",
    model="base",
    base_model="base",
    endpoint="completions",
    gateway="gw0",
)


def last(part: str, finish: Finish, counts: TokenCounts, cost: Cost | None) -> Update:
    queue_us = cost.queue_us if cost else 0
    return Update(part, counts, [], finished=True, finish=finish, queue_us=queue_us, cost=cost)


async def test_parts_add_up_and_what_they_waited_does_not(tmp_path: Path) -> None:
    spool, journal, billing = Spool(tmp_path / "spool.sqlite3"), Journal(tmp_path / "journal"), Charged()
    telemetry = Telemetry("base", "1")
    capture: Any = Capture(
        spool=spool,
        journal=journal,
        billing=billing,  # type: ignore[arg-type]
        telemetry=telemetry,
        clock_us=lambda: RECORD.ts_us + 5,
    )
    live = capture.open(RECORD, ["a", "b", "c"])
    capture.on_step(StepOutput(1, [Update("b", TokenCounts(prompt=4), [])], EngineStats()))
    capture.on_step(
        StepOutput(
            2,
            [
                last("a", Finish.STOP, TokenCounts(prompt=4, completion=2, recomputed=3), Cost(1000, 70, 30, 2, 3)),
                last("stranger", Finish.STOP, TokenCounts(), Cost(1 << 40, 1 << 40, 1 << 40, 9, 9)),
            ],
            EngineStats(),
        )
    )
    capture.on_step(
        StepOutput(3, [last("b", Finish.ABORT, TokenCounts(prompt=4), Cost(500, 9, 40, 1, 0))], EngineStats())
    )
    await capture.settle(live, Outcome.ABORT)
    capture.on_step(StepOutput(4, [last("c", Finish.ABORT, TokenCounts(prompt=9), Cost(1, 1, 1, 1, 1))], EngineStats()))
    (event,) = spool.pending("ledger", 9)
    assert billing.events == [event]
    assert (event.compute_us, event.kv_block_us, event.preemptions) == (1500, 79, 3)
    assert (event.queue_us, event.recomputed_tokens, event.prompt_tokens) == (40, 3, 8)
    assert b'meterhouse_settled_compute_seconds_total{outcome="abort"} 0.0015' in telemetry.exposition()
    journal.close()
    spool.close()


def test_an_orphan_is_settled_without_cost(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.opened(RECORD)
    journal.step([(RECORD.event_id, (7, 0, 3, 0, 2, 0))])
    journal.close()
    spool = Spool(tmp_path / "spool.sqlite3")
    (event,) = recover_orphans(tmp_path / "journal", spool, RECORD.ts_us + 9, "gw0")
    assert spool.pending("ledger", 9) == [event]
    spool.close()
    assert (event.v, event.completion_tokens, event.recomputed_tokens) == (VERSION, 3, 2)
    assert (event.compute_us, event.kv_block_us, event.queue_us, event.preemptions) == (0, 0, 0, 0)
