"""The core over a scripted runner: what is reported, counted and freed."""

from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.types import (
    AdapterRef,
    AdapterRejected,
    AdapterUnknown,
    Cost,
    EngineBusy,
    EngineError,
    Finish,
    PromptTooLong,
    Request,
    SamplingParams,
    StepOutput,
    TokenCounts,
    Update,
)
from tests.fixtures.scripted import ScriptedRunner, make_core, next_token

PROMPT = list(b"a prompt of 24 characters")[:24]


def spell(text: str):
    """A model that says this text, whatever it is asked."""
    return lambda tokens, _digest, _index: text.encode()[len(tokens) - len(PROMPT)]


def request(id_: str = "r", prompt: list[int] | None = None, **fields) -> Request:
    ours = {
        *("n", "token_ceiling", "ceiling_final", "tenant", "cache_salt", "adapter"),
        *("queue_timeout_ms", "public_cache", "weight"),
    }
    sampling = SamplingParams(**{"max_tokens": 8} | {k: v for k, v in fields.items() if k not in ours})
    rest = {k: v for k, v in fields.items() if k in ours}
    return Request(id=id_, prompt=PROMPT if prompt is None else prompt, sampling=sampling, **rest)


def drain(core: EngineCore) -> list[StepOutput]:
    outputs = []
    while (output := core.step()) is not None:
        core.check_integrity()
        outputs.append(output)
    return outputs


def updates(outputs: list[StepOutput], id_: str = "r") -> list[Update]:
    return [update for output in outputs for update in output.updates if update.request_id == id_]


def text(ups: list[Update], index: int = 0) -> str:
    return "".join(delta.text for update in ups for delta in update.deltas if delta.index == index)


def tokens(ups: list[Update], index: int = 0) -> list[int]:
    return [token for update in ups for delta in update.deltas if delta.index == index for token in delta.token_ids]


def all_free(core: EngineCore) -> bool:
    core.check_integrity()
    pool = core.scheduler.pool
    return pool.num_free == pool.num_blocks and core.scheduler.num_running == core.scheduler.num_waiting == 0


def write_adapter(folder: Path, content: bytes = b"weights", id_: str = "a1") -> AdapterRef:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return AdapterRef(id=id_, name="pirate", path=str(folder))


def test_a_request_is_reported_step_by_step_and_ends_once() -> None:
    core = make_core(ScriptedRunner(), max_num_batched_tokens=10)
    core.add(request(max_tokens=3))
    ups = updates(drain(core))
    assert [(up.counts.prompt, up.counts.completion) for up in ups] == [(10, 0), (20, 0), (24, 1), (24, 2), (24, 3)]
    assert [up.finished for up in ups] == [False] * 4 + [True]
    assert (ups[-1].finish, ups[-1].deltas[0].finish) == (Finish.LENGTH, Finish.LENGTH)
    said, history = tokens(ups), list(PROMPT)
    for token in said:
        assert token == next_token(history, None, 0)
        history.append(token)
    assert all_free(core)


def test_the_time_in_the_queue_is_told_and_does_not_grow() -> None:
    now = [1000]
    runner = ScriptedRunner()
    core = make_core(runner, max_num_seqs=1)
    core._clock_us = lambda: now[0]
    core.add(request("a", max_tokens=2))
    core.add(request("b", max_tokens=2), arrived_us=900)
    core.step()
    now[0] = 1500
    core.step()
    now[0] = 2000
    outputs = drain(core)
    assert {up.queue_us for up in updates(outputs, "b")} == {1100}


def test_the_end_of_sequence_counts_but_is_not_text() -> None:
    core = make_core(ScriptedRunner(token=lambda *_: 65, eos_at=3))
    core.add(request())
    last = updates(ups := drain(core))[-1]
    assert (text(updates(ups)), last.counts.completion, last.finish) == ("AA", 3, Finish.STOP)
    assert last.deltas[0].stop_reason is None
    core.add(request("i", ignore_eos=True))
    assert updates(drain(core), "i")[-1].counts.completion == 8


def test_a_stop_token_counts_and_is_named() -> None:
    core = make_core(ScriptedRunner(token=spell("ABCDEF")))
    core.add(request(stop_token_ids=(67,)))
    ups = updates(drain(core))
    assert (text(ups), tokens(ups), ups[-1].deltas[0].stop_reason) == ("AB", [65, 66, 67], 67)
    core.add(request(stop_token_ids=(67,), include_stop_str_in_output=True))
    assert text(updates(drain(core))) == "ABC"


