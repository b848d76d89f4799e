"""Linear maps in every layout, and rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.layers import Linear, Rotary
from engine.models.config import ModelConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
def test_linear(rows: int, biased: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 36), (20, 36), (20,)))
    expected = functional.linear(x, weight, bias if biased else None)
    actual = Linear(weight, bias if biased else None)(x)
    torch.testing.assert_close(actual, expected)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, every parameter": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("before", [False, True])
def test_rotary(name: str, before: bool) -> None:
    """`before`: the same configuration as it was written before transformers 5."""
    given = ROPES[name]
    reference = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=given))
    raw: dict[str, Any] = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=given).to_dict()
    if before:
        rope = dict(raw.pop("rope_parameters"))
        raw["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        raw["rope_scaling"] = None if name == "default" else rope
    config = ModelConfig.from_dict(raw, name="m")
    positions = torch.tensor([0, 1, 77, 4095, 40_000, 131_071])
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), positions[None])
    actual = Rotary(config.rope, 64, CPU)(positions)
    sign = torch.cat((-torch.ones(32), torch.ones(32)))
    assert torch.equal(actual[:, 0], cos[0])
    assert torch.equal(actual[:, 1], sin[0] * sign)
