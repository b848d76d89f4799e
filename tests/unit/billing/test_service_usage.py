"""Charges: live, exactly once, through every crash point between the spool and the log."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from billing import store
from billing.errors import Conflict, InsufficientCredits, Invalid, LedgerUnavailable, NoPrice, NotFound
from billing.service import Billing, Hold, Idempotency
from billing.store import EventStore, Log, NewEvent
from metering.events import Outcome, UsageEvent, decode, encode
from tests import oldevents

MILLION = 10**6
USD = 10**15  # femto-units


def balance(house: Any, tenant: str = "acme") -> tuple[int, int, int, int]:
    one = house.billing.balance(tenant)
    return one.granted_femto, one.charged_femto, one.held_femto, one.available_femto


def quote(house: Any) -> Any:
    return house.billing.quote("acme", "base", "base", house.clock())


def rated_rows(house: Any) -> list[str]:
    return [row.key for row in house.billing._store.read(limit=100_000) if row.type == "usage.rated"]


def test_credit_is_granted_exactly(house: Any) -> None:
    house.billing.grant_credit("acme", "10.000000000000001", "usd", "trial")
    house.billing.grant_credit("acme", "0.10", "usd", "more")
    assert balance(house)[0] == 10 * USD + 1 + USD // 10
    assert house.restart().balance("acme").granted_femto == 10 * USD + 1 + USD // 10


@pytest.mark.parametrize(
    ("amount", "currency", "reason", "fields"),
    [
        ("0", "usd", "x", ["amount"]),
        ("-1", "usd", "x", ["amount"]),
        ("1e40", "usd", "x", ["amount"]),
        ("NaN", "usd", "x", ["amount"]),
        ("1,5", "usd", "x", ["amount"]),
        (1.5, "eur", "", ["amount", "currency", "reason"]),
    ],
)
def test_a_bad_grant_changes_nothing(house: Any, amount: Any, currency: str, reason: str, fields: list[str]) -> None:
    with pytest.raises(Invalid) as caught:
        house.billing.grant_credit("acme", amount, currency, reason)
    assert [field for field, _ in caught.value.faults] == fields
    assert balance(house) == (0, 0, 0, 0)


def test_a_request_from_hold_to_charge(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    rate = quote(house)
    event = house.event(prompt=100, cached=40, completion=7)
    hold = house.billing.open_hold("acme", event.event_id, rate, 100, 50)
    assert hold == Hold(50, True)
    assert balance(house) == (USD, 0, 100 * rate.prompt + 50 * rate.completion, USD - 200 * rate.prompt)
    house.billing.reprice_prompt(event.event_id, 100, 40)
    exact_prompt = 60 * rate.prompt + 40 * rate.cached
    assert balance(house)[2] == exact_prompt + 50 * rate.completion
    cost = exact_prompt + 7 * rate.completion
    house.billing.settle(event)
    assert balance(house) == (USD, cost, 0, USD - cost)
    house.billing.record([event])
    assert balance(house) == (USD, cost, 0, USD - cost)
    house.restart()
    assert balance(house) == (USD, cost, 0, USD - cost)
    assert house.billing.alarms() == {}


def test_case_7_cached_tokens_are_charged_once_and_as_cached(house: Any) -> None:
    house.billing.grant_credit("acme", "1000", "usd", "trial")
    house.use(prompt=262_960, cached=257_955, completion=0)
    rate = quote(house)
    assert balance(house)[1] == (262_960 - 257_955) * rate.prompt + 257_955 * rate.cached


@pytest.mark.parametrize("order", ["settle record", "record settle", "settle settle record", "record record settle"])
def test_settle_and_record_charge_once_in_any_order(house: Any, order: str) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    event = house.event()
    house.billing.open_hold("acme", event.event_id, quote(house), 10, 5)
    for step in order.split():
        house.billing.settle(event) if step == "settle" else house.billing.record([event])
    cost = 20 * MILLION * 1000
    assert balance(house) == (USD, cost, 0, USD - cost)
    assert rated_rows(house) == [f"usage:{event.event_id}"]
    assert house.billing.alarms() == {}


def test_a_charge_recorded_before_it_is_settled_here_takes_the_holds_place(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    event = house.event()
    house.billing.open_hold("acme", event.event_id, quote(house), 10, 50)
    house.billing.record([event])
    assert balance(house) == (USD, 20 * 10**9, 0, USD - 20 * 10**9)


def test_case_22b_a_reservation_whose_settlement_failed_is_neither_lost_nor_doubled_nor_stuck(
    either_house: Any,
) -> None:
    """Killed at each point after the spool had the event: before settle, after it, after record, before the ack."""
    house = either_house
    house.billing.grant_credit("acme", "1", "usd", "trial")
    cost = 20 * MILLION * 1000
    for number, steps in enumerate(([], ["settle"], ["record"], ["settle", "record"]), start=1):
        event = house.event()
        house.billing.open_hold("acme", event.event_id, quote(house), 10, 5)
        for step in steps:
            house.billing.settle(event) if step == "settle" else house.billing.record([event])
        house.restart()
        house.billing.record([event])  # what the spool still has is given again
        house.billing.settle(event)
        assert balance(house) == (USD, number * cost, 0, USD - number * cost)
        assert len(rated_rows(house)) == number


def test_an_old_event_settled_again_is_known_from_the_store(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    event = house.use()
    house.restart()
    house.billing._books.ledger._recent.clear()  # as if many had come since
    charged = balance(house)[1]
    house.billing.settle(event)
    assert balance(house)[1] == charged > 0


def test_case_28_the_first_content_of_an_id_stands_and_the_second_is_an_alarm(house: Any) -> None:
    event = house.event(completion=5)
    other = msgspec.structs.replace(event, completion_tokens=500)
    house.billing.record([event, other, event])
    assert len(rated_rows(house)) == 1
    assert house.billing.alarms() == {"usage_conflict": 1}
    charged = balance(house)[1]
    house.billing.record([other])
    house.billing.settle(other)
    assert house.billing.alarms() == {"usage_conflict": 3}
    assert balance(house)[1] == charged
    assert house.restart().balance("acme").charged_femto == charged


def test_case_23_usage_without_a_price_is_never_charged_at_nothing(house: Any) -> None:
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    with pytest.raises(NoPrice):
        house.billing.quote("euro", "base", "base", house.clock())
    event = house.event(tenant="euro")
    house.billing.settle(event)
    house.billing.record([event])
    house.billing.record([event])
    assert house.billing.alarms() == {"usage_unrated": 1}
    assert rated_rows(house) == []
    assert balance(house, "euro") == (0, 0, 0, 0)

    assert house.billing.rate_unrated() == 0
    house.set_price(currency="eur", prompt="3", cached="3", completion="3")
    once = Idempotency(key="k", payload_hash="h")
    assert house.billing.rate_unrated(idempotency=once) == 1
    assert house.billing.rate_unrated(idempotency=once) == 1
    assert house.billing.rate_unrated() == 0
    assert balance(house, "euro")[1] == 15 * 3 * 10**9
    house.restart().record([event])
    assert balance(house, "euro")[1] == 15 * 3 * 10**9


def test_usage_that_no_price_reaches_does_not_keep_the_rest_from_being_rated(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("billing.service.usage.RATE_BATCH", 2)
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    events = [house.event(tenant="euro", model=model) for model in ("free", "free", "free", "sold", "sold", "sold")]
    house.billing.record(events)
    assert [one.event_id for one in house.billing.unrated("euro")] == [event.event_id for event in events]
    house.set_price(model="sold", currency="eur")
    assert [house.billing.rate_unrated() for _ in range(3)] == [2, 1, 0]
    assert [one.model for one in house.billing.unrated()] == ["free"] * 3
    assert house.billing.unrated_count() == house.restart().unrated_count() == 3


def test_images_that_no_price_reaches_do_not_keep_the_rest_from_being_rated(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("billing.service.usage.RATE_BATCH", 2)
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    media = [{"images": 1}, {"audio_ms": 5}, {"images": 2}]
    house.billing.record([house.event(tenant="euro", **more) for more in [*media, {}, {}, {}]])
    house.set_price(currency="eur")
    assert [house.billing.rate_unrated() for _ in range(3)] == [2, 1, 0]
    assert [house.billing.unrated_count(), house.restart().rate_unrated()] == [3, 0]


def test_unrated_usage_is_listed_page_by_page_and_by_tenant(house: Any) -> None:
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    events = [house.event(tenant="euro") for _ in range(3)]
    house.billing.record([*events, msgspec.structs.replace(house.event(), prompt_tokens=-1)])
    first = house.billing.unrated("euro", limit=2)
    assert [one.event_id for one in first] == [events[0].event_id, events[1].event_id]
    (last,) = house.billing.unrated("euro", limit=2, after=first[-1].event_id)
    assert (last.event_id, last.ts_us, last.reason) == (events[2].event_id, events[2].ts_us, "no price")
    assert [one.reason for one in house.billing.unrated("acme")] == ["a count is negative"]
    with pytest.raises(NotFound):
        house.billing.unrated("nobody")


@pytest.mark.parametrize(
    "garbage", [{"tenant": "nobody"}, {"prompt_tokens": -1}, {"cached_tokens": 99}, {"reasoning_tokens": 99}]
)
def test_garbage_is_kept_and_does_not_stop_the_others(house: Any, garbage: dict[str, Any]) -> None:
    bad, good = msgspec.structs.replace(house.event(), **garbage), house.event()
    house.billing.settle(bad)
    house.billing.record([bad, good])
    assert house.billing.alarms() == {"usage_unrated": 1}
    assert rated_rows(house) == [f"usage:{good.event_id}"]
    assert house.billing.rate_unrated() == 0


def test_a_request_that_the_money_does_not_cover_keeps_nothing(house: Any) -> None:
    rate = quote(house)
    house.billing.grant_credit("acme", "0.00001", "usd", "ten prompt tokens")
    with pytest.raises(InsufficientCredits) as caught:
        house.billing.open_hold("acme", "r1", rate, 9, 5)
    assert (caught.value.needed_femto, caught.value.available_femto) == (11 * rate.prompt, 10 * rate.prompt)
    assert house.billing.holds_open() == 0
    assert house.billing.open_hold("acme", "r1", rate, 8, 5) == Hold(1, False)
    assert house.billing.extend_hold("r1", 5) == Hold(1, False)
    house.billing.grant_credit("acme", "0.000005", "usd", "two and a half")
    assert house.billing.extend_hold("r1", 5) == Hold(3, False)
    assert house.billing.extend_hold("r1", 2) == Hold(3, True)
    assert balance(house)[3] == rate.prompt


def test_holds_know_their_requests(house: Any) -> None:
    rate = quote(house)
    house.billing.grant_credit("acme", "1", "usd", "trial")
    house.billing.open_hold("acme", "r1", rate, 1, 1)
    with pytest.raises(Conflict):
        house.billing.open_hold("acme", "r1", rate, 1, 1)
    with pytest.raises(NotFound):
        house.billing.open_hold("nobody", "r2", rate, 1, 1)
    with pytest.raises(NotFound):
        house.billing.extend_hold("r2", 1)
    with pytest.raises(Invalid):
        house.billing.open_hold("acme", "r2", rate, -1, 1)
    house.billing.reprice_prompt("r2", 1, 0)
    house.billing.release("r2")
    house.billing.release("r1")
    assert balance(house) == (USD, 0, 0, USD)
    assert house.billing.holds_open() == 0


def test_what_costs_nothing_needs_no_money(house: Any) -> None:
    house.set_price("free", "0", "0", "0")
    rate = house.billing.quote("acme", "free", "base", house.clock())
    assert house.billing.open_hold("acme", "r1", rate, 1000, 1000) == Hold(1000, True)
    assert balance(house) == (0, 0, 0, 0)


def test_what_costs_nothing_runs_also_on_a_balance_below_zero(house: Any) -> None:
    house.set_price("free", "0", "0", "0")
    house.use()  # nothing was granted
    assert balance(house)[3] < 0
    rate = house.billing.quote("acme", "free", "base", house.clock())
    assert house.billing.open_hold("acme", "r1", rate, 10, 10) == Hold(10, True)
    with pytest.raises(InsufficientCredits):
        house.billing.open_hold("acme", "r2", quote(house), 0, 1)


def test_a_partly_computed_prompt_frees_only_what_is_certain(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    rate = quote(house)
    house.billing.open_hold("acme", "r1", rate, 100, 1)
    house.billing.reprice_prompt("r1", 50, 30)
    assert balance(house)[2] == 20 * rate.prompt + 30 * rate.cached + 50 * rate.prompt + rate.completion
    house.billing.reprice_prompt("r1", 400, 0)  # never more than was held
    assert balance(house)[2] == 70 * rate.prompt + 30 * rate.cached + rate.completion


def test_the_dearest_of_prompt_and_cached_is_held(house: Any) -> None:
    house.set_price("odd", prompt="1", cached="5", completion="1")
    house.billing.grant_credit("acme", "1", "usd", "trial")
    rate = house.billing.quote("acme", "odd", "base", house.clock())
    house.billing.open_hold("acme", "r1", rate, 100, 1)
    assert balance(house)[2] == 100 * rate.cached + rate.completion
    house.billing.settle(house.event(prompt=100, cached=100, completion=1, model="odd", event_id="r1"))
    assert house.billing.alarms() == {}


def test_more_than_was_held_is_charged_and_is_an_alarm(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    house.billing.open_hold("acme", "r1", quote(house), 1, 1)
    house.billing.settle(house.event(prompt=1, completion=2, event_id="r1"))
    assert house.billing.alarms() == {"hold_exceeded": 1}
    assert balance(house)[1] == 5 * 10**9


def test_a_price_set_while_a_request_runs_does_not_touch_it(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    event = house.event()
    rate = house.billing.quote("acme", "base", "base", event.ts_us)
    house.billing.open_hold("acme", event.event_id, rate, 10, 5)
    house.set_price(prompt="1000", cached="1000", completion="1000")  # effective since ever, recorded now
    house.billing.settle(event)
    house.billing.record([event])
    assert balance(house)[1] == 10 * rate.prompt + 5 * rate.completion
    assert house.billing.quote("acme", "base", "base", house.clock()).prompt == 1000 * 10**9


def test_a_price_does_not_reach_a_request_quoted_before_it_by_a_faster_clock(house: Any) -> None:
    ahead = house.clock()
    before = house.billing.quote("acme", "base", "base", ahead)
    house.clock.now_us = ahead - 1  # the price is set within the same microsecond
    house.set_price(prompt="9")
    assert house.billing.quote("acme", "base", "base", ahead) == before


def test_requests_that_run_do_not_wait_for_a_price_to_be_written(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What began before the price counts is quoted by the book without it, and nothing is by a book that may change."""
    house.billing.grant_credit("acme", "1", "usd", "trial")
    before = quote(house)
    house.billing.open_hold("acme", "r1", before, 10, 5)
    seen: list[object] = []
    append = Log.append

    def slow_append(self: Log, *args: Any, **more: Any) -> Any:
        def serve() -> None:
            reserved_us = house.billing._undecided_us
            seen.append(house.billing.quote("acme", "base", "base", reserved_us - 1) == before)
            seen.append(house.billing.extend_hold("r1", 6).covered_tokens)
            with pytest.raises(LedgerUnavailable):
                house.billing.quote("acme", "base", "base", reserved_us)

        thread = threading.Thread(target=serve)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        return append(self, *args, **more)

    monkeypatch.setattr(Log, "append", slow_append)
    house.set_price(prompt="9")
    assert seen == [True, 6]
    assert quote(house).prompt == 9 * 10**9


@pytest.mark.parametrize("stands", [False, True])
def test_after_a_write_with_an_unknown_end_nothing_is_quoted_until_the_ledger_tells(
    house: Any, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    """The connection is lost at the commit: the price may stand or not."""
    exclusive = EventStore.exclusive

    @contextmanager
    def robbed(self: EventStore) -> Iterator[Log]:
        with suppress(KeyError), exclusive(self) as log:
            yield log
            if not stands:
                raise KeyError
        raise LedgerUnavailable("the answer to the commit was lost")

    monkeypatch.setattr(EventStore, "exclusive", robbed)
    with pytest.raises(LedgerUnavailable):
        house.set_price(prompt="9")
    with pytest.raises(LedgerUnavailable):
        quote(house)
    monkeypatch.undo()
    house.billing.refresh()
    assert quote(house).prompt == (9 if stands else 1) * 10**9


def test_what_is_quoted_while_prices_are_written_is_what_is_charged(house: Any) -> None:
    began_us = house.clock()

    def now_us() -> int:
        return began_us + time.monotonic_ns() // 1000

    billing = Billing(EventStore(house.url), base_model="base", clock=now_us, price_lead_us=20_000)
    house.opened.append(billing)
    stop = threading.Event()
    quoted: list[tuple[int, str]] = []

    def ask() -> None:
        while not stop.is_set():
            ts_us = now_us()
            with suppress(LedgerUnavailable):  # the disk took longer than the lead
                quoted.append((ts_us, billing.quote("acme", "base", "base", ts_us).price_id))
            time.sleep(0.0005)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for number in range(10):
            per_million = dict.fromkeys(("prompt", "cached", "completion"), str(number))
            price = billing.set_price(model="*", effective_at_us=0, currency="usd", per_million=per_million)
            assert billing.quote("acme", "base", "base", now_us()).price_id == price.id
    finally:
        stop.set()
        for thread in asking:
            thread.join()
    assert len({price_id for _, price_id in quoted}) > 5
    assert quoted == [(ts_us, billing.quote("acme", "base", "base", ts_us).price_id) for ts_us, _ in quoted]


def test_a_report_about_the_future_does_not_delay_the_next_price(house: Any) -> None:
    house.billing.quote("acme", "base", "base", house.clock.now_us + 10**12)
    id = house.set_price(prompt="9")
    assert house.billing.quote("acme", "base", "base", house.clock()).price_id == id


def test_case_20_a_hundred_at_once_on_a_balance_for_three(house: Any) -> None:
    """Threads race for holds of up to 20 tokens, extended two by two; nobody ever overspends."""
    rate = quote(house)
    grant = 3 * (10 * rate.prompt + 20 * rate.completion) + rate.completion // 2
    house.billing.grant_credit("acme", f"{grant // USD}.{grant % USD:015d}", "usd", "for three")
    events: list[UsageEvent] = []
    refused: list[int] = []
    wanted_more: list[int] = []
    start = threading.Barrier(10)

    def run(worker: int) -> None:
        start.wait()
        for number in range(10):
            id = f"w{worker}-{number}"
            try:
                hold = house.billing.open_hold("acme", id, rate, 10, 2)
            except InsufficientCredits:
                refused.append(worker)
                continue
            while hold.complete and hold.covered_tokens < 20:
                hold = house.billing.extend_hold(id, hold.covered_tokens + 2)
            if not hold.complete:
                wanted_more.append(worker)
            event = house.event(prompt=10, completion=hold.covered_tokens, event_id=id)
            events.append(event)
            house.billing.settle(event)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    granted, charged, held, available = balance(house)
    assert len(events) + len(refused) == 100
    assert refused
    assert held == 0
    assert charged == sum(10 * rate.prompt + one.completion_tokens * rate.completion for one in events) <= granted
    assert available == granted - charged < 11 * rate.prompt + rate.completion
    house.billing.record(events)
    assert balance(house) == (granted, charged, held, available)
    assert house.billing.alarms() == {}


def test_the_hot_path_does_not_wait_for_the_ledgers_disk(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "trial")
    _, secret = house.billing.create_key("acme", "ci")
    rate = quote(house)
    with house.billing._writing, house.billing._store.exclusive():
        done: list[bool] = []

        def serve() -> None:
            assert house.billing.authenticate(secret) is not None
            house.billing.resolve_model("acme", "base")
            quote(house)
            house.billing.open_hold("acme", "r1", rate, 10, 5)
            house.billing.extend_hold("r1", 6)
            house.billing.settle(house.event(event_id="r1"))
            house.billing.balance("acme")
            done.append(True)

        thread = threading.Thread(target=serve)
        thread.start()
        thread.join(10)
        assert done == [True]


def test_two_processes_record_the_same_spool_once(either_house: Any) -> None:
    house = either_house
    house.billing.grant_credit("acme", "1", "usd", "trial")
    other = house.open()
    events = [house.event() for _ in range(50)]
    threads = [
        threading.Thread(target=billing.record, args=(events[first : first + 30],))
        for billing in (house.billing, other)
        for first in (0, 10, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for billing in (house.billing, other):
        billing.refresh()
        assert billing.balance("acme").charged_femto == 50 * 20 * 10**9
        assert billing.alarms() == {}
    assert len(set(rated_rows(house))) == len(rated_rows(house)) == 50


def record_until_killed(url: str, batches: list[list[bytes]], started: Any) -> None:
    billing = Billing(EventStore(url), base_model="base")
    started.set()
    while True:
        for batch in batches:
            billing.record([decode(data) for data in batch])


def test_a_recorder_killed_at_any_moment_leaves_each_event_once(house: Any) -> None:
    events = [house.event() for _ in range(400)]
    batches = [[encode(event) for event in events[first : first + 7]] for first in range(0, 400, 7)]
    spawn = multiprocessing.get_context("spawn")
    for delay_s in (0.0, 0.02, 0.05):
        started = spawn.Event()
        process = spawn.Process(target=record_until_killed, args=(house.url, batches, started))
        process.start()
        assert started.wait(60)
        time.sleep(delay_s)
        assert process.pid is not None
        os.kill(process.pid, 9)
        process.join(30)
        house.billing._store.verify_chain()
    house.restart().record(events)
    assert sorted(rated_rows(house)) == sorted(f"usage:{event.event_id}" for event in events)
    assert balance(house)[1] == 400 * 20 * 10**9


@pytest.mark.parametrize("outcome", list(Outcome))
def test_whatever_ended_a_request_its_tokens_are_charged(house: Any, outcome: Outcome) -> None:
    house.use(outcome=outcome)
    house.use(prompt=0, completion=0, outcome=outcome)
    assert balance(house)[1] == 20 * 10**9
    assert len(rated_rows(house)) == 2


def test_recording_is_quick_enough(house: Any) -> None:
    events = [house.event() for _ in range(6000)]
    began = time.process_time()
    house.billing.record(events)
    spent_s = time.process_time() - began
    assert len(events) / spent_s > 5000, f"{len(events) / spent_s:.0f} events a CPU second"


def test_requests_do_not_wait_while_the_log_is_read(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have appended a lot, and the database may be slow: that is the recorder's time alone."""
    house.billing.grant_credit("acme", "1.00", "usd", "trial")
    real, waited = store._page, []

    def read(*args: Any) -> Any:
        request = threading.Thread(target=house.billing.balance, args=("acme",))
        request.start()
        request.join(5)
        waited.append(request.is_alive())
        return real(*args)

    monkeypatch.setattr(store, "_page", read)
    house.billing.record([house.event()])
    house.billing.grant_credit("acme", "1.00", "usd", "more")
    assert waited == [False, False]


def test_events_of_version_1_are_charged_and_compared_by_their_own_hash(house: Any) -> None:
    old = [decode(body) for body in oldevents.EVENTS]
    house.billing.settle(old[0])
    house.billing.record(old)
    house.restart()
    assert house.billing.rate_unrated() == 2  # they are older than the house's price
    house.billing.record(old)
    house.billing.settle(old[0])
    rows = house.billing._store.read(limit=100)
    assert {row.payload_hash for row in rows if row.key} >= set(oldevents.EVENTS.values())
    rated = {
        digest
        for digest in oldevents.EVENTS.values()
        for row in rows
        if row.type == "usage.rated" and digest in row.payload
    }
    assert rated == set(oldevents.EVENTS.values())
    assert house.billing.alarms() == {}
    house.billing.record([msgspec.structs.replace(old[0], v=2)])
    assert house.billing.alarms() == {"usage_conflict": 1}  # as another version it is another content


def test_what_was_unrated_in_version_1_is_rated_by_the_hash_it_had(house: Any) -> None:
    event = decode(oldevents.SMALL)
    row = NewEvent(
        stream="unrated",
        type="usage.unrated",
        payload=oldevents.UNRATED,
        key=f"usage:{event.event_id}",
        payload_hash=oldevents.SMALL_HASH,
    )
    with house.billing._store.exclusive() as log:
        log.append([row], actor="ledger", time_us=house.clock())
    house.billing.refresh()
    assert [one.event_id for one in house.billing.unrated()] == [event.event_id]
    assert house.billing.rate_unrated() == 1
    house.billing.record([event])
    assert house.billing.alarms() == {}
    (rated,) = [row for row in house.billing._store.read(limit=100) if row.type == "usage.rated"]
    assert f'"event_hash":"{oldevents.SMALL_HASH}"' in rated.payload


def test_a_charge_does_not_depend_on_what_the_request_took(house: Any) -> None:
    cheap = house.event(prompt=10, completion=5)
    dear = msgspec.structs.replace(cheap, event_id="dear", compute_us=10**9, kv_block_us=-1, preemptions=7)
    for event in (cheap, dear):
        before = balance(house)[1]
        house.billing.settle(event)
        house.billing.record([event])
        assert balance(house)[1] - before == 10 * quote(house).prompt + 5 * quote(house).completion
    assert house.billing.alarms() == {}


def test_an_event_of_a_newer_version_is_not_rated_by_code_that_does_not_know_it(house: Any) -> None:
    newer = oldevents.UNRATED.replace('"v":1', '"v":4').replace('"user":""', '"user":"","tomorrow":1')
    row = NewEvent(stream="unrated", type="usage.unrated", payload=newer, key="usage:newer")
    with house.billing._store.exclusive() as log:
        log.append([row], actor="ledger", time_us=house.clock())
    house.billing.refresh()
    assert house.billing.unrated_count() == 1
    assert house.billing.rate_unrated() == 0
    assert house.billing.unrated_count() == 1