def test_a_stop_string_is_trimmed_its_tokens_count_and_nothing_later_leaks() -> None:
    core = make_core(ScriptedRunner(token=spell("say stop now")))
    core.add(request(max_tokens=12, stop=(" stop",), logprobs=0))
    ups = updates(drain(core))
    assert text(ups) == "say"
    assert (tokens(ups), ups[-1].counts.completion) == (list(b"say stop"), 8)
    assert sum(len(delta.logprobs) for up in ups for delta in up.deltas) == 8
    assert (ups[-1].finish, ups[-1].deltas[0].stop_reason) == (Finish.STOP, " stop")


def test_text_held_for_a_stop_string_is_given_out_at_the_end() -> None:
    core = make_core(ScriptedRunner(token=spell("say sto")))
    core.add(request(max_tokens=7, stop=("stop",)))
    assert text(updates(drain(core))) == "say sto"


def test_a_request_cut_in_decode_is_billed_what_was_sampled() -> None:
    core = make_core(ScriptedRunner(num_blocks=100))
    core.add(request(max_tokens=300))
    for _ in range(5):
        core.step()
    core.abort("r")
    assert all_free(core)
    [up] = updates(drain(core))
    assert (up.counts, up.finished, up.finish) == (TokenCounts(prompt=24, completion=5), True, Finish.ABORT)
    core.abort("r")
    assert core.step() is None


def test_a_request_cut_in_prefill_is_billed_the_part_computed() -> None:
    core = make_core(ScriptedRunner(), max_num_batched_tokens=10)
    core.add(request())
    core.step()
    core.abort("r")
    [up] = updates(drain(core))
    assert (up.counts, up.finish) == (TokenCounts(prompt=10), Finish.ABORT)
    assert all_free(core)


def test_a_request_cut_in_the_queue_is_billed_nothing() -> None:
    core = make_core(ScriptedRunner(), max_num_seqs=1)
    core.add(request("a", max_tokens=2))
    core.step()
    core.add(request(n=2))
    core.abort("r")
    [up] = updates(drain(core))
    assert (up.counts, up.finish, len(up.deltas)) == (TokenCounts(), Finish.ABORT, 2)
    assert all_free(core)


def test_what_ends_between_steps_is_told_before_the_next_step() -> None:
    runner = ScriptedRunner()
    core = make_core(runner)
    core.add(request("a", max_tokens=50))
    core.add(request("b", max_tokens=50))
    core.step()
    core.abort("a")
    computed = runner.computed
    output = core.step()
    assert [up.request_id for up in output.updates] == ["a"]
    assert runner.computed == computed


def test_the_prompt_of_many_choices_is_counted_once() -> None:
    runner = ScriptedRunner()
    core = make_core(runner, max_num_seqs=3)
    core.add(request("warm"))
    drain(core)
    before = runner.computed
    core.add(request(n=8, max_tokens=4))
    ups = updates(drain(core))
    counts = ups[-1].counts
    assert (counts.prompt, counts.cached, counts.completion) == (24, 20, 32)
    assert [len(tokens(ups, index)) for index in range(8)] == [4] * 8
    assert len({tuple(tokens(ups, index)) for index in range(8)}) == 8
    assert runner.computed - before == 24 - 20 + counts.recomputed + 8 * 3
    assert all_free(core)


def test_preempted_requests_say_and_cost_the_same_as_undisturbed_ones() -> None:
    prompts = {f"r{i}": [i] * 5 for i in range(6)}
    seen, recomputed, stats = [], [], []
    for blocks in (200, 9):
        core = make_core(ScriptedRunner(num_blocks=blocks))
        for id_, prompt in prompts.items():
            core.add(request(id_, prompt, max_tokens=16))
        outputs = drain(core)
        last = {id_: updates(outputs, id_)[-1].counts for id_ in prompts}
        billed = {id_: (counts.prompt, counts.cached, counts.completion) for id_, counts in last.items()}
        seen.append((billed, {id_: tokens(updates(outputs, id_)) for id_ in prompts}))
        recomputed.append(sum(counts.recomputed for counts in last.values()))
        stats.append(core.scheduler.stats)
        assert all_free(core)
    assert seen[0] == seen[1]
    assert recomputed[0] == stats[0].preemptions == 0
    assert recomputed[1] > 0
    assert stats[1].preemptions >= 4
    assert stats[0].prefix_queries == stats[1].prefix_queries == 30


