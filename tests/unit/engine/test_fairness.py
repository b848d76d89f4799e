"""One tenant's flood and another's request: on the scheduler alone, by what the steps compute."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from engine.blocks import BlockPool, cache_root
from engine.fairness import FairOrder
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import SequenceGroup, Status
from engine.types import EngineBusy, Finish, Request, SamplingParams

BUDGET = 512
SEQS = 32


class Flooded:
    """A scheduler as it ships, and requests by tenant and length; each ends after `out` tokens."""

    def __init__(
        self, blocks: int = 8000, seqs: int = SEQS, budget: int = BUDGET, waiting: int = 1024, burst: int = 8192
    ) -> None:
        self.pool = BlockPool(blocks, 16)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=seqs, max_num_batched_tokens=budget, max_waiting=waiting, burst=burst
        )
        self.budget = budget
        self.arrivals = 0
        self.steps = 0
        self.served: dict[str, int] = {}  # prompt and sampled tokens, the latter twice

    def ask(self, tenant: str, prompt: int, out: int = 300, weight: float = 1.0) -> SequenceGroup:
        self.arrivals += 1
        request = Request(
            id=f"r{self.arrivals}",
            prompt=[self.arrivals] * prompt,
            sampling=SamplingParams(max_tokens=out),
            tenant=tenant,
            weight=weight,
        )
        group = SequenceGroup(request, arrival=self.arrivals, cache_root=cache_root(tenant, "", ""))
        self.scheduler.add(group)
        return group

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> StepPlan:
        """`meanwhile`: what happens while it is computed."""
        plan = self.scheduler.schedule()
        meanwhile()
        assert sum(entry.count for entry in plan.scheduled) <= self.budget
        for entry in plan.scheduled:
            owed = entry.count * (entry.start < entry.sequence.num_prompt) + 2 * entry.sample
            self.served[entry.sequence.request.tenant] = self.served.get(entry.sequence.request.tenant, 0) + owed
        self.scheduler.commit(plan, [7 if entry.sample else None for entry in plan.scheduled])
        for entry in plan.scheduled:
            if entry.sequence.num_sampled >= entry.sequence.sampling.max_tokens:
                self.scheduler.finish(entry.sequence, Finish.LENGTH)
        self.steps += 1
        if self.steps % 50 == 0:  # the property tests do it after every step
            self.scheduler.check_integrity()
        return plan

    def first_token(self, tenant: str, prompt: int, out: int = 300) -> tuple[int, int]:
        """The steps until it comes, after the one during which it is asked for, and others' prompt tokens in all."""
        asked: list[SequenceGroup] = []
        plans = [self.step(lambda: asked.append(self.ask(tenant, prompt, out)))]
        while asked[0].completion == 0:
            plans.append(self.step())
        entries = [entry for plan in plans for entry in plan.scheduled]
        others = sum(e.count for e in entries if e.count > 1 and e.sequence.request.tenant != tenant)
        return len(plans) - 1, others


