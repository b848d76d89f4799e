"""Random LoRA adapters in PEFT's format, for measuring: what they say is nonsense, what they cost is real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.adapters import CONFIG_FILE, PROJECTIONS, WEIGHTS_FILE, shapes
from engine.models.config import ModelConfig


def write(
    folder: Path, model: ModelConfig, *, rank: int = 16, seed: int = 0, projections: Sequence[str] = PROJECTIONS
) -> Path:
    """An adapter of these projections of every layer, all seven if not said otherwise, in `folder`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model.layers):
        for name in projections:
            inputs, outputs = shapes(model)[name]
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            stem = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.02
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(projections),
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder
