"""The obligations of `engine.client.Engine`, held against the fake engine and the real one in its process.

The real one serves a tiny random model, whose end-of-sequence token is ignored: tests say how much is sampled.
"""

import asyncio
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine.client import Engine
from engine.fake import FakeEngine
from engine.process import EngineProcess
from engine.types import (
    AdapterRef,
    AdapterRejected,
    AdapterUnknown,
    Cost,
    EngineBusy,
    EngineConfig,
    EngineError,
    EngineUnavailable,
    Finish,
    PromptTooLong,
    Request,
    SamplingParams,
    StepOutput,
    TokenCounts,
    Update,
)

BLOCK = 4
BUDGET = 8  # prompt tokens a step, so a prompt of a hundred takes a dozen steps
PROMPT = [65 + i % 20 for i in range(100)]


pytestmark = pytest.mark.asyncio(loop_scope="module")


class Bench:
    """An engine for one test: what its steps said, how it is killed, and requests that share no cache with others."""

    def __init__(self, engine: Engine, kill: Callable[[], None]) -> None:
        self.engine = engine
        self.kill = kill
        self.restarts = engine.restarts
        self.shown: list[StepOutput] = []
        self.engine.on_step = self.shown.append
        self._tenant = uuid.uuid4().hex

    def ask(
        self, id_: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 8, tenant: str = "", **fields: object
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(id=id_, prompt=prompt, sampling=sampling, tenant=self._tenant + tenant, **fields)

    def counts_shown(self, id_: str) -> list[TokenCounts]:
        return [update.counts for output in self.shown for update in output.updates if update.request_id == id_]

    async def settled(self) -> bool:
        """The engine holds nothing for anybody."""
        for _ in range(500):
            stats = self.engine.stats
            if stats.running == stats.waiting == stats.blocks_used == 0:
                return True
            await asyncio.sleep(0.01)
        return False

    async def back(self) -> None:
        """The engine died once, and serves again."""
        async with asyncio.timeout(60):
            while self.engine.restarts == self.restarts:  # noqa: ASYNC110  # the interface has no event for it
                await asyncio.sleep(0.02)
        assert self.engine.ready


def make_fake() -> FakeEngine:
    return FakeEngine(
        prefill_tokens=BUDGET, block_size=BLOCK, max_num_seqs=4, max_waiting=4, max_model_len=512, step_s=0.002
    )


def make_process(model: Path) -> EngineProcess:
    return EngineProcess(
        EngineConfig(
            model=str(model),
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=BUDGET,
            max_waiting=4,
            max_adapters=64,
            kv_cache_bytes=4 << 20,
            threads=1,
        )
    )


@pytest_asyncio.fixture(params=["fake", "process"], scope="module", loop_scope="module")
async def started(request: pytest.FixtureRequest) -> AsyncIterator[FakeEngine | EngineProcess]:
    engine = make_fake() if request.param == "fake" else make_process(request.getfixturevalue("tiny_model"))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def bench(started: FakeEngine | EngineProcess) -> Bench:
    if isinstance(started, FakeEngine):
        return Bench(started, started.kill)
    return Bench(started, lambda: os.kill(started.pid or 0, signal.SIGKILL))


async def read(stream: AsyncIterator[Update]) -> list[Update]:
    return [update async for update in stream]


def tokens(ups: list[Update], index: int = 0) -> list[int]:
    return [token for up in ups for delta in up.deltas if delta.index == index for token in delta.token_ids]


def write_adapter(folder: Path, scale: float = 1.0) -> AdapterRef:
    """A PEFT folder for the tiny model: rank 2 on the query projections."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    shapes = {"lora_A": (2, 64), "lora_B": (64, 2)}
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{side}.weight": torch.full(shape, scale)
        for layer in range(2)
        for side, shape in shapes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return AdapterRef(id=uuid.uuid4().hex, name=folder.name, path=str(folder))


async def test_a_stream_yields_every_update_in_order_and_one_last(bench: Bench) -> None:
    ups = await read(bench.engine.submit(bench.ask(max_tokens=5)))
    assert [up.finished for up in ups] == [False] * (len(ups) - 1) + [True]
    assert ups[-1].counts == TokenCounts(prompt=100, completion=5)
    assert (ups[-1].finish, len(tokens(ups))) == (Finish.LENGTH, 5)
    assert [up.counts for up in ups] == bench.counts_shown("r")
    prompts = [up.counts.prompt for up in ups]
    assert prompts == sorted(prompts)
    assert prompts[0] == BUDGET
    assert await bench.settled()


async def test_the_same_prompt_again_is_mostly_cached_and_says_the_same(bench: Bench) -> None:
    first = await read(bench.engine.submit(bench.ask("a", tenant="t")))
    again = await read(bench.engine.submit(bench.ask("b", tenant="t")))
    other = await read(bench.engine.submit(bench.ask("c", tenant="u")))
    assert again[-1].counts == TokenCounts(prompt=100, cached=96, completion=8)
    assert other[-1].counts == TokenCounts(prompt=100, cached=0, completion=8)
    assert tokens(first) == tokens(again) == tokens(other)


async def test_choices_share_a_prompt_that_is_counted_once(bench: Bench) -> None:
    ups = await read(bench.engine.submit(bench.ask(n=3, max_tokens=6)))
    counts = ups[-1].counts
    assert (counts.prompt, counts.cached, counts.completion) == (100, 0, 18)
    assert [len(tokens(ups, index)) for index in range(3)] == [6, 6, 6]
    ends = [delta.index for up in ups for delta in up.deltas if delta.finish is not None]
    assert sorted(ends) == [0, 1, 2]


async def test_many_streams_at_once_each_get_their_own(bench: Bench) -> None:
    requests = [bench.ask(str(i), PROMPT[i:], 4 + i) for i in range(8)]
    streams = [bench.engine.submit(request) for request in requests]
    results = await asyncio.gather(*map(read, streams))
    for i, ups in enumerate(results):
        assert ups[-1].counts.completion == len(tokens(ups)) == 4 + i
        assert {up.request_id for up in ups} == {str(i)}
    alone = await read(bench.engine.submit(bench.ask("alone", PROMPT[3:], 7)))
    assert tokens(alone) == tokens(results[3])
    assert await bench.settled()


async def test_a_stream_nobody_reads_blocks_no_other(bench: Bench) -> None:
    unread = bench.engine.submit(bench.ask("unread"))
    assert (await read(bench.engine.submit(bench.ask("other", max_tokens=30))))[-1].finished
    assert (await read(unread))[-1].finished


async def test_an_abort_in_decode_ends_with_the_counts_of_the_running_step(bench: Bench) -> None:
    ups = []
    async for update in bench.engine.submit(bench.ask(max_tokens=400)):
        ups.append(update)
        if update.counts.completion == 5:
            bench.engine.abort("r")
    last = ups[-1]
    assert (last.finish, last.finished) == (Finish.ABORT, True)
    assert 5 <= last.counts.completion == len(tokens(ups)) < 400
    assert bench.counts_shown("r")[-1] == last.counts
    assert await bench.settled()


async def test_an_abort_in_prefill_counts_the_part_done(bench: Bench) -> None:
    for attempt in range(20):  # the engine may be done with the prefill before it is told
        id_ = f"r{attempt}"
        ups = []
        async for update in bench.engine.submit(bench.ask(id_, PROMPT * 4, cache_salt=id_)):
            if not ups:
                bench.engine.abort(id_)
            ups.append(update)
        counts = ups[-1].counts
        assert bench.counts_shown(id_)[-1] == counts
        assert await bench.settled()
        if ups[-1].finish is Finish.ABORT and counts.completion == 0:
            assert 0 < counts.prompt < 400
            assert counts.prompt % BUDGET == 0
            return
    pytest.fail("the abort never came in time")


async def test_an_abort_in_the_queue_counts_nothing(bench: Bench) -> None:
    running = [bench.engine.submit(bench.ask(str(i), max_tokens=40)) for i in range(4)]
    queued = bench.engine.submit(bench.ask("queued", n=2))
    bench.engine.abort("queued")
    [last] = await read(queued)
    assert (last.counts, last.finish, last.finished) == (TokenCounts(), Finish.ABORT, True)
    for stream in running:
        assert (await read(stream))[-1].counts.completion == 40


async def test_a_request_that_waits_too_long_expires_and_counts_nothing(bench: Bench) -> None:
    running = [bench.engine.submit(bench.ask(str(i), PROMPT[:4], 500)) for i in range(4)]
    for stream in running:
        await anext(stream)
    ups = await read(bench.engine.submit(bench.ask("late", n=2, queue_timeout_ms=1)))
    patient = bench.engine.submit(bench.ask("patient", queue_timeout_ms=600_000))
    [last] = ups
    assert (last.counts, last.finish, last.finished, last.error) == (TokenCounts(), Finish.EXPIRED, True, None)
    assert [(delta.index, delta.token_ids) for delta in last.deltas] == [(0, []), (1, [])]
    assert {delta.finish for delta in last.deltas} == {Finish.EXPIRED}
    assert last.queue_us >= 1000
    assert last.cost == Cost(queue_us=last.queue_us)
    assert bench.counts_shown("late") == [TokenCounts()]
    for stream in running:
        assert (await read(stream))[-1].finish is Finish.LENGTH
    assert (await read(patient))[-1].finish is Finish.LENGTH
    assert await bench.settled()


async def test_what_requests_cost_adds_up_to_what_the_engine_was_busy(bench: Bench) -> None:
    before = bench.engine.stats
    streams = [bench.engine.submit(bench.ask(str(i), PROMPT[i:], 4 + i, n=1 + i % 2)) for i in range(6)]
    results = await asyncio.gather(*map(read, streams))
    assert await bench.settled()
    costs = [ups[-1].cost for ups in results]
    assert all(cost is not None and cost.compute_us > 0 and cost.kv_block_us > 0 for cost in costs)
    assert all(up.cost is None for ups in results for up in ups[:-1])
    told_us = bench.engine.stats.ended_compute_us_total - before.ended_compute_us_total
    assert sum(cost.compute_us for cost in costs) == told_us
    assert told_us == bench.engine.stats.busy_us_total - before.busy_us_total


async def test_a_public_salt_is_shared_between_tenants_and_no_other(bench: Bench) -> None:
    salt = uuid.uuid4().hex
    asked = [
        bench.ask("a", tenant="t", cache_salt=salt, public_cache=True),
        bench.ask("b", tenant="u", cache_salt=salt, public_cache=True),
        bench.ask("c", tenant="u", cache_salt=salt),
        bench.ask("d", tenant="u", cache_salt=salt + "x", public_cache=True),
    ]
    cached = [(await read(bench.engine.submit(request)))[-1].counts.cached for request in asked]
    assert cached == [0, 96, 0, 0]


async def test_abort_and_ceiling_of_an_unknown_or_ended_request_do_nothing(bench: Bench) -> None:
    bench.engine.abort("never")
    bench.engine.set_ceiling("never", 5, final=True)
    stream = bench.engine.submit(bench.ask(max_tokens=2))
    ups = await read(stream)
    bench.engine.abort("r")
    bench.engine.set_ceiling("r", 5, final=True)
    assert (await read(stream)) == []
    assert ups[-1].finish is Finish.LENGTH
    assert (await read(bench.engine.submit(bench.ask("next", max_tokens=2))))[-1].finish is Finish.LENGTH


@pytest.mark.parametrize("n", [1, 3])
async def test_a_ceiling_pauses_is_raised_and_ends_to_the_token(bench: Bench, n: int) -> None:
    pauses = []
    ups = []
    async for update in bench.engine.submit(bench.ask(max_tokens=50, n=n, token_ceiling=7)):
        ups.append(update)
        if update.paused:
            pauses.append(update.counts.completion)
            if len(pauses) < 3:
                bench.engine.set_ceiling("r", 7 * (len(pauses) + 1), final=False)
            else:
                bench.engine.set_ceiling("r", 10, final=True)
    assert pauses == [7, 14, 21]
    assert (ups[-1].finish, ups[-1].counts.completion) == (Finish.QUOTA, 21)
    assert sum(len(tokens(ups, index)) for index in range(n)) == 21
    assert await bench.settled()


async def test_a_final_ceiling_ends_without_a_pause_and_a_far_one_is_not_felt(bench: Bench) -> None:
    ups = await read(bench.engine.submit(bench.ask("a", max_tokens=50, n=2, token_ceiling=9, ceiling_final=True)))
    assert (ups[-1].finish, ups[-1].counts.completion) == (Finish.QUOTA, 9)
    assert not any(up.paused for up in ups)
    ups = await read(bench.engine.submit(bench.ask("b", max_tokens=5, token_ceiling=5)))
    assert (ups[-1].finish, ups[-1].counts.completion) == (Finish.LENGTH, 5)
    assert not any(up.paused for up in ups)


async def test_a_paused_request_can_be_aborted(bench: Bench) -> None:
    ups = []
    async for update in bench.engine.submit(bench.ask(max_tokens=50, token_ceiling=3)):
        ups.append(update)
        if update.paused:
            bench.engine.abort("r")
    assert (ups[-1].finish, ups[-1].counts.completion) == (Finish.ABORT, 3)
    assert await bench.settled()


async def test_what_cannot_be_served_is_refused_before_anything_is_computed(bench: Bench) -> None:
    with pytest.raises(PromptTooLong):
        bench.engine.submit(bench.ask(max_tokens=413))
    with pytest.raises(AdapterUnknown):
        bench.engine.submit(bench.ask(adapter=AdapterRef(id="none", name="n", path="p")))
    with pytest.raises(EngineError):
        bench.engine.submit(bench.ask(prompt=[]))
    with pytest.raises(EngineError):
        bench.engine.submit(bench.ask(prompt=[10_000]))
    for fields in ({"weight": 0.0}, {"weight": float("nan")}, {"queue_timeout_ms": 0}, {"public_cache": True}):
        with pytest.raises(EngineError, match=next(iter(fields))):
            bench.engine.submit(bench.ask(**fields))
    streams = [bench.engine.submit(bench.ask(str(i), max_tokens=20)) for i in range(8)]
    with pytest.raises(EngineBusy):
        bench.engine.submit(bench.ask("one too many"))
    assert all(ups[-1].finish is Finish.LENGTH for ups in await asyncio.gather(*map(read, streams)))
    assert bench.counts_shown("one too many") == []


async def test_a_death_fails_every_open_stream_and_the_engine_comes_back(bench: Bench) -> None:
    streams = [bench.engine.submit(bench.ask(str(i), max_tokens=400)) for i in range(6)]
    received: dict[str, list[Update]] = {str(i): [] for i in range(6)}

    async def follow(id_: str, stream: AsyncIterator[Update]) -> None:
        async for update in stream:
            received[id_].append(update)
            if id_ == "0" and update.counts.completion == 3:
                bench.kill()

    ends = await asyncio.gather(*(follow(str(i), s) for i, s in enumerate(streams)), return_exceptions=True)
    assert all(isinstance(end, EngineUnavailable) for end in ends)
    for id_, ups in received.items():
        assert [up.counts for up in ups] == bench.counts_shown(id_)
    assert not bench.engine.ready
    with pytest.raises(EngineUnavailable):
        bench.engine.submit(bench.ask("while down"))
    await bench.back()
    assert (await read(bench.engine.submit(bench.ask("after"))))[-1].finish is Finish.LENGTH


async def test_counts_are_shown_before_any_stream_sees_them(bench: Bench) -> None:
    async def follow(id_: str) -> None:
        async for update in bench.engine.submit(bench.ask(id_)):
            assert update.counts in bench.counts_shown(id_)

    await asyncio.gather(*(follow(str(i)) for i in range(3)))


async def test_a_step_that_cannot_be_recorded_is_not_delivered(bench: Bench) -> None:
    recorded: list[int] = []

    def record(output: StepOutput) -> None:
        if any(update.counts.completion == 3 for update in output.updates):
            raise OSError("disk full")
        recorded.extend(update.counts.completion for update in output.updates)

    bench.engine.on_step = record
    received: list[int] = []

    async def follow() -> None:
        async for update in bench.engine.submit(bench.ask(max_tokens=50)):
            received.append(update.counts.completion)

    with pytest.raises(EngineUnavailable):
        await follow()
    assert received == recorded
    assert max(received) == 2
    assert await bench.settled()
    bench.engine.on_step = None
    assert (await read(bench.engine.submit(bench.ask("next"))))[-1].finish is Finish.LENGTH


async def test_an_adapter_has_its_own_output_and_its_own_cache(bench: Bench, tmp_path: Path) -> None:
    info = await bench.engine.load_adapter(ref := write_adapter(tmp_path / "loud"))
    assert (info.id, info.rank, info.targets) == (ref.id, 2, ("q_proj",))
    assert len(info.digest) == 64
    await read(bench.engine.submit(bench.ask("base")))
    ups = await read(bench.engine.submit(bench.ask("adapted", adapter=ref)))
    assert ups[-1].counts == TokenCounts(prompt=100, cached=0, completion=8)
    again = await read(bench.engine.submit(bench.ask("again", adapter=ref)))
    assert again[-1].counts.cached == 96
    assert tokens(again) == tokens(ups)


async def test_one_content_under_two_names_shares_and_other_content_does_not(bench: Bench, tmp_path: Path) -> None:
    refs = [write_adapter(tmp_path / name, scale) for name, scale in (("a", 1.0), ("b", 1.0), ("c", 0.5))]
    digests = [(await bench.engine.load_adapter(ref)).digest for ref in refs]
    assert digests[0] == digests[1] != digests[2]
    cached = []
    for ref in refs:
        cached.append((await read(bench.engine.submit(bench.ask(ref.id, adapter=ref))))[-1].counts.cached)
    assert cached == [0, 96, 0]


async def test_an_adapter_that_cannot_be_served_is_rejected_and_not_known(bench: Bench, tmp_path: Path) -> None:
    nothing = AdapterRef(id="nothing", name="n", path=str(tmp_path / "nothing"))
    changed = AdapterRef(id="changed", name="n", path=write_adapter(tmp_path / "changed").path, digest="0" * 64)
    for ref in (nothing, changed):
        with pytest.raises(AdapterRejected) as rejected:
            await bench.engine.load_adapter(ref)
        assert str(tmp_path) not in str(rejected.value)
        with pytest.raises(AdapterUnknown):
            bench.engine.submit(bench.ask(adapter=ref))


async def test_unloading_waits_for_the_last_request_and_refuses_new_ones_at_once(bench: Bench, tmp_path: Path) -> None:
    ref = write_adapter(tmp_path / "a")
    await bench.engine.load_adapter(ref)
    stream = bench.engine.submit(bench.ask(adapter=ref, max_tokens=60))
    await anext(stream)
    unload = asyncio.create_task(bench.engine.unload_adapter(ref.id))
    await asyncio.sleep(0)
    with pytest.raises(AdapterUnknown):
        bench.engine.submit(bench.ask("late", adapter=ref))
    ups = await read(stream)
    assert ups[-1].finish is Finish.LENGTH
    async with asyncio.timeout(10):
        await unload
    with pytest.raises(AdapterUnknown):
        bench.engine.submit(bench.ask("later", adapter=ref))
    await bench.engine.unload_adapter("never loaded")


async def test_loaded_adapters_survive_a_death(bench: Bench, tmp_path: Path) -> None:
    kept, gone = write_adapter(tmp_path / "kept"), write_adapter(tmp_path / "gone")
    await bench.engine.load_adapter(kept)
    await bench.engine.load_adapter(gone)
    await bench.engine.unload_adapter(gone.id)
    bench.kill()
    await bench.back()
    assert (await read(bench.engine.submit(bench.ask(adapter=kept))))[-1].finish is Finish.LENGTH
    with pytest.raises(AdapterUnknown):
        bench.engine.submit(bench.ask(adapter=gone))


async def test_prompt_logprobs_are_told_once_and_the_prompt_is_computed(bench: Bench) -> None:
    prompt = [5 + place % 50 for place in range(3 * BUDGET)]
    first = bench.ask("p1", prompt, 2)
    await read(bench.engine.submit(first))
    asked = msgspec.structs.replace(
        first, id="p2", n=2, sampling=msgspec.structs.replace(first.sampling, prompt_logprobs=2)
    )
    ups = await read(bench.engine.submit(asked))
    (told,) = [up for up in ups if up.prompt_logprobs is not None]
    assert told.counts.completion <= 2  # with the first tokens, or before
    assert told.prompt_logprobs is not None
    assert told.prompt_logprobs[0] is None
    entries = [entry for entry in told.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in entries] == prompt[1:]
    assert all(len(entry.top) == 2 and entry.rank >= 1 for entry in entries)
    assert (ups[-1].counts.prompt, ups[-1].counts.cached) == (len(prompt), 0)
    again = await read(bench.engine.submit(msgspec.structs.replace(first, id="p3")))
    assert again[-1].counts.cached > 0
    assert await bench.settled()