def test_a_request_pauses_at_its_ceiling_once_and_goes_on_when_it_is_raised() -> None:
    core = make_core(ScriptedRunner())
    core.add(request(max_tokens=8, token_ceiling=3))
    ups = updates(drain(core))
    assert [up.paused for up in ups] == [False, False, True]
    core.set_ceiling("r", 3, final=False)
    assert core.step() is None
    core.set_ceiling("r", 5, final=False)
    ups += updates(drain(core))
    assert [up.paused for up in ups] == [False, False, True, False, True]
    core.set_ceiling("r", 2, final=True)  # never fewer than before
    [last] = updates(drain(core))
    assert (last.finish, last.counts.completion, last.paused) == (Finish.QUOTA, 5, False)
    assert all_free(core)


def test_a_final_ceiling_ends_the_request_in_the_step_that_reaches_it() -> None:
    core = make_core(ScriptedRunner())
    core.add(request(max_tokens=8, n=3, token_ceiling=7, ceiling_final=True))
    ups = updates(drain(core))
    assert (ups[-1].finish, ups[-1].counts.completion) == (Finish.QUOTA, 7)
    assert not any(up.paused for up in ups)
    assert sum(len(tokens(ups, index)) for index in range(3)) == 7
    ends = [delta.index for up in ups for delta in up.deltas if delta.finish is not None]
    assert sorted(ends) == [0, 1, 2]
    assert all(len({delta.index for delta in up.deltas}) == len(up.deltas) for up in ups)


def test_a_ceiling_that_is_not_in_the_way_changes_nothing() -> None:
    core = make_core(ScriptedRunner())
    core.add(request(max_tokens=4, token_ceiling=4))
    last = updates(drain(core))[-1]
    assert (last.finish, last.paused, last.counts.completion) == (Finish.LENGTH, False, 4)


def test_what_cannot_be_served_is_refused_with_nothing_changed() -> None:
    core = make_core(ScriptedRunner(num_blocks=8, block_size=4), max_num_seqs=1, max_waiting=1)
    assert core.info.max_model_len == 32  # the cache is smaller than the model's context
    with pytest.raises(PromptTooLong):
        core.add(request(max_tokens=9))
    with pytest.raises(AdapterUnknown):
        core.add(request(adapter=AdapterRef(id="none", name="n", path="p")))
    core.add(request())
    with pytest.raises(EngineError, match="open already"):
        core.add(request())
    core.add(request("s"))
    with pytest.raises(EngineBusy):
        core.add(request("t"))
    core.refuse("t", "the engine's queue is full")
    [up] = updates([core.step()], "t")
    assert (up.finish, up.finished, up.error, up.counts) == (
        Finish.ERROR,
        True,
        "the engine's queue is full",
        TokenCounts(),
    )
    drain(core)
    assert all_free(core)


def test_the_cache_is_by_tenant_salt_and_adapter_content(tmp_path: Path) -> None:
    core = make_core(ScriptedRunner())
    core.load_adapter(same := write_adapter(tmp_path / "a", b"one", "a1"))
    core.load_adapter(again := write_adapter(tmp_path / "b", b"one", "a2"))
    core.load_adapter(other := write_adapter(tmp_path / "c", b"two", "a3"))
    identities = [
        {"tenant": "ab", "cache_salt": "c"},
        {"tenant": "a", "cache_salt": "bc"},
        {"tenant": "ab", "cache_salt": "c", "adapter": same},
        {"tenant": "ab", "cache_salt": "c", "adapter": other},
        {"tenant": "ab", "cache_salt": "c", "adapter": again},
    ]
    cached = []
    for number, identity in enumerate(identities):
        core.add(request(str(number), **identity))
        cached.append(updates(drain(core), str(number))[-1].counts.cached)
    assert cached == [0, 0, 0, 0, 20]


