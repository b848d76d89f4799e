"""Every family on tiny random weights: token for token and logit for logit what transformers computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import build
from engine.models.config import ModelConfig
from engine.types import EngineConfig
from tests.fixtures.model import make_tiny_model
from tests.generation import greedy, run, transformers_greedy

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biased and untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, one query head a key head": ("llama", {"num_key_value_heads": 4}),
    "llama, one layer": ("llama", {"num_hidden_layers": 1}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, odd window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "num_hidden_layers": 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of many lengths arrive one step apart under a small token budget: chunks and decodes mix."""
    family, overrides = MODELS[name]
    folder = make_tiny_model(family, tmp_path / "model", **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = random.Random(7)
    prompts = {str(n): [draw.randrange(3, 512) for _ in range(n)] for n in (1, 3, 4, 17, 40, 90)}
    references = {key: transformers_greedy(model, prompt, 8) for key, prompt in prompts.items()}
    for native in ("on", "off"):
        core = build(
            EngineConfig(
                model=str(folder),
                dtype="float32",
                device="cpu",
                native=native,
                block_size=4,
                max_num_seqs=4,
                max_num_batched_tokens=11,
            )
        )
        tokens, logprobs = run(core, [greedy(key, prompt, 8, logprobs=3) for key, prompt in prompts.items()], apart=1)
        for key, (expected, logits) in references.items():
            assert tokens[key] == expected
            for found, row in zip(logprobs[key], logits, strict=True):
                reference = row.float().log_softmax(-1)
                ids = [token for token, _ in found.top]
                torch.testing.assert_close(
                    torch.tensor([value for _, value in found.top]), reference[ids], atol=2e-4, rtol=1e-5
                )


@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_stays_close(family: str, native: str, tiny_models: Callable[[str], Path]) -> None:
    """bfloat16 rounds: the likeliest tokens' log-probabilities are near float32's, not equal."""
    folder = tiny_models(family)
    prompt = list(range(3, 40))
    found = {}
    for dtype in ("float32", "bfloat16"):
        core = build(EngineConfig(model=str(folder), dtype=dtype, device="cpu", native=native, max_num_seqs=2))
        assert core.info.dtype == dtype
        _, logprobs = run(core, [greedy("a", prompt, 1, logprobs=5)])
        found[dtype] = dict(logprobs["a"][0].top)
    shared = found["float32"].keys() & found["bfloat16"].keys()
    assert len(shared) >= 3
    for token in shared:
        assert found["bfloat16"][token] == pytest.approx(found["float32"][token], abs=0.35)


def test_config_of_every_family_is_read(tiny_models: Callable[[str], Path]) -> None:
    llama, qwen2, qwen3, mistral = (
        ModelConfig.from_folder(tiny_models(family)) for family in ("llama", "qwen2", "qwen3", "mistral")
    )
    assert (llama.tie, llama.qkv_bias, llama.qk_norm) == (True, False, False)
    assert (qwen2.tie, qwen2.qkv_bias, qwen2.o_bias) == (False, True, False)
    assert (qwen3.qk_norm, qwen3.head_dim) == (True, 16)
    assert [layer.window for layer in mistral.plan] == [32, 32]
    assert llama.eos_token_ids == (2,)
    assert llama.dtype == "float32"
