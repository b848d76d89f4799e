"""The scheduler alone: who is scheduled, who waits, who is preempted, and what is counted."""

import pytest

from engine.adapterslots import CLOSE_AFTER_STEPS, AdapterSlots
from engine.blocks import BlockPool, cache_root
from engine.scheduler import LOOKAHEAD, Scheduler, StepPlan
from engine.sequence import SequenceGroup, Status
from engine.types import AdapterRef, EngineBusy, Finish, Request, SamplingParams


class Bench:
    """A scheduler and a counter of arrivals; a step samples token 7 for whoever samples."""

    def __init__(
        self, blocks: int = 32, size: int = 4, seqs: int = 8, budget: int = 64, waiting: int = 100, slots: int = 8
    ) -> None:
        self.pool = BlockPool(blocks, size)
        self.slots = AdapterSlots(slots)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_waiting=waiting,
            adapters=self.slots,
        )
        self.arrivals = 0

    def add(
        self,
        prompt: list[int],
        *,
        tenant: str = "t",
        n: int = 1,
        ceiling: int | None = None,
        adapter: str = "",
        weight: float = 1.0,
    ) -> SequenceGroup:
        self.arrivals += 1
        request = Request(
            id=f"r{self.arrivals}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=100),
            n=n,
            token_ceiling=ceiling,
            adapter=AdapterRef(id=adapter, name=adapter, path="") if adapter else None,
            tenant=tenant,
            weight=weight,
        )
        group = SequenceGroup(request, arrival=self.arrivals, cache_root=cache_root(tenant, "", ""))
        self.scheduler.add(group)
        return group

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan, [7 if entry.sample else None for entry in plan.scheduled])
        self.scheduler.check_integrity()
        return plan

    def end(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished:
            self.scheduler.finish(sequence, Finish.ABORT)
        self.scheduler.check_integrity()


def said(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(entry.sequence.request.id, entry.start, entry.count, entry.sample) for entry in plan.scheduled]


def test_a_long_prompt_is_cut_to_the_budget_and_decodes_come_first() -> None:
    bench = Bench(budget=8)
    bench.add([1] * 3, tenant="a")
    assert said(bench.step()) == [("r1", 0, 3, True)]
    long = bench.add([2] * 12, tenant="b")
    assert said(bench.step()) == [("r1", 3, 1, True), ("r2", 0, 7, False)]
    assert (long.prompt, long.completion) == (7, 0)
    assert said(bench.step()) == [("r1", 4, 1, True), ("r2", 7, 5, True)]
    assert (long.prompt, long.completion) == (12, 1)


def test_requests_are_taken_first_come_first_served_into_the_free_slots() -> None:
    bench = Bench(seqs=2)
    groups = [bench.add([i], tenant=str(i)) for i in range(3)]
    assert said(bench.step()) == [("r1", 0, 1, True), ("r2", 0, 1, True)]
    bench.end(groups[0])
    assert said(bench.step()) == [("r2", 1, 1, True), ("r3", 0, 1, True)]


def test_the_queue_has_a_limit_that_free_slots_do_not_count_against() -> None:
    bench = Bench(seqs=2, waiting=1)
    for i in range(3):
        bench.add([i])
    with pytest.raises(EngineBusy):
        bench.add([9])
    bench.step()
    with pytest.raises(EngineBusy):
        bench.add([9])
    assert bench.scheduler.num_waiting == 1


def test_a_prompt_seen_before_is_reused_but_for_its_last_token() -> None:
    bench = Bench()
    first = bench.add([1, 2, 3, 4, 5, 6, 7, 8])
    bench.step()
    second = bench.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert said(bench.step())[1] == ("r2", 4, 4, True)
    assert (first.prompt, first.cached, second.prompt, second.cached) == (8, 0, 8, 4)
    assert second.sequences[0].block_table[0] == first.sequences[0].block_table[0]
    assert (bench.scheduler.stats.prefix_queries, bench.scheduler.stats.prefix_hits) == (16, 4)


def test_nothing_is_reused_before_it_is_computed_nor_by_another_tenant() -> None:
    bench = Bench()
    bench.add([1] * 8)
    bench.add([1] * 8)
    bench.add([1] * 8, tenant="u")
    assert sorted(said(bench.step())) == [("r1", 0, 8, True), ("r2", 0, 8, True), ("r3", 0, 8, True)]
    assert bench.add([1] * 9, tenant="v").cached == 0
    assert said(bench.step())[3] == ("r4", 0, 9, True)


def test_sampled_tokens_are_reused_by_the_next_turn() -> None:
    bench = Bench()
    group = bench.add([1, 2, 3])
    for _ in range(6):
        bench.step()
    bench.end(group)
    bench.add([1, 2, 3, 7, 7, 7, 7, 7, 9])
    assert said(bench.step()) == [("r2", 8, 1, True)]


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens_and_counts() -> None:
    bench = Bench(blocks=4, size=2)
    old, young = bench.add([1, 1, 1], tenant="a"), bench.add([2, 2, 2], tenant="b")
    bench.step()
    bench.step()  # both have 4 computed tokens in 2 blocks: the pool is full
    before = (young.prompt, young.cached, young.completion)
    assert said(bench.step()) == [("r1", 4, 1, True)]
    victim = young.sequences[0]
    assert victim.status is Status.WAITING
    assert not victim.block_table
    assert victim.tokens == [2, 2, 2, 7, 7]
    assert (young.prompt, young.cached, young.completion) == before
    bench.end(old)
    bench.step()
    assert (young.prompt, young.cached, young.completion) == (3, 0, 3)
    assert young.recomputed == 2  # its first block survived in the cache
    assert bench.scheduler.stats.preemptions == 1
    assert bench.scheduler.stats.prefix_queries == 6


def test_the_preempted_come_first_and_nobody_passes_them() -> None:
    bench = Bench(blocks=4, size=2)
    bench.add([1, 1, 1], tenant="a")
    bench.add([2, 2, 2], tenant="b")
    bench.step()
    bench.step()
    bench.add([3], tenant="c")
    assert said(bench.step()) == [("r1", 4, 1, True)]
    assert bench.scheduler.num_waiting == 2


def test_a_preempted_prefill_reuses_no_more_than_it_had() -> None:
    bench = Bench(size=2, budget=10, seqs=2)
    bench.add([1] * 8)
    young = bench.add([1] * 8)
    assert said(bench.step()) == [("r1", 0, 8, True), ("r2", 0, 2, False)]
    other = bench.add([3], tenant="u")  # both slots are t's: one of them is owed to u
    assert said(bench.step()) == [("r1", 8, 1, True), ("r3", 0, 1, True)]
    assert (young.sequences[0].status, young.preemptions) == (Status.WAITING, 1)
    bench.end(other)
    assert said(bench.step())[1] == ("r2", 2, 6, True)  # though all of the prompt is in the cache by now
    assert (young.prompt, young.cached, young.recomputed) == (8, 0, 0)


def test_a_lone_sequence_that_fills_the_pool_is_finished() -> None:
    bench = Bench(blocks=3, size=4)
    group = bench.add([1] * 5)
    for expected in range(1, 8):
        bench.step()
        assert group.completion == expected
    assert bench.pool.num_free == 0


def test_the_choices_wait_for_the_prompt_then_share_it_and_copy_its_rest() -> None:
    bench = Bench(size=4)
    group = bench.add([1, 2, 3, 4, 5, 6], n=3)
    assert said(bench.step()) == [("r1", 0, 6, True)]
    plan = bench.step()
    assert said(plan) == [("r1", 6, 1, True), ("r1", 5, 1, True), ("r1", 5, 1, True)]
    tables = [sequence.block_table for sequence in group.sequences]
    assert len({table[0] for table in tables}) == 1
    assert plan.copies == [(tables[0][1], tables[1][1]), (tables[0][1], tables[2][1])]
    assert len({table[1] for table in tables}) == 3
    assert (group.prompt, group.cached, group.completion, group.recomputed) == (6, 0, 4, 2)
    assert bench.scheduler.stats.prefix_queries == 6


def test_a_choice_whose_first_is_gone_computes_the_rest_of_the_prompt_again() -> None:
    bench = Bench(size=4)
    group = bench.add([1, 2, 3, 4, 5, 6], n=2)
    bench.step()
    bench.scheduler.finish(group.sequences[0], Finish.STOP)
    plan = bench.step()
    assert said(plan) == [("r1", 4, 2, True)]
    assert not plan.copies
    assert (group.prompt, group.cached, group.completion, group.recomputed) == (6, 0, 2, 2)


def test_a_ceiling_is_never_exceeded_by_choices_of_one_step() -> None:
    bench = Bench(size=4)
    group = bench.add([1, 2], n=4, ceiling=6)
    for _ in range(5):
        bench.step()
    assert group.completion == 6
    assert bench.step().scheduled == []
    bench.scheduler.set_ceiling(group, 7, final=False)
    bench.step()
    bench.step()
    assert group.completion == 7


def test_choices_that_could_not_start_at_the_ceiling_start_when_it_is_raised() -> None:
    bench = Bench()
    group = bench.add([1, 2], n=2, ceiling=1)
    bench.step()
    assert [sequence.status for sequence in group.sequences] == [Status.RUNNING, Status.PARKED]
    assert bench.step().scheduled == []
    bench.scheduler.set_ceiling(group, 3, final=False)
    bench.step()
    assert group.completion == 3
    bench.scheduler.set_ceiling(group, 2, final=False)
    assert group.ceiling == 3


def test_a_paused_request_keeps_its_blocks_until_others_need_them() -> None:
    bench = Bench(blocks=4, size=2)
    paused = bench.add([1, 1, 1], tenant="a", ceiling=1)
    bench.step()
    assert len(paused.sequences[0].block_table) == 2
    other = bench.add([2, 2, 2], tenant="b")
    bench.step()
    bench.step()
    assert len(paused.sequences[0].block_table) == 2
    bench.step()
    assert paused.sequences[0].status is Status.PARKED
    assert other.completion == 3
    bench.end(other)
    bench.scheduler.set_ceiling(paused, 2, final=False)
    bench.step()
    assert (paused.prompt, paused.cached, paused.completion) == (3, 0, 2)


def test_paused_requests_do_not_stop_the_queue() -> None:
    bench = Bench(blocks=2, size=2, seqs=1)
    paused = bench.add([1, 1, 1], tenant="a", ceiling=1)
    bench.step()
    bench.add([2, 2, 2], tenant="b")
    assert said(bench.step()) == [("r2", 0, 3, True)]
    assert paused.sequences[0].status is Status.PARKED


def test_one_that_was_refused_a_slot_comes_in_when_all_that_run_pause() -> None:
    bench = Bench(seqs=1)
    paused = bench.add([1], tenant="a", ceiling=3)
    bench.step()
    bench.add([2], tenant="b")
    assert said(bench.step()) == [("r1", 1, 1, True)]
    assert said(bench.step()) == [("r1", 2, 1, True)]
    assert said(bench.step()) == [("r2", 0, 1, True)]
    assert paused.sequences[0].status is Status.PARKED


def test_an_end_frees_everything_at_once_in_every_state() -> None:
    bench = Bench(blocks=6, size=2, seqs=3)
    groups = [bench.add([i] * 3, tenant=str(i), n=2) for i in range(1, 4)]
    bench.step()
    bench.step()
    for group in groups:
        bench.end(group)
    assert bench.pool.num_free == 6
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 0)
    assert not bench.scheduler.groups


