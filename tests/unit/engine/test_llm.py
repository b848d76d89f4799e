"""The offline door over the tiny model."""

import io
import os
import re
import signal
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.llm import LLM
from engine.types import (
    AdapterRef,
    AdapterUnknown,
    EngineError,
    EngineUnavailable,
    Finish,
    Guide,
    PromptTooLong,
    SamplingParams,
    StepOutput,
)
from tests.peft_adapters import make_adapter

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    import torch

    before = torch.get_num_threads()
    yield LLM(tiny_model, dtype="float32", device="cpu", threads=1, kv_cache_bytes=2 << 20, max_num_seqs=3)
    torch.set_num_threads(before)


def test_a_batch_keeps_its_order_and_says_what_each_prompt_says_alone(llm: LLM) -> None:
    prompts = ["the quick brown fox", "hello", [7, 8, 9], "a token is counted once", "numbers 0 1 2"]
    params = [SamplingParams(max_tokens=3 + i, temperature=0.0, ignore_eos=True) for i in range(5)]
    together = llm.generate(prompts, params)
    assert [len(completion.choices[0].token_ids) for completion in together] == [3, 4, 5, 6, 7]
    for prompt, sampling, completion in zip(prompts, params, together, strict=True):
        [alone] = llm.generate([prompt], sampling)
        assert alone.choices == completion.choices
        assert completion.text == llm.tokenizer.decode(completion.choices[0].token_ids)
        assert completion.choices[0].finish is Finish.LENGTH
    assert together[2].prompt_token_ids == [7, 8, 9]
    assert together[2].counts.prompt == 3


def test_without_a_seed_no_two_calls_draw_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=32, temperature=2.0, ignore_eos=True)
    first, second = (llm.generate("A", params)[0] for _ in range(2))
    assert first.choices[0].token_ids != second.choices[0].token_ids
    seeded = msgspec.structs.replace(params, seed=5)
    first, second = (llm.generate("A", seeded)[0] for _ in range(2))
    assert first.choices[0].token_ids == second.choices[0].token_ids


def test_choices_and_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=7, logprobs=2, ignore_eos=True)
    [completion] = llm.generate(["hello world"], sampling, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.counts.completion == 15
    assert len({tuple(choice.token_ids) for choice in completion.choices}) == 3
    for choice in completion.choices:
        assert [logprob.token_id for logprob in choice.logprobs] == choice.token_ids
        assert all(len(logprob.top) == 2 for logprob in choice.logprobs)


def test_a_chat_is_answered_in_the_models_format(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    completion = llm.chat(messages, GREEDY)
    assert completion.prompt_token_ids == llm.tokenizer.apply_chat(messages)
    assert len(completion.choices[0].token_ids) == 6


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "how are you today?", "numbers")]
    answers = llm.chat(conversations, [SamplingParams(max_tokens=2 + i, temperature=0.0) for i in range(3)])
    assert [answer.prompt_token_ids for answer in answers] == [llm.tokenizer.apply_chat(c) for c in conversations]
    [alone] = llm.chat(conversations[2:], SamplingParams(max_tokens=4, temperature=0.0))
    assert alone.choices == answers[2].choices
    bare = llm.chat(conversations[0], GREEDY, add_generation_prompt=False)
    assert len(bare.prompt_token_ids) < len(answers[0].prompt_token_ids)
    with pytest.raises(ValueError, match="at least one message"):
        llm.chat([])


def test_one_text_is_a_batch_of_one_and_what_is_no_prompt_is_refused(llm: LLM) -> None:
    [completion] = llm.generate("hello", GREEDY)
    assert completion.choices == llm.generate(["hello"], GREEDY)[0].choices
    assert llm.generate([]) == []
    with pytest.raises(TypeError, match="not int"):
        llm.generate([1, 2, 3], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="params: 2 are given for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_each_prompt_may_have_its_own_adapter(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    a, b = (
        llm.load_adapter(make_adapter(tiny_model, tmp_path / n, seed=s, **options), n) for s, n in ((1, "a"), (2, "b"))
    )
    prompts = ["the quick brown fox"] * 4
    mixed = llm.generate(prompts, GREEDY, adapter=[None, a, b, a])
    alone = [llm.generate(prompts[:1], GREEDY, adapter=ref)[0] for ref in (None, a, b)]
    assert [c.text for c in mixed] == [alone[0].text, alone[1].text, alone[2].text, alone[1].text]
    assert len({c.text for c in alone}) == 3
    with pytest.raises(ValueError, match="adapter: 1 are given for 4 prompts"):
        llm.generate(prompts, GREEDY, adapter=[a])
    llm.unload_adapter(a)
    llm.unload_adapter(b)
    with pytest.raises(AdapterUnknown):
        llm.generate(prompts, GREEDY, adapter=[None, None, None, a])
    assert llm.generate(prompts[:1], GREEDY)[0].choices == alone[0].choices


def test_the_scheduler_sees_a_long_batch_in_waves(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    depths, step = [], llm._core.step

    def watched() -> StepOutput | None:
        depths.append(len(llm._core.scheduler.groups))
        return step()

    monkeypatch.setattr(llm._core, "step", watched)
    prompts = [[3 + i % 200, 5, 6] for i in range(100)]
    done = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    assert [completion.prompt_token_ids for completion in done] == prompts
    assert all(completion.counts.completion == 2 for completion in done)
    assert max(depths) == 6  # twice max_num_seqs
    assert all(0 < completion.first_token_s <= completion.finished_s for completion in done)
    assert done[99].first_token_s > done[0].finished_s


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as Python has it: a process that was started in the background ignores it from birth."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_batch_between_two_steps_and_the_next_one_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = llm._core.step, 0

    def interrupted() -> StepOutput | None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9, 9, 9]] * 20, GREEDY)
    assert steps == 4  # the third was finished, the fourth took the reports of the aborted
    assert not llm._core.scheduler.groups
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert llm.generate(["fine"], GREEDY)[0].counts.completion == 6


