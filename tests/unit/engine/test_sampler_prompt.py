"""Log-probabilities of a prompt's tokens, through the engine: chunked, preempted, beside others, told once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core import EngineCore, build
from engine.kvcache import block_bytes
from engine.llm import LLM
from engine.models.config import ModelConfig
from engine.types import EngineConfig, Request, SamplingParams, TokenCounts, TokenLogprob
from tests.generation import greedy

PROMPT = [(7 * place * place + 3 * place) % 500 for place in range(90)]


def core(model: Path, **changes: Any) -> EngineCore:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 4, "threads": 1}
    return build(EngineConfig(model=str(model), **(fields | changes)))


def asking(name: str, prompt: list[int] = PROMPT, *, count: int = 3, tokens: int = 4, n: int = 1) -> Request:
    made = greedy(name, prompt, tokens)
    return msgspec.structs.replace(made, n=n, sampling=msgspec.structs.replace(made.sampling, prompt_logprobs=count))


def told(engine: EngineCore, requests: list[Request]) -> tuple[dict[str, list[Any]], dict[str, TokenCounts]]:
    """What each request's updates told of its prompt, and its last counts."""
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    counts: dict[str, TokenCounts] = {}
    for request in requests:
        engine.add(request)
    while (output := engine.step()) is not None:
        for update in output.updates:
            assert update.error is None
            counts[update.request_id] = update.counts
            if update.prompt_logprobs is not None:
                found[update.request_id].append(update.prompt_logprobs)
                assert update.counts.completion <= 1
    engine.check_integrity()
    return found, counts


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> torch.Tensor:
    """[len(PROMPT), vocab] log-probabilities after each token of the prompt, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)


def check(found: list[TokenLogprob | None], expected: torch.Tensor, count: int) -> None:
    assert len(found) == len(PROMPT)
    assert found[0] is None
    for place, entry in enumerate(found[1:], start=1):
        assert entry is not None
        row = expected[place - 1]
        assert entry.token_id == PROMPT[place]
        assert entry.logprob == pytest.approx(float(row[PROMPT[place]]), abs=1e-4)
        assert abs(entry.rank - 1 - int((row > row[PROMPT[place]]).sum())) <= 1  # of two that are all but equal
        assert [value for _, value in entry.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(row[token]), abs=1e-4) for token, value in entry.top)


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("budget", [7, 512])
def test_they_equal_transformers_in_chunks_and_beside_others(
    tiny_model: Path, expected: torch.Tensor, budget: int, native: str
) -> None:
    engine = core(tiny_model, max_num_batched_tokens=budget, native=native)
    requests = [greedy("plain", PROMPT[:5], 9), asking("three"), asking("none", count=0, n=2), asking("short", [4])]
    found, counts = told(engine, requests)
    assert found["plain"] == []
    assert found["short"] == [[None]]
    for name, count in (("three", 3), ("none", 0)):
        (only,) = found[name]
        check(only, expected, count)
    assert counts["none"].completion == 8


def test_a_prompt_that_is_cached_is_computed_again(tiny_model: Path, expected: torch.Tensor) -> None:
    engine = core(tiny_model)
    told(engine, [greedy("first", PROMPT, 2)])
    found, counts = told(engine, [asking("again")])
    check(found["again"][0], expected, 3)
    assert counts["again"].cached == 0
    assert counts["again"].prompt == len(PROMPT)
    _, counts = told(engine, [greedy("third", PROMPT, 2)])
    assert counts["third"].cached > 0


def test_preemption_changes_nothing_of_them(tiny_model: Path, expected: torch.Tensor) -> None:
    size = block_bytes(ModelConfig.from_folder(tiny_model), 4, torch.float32)
    engine = core(tiny_model, kv_cache_bytes=size * 34, max_model_len=130, max_num_batched_tokens=4)
    requests = [greedy(f"old {number}", PROMPT[number : 4 + number], 70) for number in range(2)]
    found, counts = told(engine, [*requests, asking("young", tokens=20)])
    (only,) = found["young"]
    check(only, expected, 3)
    assert counts["young"].recomputed > 0
    assert counts["young"].cached == 0


def test_they_come_through_the_offline_door(tiny_model: Path, expected: torch.Tensor) -> None:
    with LLM(tiny_model, dtype="float32", device="cpu", threads=1) as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
        asked, plain = llm.generate([PROMPT, PROMPT], [params, SamplingParams(max_tokens=2)])
    assert asked.prompt_logprobs is not None
    check(asked.prompt_logprobs, expected, 1)
    assert plain.prompt_logprobs is None