def who(plan: StepPlan) -> list[str]:
    return [entry.sequence.request.id for entry in plan.scheduled]


def test_a_step_computes_no_more_adapters_than_there_are_slots_and_the_others_step_aside() -> None:
    bench = Bench(slots=2)
    groups = [bench.add([i], adapter=name) for i, name in enumerate(["a", "b", "c", "a", "", "c", "b"])]
    assert who(bench.step()) == ["r1", "r2", "r4", "r5", "r7"]
    assert who(bench.step()) == ["r1", "r2", "r4", "r5", "r7"]
    bench.end(groups[1])
    bench.end(groups[6])
    assert sorted(who(bench.step())) == ["r1", "r3", "r4", "r5", "r6"]
    assert bench.slots.take_swaps() == [("a", True), ("b", True), ("b", False), ("c", True)]


def test_who_waits_for_a_slot_is_not_overtaken_for_ever() -> None:
    bench = Bench(slots=1, seqs=4)
    groups = [bench.add([1], adapter="a")]
    bench.step()
    waiting = bench.add([2], adapter="b")
    steps = 0
    while not waiting.started:
        steps += 1
        groups.append(bench.add([1], adapter="a"))  # there is always one of a's in the slot when the next one comes
        bench.step()
        bench.end(groups.pop(0))
    assert steps == CLOSE_AFTER_STEPS + 2
    assert not groups[0].started  # it came after its slot was closed to it