def test_a_bar_is_shown_on_a_terminal_or_when_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stderr, asked, shown in (
        (io.StringIO(), None, False),
        (io.StringIO(), True, True),
        (Terminal(), None, True),
        (Terminal(), False, False),
    ):
        monkeypatch.setattr(sys, "stderr", stderr)
        llm.generate(["one", "two"], GREEDY, progress=asked)
        assert ("2/2" in stderr.getvalue() and "output tok/s" in stderr.getvalue()) == shown


def test_two_models_live_in_one_process_and_a_closed_one_says_so(llm: LLM, tiny_model: Path) -> None:
    with LLM(tiny_model, dtype="float32", device="cpu", kv_cache_bytes=1 << 20) as other:
        ours, theirs = llm.generate(["hello"], GREEDY), other.generate(["hello"], GREEDY)
        assert ours[0].choices == theirs[0].choices
        core = weakref.ref(other._core)
    assert core() is None  # its memory, threads and processes with it
    with pytest.raises(EngineUnavailable, match="closed"):
        other.generate(["hello"], GREEDY)
    other.close()
    assert llm.generate(["hello"], GREEDY)[0].choices == ours[0].choices


def test_an_unknown_adapter_computes_nothing(llm: LLM) -> None:
    before = llm._core.scheduler.stats.prefix_queries
    with pytest.raises(AdapterUnknown):
        llm.generate(["one", "two"], GREEDY, adapter=[None, AdapterRef(id="no", name="no", path="/no")])
    assert llm._core.scheduler.stats.prefix_queries == before


def test_a_batch_with_one_impossible_prompt_is_refused_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate(["fine", [1] * 5000], GREEDY)
    with pytest.raises(EngineError):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(EngineError, match="bad_words"):
        llm.generate(["fine"] * 10, [*[GREEDY] * 9, msgspec.structs.replace(GREEDY, bad_words=("\ud800",))])
    assert llm.generate(["fine"], GREEDY)[0].counts.completion == 6


def test_what_people_write_is_taken(llm: LLM) -> None:
    given: Any = {"stop": ["b", "c"], "bad_words": "a word", "guided": Guide("choice", ["yes", "no"])}  # type: ignore[arg-type]
    (completion,) = llm.generate("A", SamplingParams(max_tokens=8, **given))
    assert completion.text in ("yes", "no")
    (completion,) = llm.generate("A", SamplingParams(max_tokens=40, temperature=0.0, stop="e"))  # type: ignore[arg-type]
    (wanted,) = llm.generate("A", SamplingParams(max_tokens=40, temperature=0.0, stop=("e",)))
    assert completion.text == wanted.text
    schema: Any = {"type": "boolean"}
    (completion,) = llm.generate("A", SamplingParams(max_tokens=8, guided=Guide("json_schema", schema)))
    assert completion.text.strip() in ("true", "false")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("max_tokens", "ten", "max_tokens: Expected `int`, got `str`"),
        ("top_p", "x", "top_p: Expected `float`, got `str`"),
        ("seed", 1.5, "seed: Expected `int | null`, got `float`"),
        ("stop", (1,), "stop"),
        ("guided", {"json": 1}, "guided: Object missing required field `kind`"),
        ("guided", Guide("regex", 5), "guided.value: Expected `str | array`, got `int`"),  # type: ignore[arg-type]
        ("logit_bias", {1: object()}, "params: "),
    ],
)
def test_a_parameter_of_another_type_is_named(llm: LLM, field: str, value: Any, reason: str) -> None:
    with pytest.raises(EngineError, match=f"^{re.escape(reason)}"):
        llm.generate("A", SamplingParams(**{field: value}))


def test_what_is_no_parameter_no_adapter_and_no_conversation(llm: LLM) -> None:
    other: Any
    for other in ({"max_tokens": 4}, "x", [{"max_tokens": 4}]):
        with pytest.raises((TypeError, ValueError)):
            llm.generate("A", other)
    for other in ("pirate", 5, ["pirate"]):
        with pytest.raises(TypeError, match="an adapter is what load_adapter returned, not"):
            llm.generate("A", adapter=other)
    for other in ("hi", ["hi"], [["hi"]]):
        with pytest.raises(TypeError, match="a conversation is a list of messages"):
            llm.chat(other)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(EngineUnavailable, match="not a hub name"):
        LLM("nowhere")


@pytest.mark.parametrize("given", ["~/cache", None])
def test_the_cache_lies_in_the_home_folder(
    given: str | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("METERHOUSE_CACHE_DIR", raising=False)
    seen: list[Path] = []

    def resolve(spec: str, cache: Path, *, progress: object) -> Path:
        seen.append(cache)
        return Path(spec)

    monkeypatch.setattr("engine.llm.resolve_model", resolve)
    with LLM(tiny_model, cache_dir=given, device="cpu", native="off", kv_cache_bytes=1 << 20):
        assert seen == [tmp_path / ("cache" if given else ".cache/meterhouse")]
