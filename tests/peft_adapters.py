"""LoRA adapters made by PEFT itself, random but strong enough to change what is generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine.adapters import digest_folder
from engine.types import AdapterRef


def make_adapter(model: Path, folder: Path, *, seed: int, strength: float = 0.3, **config: Any) -> Path:
    """An adapter of `model` with PEFT's `config` (r, target_modules, …), every matrix random."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    _randomise(tuned, seed, strength)
    tuned.save_pretrained(folder)
    return folder


def make_adapters(
    model: Path, folder: Path, configs: Sequence[dict[str, Any]], *, count: int, strength: float
) -> list[Path]:
    """`count` adapters, each with the next of PEFT's `configs`; much quicker than as many calls of `make_adapter`."""
    made: dict[int, Path] = {}
    for index, config in enumerate(configs):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tuned = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
        for number in range(index, count, len(configs)):
            _randomise(tuned, number, strength)
            made[number] = folder / f"adapter-{number}"
            tuned.save_pretrained(made[number])
    return [made[number] for number in range(count)]


def _randomise(tuned: Any, seed: int, strength: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            width = parameter.shape[-1]
            parameter.data = torch.randn(parameter.shape, generator=generator) * strength / width**0.5


def refer(folder: Path, name: str) -> AdapterRef:
    return AdapterRef(id=f"load-of-{name}", name=name, path=str(folder), digest=digest_folder(folder))


def peft_models(model: Path, folders: Sequence[Path]) -> Any:
    """One PEFT model with every folder loaded under its name: `set_adapter` chooses, `disable_adapter()` is none."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, folders[0], adapter_name=folders[0].name)
    for folder in folders[1:]:
        tuned.load_adapter(folder, adapter_name=folder.name)
    return tuned.eval()
