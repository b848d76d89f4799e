"""Requests that wait for their grammar: who is compiled when, what is kept, and how the core ends them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from engine import grammarstore
from engine.core import EngineCore
from engine.fake import FakeTokenizer
from engine.grammar import Compiler, Masks, Vocabulary, source_of
from engine.grammarstore import GrammarStore
from engine.scheduler import StepPlan
from engine.sequence import SequenceGroup
from engine.types import (
    EngineBusy,
    EngineConfig,
    EngineError,
    Finish,
    GrammarRejected,
    Guide,
    Request,
    SamplingParams,
    Update,
)
from tests.fixtures.scripted import Drawn, ScriptedRunner

WAIT_S = 20.0


class Desk:
    """Compiles as told: `gate` lets it go on, `refused` are refused. Grammars are real, over bytes."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        self.nbytes = 1000
        self.begun = threading.Semaphore(0)
        self.closed = threading.Event()
        self._compiler = Compiler(Vocabulary.of(FakeTokenizer()))

    def compile(self, guide: Guide):
        self.begun.release()
        assert self.gate.wait(WAIT_S)
        value = str(guide.value)
        self.compiled.append(value)
        if value in self.refused:
            raise GrammarRejected("it is refused")
        if value in self.broken:
            raise RuntimeError("a fault of ours")
        made = self._compiler.compile(source_of(guide))
        made.nbytes = self.nbytes
        return made

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def store_of(desk: Desk, held_max: int = 8) -> GrammarStore:
    return GrammarStore(FakeTokenizer(), held_max=held_max, compiler=lambda: desk)


def group(name: str, value: str, tenant: str = "", n: int = 1) -> SequenceGroup:
    sampling = SamplingParams(guided=Guide("regex", value))
    return SequenceGroup(Request(id=name, prompt=[1], sampling=sampling, tenant=tenant, n=n), arrival=0, cache_root=b"")


def ready(store: GrammarStore) -> list[tuple[str, str | None]]:
    return [(one.request.id, error and str(error)) for one, error in store.take_ready(block=True)]


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- the store ----


def test_what_asks_for_no_grammar_does_not_wait(desk: Desk) -> None:
    free = SequenceGroup(Request(id="r", prompt=[1], sampling=SamplingParams()), arrival=0, cache_root=b"")
    assert store_of(desk).admit(free)
    assert free.sequences[0].matcher is None
    assert desk.compiled == []


def test_one_grammar_is_compiled_once_for_all_who_wait_and_kept(desk: Desk) -> None:
    store = store_of(desk)
    desk.gate.clear()
    waiting = [group(f"r{number}", "a+", n=2) for number in range(3)]
    assert [store.admit(one) for one in waiting] == [False] * 3
    assert list(store.held) == ["r0", "r1", "r2"]
    assert store.take_ready() == []
    desk.gate.set()
    assert ready(store) == [("r0", None), ("r1", None), ("r2", None)]
    assert not store.held
    late = group("r3", "a+")
    assert store.admit(late)
    assert desk.compiled == ["a+"]
    matchers = [sequence.matcher for one in [*waiting, late] for sequence in one.sequences]
    assert len(set(map(id, matchers))) == 7  # a place of its own for each choice


def test_a_refusal_is_told_to_all_and_kept_a_fault_of_ours_is_not(desk: Desk) -> None:
    store = store_of(desk)
    desk.refused, desk.broken = {"b"}, {"c"}
    for turn in range(2):
        store.admit(group(f"b{turn}", "b"))
        assert ready(store) == [(f"b{turn}", "it is refused")]
        store.admit(group(f"c{turn}", "c"))
        assert ready(store) == [(f"c{turn}", "grammars cannot be compiled now")]
    assert desk.compiled == ["b", "c", "c"]


def test_tenants_take_turns_and_share_nothing(desk: Desk) -> None:
    store = store_of(desk)
    desk.gate.clear()
    store.admit(group("a0", "x0", "flood"))
    assert desk.begun.acquire(timeout=WAIT_S)  # it is being compiled
    for number in range(1, 5):
        store.admit(group(f"a{number}", f"x{number}", "flood"))
    store.admit(group("b", "x0", "other"))
    desk.gate.set()
    done: list[str] = []
    while store.held:
        done += [name for name, _ in ready(store)]
    assert done.index("b") <= 2
    assert desk.compiled.count("x0") == 2


def test_nobody_waits_for_what_was_dropped(desk: Desk) -> None:
    store = store_of(desk)
    desk.gate.clear()
    first, second = group("r0", "a"), group("r1", "b")
    store.admit(first)
    assert desk.begun.acquire(timeout=WAIT_S)
    store.admit(second)
    store.drop(second)  # still queued
    store.drop(first)  # being compiled
    store.drop(first)
    assert not store.held
    desk.gate.set()
    until(lambda: desk.compiled == ["a"])
    store.admit(third := group("r2", "a"))
    if store.held:  # it came before the store heard that it is there
        assert ready(store) == [("r2", None)]
    assert third.sequences[0].matcher is not None
    assert desk.compiled in (["a"], ["a", "a"])


def test_at_the_limit_of_those_who_wait_there_is_an_error(desk: Desk) -> None:
    store = store_of(desk, held_max=1)
    desk.gate.clear()
    store.admit(group("r0", "a"))
    with pytest.raises(EngineBusy):
        store.admit(group("r1", "a"))
    desk.gate.set()
    assert ready(store) == [("r0", None)]
    assert store.admit(group("r2", "a"))


def test_the_longest_unused_go_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammarstore, "KEPT_MAX", 2)
    store = store_of(desk)
    for value in ("a", "b", "a", "c", "a", "b"):
        if not store.admit(group("r", value)):
            ready(store)
    assert desk.compiled == ["a", "b", "c", "b"]
    monkeypatch.setattr(grammarstore, "KEPT_MAX", 10)
    monkeypatch.setattr(grammarstore, "KEPT_BYTES_MAX", 5000)
    desk.nbytes = 3000
    for value in ("d", "e", "d"):
        if not store.admit(group("r", value)):
            ready(store)
    assert desk.compiled[4:] == ["d", "e", "d"]


def test_too_much_in_use_makes_the_next_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that nobody keeps, but whose requests are open."""
    monkeypatch.setattr(grammarstore, "KEPT_MAX", 0)
    monkeypatch.setattr(grammarstore, "OPEN_BYTES_MAX", 1500)
    store = store_of(desk)
    open_groups = []
    for number in range(2):
        open_groups.append(group(f"r{number}", f"a{number}"))
        store.admit(open_groups[-1])
        assert ready(store) == [(f"r{number}", None)]
    store.admit(group("r2", "a2"))
    time.sleep(0.1)
    assert desk.compiled == ["a0", "a1"]
    for one in open_groups:
        one.sequences[0].matcher = None
    assert ready(store) == [("r2", None)]


def test_a_model_without_an_end_of_sequence_follows_no_grammar(desk: Desk) -> None:
    class Endless(FakeTokenizer):
        eos_token_ids: tuple[int, ...] = ()

    store = GrammarStore(Endless(), held_max=8, compiler=lambda: desk)
    store.admit(group("r", "a"))
    [(_, error)] = store.take_ready()
    assert isinstance(error, GrammarRejected)


def test_the_thread_ends_with_the_store(desk: Desk) -> None:
    store = store_of(desk)
    woken = threading.Event()
    store.wake_with(woken.set)
    store.prepare()
    store.admit(group("r", "a"))
    assert woken.wait(WAIT_S)
    assert ready(store) == [("r", None)]
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert desk.closed.wait(WAIT_S)


# ---- the core ----


class GuidedRunner(ScriptedRunner):
    """Says the first allowed token of those the script would say next; without a grammar what the script says."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self._masks = Masks(257, (256,))

    def execute(self, plan: StepPlan) -> list[Drawn | None]:
        drawn = super().execute(plan)
        for place, entry in enumerate(plan.scheduled):
            matcher = entry.sequence.matcher
            if matcher is not None and drawn[place] is not None:
                bits = np.flatnonzero(np.unpackbits(self._masks.fill([matcher])[0], bitorder="little"))
                wish = drawn[place].token_id
                drawn[place] = Drawn(int(bits[(bits >= wish).argmax()]), drawn[place].logprob)
        return drawn


def core_of(desk: Desk, runner: ScriptedRunner | None = None, **config) -> EngineCore:
    core = EngineCore(runner or GuidedRunner(), FakeTokenizer(), EngineConfig(model="scripted", **config))
    core.grammars = GrammarStore(FakeTokenizer(), held_max=core.grammars._held_max, compiler=lambda: desk)
    return core


def request(name: str, value: str | None, *, n: int = 1, **sampling) -> Request:
    guide = None if value is None else Guide("regex", value)
    params = SamplingParams(**{"max_tokens": 20, "guided": guide} | sampling)
    return Request(id=name, prompt=[*b"a prompt"], sampling=params, n=n)


def run(core: EngineCore) -> dict[str, list[Update]]:
    """Every update of every request, by id."""
    found: dict[str, list[Update]] = {}
    while True:
        output = core.step()
        if output is None and not core.wait_for_grammar():
            break
        core.check_integrity()
        for update in output.updates if output is not None else ():
            found.setdefault(update.request_id, []).append(update)
    pool = core.scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert not core.grammars.held
    return found


def text(updates: list[Update], index: int = 0) -> str:
    return "".join(delta.text for update in updates for delta in update.deltas if delta.index == index)


def test_a_guided_request_ends_with_its_grammar_beside_one_that_is_free(desk: Desk) -> None:
    core = core_of(desk)
    core.add(request("free", None, ignore_eos=True))
    core.add(request("guided", "[xy]{3}", ignore_eos=True))
    found = run(core)
    last = found["guided"][-1]
    assert (last.finish, last.error, last.counts.completion) == (Finish.STOP, None, 3)  # no end was drawn
    assert len(text(found["guided"])) == 3
    assert set(text(found["guided"])) <= {"x", "y"}
    alone = core_of(desk)
    alone.add(request("free", None, ignore_eos=True))
    assert text(run(alone)["free"]) == text(found["free"])


