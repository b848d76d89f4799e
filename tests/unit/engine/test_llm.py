"""The offline door over the tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.llm import LLM
from engine.types import EngineError, EngineUnavailable, Finish, PromptTooLong, SamplingParams

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


def test_a_batch_with_one_impossible_prompt_is_refused_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate(["fine", [1] * 5000], GREEDY)
    with pytest.raises(EngineError):
        llm.generate(["fine", []], GREEDY)
    assert llm.generate(["fine"], GREEDY)[0].counts.completion == 6


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable):
        LLM(tmp_path)
