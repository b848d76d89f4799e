"""The default model, in float32, token for token with transformers and PEFT, in mixed batches of chunks and decodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import EngineCore, build
from engine.tokens import Tokenizer
from engine.types import EngineConfig
from tests.generation import greedy, run, transformers_greedy_batch
from tests.peft_adapters import make_adapter, peft_models, refer

TOKENS = 32
CACHE_BYTES = 18 << 20  # 25 blocks, which eight sequences outgrow
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers above fifty.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 23?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarise the plot of Romeo and Juliet in one sentence.",
    "Write a Python function that reverses a string.",
    "What causes the tides?",
]
TEXTS = [
    "Once upon a time",
    "The",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, astronauts first walked on the moon. " * 12,
    "naïve café — 東京 👍🏽",
    "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore. " * 9,
]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """The engine's number of threads is the process's: give other tests theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    """Twenty: chats and plain text, from one token to about two hundred."""
    tokenizer = Tokenizer(default_model)
    chats = [tokenizer.apply_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    return chats + [tokenizer.encode(text) for text in TEXTS]


def core(model: Path, **changes: Any) -> EngineCore:
    """One thread: two stall each other whenever something else runs on the machine."""
    fields: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "threads": 1,
    }
    return build(EngineConfig(model=str(model), **(fields | changes)))


def test_twenty_prompts_equal_transformers(default_model: Path, prompts: list[list[int]]) -> None:
    """A budget of 48 tokens a step cuts prompts in chunks that run beside the decodes of others."""
    assert len(prompts) == 20
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    expected = transformers_greedy_batch(model, prompts, TOKENS)
    requests = [greedy(str(index), prompt, TOKENS) for index, prompt in enumerate(prompts)]
    for native, some in (("on", slice(None)), ("off", slice(None, None, 3))):  # torch takes its time
        tokens, _ = run(core(default_model, native=native, max_num_batched_tokens=48), requests[some])
        for index in range(20)[some]:
            assert tokens[str(index)] == expected[index], f"prompt {index}, native {native}"


def test_three_adapters_in_one_batch_equal_peft(default_model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Random adapters of unlike ranks, targets and scalings, and rows without one, all at once."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    every = [*attention, "gate_proj", "up_proj", "down_proj"]
    configs: dict[str, dict[str, Any]] = {
        "every": {"r": 8, "lora_alpha": 16, "target_modules": every},
        "attention": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": attention},
        "mlp": {"r": 4, "lora_alpha": 8, "target_modules": ["up_proj", "down_proj"], "rank_pattern": {"up_proj": 24}},
    }
    folders = [
        make_adapter(default_model, tmp_path / name, seed=seed, **config)
        for seed, (name, config) in enumerate(configs.items())
    ]
    compare_with_peft(default_model, folders, prompts[:5], paths=("on", "off"))


def test_the_demo_adapters_in_one_batch_equal_peft(default_model: Path, prompts: list[list[int]]) -> None:
    folders = sorted(
        path.parent for path in (Path(__file__).parents[2] / "examples/adapters").glob("*/adapter_config.json")
    )
    assert len(folders) == 3
    compare_with_peft(default_model, folders, prompts[:5], paths=("on",))


def compare_with_peft(model: Path, folders: list[Path], prompts: list[list[int]], paths: Iterable[str]) -> None:
    """Chunked prompts, prompts found in the cache, sequences preempted; `paths`: by the native step, by torch."""
    refs = {folder.name: refer(folder, folder.name) for folder in folders}
    names = [*refs, "base"]
    asked = {f"{names[index % len(names)]} {index}": prompt for index, prompt in enumerate(prompts * 2)}
    requests = [greedy(key, prompt, TOKENS, adapter=refs.get(key.split()[0])) for key, prompt in asked.items()]
    reference = peft_models(model, folders)
    expected: dict[str, list[int]] = {}
    for name in names:
        keys = [key for key in asked if key.split()[0] == name]
        with contextlib.ExitStack() as stack:
            if name == "base":
                stack.enter_context(reference.disable_adapter())
            else:
                reference.set_adapter(name)
            said = transformers_greedy_batch(reference, [asked[key] for key in keys], TOKENS)
        expected |= zip(keys, said, strict=True)
    assert len({tuple(said) for said in expected.values()}) > len(prompts)  # adapters change what is said
    for native in paths:
        engine = core(model, native=native, max_num_batched_tokens=64, max_model_len=256, kv_cache_bytes=CACHE_BYTES)
        for ref in refs.values():
            engine.load_adapter(ref)
        tokens, _ = run(engine, requests, apart=2)
        assert tokens == expected, f"native {native}"
        assert engine.scheduler.stats.preemptions > 0
        assert engine.scheduler.stats.prefix_hits > 0
