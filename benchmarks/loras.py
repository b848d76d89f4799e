"""Random LoRA adapters in PEFT's format, for measuring: what they say is nonsense, what they cost is real."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.adapters import CONFIG_FILE, PROJECTIONS, WEIGHTS_FILE, shapes
from engine.models.config import ModelConfig


def write(folder: Path, model: ModelConfig, *, rank: int = 16, seed: int = 0) -> Path:
    """An adapter of all seven projections of every layer, in `folder`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model.layers):
        for name in PROJECTIONS:
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
        "target_modules": list(PROJECTIONS),
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder
