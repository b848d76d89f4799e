"""Who gets a slot, who loses one, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adapterslots import CLOSE_AFTER_STEPS, AdapterSlots


def step(slots: AdapterSlots, running: str = "", waiting: str = "") -> str:
    """A step with these; each letter is a sequence, named by its adapter. Returns those of `waiting` that may begin."""
    slots.begin(running)
    admitted = "".join(adapter for adapter in waiting if slots.admits(adapter))
    slots.check_integrity()
    return admitted


def test_free_slots_are_filled_in_the_order_of_asking() -> None:
    slots = AdapterSlots(2)
    assert step(slots, waiting="abcab") == "abab"
    assert slots.take_swaps() == [("a", True), ("b", True)]
    assert slots.take_swaps() == []
    assert ("a" in slots, "c" in slots, slots.resident, slots.loads, slots.evictions) == (True, False, 2, 2, 0)


def test_the_least_recently_used_that_nobody_computes_with_leaves() -> None:
    slots = AdapterSlots(3)
    step(slots, waiting="abc")
    step(slots, running="ca")
    slots.take_swaps()
    assert step(slots, running="a", waiting="d") == "d"
    assert slots.take_swaps() == [("b", False), ("d", True)]
    assert step(slots, running="ad", waiting="e") == "e"
    assert slots.take_swaps() == [("c", False), ("e", True)]
    assert step(slots, running="ade", waiting="f") == ""
    assert slots.take_swaps() == []
    assert slots.evictions == 2


def test_one_that_stops_in_this_step_makes_room_in_the_next() -> None:
    slots = AdapterSlots(1)
    assert step(slots, waiting="ab") == "a"
    assert step(slots, running="a", waiting="b") == ""
    assert step(slots, waiting="b") == "b"


def test_a_pinned_one_comes_by_itself_and_never_leaves() -> None:
    slots = AdapterSlots(2)
    assert slots.pin("p")
    assert slots.pin("p")
    assert not slots.pin("q")  # somebody else must be able to come
    step(slots)
    assert slots.take_swaps() == [("p", True)]
    assert step(slots, waiting="a") == "a"
    assert step(slots, waiting="b") == "b"
    assert slots.take_swaps() == [("a", True), ("a", False), ("b", True)]
    assert "p" in slots
    slots.vacate("p")
    assert slots.pin("q")
    assert not AdapterSlots(1).pin("p")


def test_what_is_not_at_hand_holds_its_slot_and_runs_when_it_has_arrived() -> None:
    slots = AdapterSlots(2, at_hand=lambda adapter: adapter == "a")
    assert step(slots, waiting="bac") == "a"
    assert slots.take_swaps() == [("b", True), ("a", True)]
    assert ("b" in slots, slots.resident, slots.runs("b")) == (True, 1, False)
    assert step(slots, running="a", waiting="bc") == ""
    slots.arrived("b")
    assert step(slots, running="a", waiting="bc") == "b"
    assert slots.loads == 2
    step(slots, waiting="c")
    slots.vacate("c")
    assert "c" not in slots
    assert step(slots, waiting="d") == ""
    slots.arrived("never asked for")
    assert slots.resident == 1


def test_a_paused_one_loses_its_slot_and_stands_aside_when_it_comes_back() -> None:
    slots = AdapterSlots(1)
    step(slots, waiting="a")
    assert step(slots, waiting="b") == "b"  # nobody computes with a
    slots.begin("ab")
    assert (slots.runs("a"), slots.runs("b")) == (False, True)
    slots.begin("a")
    assert slots.runs("a")


def test_whoever_has_waited_long_closes_the_least_used_slot_to_newcomers_and_no_other() -> None:
    slots = AdapterSlots(2)
    step(slots, waiting="ab")
    for _ in range(CLOSE_AFTER_STEPS):
        assert step(slots, running="aab", waiting="cab") == "ab"
    assert step(slots, running="aab", waiting="cab") == "a"
    assert step(slots, running="aab", waiting="bca") == "ba"  # one that comes before it in the order is not kept out
    assert step(slots, running="aab") == ""  # a step that asks nobody forgets nothing
    assert step(slots, running="aab", waiting="cab") == "a"
    assert step(slots, running="aa", waiting="cab") == "ca"
    assert step(slots, running="aac", waiting="b") == ""


def test_a_stream_of_requests_that_never_ends_keeps_nobody_out_for_long() -> None:
    slots = AdapterSlots(1)
    ends: list[int] = []  # of the sequences that run; each runs for 20 steps, and a new one comes in every step
    for now in range(1000):
        ends = [end for end in ends if end > now]
        admitted = step(slots, running="a" * len(ends), waiting="ba" if now else "a")
        if "b" in admitted:
            assert now <= CLOSE_AFTER_STEPS + 21
            return
        ends += [now + 20] * len(admitted)
    pytest.fail("it starved")


def test_one_that_went_away_has_not_waited() -> None:
    slots = AdapterSlots(1)
    step(slots, waiting="a")
    for _ in range(CLOSE_AFTER_STEPS):
        step(slots, running="a", waiting="b")
    for _ in range(CLOSE_AFTER_STEPS + 1):
        step(slots, running="a")
    assert step(slots, running="a", waiting="ba") == "a"


def test_a_slot_is_needed() -> None:
    with pytest.raises(ValueError, match="slot"):
        AdapterSlots(0)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    pins=st.integers(0, 3),
    slow=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_everybody_runs_in_the_end(seed: int, size: int, pins: int, slow: bool) -> None:
    """Requests come without a break for few adapters, and one now and then for each of many."""
    draw = random.Random(seed)
    slots = AdapterSlots(size, at_hand=lambda adapter: not slow or draw.random() < 0.5)
    for pinned in range(pins):
        assert slots.pin(f"{pinned}") == (pinned < size - 1)
    queue: deque[tuple[int, str]] = deque()  # since when, by whom
    running: list[tuple[int, str]] = []  # until when, by whom
    here: set[str] = set()
    now = 0
    while now < 300 or queue or running:
        now += 1
        assert now < 3000, f"{len(queue)} still wait"
        if now < 300:
            queue += [(now, draw.choice("01")) for _ in range(2)]
            queue += [(now, draw.choice("0123456789")) for _ in range(now % 8 == 0)]
        for adapter in [adapter for adapter in here if draw.random() < 0.5]:
            slots.arrived(adapter)
        slots.begin([adapter for _, adapter in running])
        assert all(slots.runs(adapter) for _, adapter in running)
        for entry in list(queue)[:60]:
            if len(running) < 12 and slots.admits(entry[1]):
                queue.remove(entry)
                running.append((now + draw.randrange(1, 6), entry[1]))
        slots.check_integrity()
        for adapter, enters in slots.take_swaps():
            (here.add if enters else here.remove)(adapter)
        assert len(here) <= size
        assert {adapter for _, adapter in running} <= here
        running = [entry for entry in running if entry[0] > now]
    assert all(adapter in here for adapter in ("0", "1")[: min(pins, size - 1)])