def test_each_choice_follows_the_grammar_for_itself_and_preemption_replays_nothing(desk: Desk) -> None:
    def said(**options) -> tuple[list[str], int]:
        core = core_of(desk, GuidedRunner(**options))
        for number in range(3):
            core.add(request(f"r{number}", "[a-z]{12}[0-9]", n=2))
        found = run(core)
        texts = [text(found[f"r{number}"], index) for number in range(3) for index in range(2)]
        return texts, core.scheduler.stats.preemptions

    undisturbed, none = said(num_blocks=64)
    squeezed, some = said(num_blocks=7)
    assert none == 0 < some
    assert undisturbed == squeezed
    assert all(len(one) == 13 and one[:12].isalpha() and one[12].isdigit() for one in undisturbed)
    assert len(set(undisturbed)) > 1


def test_max_tokens_stop_strings_and_ceilings_cut_a_guided_text(desk: Desk) -> None:
    core = core_of(desk)
    core.add(request("cut", "x{9}", max_tokens=4))
    core.add(request("stopped", "xxyyzz", stop=("yy",)))
    core.add(request("id", "xxyyzz", stop_token_ids=(ord("z"),)))
    quota = request("quota", "x{9}")
    core.add(Request(id="quota", prompt=quota.prompt, sampling=quota.sampling, token_ceiling=2, ceiling_final=True))
    found = run(core)
    assert {name: (text(updates), updates[-1].finish) for name, updates in found.items()} == {
        "cut": ("xxxx", Finish.LENGTH),
        "stopped": ("xx", Finish.STOP),
        "id": ("xxyy", Finish.STOP),
        "quota": ("xx", Finish.QUOTA),
    }


def test_a_refused_grammar_ends_its_request_alone_with_nothing_computed(desk: Desk) -> None:
    desk.refused = {"bad"}
    core = core_of(desk)
    core.add(request("r0", "bad", n=2))
    core.add(request("r1", "ok"))
    found = run(core)
    [last] = found["r0"]
    assert (last.finish, last.error, last.rejected) == (Finish.ERROR, "it is refused", True)
    assert [(delta.index, delta.finish) for delta in last.deltas] == [(0, Finish.ERROR), (1, Finish.ERROR)]
    assert last.counts.prompt == last.counts.completion == 0
    assert text(found["r1"]) == "ok"
    core.add(request("r0", "ok"))  # its id is free again
    assert text(run(core)["r0"]) == "ok"


def test_a_request_is_ended_while_its_grammar_is_compiled(desk: Desk) -> None:
    core = core_of(desk)
    desk.gate.clear()
    core.add(request("r0", "x+"))
    core.add(request("other", None, max_tokens=2, ignore_eos=True))
    with pytest.raises(EngineError, match="open already"):
        core.add(request("r0", "y+"))
    output = core.step()  # the other one goes on
    assert output is not None
    assert [update.request_id for update in output.updates] == ["other"]
    assert output.stats.waiting == 1
    core.set_ceiling("r0", 5, final=False)
    core.abort("r0")
    desk.gate.set()
    found = run(core)
    [last] = found["r0"]
    assert (last.finish, last.counts.completion) == (Finish.ABORT, 0)
    assert last.queue_us > 0


def test_waiting_for_a_grammar_is_waiting_in_the_queue(desk: Desk) -> None:
    now_us = [0]
    core = EngineCore(
        GuidedRunner(), FakeTokenizer(), EngineConfig(model="scripted", queue_timeout_s=5.0), clock_us=lambda: now_us[0]
    )
    core.grammars = store_of(desk)
    desk.gate.clear()
    core.add(request("late", "x{2}"))
    now_us[0] = 3_000_000
    core.add(request("later", "x{2}"))
    assert core.step() is None
    now_us[0] = 6_000_000
    [expired] = core.step().updates
    assert (expired.request_id, expired.finish) == ("late", Finish.EXPIRED)
    desk.gate.set()
    found = run(core)
    assert text(found["later"]) == "xx"
    assert found["later"][-1].queue_us == 3_000_000
    assert "late" not in found


def test_a_dead_end_ends_the_choice_with_the_reason(desk: Desk) -> None:
    words = [b"" if token == ord("q") else word for token, word in enumerate(Vocabulary.of(FakeTokenizer()).words)]
    desk._compiler = Compiler(Vocabulary(words, (256,)))  # nothing spells a q
    core = core_of(desk)
    core.add(request("r", "x(yq|zq)"))
    last = run(core)["r"][-1]
    assert (last.finish, last.error) == (Finish.ERROR, "the grammar allows no token here")
    assert last.rejected


def test_where_every_place_is_taken_when_the_grammar_comes_the_request_is_told(desk: Desk) -> None:
    core = core_of(desk, max_waiting=1, max_num_seqs=1)
    desk.gate.clear()
    core.add(request("r0", "x"))
    for number in range(2):
        core.add(request(f"free{number}", None, max_tokens=2))
    desk.gate.set()
    assert core.wait_for_grammar()
    found = run(core)
    assert found["r0"][-1].error == "the engine's queue is full"
    assert not found["r0"][-1].rejected
