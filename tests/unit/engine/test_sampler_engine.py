"""What the whole engine draws: thousands of seeds in batches, against transformers' own model and warpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core import EngineCore, build
from engine.types import EngineConfig, Request, SamplingParams
from tests.chisquare import follows, warped
from tests.generation import run

PROMPT = [11, 12, 13, 14, 15, 16]
DRAWS = 3000


@pytest.fixture(scope="module")
def logits(tiny_model: Path) -> torch.Tensor:
    """[1, vocab] after the prompt, by transformers.."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1:]
    return found


@pytest.fixture(scope="module")
def core(tiny_model: Path) -> EngineCore:
    return build(
        EngineConfig(
            model=str(tiny_model),
            dtype="float32",
            device="cpu",
            block_size=4,
            max_num_seqs=64,
            max_waiting=9999,
            threads=1,
        )
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 2.0},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 100, "min_p": 0.01},
    ],
    ids=str,
)
def test_first_tokens_follow_transformers_probabilities(
    core: EngineCore, logits: torch.Tensor, fields: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True, **fields)
    requests = [
        Request(id=str(seed), prompt=PROMPT, sampling=msgspec.structs.replace(params, seed=seed))
        for seed in range(DRAWS)
    ]
    tokens, _ = run(core, requests)
    drawn = [token for text in tokens.values() for token in text]
    assert len(drawn) == DRAWS
    assert len(set(drawn)) > 3
    assert follows(drawn, warped(logits, params)[0])


def test_a_seed_says_the_same_alone_in_a_batch_and_after_preemption(tiny_model: Path) -> None:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "threads": 1}

    def request(name: str, seed: int, **more: Any) -> Request:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=seed, frequency_penalty=0.5, **more)
        return Request(id=name, prompt=[*PROMPT, seed], sampling=sampling)

    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 9, "repetition_penalty": 1.2}, {"min_p": 0.01}]
    asked = [request(f"{seed}", seed, **kinds[seed % 4]) for seed in range(8)]
    expected = {}
    for one in asked:
        expected |= run(build(EngineConfig(model=str(tiny_model), **fields)), [one])[0]
    roomy = build(EngineConfig(model=str(tiny_model), **fields))
    assert run(roomy, asked[::-1], apart=2)[0] == expected
    block = roomy._runner._cache.tensor[:, 0].nbytes  # type: ignore[attr-defined]
    tight = build(EngineConfig(model=str(tiny_model), kv_cache_bytes=block * 14, max_model_len=40, **fields))
    assert run(tight, asked)[0] == expected
    assert tight.scheduler.stats.preemptions > 0
