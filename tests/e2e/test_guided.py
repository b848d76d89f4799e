"""The default model at temperature 1, guided in every way, beside requests that are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.llm import LLM, Choice, Completion
from engine.types import Finish, Guide, SamplingParams
from tests.guides import cases
from tests.peft_adapters import make_adapter

COUNT = 200
PROMPT = "Give an example, short and exact:\n"


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Iterator[LLM]:
    before = torch.get_num_threads()
    with LLM(default_model, max_num_seqs=32, max_model_len=512, kv_cache_bytes=64 << 20, device="cpu") as made:
        yield made
    torch.set_num_threads(before)


def spelled(llm: LLM, choice: Choice) -> str:
    """Its tokens as text; fails where they are not UTF-8 throughout or one is a special token."""
    eos = set(llm.info.eos_token_ids)
    tokens = choice.token_ids[:-1] if choice.token_ids[-1] in eos else choice.token_ids
    assert not llm.tokenizer.special_ids.intersection(tokens)
    return b"".join(map(llm.tokenizer.token_bytes, tokens)).decode("utf-8")


def test_every_finished_output_of_200_guides_is_what_was_asked_for(llm: LLM) -> None:
    asked = cases(COUNT, seed=7)
    assert len({guide.kind for guide, _ in asked}) == 4
    params = [
        SamplingParams(max_tokens=112, temperature=1.0, seed=number, guided=guide)
        for number, (guide, _) in enumerate(asked)
    ]
    for place in range(0, len(params) + COUNT // 10, 11):  # one in eleven is not guided
        params.insert(place, SamplingParams(max_tokens=16, seed=place, ignore_eos=True))
    completions = llm.generate([PROMPT] * len(params), params)
    free = [made for made, one in zip(completions, params, strict=True) if one.guided is None]
    guided = [made for made, one in zip(completions, params, strict=True) if one.guided is not None]
    assert len(free) == COUNT // 10
    assert all(made.choices[0].finish is Finish.LENGTH and made.counts.completion == 16 for made in free)
    finished = 0
    for (guide, judge), made in zip(asked, guided, strict=True):
        assert made.error is None, (guide, made.error)
        if made.choices[0].finish is Finish.STOP:
            finished += 1
            text = spelled(llm, made.choices[0])
            assert text == made.text
            assert judge(text), (guide, text)
        else:
            assert made.choices[0].finish is Finish.LENGTH
    assert finished >= 0.85 * COUNT, "the outputs are cut too often to show anything"


def test_choices_preemption_and_adapters_change_nothing_about_that(
    llm: LLM, default_model: Path, tmp_path: Path
) -> None:
    """Three choices each, on an adapter, in a cache so small that they are preempted."""
    asked = cases(10, seed=11)
    make_adapter(default_model, tmp_path / "adapter", seed=1, strength=0.05, r=8)
    with LLM(
        default_model,
        max_num_seqs=16,
        max_model_len=128,
        kv_cache_bytes=3 << 20,
        block_size=4,
        threads=1,
        max_num_batched_tokens=48,
        device="cpu",
    ) as small:
        adapter = small.load_adapter(tmp_path / "adapter")
        made: list[Completion] = small.generate(
            [PROMPT * 4] * len(asked),
            [SamplingParams(max_tokens=48, seed=3, guided=guide, logprobs=1) for guide, _ in asked],
            n=3,
            adapter=adapter,
        )
        assert small._core.scheduler.stats.preemptions > 0
        small._core.check_integrity()
    ended = [
        (judge, choice)
        for (_, judge), completion in zip(asked, made, strict=True)
        for choice in completion.choices
        if choice.finish is Finish.STOP
    ]
    assert len(ended) >= 20
    for judge, choice in ended:
        assert judge(choice.text), choice.text


def test_what_else_is_asked_for_cannot_lift_a_grammar(llm: LLM) -> None:
    guide = Guide("regex", "[a-c]{4}")
    digits = {token: 100.0 for digit in "0123456789" for token in llm.tokenizer.encode(digit)}
    biased, stopped, punished, longer = llm.generate(
        [PROMPT] * 4,
        [
            SamplingParams(max_tokens=8, seed=1, guided=guide, logit_bias=digits),
            SamplingParams(max_tokens=8, seed=1, guided=Guide("choice", ("abcabc",)), stop=("cab",)),
            SamplingParams(max_tokens=8, seed=1, guided=guide, repetition_penalty=2.0, top_k=1, bad_words=("a",)),
            SamplingParams(max_tokens=8, seed=1, guided=guide, min_tokens=8, ignore_eos=True),
        ],
    )
    for made in (biased, punished, longer):
        assert made.choices[0].finish is Finish.STOP
        assert len(made.text) == 4
        assert set(made.text) <= set("abc")
    assert llm.tokenizer.encode("a")[0] not in punished.choices[0].token_ids
    assert (stopped.text, stopped.choices[0].stop_reason) == ("ab", "cab")
