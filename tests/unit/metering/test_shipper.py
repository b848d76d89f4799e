from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import pytest

from metering.backoff import Backoff
from metering.errors import Rejected
from metering.events import UsageEvent
from metering.shipper import Drain
from metering.spool import Spool
from tests.unit.metering.test_spool import make_event


class Sink:
    """A consumer that can be told to fail; it keeps every batch it was handed."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.taken: list[str] = []
        self.fault: Callable[[list[UsageEvent]], None] = lambda events: None
        self.after: Callable[[], None] = lambda: None

    def __call__(self, events: list[UsageEvent]) -> None:
        self.batches.append([e.event_id for e in events])
        self.fault(events)
        self.taken += [e.event_id for e in events]
        self.after()


@pytest.fixture
def spool(tmp_path: Path):
    spool = Spool(tmp_path / "spool.sqlite3")
    yield spool
    spool.close()


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def drain(spool: Spool, sink: Sink):
    made: list[Drain] = []

    def make(**options: object) -> Drain:
        defaults: dict[str, object] = {"max_age_s": 0.02, "min_pause_s": 0.01, "max_pause_s": 0.05}
        drain = Drain(spool, "ledger", sink, **{**defaults, **options})
        made.append(drain)
        drain.start()
        return drain

    yield make
    for each in made:
        each.stop(timeout=0.2)


def settle(spool: Spool, *numbers: int) -> list[str]:
    events = [make_event(i) for i in numbers]
    wait([spool.settle(event) for event in events])
    return [event.event_id for event in events]


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def test_what_was_settled_is_delivered_once_and_acknowledged(spool: Spool, sink: Sink, drain) -> None:
    ids = settle(spool, *range(10))
    worker = drain(max_events=4)
    assert worker.flush(10)
    more = settle(spool, *range(10, 13))
    until(lambda: spool.count("ledger") == 0)
    assert sink.taken == ids + more
    assert max(map(len, sink.batches)) == 4
    assert worker.delivered_total == 13
    assert spool.count("clickhouse") == 13, "another consumer's events are its own"


def test_flush_on_an_empty_spool_is_true_and_on_a_dead_sink_false(spool: Spool, sink: Sink, drain) -> None:
    worker = drain()
    assert worker.flush(10)

    def fault(events: list[UsageEvent]) -> None:
        raise ConnectionError("refused")

    sink.fault = fault
    settle(spool, 1)
    assert not worker.flush(0.2)
    assert worker.last_error == "refused"
    assert worker.failures_total > 0
    assert spool.count("ledger") == 1
    sink.fault = lambda events: None
    assert worker.flush(10)
    assert worker.last_error is None
    assert sink.taken == ["id-00001"]


def test_a_sink_that_fails_after_it_took_them_gets_them_again(spool: Spool, sink: Sink, drain) -> None:
    ids = settle(spool, *range(6))
    failures = iter([True, True])

    def after() -> None:
        if next(failures, False):
            raise TimeoutError("the answer was lost")

    sink.after = after
    worker = drain()
    until(lambda: spool.count("ledger") == 0)
    assert sorted(set(sink.taken)) == ids
    assert len(sink.taken) > len(ids)
    assert worker.buried_total == 0


def test_poison_is_found_and_buried_and_the_rest_ships(spool: Spool, sink: Sink, drain) -> None:
    ids = settle(spool, *range(32))
    poison = {ids[3], ids[17], ids[18]}
    buried: list[tuple[str, str]] = []

    def fault(events: list[UsageEvent]) -> None:
        if bad := sorted(poison & {e.event_id for e in events}):
            raise Rejected(f"never: {bad[0]}")

    sink.fault = fault
    worker = drain(bury=lambda event, reason: buried.append((event.event_id, reason)))
    assert worker.flush(10)
    assert buried == [(event_id, f"never: {event_id}") for event_id in sorted(poison)]
    assert sink.taken == [event_id for event_id in ids if event_id not in poison]
    assert (worker.buried_total, worker.delivered_total) == (3, 29)
    assert spool.count("ledger") == 0


def test_a_grave_that_fails_keeps_the_event(spool: Spool, sink: Sink, drain) -> None:
    settle(spool, 1)
    open_grave = threading.Event()

    def fault(events: list[UsageEvent]) -> None:
        raise Rejected("never")

    def bury(event: UsageEvent, reason: str) -> None:
        if not open_grave.is_set():
            raise ConnectionError("store down")

    sink.fault = fault
    worker = drain(bury=bury)
    until(lambda: worker.failures_total > 1)
    assert spool.count("ledger") == 1
    open_grave.set()
    until(lambda: spool.count("ledger") == 0)
    assert worker.buried_total == 1


def test_without_a_grave_poison_waits_and_does_not_hold_up_the_others(spool: Spool, sink: Sink, drain) -> None:
    ids = settle(spool, *range(8))

    def fault(events: list[UsageEvent]) -> None:
        if any(e.event_id == ids[2] for e in events):
            raise KeyError("no price")

    sink.fault = fault
    worker = drain(rejected=(KeyError,))
    assert worker.flush(10)
    assert worker.stuck == 1
    assert "no price" in (worker.last_error or "")
    assert [e.event_id for e in spool.pending("ledger", 10)] == [ids[2]]
    sink.fault = lambda events: None
    assert worker.flush(10)
    assert worker.stuck == 0
    assert worker.last_error is None
    assert sorted(sink.taken) == ids


def test_connection_errors_never_bury_and_shrink_the_batch(spool: Spool, sink: Sink, drain) -> None:
    settle(spool, *range(64))
    buried: list[str] = []

    def fault(events: list[UsageEvent]) -> None:
        if len(events) > 10:
            raise OSError("too much at once")

    sink.fault = fault
    worker = drain(bury=lambda event, reason: buried.append(event.event_id), max_events=64)
    until(lambda: spool.count("ledger") == 0)
    assert buried == []
    assert len(set(sink.taken)) == len(sink.taken) == 64
    assert worker.last_error is None or worker.flush(10)


def test_pauses_double_to_their_bound_with_jitter_and_begin_anew_after_a_success(
    spool: Spool, sink: Sink, drain
) -> None:
    drawn: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    fail = [7, 2]

    def fault(events: list[UsageEvent]) -> None:
        if fail and fail[0]:
            fail[0] -= 1
            raise OSError("down")

    sink.fault = fault
    settle(spool, 1)
    worker = drain(min_pause_s=0.001, max_pause_s=0.02, draw=draw)
    until(lambda: spool.count("ledger") == 0)
    full = [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]
    assert drawn == [(each / 2, each) for each in full]
    assert worker.failures_total == 7
    fail.pop(0)
    settle(spool, 2)
    until(lambda: spool.count("ledger") == 0)
    assert drawn[7:] == [(0.0005, 0.001), (0.001, 0.002)]


def test_what_it_draws_spreads_those_who_failed_together() -> None:
    pauses = [Backoff(0.1, 10.0, random.Random(seed).uniform) for seed in range(200)]
    for full in (0.1, 0.2, 0.4):
        waited = sorted(each.next_s() for each in pauses)
        assert full / 2 <= waited[0] < 0.55 * full
        assert 0.95 * full < waited[-1] <= full
        assert len(set(waited)) == 200


def test_a_batch_ends_at_its_bytes_too(spool: Spool, sink: Sink, drain) -> None:
    events = [make_event(i, user="x" * 1000) for i in range(10)]
    wait([spool.settle(event) for event in events])
    worker = drain(max_bytes=4000, max_age_s=30.0)
    until(lambda: spool.count("ledger") == 0)
    assert [len(batch) for batch in sink.batches] == [3, 3, 3, 1]
    assert worker.delivered_total == 10
    huge = make_event(99, user="x" * 9000)
    spool.settle(huge).result()
    assert worker.flush(10)
    assert sink.batches[-1] == [huge.event_id]


def test_a_flush_gives_up_by_its_clock(spool: Spool, sink: Sink, drain) -> None:
    now_s = itertools.chain([0.0, 0.5], itertools.count(10.0, 10.0))
    worker = drain(clock_s=lambda: next(now_s), min_pause_s=60.0, max_pause_s=60.0)

    def fault(events: list[UsageEvent]) -> None:
        raise OSError("down")

    sink.fault = fault
    settle(spool, 1)
    assert not worker.flush(9.9)


def test_stop_ships_what_is_there_and_then_nothing(spool: Spool, sink: Sink, drain) -> None:
    worker = drain(max_age_s=30.0)
    until(lambda: worker.flush(0.1))
    ids = settle(spool, *range(3))
    assert worker.stop(10)
    assert sink.taken == ids
    settle(spool, 9)
    assert not worker.stop(0.1)
    assert not worker.flush(0.1)
    assert spool.count("ledger") == 1


def test_stop_does_not_wait_longer_than_told_for_a_dead_sink(spool: Spool, sink: Sink, drain) -> None:
    def fault(events: list[UsageEvent]) -> None:
        raise OSError("down")

    sink.fault = fault
    settle(spool, 1)
    worker = drain(max_pause_s=60.0, min_pause_s=60.0)
    started = time.monotonic()
    assert not worker.stop(0.3)
    assert time.monotonic() - started < 5
    assert spool.count("ledger") == 1


def test_events_settled_meanwhile_are_in_a_later_flush(spool: Spool, sink: Sink, drain) -> None:
    """A flush promises what was there when it was asked, also while others keep settling."""
    worker = drain(max_events=8)
    stop = threading.Event()

    def keep_settling() -> None:
        i = 1000
        while not stop.is_set():
            settle(spool, i)
            i += 1

    thread = threading.Thread(target=keep_settling)
    thread.start()
    try:
        for i in range(5):
            (event_id,) = settle(spool, i)
            assert worker.flush(10)
            assert event_id in sink.taken
    finally:
        stop.set()
        thread.join()
