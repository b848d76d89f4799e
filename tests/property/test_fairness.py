"""Random days on the pure scheduler: after every step its sums are right, and no tenant gets more than its share.

The driver is the engine's core without text, time and tensors: whatever is planned is computed, and token 7 is drawn.
"""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adapterslots import AdapterSlots
from engine.blocks import BlockPool, cache_root
from engine.fairness import COMPLETION_COST, PROMPT_COST
from engine.scheduler import Scheduler, StepPlan, running_limit
from engine.sequence import Sequence, SequenceGroup, Status
from engine.types import AdapterRef, EngineBusy, Finish, Request, SamplingParams

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 0.5}
MAX_PROMPT = 60
BLOCK = 4


class Day:
    """Arrivals of four tenants, aborts, expiries, ceilings, forks and adapters, all drawn from one seed."""

    def __init__(self, seed: int, *, blocks: int, seqs: int, budget: int, slots: int = 0) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(blocks, BLOCK)
        self.slots = AdapterSlots(slots) if slots else None
        self.budget = budget
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=seqs, max_num_batched_tokens=budget, max_waiting=40, burst=64, adapters=self.slots
        )
        self.limit = running_limit(seqs, budget)
        self.longest = min(200, blocks * BLOCK)
        self.arrived: list[SequenceGroup] = []
        self.ends: Counter[Finish] = Counter()
        self.computed = 0
        self.steps = 0
        self.events: Counter[str] = Counter()
        self.service: Counter[str] = Counter()  # of each tenant, by its weight
        self.backlogged: set[str] = set()
        self.since: dict[tuple[str, str], float] = {}  # of two backlogged tenants, by how much one was ahead
        self.widest = 0.0  # how far apart two that stayed backlogged ever came
        self.passed: Counter[str] = Counter()  # what others were given since a waiting tenant was given anything
        self.longest_wait = 0

    # What happens between steps

    def run(self, steps: int) -> None:
        kinds = (self.arrive, self.abort, self.expire, self.answer)
        for _ in range(steps):
            for event in self.random.choices(kinds, (8, 1, 1, 4), k=2):
                event()
            self.step()
        for _ in range(40 * len(self.arrived) + 400):
            self.answer(final=True)
            if not self.scheduler.groups:
                return
            self.step()
        raise AssertionError("requests that never ended: " + ", ".join(self.scheduler.groups))

    def arrive(self) -> None:
        tenant = self.random.choice("aaaabbcd")
        length = self.random.choice((self.random.randrange(1, 9), self.random.randrange(1, MAX_PROMPT)))
        length = min(length, self.longest - 1)
        prompt = [self.random.randrange(2)] * (length // 2) + [
            self.random.randrange(3) for _ in range(length - length // 2)
        ]
        adapter = self.random.choice((None, "x", "y", "z")) if self.slots else None
        ceiling = self.random.choice((None, None, None, self.random.randrange(1, 12)))
        request = Request(
            id=f"r{len(self.arrived)}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=self.random.randrange(1, min(40, self.longest - length) + 1)),
            n=self.random.choice((1, 1, 1, 2, 4)),
            tenant=tenant,
            weight=WEIGHTS[tenant],
            adapter=AdapterRef(id=adapter, name=adapter, path="") if adapter else None,
            token_ceiling=ceiling,
        )
        root = cache_root(tenant, adapter or "", "")
        group = SequenceGroup(request, arrival=len(self.arrived), cache_root=root)
        try:
            self.scheduler.add(group)
        except EngineBusy:
            self.events["busy"] += 1
        else:
            self.arrived.append(group)

    def abort(self) -> None:
        if self.scheduler.groups:
            self.end(self.random.choice(list(self.scheduler.groups.values())), Finish.ABORT)

    def expire(self) -> None:
        """One that has not begun ends in the queue, and nothing was counted."""
        queued = [group for group in self.scheduler.groups.values() if not group.started]
        if queued:
            group = queued[0]
            self.end(group, Finish.ABORT)
            self.events["expired"] += 1
            assert (group.prompt, group.cached, group.completion, group.recomputed) == (0, 0, 0, 0)

    def end(self, group: SequenceGroup, finish: Finish) -> None:
        for sequence in group.unfinished:
            self.scheduler.finish(sequence, finish)
            self.ends[finish] += 1

    def answer(self, *, final: bool = False) -> None:
        paused = [group for group in self.scheduler.groups.values() if group.at_ceiling]
        for group in paused if final else paused[:1]:
            if final or self.random.random() < 0.2:
                self.end(group, Finish.QUOTA)
            else:
                more = self.random.randrange(0, 8)
                self.scheduler.set_ceiling(group, (group.ceiling or 0) + more, final=False)
                self.events["raised"] += 1

    # The step

    def step(self) -> StepPlan:
        before = [sequence for sequence in self.running if not sequence.group.at_ceiling]
        decodes = [sequence for sequence in before if sequence.num_uncomputed == 1]
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_plan(plan, decodes)
        self.compute(plan)
        self.scheduler.check_integrity()
        self.conserve()
        self.compare()
        return plan

    @property
    def running(self) -> list[Sequence]:
        groups = self.scheduler.groups.values()
        return [sequence for group in groups for sequence in group.sequences if sequence.status is Status.RUNNING]

    def check_plan(self, plan: StepPlan, decodes: list[Sequence]) -> None:
        planned = [entry.sequence for entry in plan.scheduled]
        assert sum(entry.count for entry in plan.scheduled) <= self.budget
        assert len(set(planned)) == len(planned) <= self.limit
        for entry in plan.scheduled:
            assert entry.sequence.status is Status.RUNNING
            assert entry.count >= 1
            assert entry.start == entry.sequence.num_computed
            assert len(entry.sequence.block_table) * BLOCK >= entry.start + entry.count
        for sequence in decodes:  # a sibling may have taken the last token that is allowed
            still = sequence.status is Status.RUNNING and sequence.group.ceiling is None
            assert sequence in planned or not still or self.slots
        if self.slots:
            assert len({sequence.adapter_id for sequence in planned} - {None}) <= self.slots.slots
            self.slots.take_swaps()
        if not planned:
            idle = [group for group in self.scheduler.groups.values() if not group.at_ceiling]
            assert not idle, "requests that could run, and nothing to do: a deadlock"

    def compute(self, plan: StepPlan) -> None:
        self.steps += bool(plan.scheduled)
        for entry in plan.scheduled:
            self.computed += entry.count
            sequence = entry.sequence
            fresh = max(0, min(entry.start + entry.count, sequence.num_prompt) - max(entry.start, sequence.high_water))
            cost = fresh * PROMPT_COST + entry.sample * COMPLETION_COST
            self.service[sequence.request.tenant] += cost / sequence.request.weight
            self.passed.update(dict.fromkeys(WEIGHTS, cost))
        for name in {entry.sequence.request.tenant for entry in plan.scheduled}:
            del self.passed[name]
        self.scheduler.commit(plan, [7 if entry.sample else None for entry in plan.scheduled])
        for entry in plan.scheduled:
            sequence = entry.sequence
            if sequence.num_sampled >= sequence.sampling.max_tokens:
                self.scheduler.finish(sequence, Finish.LENGTH)
                self.ends[Finish.LENGTH] += 1

    # What always holds

    def conserve(self) -> None:
        """Every token computed is in one bucket: fresh prompt, recomputed, or a sampled one read back."""
        read_back = sum(
            max(0, sequence.high_water - sequence.num_prompt) for group in self.arrived for sequence in group.sequences
        )
        booked = sum(group.prompt - group.cached + group.recomputed for group in self.arrived)
        assert self.computed == booked + read_back
        for group in self.arrived:
            assert 0 <= group.cached <= group.prompt <= len(group.request.prompt)
            assert group.completion == sum(sequence.num_sampled for sequence in group.sequences)
            assert group.ceiling is None or group.completion <= group.ceiling

    def compare(self) -> None:
        """Two tenants that have waited without a break were given alike: section 4 of the paper, by its own bound."""
        groups = self.scheduler.groups.values()
        waiting = {group.request.tenant for group in groups if any(s.status is Status.WAITING for s in group.sequences)}
        for name in WEIGHTS:
            if name not in waiting:
                self.passed.pop(name, None)
            self.longest_wait = max(self.longest_wait, self.passed[name])
            assert self.passed[name] <= 2 * self.bound((name, name))
        for pair in combinations(sorted(WEIGHTS), 2):
            if not waiting.issuperset(pair):
                self.since.pop(pair, None)
                continue
            ahead = self.service[pair[0]] - self.service[pair[1]]
            apart = abs(ahead - self.since.setdefault(pair, ahead))
            self.widest = max(self.widest, apart)
            assert apart <= self.bound(pair)

    def bound(self, pair: tuple[str, str]) -> float:
        """2 max(w_p L, w_q M), L being the longest prompt and M the tokens that fit into the cache; by weight."""
        tokens = self.pool.num_blocks * BLOCK
        light = min(WEIGHTS[name] for name in pair)
        return 2 * max(PROMPT_COST * max(MAX_PROMPT, self.budget), COMPLETION_COST * tokens) / light


def check_end(day: Day) -> None:
    assert day.pool.num_free == day.pool.num_blocks
    assert day.scheduler.num_running == day.scheduler.num_waiting == 0
    assert day.scheduler.schedule().scheduled == []


@pytest.mark.parametrize(
    ("blocks", "seqs", "budget", "slots"),
    [(50, 6, 24, 0), (60, 16, 64, 0), (50, 5, 9, 0), (400, 12, 40, 0), (60, 8, 32, 2)],
)
def test_a_long_random_day_is_fair_and_loses_nothing(blocks: int, seqs: int, budget: int, slots: int) -> None:
    day = Day(blocks * 1000 + seqs, blocks=blocks, seqs=seqs, budget=budget, slots=slots)
    day.run(500)
    check_end(day)
    assert day.steps >= 480
    assert min(day.ends[finish] for finish in (Finish.LENGTH, Finish.ABORT, Finish.QUOTA)) > 0
    assert day.events["expired"] > 0
    assert day.events["raised"] > 0
    assert day.scheduler.stats.preemptions > 0
    assert day.scheduler.stats.prefix_hits > 0


@given(seed=st.integers(0, 2**32), blocks=st.integers(50, 90), seqs=st.integers(1, 9), budget=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_any_short_day_is_fair_and_loses_nothing(seed: int, blocks: int, seqs: int, budget: int) -> None:
    day = Day(seed, blocks=blocks, seqs=seqs, budget=budget)
    day.run(30)
    check_end(day)
