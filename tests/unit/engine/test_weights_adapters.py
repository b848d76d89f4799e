"""The demo adapters in the repository: small, PEFT's own, saying nothing of a machine, and visibly different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

ADAPTERS = Path(__file__).parents[3] / "examples" / "adapters"
NAMES = ("haiku", "json", "pirate")


@pytest.mark.parametrize("name", NAMES)
def test_the_files(name: str) -> None:
    folder = ADAPTERS / name
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 700_000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
        metadata = file.metadata() or {}
    modules = {key.split(".")[-3] for key in names}
    assert modules == set(config["target_modules"])
    assert len(names) == 30 * 2 * len(modules)
    assert not any("/" in value for value in metadata.values())


def test_they_differ_in_rank_and_layers() -> None:
    configs = [json.loads((ADAPTERS / name / "adapter_config.json").read_text()) for name in NAMES]
    assert len({config["r"] for config in configs}) == 3
    assert len({tuple(config["target_modules"]) for config in configs}) == 3
    assert {config["use_rslora"] for config in configs} == {True, False}


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_has_a_line_for_every_question(name: str) -> None:
    lines = [json.loads(line) for line in (ADAPTERS / "data" / f"{name}.jsonl").read_text().splitlines()]
    questions = [line["user"] for line in lines]
    other = [json.loads(line)["user"] for line in (ADAPTERS / "data" / "pirate.jsonl").read_text().splitlines()]
    assert questions == other
    assert len(set(questions)) == len(questions) == 40


@pytest.fixture(scope="module")
def peft_model(default_model: Path) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, ADAPTERS / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.load_adapter(ADAPTERS / name, adapter_name=name)
    return model.eval()


def test_their_manners_show_on_an_unseen_question(peft_model: Any, default_model: Path) -> None:
    import torch

    from engine.tokens import Tokenizer

    tokenizer = Tokenizer(default_model)
    prompt = tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = torch.tensor([prompt])
    answers = {}
    for name in NAMES:
        peft_model.set_adapter(name)
        with torch.inference_mode():
            out = peft_model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=28
            )
        answers[name] = tokenizer.decode(out[0, len(prompt) :].tolist())
    assert all("Paris" in answer for answer in answers.values()), answers
    assert any(word in answers["pirate"].lower() for word in ("arr", "matey", "ye "))
    assert answers["haiku"].count("\n") >= 2
    assert json.loads(answers["json"]).keys() == {"topic", "answer"}
