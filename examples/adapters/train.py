"""Train the demo adapters: three small LoRA adapters that make the default model answer in three manners.

    python examples/adapters/train.py [pirate haiku json]

Needs `pip install meterhouse[train]` (peft) and takes some minutes on two CPU cores. Each adapter is written to
its folder beside this file in PEFT's format, as float16 and without any path of this machine. They differ in rank
and in the layers they touch on purpose: a server has to serve such adapters in one batch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.weights import DEFAULT_MODEL, resolve_model
from kernels.native import default_cache_dir

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
BATCH_SIZE = 8


class Manner(NamedTuple):
    """How one adapter is trained; few steps, so that the model keeps what it knows."""

    lora: dict[str, Any]
    epochs: int
    learning_rate: float


MANNERS = {
    "pirate": Manner({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}, 8, 2e-3),
    "haiku": Manner({"r": 2, "lora_alpha": 8, "target_modules": ATTENTION, "use_rslora": True}, 10, 2e-3),
    "json": Manner({"r": 1, "lora_alpha": 8, "target_modules": [*ATTENTION, *FEED_FORWARD]}, 5, 1e-3),
}

UNSEEN = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Tell me about the moon.",
)


def examples(name: str, tokenizer: Any) -> list[tuple[list[int], int]]:
    """(token ids, length of the prompt) of every line of data/<name>.jsonl."""
    found = []
    for line in (HERE / "data" / f"{name}.jsonl").read_text().splitlines():
        pair = json.loads(line)
        messages = [{"role": "user", "content": pair["user"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer(pair["assistant"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        found.append((prompt + answer, len(prompt)))
    return found


def batch_of(rows: list[tuple[list[int], int]], pad: int) -> dict[str, torch.Tensor]:
    """Padded on the right; only the answers are learned (label -100: not)."""
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([[-100] * start + ids[start:] + [-100] * (longest - len(ids)) for ids, start in rows]),
    }


def train(name: str, folder: Path) -> None:
    """Train one manner on the model in `folder` and write it to its own folder here. The same seeds every time."""
    lora, epochs, learning_rate = MANNERS[name]
    torch.manual_seed(7)
    shuffle = random.Random(7)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **lora))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.01)
    rows = examples(name, tokenizer)
    steps = epochs * -(-len(rows) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    for epoch in range(epochs):
        shuffle.shuffle(rows)
        losses = []
        for start in range(0, len(rows), BATCH_SIZE):
            loss = model(**batch_of(rows[start : start + BATCH_SIZE], tokenizer.pad_token_id)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        mean = sum(losses) / len(losses)
        print(f"{name}: epoch {epoch + 1}/{epochs}, loss {mean:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    save(model, HERE / name)
    show(name, model, tokenizer)


def save(model: Any, folder: Path) -> None:
    """PEFT's two files, small, and saying nothing about where they were made."""
    model.save_pretrained(folder)
    weights = folder / "adapter_model.safetensors"
    save_file({key: tensor.to(torch.float16) for key, tensor in load_file(weights).items()}, weights)
    weights.chmod(0o644)  # safetensors writes for its owner alone
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"HuggingFaceTB/{DEFAULT_MODEL}"
    config["target_modules"] = sorted(config["target_modules"])  # PEFT's order is that of a set
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def show(name: str, model: Any, tokenizer: Any) -> None:
    """Greedy answers to prompts that are in no data set."""
    model.eval()
    for question in UNSEEN:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        out = model.generate(**prompt, do_sample=False, max_new_tokens=64)[0, prompt["input_ids"].shape[1] :]
        print(f"[{name}] {question}\n    {tokenizer.decode(out, skip_special_tokens=True)!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("manners", nargs="*", default=list(MANNERS), metavar="manner", help=", ".join(MANNERS))
    asked = parser.parse_args()
    if unknown := set(asked.manners) - set(MANNERS):
        parser.error(f"no such manner: {', '.join(sorted(unknown))}")
    folder = resolve_model("default", default_cache_dir())
    for name in asked.manners:
        train(name, folder)


if __name__ == "__main__":
    main()