def test_a_sequence_that_was_paused_goes_on_when_its_adapter_is_back() -> None:
    bench = Bench(slots=1)
    paused = bench.add([1], adapter="a", ceiling=1)
    assert who(bench.step()) == ["r1"]
    other = bench.add([2], adapter="b")
    assert who(bench.step()) == ["r2"]
    bench.scheduler.set_ceiling(paused, 9, final=False)
    assert who(bench.step()) == ["r2"]
    bench.end(other)
    assert who(bench.step()) == ["r1"]
    assert paused.recomputed == 0


def test_no_step_looks_past_so_many_that_wait_for_a_slot() -> None:
    bench = Bench(slots=1, waiting=LOOKAHEAD * 2)
    bench.add([1], adapter="a")
    bench.step()
    for _ in range(LOOKAHEAD):
        bench.add([2], adapter="b")
    bench.add([3])
    assert who(bench.step()) == ["r1"]
    assert bench.scheduler.num_waiting == LOOKAHEAD + 1


def test_when_all_that_could_go_on_gave_way_the_step_is_planned_again() -> None:
    """An empty plan says that there is nothing to do: the engine would sleep, and work would wait for the next message.

    The older one was paused, so its adapter lost the only slot; the younger one uses that and finds no block.
    """
    bench = Bench(blocks=4, slots=1)
    older = bench.add([1] * 7, adapter="a", ceiling=1)
    assert bench.step().scheduled
    bench.add([2] * 7, adapter="b")
    assert bench.step().scheduled
    bench.scheduler.set_ceiling(older, 50, final=True)
    served = [[entry.sequence.request.id for entry in bench.step().scheduled] for _ in range(4)]
    assert served == [["r2"], ["r1"], ["r1"], ["r1"]]