@pytest.mark.parametrize("blocks", [8000, 700])
@pytest.mark.parametrize("prompt", [10, 1000, 4000])
@pytest.mark.parametrize("when", [0, 3, 50, 100, 400])
def test_a_flood_raises_anothers_first_token_by_less_than_a_step(when: int, prompt: int, blocks: int) -> None:
    bench = Flooded(blocks)
    for _ in range(200):
        bench.ask("flood", 1000)
    for _ in range(when):
        bench.step()
    steps, others = bench.first_token("other", prompt, 64)
    alone = -(-prompt // BUDGET)
    assert steps <= alone + 1
    assert others <= BUDGET


def test_a_flood_of_long_answers_in_all_slots_gives_one_up_and_no_more_than_half() -> None:
    bench = Flooded()
    flood = [bench.ask("flood", 20, 100_000) for _ in range(200)]
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == SEQS
    assert bench.first_token("other", 100)[0] == 1
    assert sum(group.preemptions for group in flood) == bench.scheduler.stats.preemptions == 1
    for _ in range(60):
        bench.ask("other", 100, 100_000)
    for _ in range(200):
        bench.step()
    running = [s.request.tenant for g in bench.scheduler.groups.values() for s in g.sequences if s.block_table]
    assert (running.count("flood"), running.count("other")) == (16, 16)
    assert bench.scheduler.stats.preemptions <= SEQS  # nothing is taken in turns
    assert sum(group.recomputed for group in flood) <= SEQS * 16  # the blocks of the preempted stay in the cache


def test_a_long_prompt_leaves_every_decode_in_every_step_and_no_step_over_budget() -> None:
    bench = Flooded()
    streams = [bench.ask(f"t{i}", 30) for i in range(SEQS - 1)]
    while any(group.completion == 0 for group in streams):
        bench.step()
    long = bench.ask("long", 4096)
    steps = 0
    while long.completion == 0:
        steps += 1
        entries = bench.step().scheduled
        assert [entry.sequence.group for entry in entries[:-1]] == streams
        assert {entry.count for entry in entries[:-1]} == {1}
        assert entries[-1].count == min(BUDGET - len(streams), 4096 - entries[-1].start)
    assert steps == -(-4096 // (BUDGET - len(streams)))


@pytest.mark.parametrize(("weight", "out"), [(1.0, 1), (3.0, 1), (1.0, 200), (3.0, 200)])
def test_two_floods_share_by_weight(weight: float, out: int) -> None:
    bench = Flooded(burst=2048)
    for _ in range(300):
        bench.ask("a", 400, out)
        bench.ask("b", 400, out, weight)
    while bench.served.get("a", 0) < 20_000:
        bench.step()
    assert bench.served["b"] / bench.served["a"] == pytest.approx(weight, rel=0.1)


def test_a_tenant_within_its_share_is_not_slowed_by_how_many_requests_another_has() -> None:
    seen = []
    for flood in (40, 400):
        bench = Flooded()
        for _ in range(flood):
            bench.ask("flood", 600)
        for _ in range(30):
            bench.step()
        steps = []
        for _ in range(20):  # one after the other, each while the flood goes on
            steps.append(bench.first_token("other", 700, 8)[0])
            for _ in range(8):
                bench.step()
        seen.append(steps)
        assert max(steps) <= 3
    assert seen[0] == seen[1]


def test_idling_earns_nothing() -> None:
    bench = Flooded(burst=2048)
    for _ in range(500):
        bench.ask("a", 500, 1)
    for _ in range(200):
        bench.step()
    alone = bench.served["a"]
    for _ in range(500):
        bench.ask("b", 500, 1)
    for _ in range(100):
        bench.step()
    assert bench.served["b"] == pytest.approx(bench.served["a"] - alone, abs=2048 + BUDGET)


def test_newcomers_without_end_do_not_starve_one_that_waits() -> None:
    bench = Flooded(burst=2048)
    flood = [bench.ask("flood", 2000, 4) for _ in range(40)]
    new = []
    for number in range(400):
        new.append(bench.ask(f"new {number}", 512, 1))  # a step's worth, in every step
        bench.step()
    assert sum(group.num_open == 0 for group in flood) >= 3  # more than any of them got; they are many
    assert sum(group.num_open == 0 for group in new) > 300


def test_what_is_remembered_of_tenants_does_not_grow() -> None:
    bench = Flooded()
    bench.ask("steady", 50, 100_000)
    fair = bench.scheduler._fair
    for number in range(1000):
        bench.ask(f"t{number}", 40, 2)
        bench.step()
    assert len(fair.tenants) < 100
    assert len(fair._heap) < 200
    for group in list(bench.scheduler.groups.values()):
        bench.scheduler.finish(group.sequences[0], Finish.ABORT)
    assert not fair.tenants


def test_a_step_looks_at_few_of_many_tenants_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Flooded(waiting=10_000)
    for number in range(2000):
        bench.ask(f"t{number}", 30, 100_000)
    for _ in range(5):
        bench.step()
    looks = 0
    take = FairOrder.take

    def counted(self: FairOrder) -> object:
        nonlocal looks
        looks += 1
        return take(self)

    monkeypatch.setattr(FairOrder, "take", counted)
    for _ in range(10):
        assert len(bench.step().scheduled) == SEQS
    assert looks <= 20


def test_one_tenant_cannot_fill_the_queue() -> None:
    bench = Flooded(seqs=1, waiting=16)
    bench.ask("flood", 10)
    bench.step()
    for _ in range(14):
        bench.ask("flood", 10)
    with pytest.raises(EngineBusy):
        bench.ask("flood", 10)
    bench.ask("other", 10)
    bench.ask("other", 10)
    with pytest.raises(EngineBusy):
        bench.ask("other", 10)
    assert bench.scheduler.num_waiting == 16


def test_floods_together_cannot_fill_the_queue_either() -> None:
    bench = Flooded(seqs=1, waiting=128)
    bench.ask("first flood", 10)
    bench.step()
    for tenant in ("first flood", "second flood", "third flood"):
        for _ in range(60):
            with suppress(EngineBusy):
                bench.ask(tenant, 10)
    for tenant in ("quiet", "as quiet"):
        for _ in range(2):
            bench.ask(tenant, 10)
        with pytest.raises(EngineBusy):
            bench.ask(tenant, 10)


def test_the_tenant_that_holds_the_most_blocks_makes_room_and_the_oldest_is_left_alone() -> None:
    bench = Flooded(blocks=20, budget=600)
    flood = [bench.ask("flood", 60, 200) for _ in range(4)]
    bench.step()
    other = bench.ask("other", 60, 200)
    while bench.scheduler.stats.preemptions == 0:
        bench.step()
    assert [group.preemptions for group in flood] == [0, 0, 0, 1]
    while flood[0].num_open:
        bench.step()
    assert flood[0].preemptions == 0
    assert other.sequences[0].status is not Status.FINISHED
    while bench.scheduler.groups:
        bench.step()
    assert all(group.completion == 200 for group in [*flood, other])