def test_an_adapter_is_unloaded_after_its_last_request(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    core = make_core(runner)
    ref = write_adapter(tmp_path / "a")
    assert core.load_adapter(ref) == core.load_adapter(ref)
    core.add(request(adapter=ref, max_tokens=4))
    core.step()
    core.unload_adapter(ref.id)
    assert (core.take_unloaded(), runner.removed) == ([], [])
    with pytest.raises(AdapterUnknown):
        core.add(request("late", adapter=ref))
    assert updates(drain(core))[-1].finish is Finish.LENGTH
    assert (core.take_unloaded(), runner.removed) == ([ref.id], [ref.id])
    core.unload_adapter("never seen")
    assert core.take_unloaded() == ["never seen"]


def test_an_adapter_that_nobody_asked_for_is_unloaded_too(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    core = make_core(runner)
    ref = write_adapter(tmp_path / "a")
    core.load_adapter(ref)
    core.unload_adapter(ref.id)
    assert (core.take_unloaded(), runner.resident) == ([ref.id], {})
    assert core.load_adapter(ref).id == ref.id  # and may come again


def test_a_rejected_adapter_is_not_known(tmp_path: Path) -> None:
    core = make_core(ScriptedRunner())
    ref = AdapterRef(id="a", name="n", path=str(tmp_path / "nothing"))
    with pytest.raises(AdapterRejected):
        core.load_adapter(ref)
    with pytest.raises(AdapterUnknown):
        core.add(request(adapter=ref))


def test_a_request_that_fails_a_step_fails_alone() -> None:
    core = make_core(ScriptedRunner(poison=66))
    core.add(request("good", max_tokens=5))
    core.step()
    core.add(request("bad", [66, 1, 2], n=2))
    outputs = drain(core)
    assert updates(outputs, "good")[-1].finish is Finish.LENGTH
    [bad] = updates(outputs, "bad")
    assert (bad.finish, bad.counts.completion) == (Finish.ERROR, 0)
    assert bad.error
    assert all_free(core)


def test_a_runner_that_can_do_nothing_ends_the_engine() -> None:
    core = make_core(ScriptedRunner(broken=True))
    for number in range(2):
        core.add(request(str(number)))
        assert updates(drain(core), str(number))[-1].finish is Finish.ERROR
    core.add(request("last"))
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        core.step()


def test_the_stats_tell_what_is_there() -> None:
    core = make_core(ScriptedRunner(), max_num_seqs=1)
    core.add(request("a", max_tokens=2))
    core.add(request("b", max_tokens=2))
    first = core.step().stats
    assert (first.running, first.waiting, first.blocks_used, first.blocks_total) == (1, 1, 6, 64)
    last = drain(core)[-1].stats
    assert (last.running, last.waiting, last.blocks_used, last.steps_total) == (0, 0, 0, 4)
    assert (last.prefix_queries_total, last.prefix_hits_total) == (48, 20)


class Clock:
    """Microseconds; a step of the scripted runner takes `step_us` of them."""

    def __init__(self, step_us: int = 0) -> None:
        self.now_us = 1_000_000
        self.step_us = step_us

    def __call__(self) -> int:
        return self.now_us

    def core(self, runner: ScriptedRunner | None = None, **config) -> EngineCore:
        runner = runner or ScriptedRunner()
        execute = runner.execute

        def timed(plan):
            self.now_us += self.step_us
            return execute(plan)

        runner.execute = timed
        core = make_core(runner, **config)
        core._clock_us = self
        return core


def test_who_waits_too_long_expires_at_the_next_step_though_the_engine_is_busy() -> None:
    clock = Clock(step_us=1000)
    core = clock.core(max_num_seqs=1)
    core.add(request("a", max_tokens=20))
    core.add(request("b", n=2, queue_timeout_ms=3))
    core.add(request("c", queue_timeout_ms=4))
    outputs = [core.step() for _ in range(3)]
    assert not updates(outputs, "b")
    output = core.step()
    [up] = output.updates
    assert (up.request_id, up.counts, up.finish, up.finished) == ("b", TokenCounts(), Finish.EXPIRED, True)
    assert [(delta.token_ids, delta.finish) for delta in up.deltas] == [([], Finish.EXPIRED)] * 2
    assert up.cost == Cost(queue_us=3000)
    assert up.queue_us == 3000
    core.abort("a")
    outputs = drain(core)
    assert updates(outputs, "c")[-1].finish is Finish.LENGTH  # there was room for it in time
    assert all_free(core)


@pytest.mark.parametrize(
    ("engines_s", "own_ms", "waits_us"), [(0.01, None, 10_000), (0.01, 4, 4000), (0.01, 40, 10_000)]
)
def test_the_lesser_of_two_limits_stands_and_is_told_to_who_sleeps(engines_s, own_ms, waits_us) -> None:
    clock = Clock()
    core = clock.core(max_num_seqs=1, queue_timeout_s=engines_s)
    core.add(request("a", max_tokens=40))
    core.step()
    clock.now_us += 500_000  # it has begun: its own limit means nothing any more
    core.add(request("b", queue_timeout_ms=own_ms))
    assert updates([core.step()], "a")[0].finish is None
    assert core.due_in_s() == waits_us / 1e6
    clock.now_us += waits_us - 1
    assert not updates([core.step()], "b")
    clock.now_us += 1
    assert updates([core.step()], "b")[0].finish is Finish.EXPIRED
    assert core.due_in_s() is None
    drain(core)
    assert all_free(core)


def test_one_that_was_preempted_has_begun_and_does_not_expire() -> None:
    clock = Clock(step_us=10_000)
    core = clock.core(ScriptedRunner(num_blocks=9), queue_timeout_s=0.005)
    for number in range(4):
        core.add(request(f"r{number}", [number] * 5, max_tokens=16))
    outputs = drain(core)
    assert core.scheduler.stats.preemptions > 0
    assert {updates(outputs, f"r{number}")[-1].finish for number in range(4)} == {Finish.LENGTH}


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    core = Clock().core(queue_timeout_s=1000.0)
    for number in range(1000):
        core.add(request(str(number), max_tokens=1))
        drain(core)
    assert len(core._deadlines) < 100


def test_what_a_request_cost_is_told_with_its_last_update() -> None:
    clock = Clock(step_us=100)
    core = clock.core()
    core.add(request("a", [1] * 4, max_tokens=2))
    ups = updates(outputs := drain(core), "a")
    # One block for the first step, two for the second, in which the token after the prompt is read back.
    assert [up.cost for up in ups] == [None, Cost(compute_us=200, kv_block_us=100 + 200)]
    assert (outputs[-1].stats.busy_us_total, outputs[-1].stats.ended_compute_us_total) == (200, 200)


def test_a_step_is_shared_out_by_tokens_and_no_microsecond_is_lost() -> None:
    clock = Clock(step_us=100)
    core = clock.core()
    for id_, length in (("a", 20), ("b", 9), ("c", 1)):
        core.add(request(id_, [1] * length, max_tokens=1, tenant=id_))
    outputs = drain(core)
    costs = {id_: updates(outputs, id_)[-1].cost.compute_us for id_ in "abc"}
    assert sum(costs.values()) == 100
    assert costs["a"] in (66, 67)
    assert costs["b"] == 30
    assert costs["c"] in (3, 4)


def test_an_abort_tells_the_cost_so_far_and_a_refusal_none() -> None:
    clock = Clock(step_us=100)
    core = clock.core(max_num_seqs=1)
    core.add(request("a", [1] * 4, max_tokens=20))
    core.add(request("b", [1] * 4))
    core.step()
    clock.now_us += 50  # the blocks are held between steps too
    core.abort("a")
    core.abort("b")
    core.refuse("c", "no")
    told = {up.request_id: up.cost for up in core.step().updates}
    assert told == {
        "a": Cost(compute_us=100, kv_block_us=150),
        "b": Cost(queue_us=150),
        "c": Cost(),
    }


def test_a_step_that_failed_is_paid_by_those_who_were_in_it() -> None:
    clock = Clock(step_us=100)
    core = clock.core(ScriptedRunner(poison=66))
    core.add(request("good", max_tokens=1))
    core.add(request("bad", [66, 1, 2]))
    outputs = drain(core)
    costs = [updates(outputs, id_)[-1].cost.compute_us for id_ in ("good", "bad")]
    assert sum(costs) == outputs[-1].stats.busy_us_total == 300  # once together, and each alone
    assert min(costs) > 0


def test_a_public_salt_is_everybodys_and_reaches_no_tenants_own_blocks() -> None:
    core = make_core(ScriptedRunner())
    identities = [
        {"tenant": "a", "cache_salt": "s"},
        {"tenant": "b", "cache_salt": "s", "public_cache": True},
        {"tenant": "c", "cache_salt": "s", "public_cache": True},
        {"tenant": "tenant", "cache_salt": "s"},
        {"tenant": "a", "cache_salt": "s"},
    ]
    cached = []
    for number, identity in enumerate(identities):
        core.add(request(str(number), **identity))
        cached.append(updates(drain(core), str(number))[-1].counts.cached)
    assert cached == [0, 0, 20, 0, 20]


def test_another_tenants_cache_changes_nothing_in_what_is_looked_up_and_computed() -> None:
    """What B could time: the blocks looked for, the steps and their tokens, with A's same prompt cached or not."""
    seen = []
    for cached in (True, False):
        runner = ScriptedRunner()
        core = make_core(runner)
        core.add(request("a", PROMPT if cached else PROMPT[::-1], tenant="A"))
        drain(core)
        runner.steps.clear()
        looked: list[tuple[bytes, bool]] = []
        find = core.scheduler.pool.find

        def spied(key, parent, tokens, find=find, looked=looked):
            found = find(key, parent, tokens)
            looked.append((key, found is None))
            return found

        core.scheduler.pool.find = spied
        core.add(request("b", tenant="B"))
        ups = updates(drain(core), "b")
        seen.append((looked, runner.steps, [up.counts for up in ups]))
    assert seen[0] == seen[1]
    assert [missed for _, missed in seen[0][0]] == [True]  # it stops at the first block
