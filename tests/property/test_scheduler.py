"""Random workloads against the core: every step keeps the pool whole and every computed token in one bucket, and at
the end every microsecond too. How fairly the scheduler shares is in `test_fairness`.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.sequence import Sequence
from engine.types import Cost, EngineBusy, EngineStats, Finish, Request, SamplingParams, TokenCounts
from tests.fixtures.scripted import ScriptedRunner, make_core


class Workload:
    """Arrivals, aborts and ceilings drawn from one seed, and what the gateway would know of each request."""

    def __init__(self, seed: int, *, blocks: int, seqs: int, budget: int) -> None:
        self.random = random.Random(seed)
        self.runner = ScriptedRunner(num_blocks=blocks, block_size=4)
        self.core: EngineCore = make_core(self.runner, max_num_seqs=seqs, max_num_batched_tokens=budget, max_waiting=12)
        self.open: dict[str, Request] = {}
        self.ceilings: dict[str, int] = {}
        self.paused: set[str] = set()
        self.counts: dict[str, TokenCounts] = {}
        self.tokens: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.finishes: Counter[Finish] = Counter()
        self.seen: set[Sequence] = set()
        self.steps = 0
        self.now_us = 0
        self.held_us = 0  # blocks in all tables, times how long
        self.costs: list[Cost] = []
        self.stats = EngineStats()
        self._watch_time()

    def _watch_time(self) -> None:
        """A clock on which steps take a while, and what is between them too."""
        execute = self.runner.execute

        def timed(plan):
            self.pass_time(self.random.randrange(1, 2000))
            return execute(plan)

        self.runner.execute = timed
        self.core._clock_us = lambda: self.now_us

    def pass_time(self, us: int) -> None:
        groups = self.core.scheduler.groups.values()
        self.held_us += us * sum(len(sequence.block_table) for group in groups for sequence in group.sequences)
        self.now_us += us

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.random.choices((self.arrive, self.abort, self.answer, lambda: None), (5, 1, 4, 4), k=2):
                event()
            self.pass_time(self.random.randrange(500))
            self.step()
        while self.open:
            for id_ in list(self.paused):
                self.core.set_ceiling(id_, self.ceilings[id_], final=True)
            assert self.step(), "open requests and nothing to do: a deadlock"

    def arrive(self) -> None:
        prompt = [self.random.randrange(3)] * self.random.randrange(0, 14) + [
            self.random.randrange(4) for _ in range(self.random.randrange(1, 8))
        ]
        room = self.core.info.max_model_len - len(prompt)
        ceiling = self.random.choice((None, None, self.random.randrange(1, 12)))
        request = Request(
            id=f"r{len(self.counts)}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=self.random.randrange(1, room + 1), stop_token_ids=(13, 14, 15)),
            n=self.random.choice((1, 1, 1, 2, 5)),
            tenant=self.random.choice("aab"),
            weight=self.random.choice((1.0, 1.0, 0.3, 4.0)),
            queue_timeout_ms=self.random.choice((None, None, self.random.randrange(1, 40))),
            cache_salt="shared",
            public_cache=self.random.random() < 0.3,
            token_ceiling=ceiling,
            ceiling_final=self.random.random() < 0.3,
        )
        try:
            self.core.add(request)
        except EngineBusy:
            return
        self.open[request.id] = request
        self.counts[request.id] = TokenCounts()
        if ceiling is not None:
            self.ceilings[request.id] = ceiling

    def abort(self) -> None:
        if self.open:
            self.core.abort(self.random.choice(list(self.open)))

    def answer(self) -> None:
        """As the gateway does: mostly for a paused request, sometimes ahead of it."""
        candidates = list(self.paused) or [id_ for id_ in self.open if id_ in self.ceilings]
        if candidates:
            id_ = self.random.choice(candidates)
            self.ceilings[id_] += self.random.randrange(0, 6)
            self.core.set_ceiling(id_, self.ceilings[id_], final=self.random.random() < 0.2)

    def step(self) -> bool:
        output = self.core.step()
        self.core.check_integrity()
        if output is None:
            return False
        self.steps += 1
        self.stats = output.stats
        for update in output.updates:
            assert update.request_id in self.open, "an update after the last one"
            self.note(update)
        self.conserve()
        return True

    def note(self, update) -> None:
        id_, new, old = update.request_id, update.counts, self.counts[update.request_id]
        assert all(
            getattr(new, field) >= getattr(old, field) for field in ("prompt", "cached", "completion", "recomputed")
        )
        assert new.cached <= max(0, len(self.open[id_].prompt) - 1)
        assert new.cached <= new.prompt <= len(self.open[id_].prompt)
        assert new.cached == old.cached or old.prompt == 0, "cached grew after the first admission"
        self.tokens[id_] += sum(len(delta.token_ids) for delta in update.deltas)
        assert self.tokens[id_] == new.completion
        if id_ in self.ceilings:
            assert new.completion <= self.ceilings[id_]
        self.counts[id_] = new
        self.paused.discard(id_)
        if update.paused:
            assert new.completion == self.ceilings[id_]
            self.paused.add(id_)
        self.ends[id_] += sum(delta.finish is not None for delta in update.deltas)
        if update.finished:
            assert self.ends[id_] == self.open[id_].n
            self.finishes[update.finish] += 1
            self.costs.append(update.cost)
            assert update.cost.recomputed == new.recomputed
            if update.finish is Finish.EXPIRED:
                assert new == TokenCounts()
            del self.open[id_]

    def conserve(self) -> None:
        """What the runner computed is exactly: fresh prompt tokens, recomputed ones, and sampled ones read back."""
        fresh = sum(counts.prompt - counts.cached + counts.recomputed for counts in self.counts.values())
        assert self.runner.computed == fresh + self.read_back()

    def read_back(self) -> int:
        """Sampled tokens whose keys and values were computed: by the marks of open sequences and of ended ones."""
        self.seen |= {sequence for group in self.core.scheduler.groups.values() for sequence in group.sequences}
        return sum(max(0, sequence.high_water - sequence.num_prompt) for sequence in self.seen)


def check_end(workload: Workload) -> None:
    pool = workload.core.scheduler.pool
    assert not workload.open
    assert pool.num_free == pool.num_blocks
    assert workload.core.scheduler.num_running == workload.core.scheduler.num_waiting == 0
    costs = workload.costs
    assert sum(cost.compute_us for cost in costs) == workload.stats.busy_us_total
    assert workload.stats.ended_compute_us_total == workload.stats.busy_us_total
    assert sum(cost.kv_block_us for cost in costs) == workload.held_us
    assert sum(cost.preemptions for cost in costs) == workload.stats.preemptions_total
    assert workload.core.step() is None


@pytest.mark.parametrize(("blocks", "seqs", "budget"), [(12, 4, 16), (8, 16, 64), (40, 8, 7), (200, 32, 512)])
def test_a_long_random_day_loses_nothing(blocks: int, seqs: int, budget: int) -> None:
    workload = Workload(blocks * 1000 + seqs, blocks=blocks, seqs=seqs, budget=budget)
    workload.run(600)
    check_end(workload)
    assert workload.steps >= 500
    assert {Finish.STOP, Finish.ABORT, Finish.QUOTA, Finish.EXPIRED} <= set(workload.finishes)
    if blocks < 20:
        assert workload.core.scheduler.stats.preemptions > 10
    assert any(counts.cached for counts in workload.counts.values())


@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(7, 30),
    seqs=st.integers(1, 9),
    budget=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_any_short_day_loses_nothing(seed: int, blocks: int, seqs: int, budget: int) -> None:
    workload = Workload(seed, blocks=blocks, seqs=seqs, budget=budget)
    workload.run(40)
    check_end(workload)


def said(requests: list[Request], *, blocks: int, seqs: int, budget: int, apart: int) -> tuple[dict, dict, int]:
    """What each choice says, what is billed for each request, and how often one was preempted."""
    core = make_core(ScriptedRunner(num_blocks=blocks, block_size=4), max_num_seqs=seqs, max_num_batched_tokens=budget)
    texts: dict[tuple[str, int], list[int]] = {}
    billed: dict[str, tuple[int, int]] = {}
    waiting = list(requests)
    steps = 0
    while waiting or core.scheduler.groups:
        if waiting and steps % apart == 0:
            core.add(waiting.pop(0))
        steps += 1
        output = core.step()
        for update in output.updates if output else ():
            billed[update.request_id] = (update.counts.prompt, update.counts.completion)
            for delta in update.deltas:
                texts.setdefault((update.request_id, delta.index), []).extend(delta.token_ids)
    core.check_integrity()
    return texts, billed, core.scheduler.stats.preemptions


@pytest.mark.parametrize("seed", range(3))
def test_tiny_budgets_change_no_token(seed: int) -> None:
    """The same requests with room for all and with room for two or three: preempted, chunked, shared, and the same."""
    draw = random.Random(seed)
    requests = [
        Request(
            id=f"r{number}",
            prompt=[draw.randrange(2)] * draw.randrange(12)
            + [draw.randrange(256) for _ in range(draw.randrange(1, 9))],
            sampling=SamplingParams(max_tokens=draw.randrange(4, 20)),
            n=draw.choice((1, 1, 1, 3)),
            tenant=draw.choice("abc"),
            weight=draw.choice((1.0, 2.0)),
        )
        for number in range(40)
    ]
    roomy = said(requests, blocks=800, seqs=64, budget=512, apart=1)
    tiny = said(requests, blocks=11, seqs=6, budget=9, apart=2)
    assert roomy[2] == 0
    assert tiny[2] > 30
    assert tiny[:2] == roomy[:2]
