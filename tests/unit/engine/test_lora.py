"""Adapters in one batch: token for token what PEFT computes for each alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters import Adapter
from engine.core import build
from engine.lora import IDLE_RANKS_MAX, LoraStore
from engine.models.config import ModelConfig
from engine.types import AdapterUnknown, EngineConfig
from kernels import lora as form
from tests.generation import greedy, run, transformers_greedy
from tests.peft_adapters import make_adapter, peft_models, refer

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "every": {"r": 8, "lora_alpha": 16, "target_modules": EVERY},
    "query-value": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "down_proj", "k_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "up_proj", "gate_proj"],
        "rank_pattern": {"up_proj": 12, "layers.1.self_attn.q_proj": 1},
        "alpha_pattern": {r"layers\.0\.mlp\.gate_proj": 20, ".*q_proj": 2},
    },
    "one-layer": {"r": 2, "lora_alpha": 8, "target_modules": ["down_proj"], "layers_to_transform": [1]},
    "regex": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.self_attn\.(q|o)_proj"},
    "all-linear": {"r": 2, "lora_alpha": 2, "target_modules": "all-linear"},
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_mixed_batch_equals_peft(family: str, tmp_path: Path, tiny_models: Callable[[str], Path]) -> None:
    model = tiny_models(family)
    folders = {
        name: make_adapter(model, tmp_path / name, seed=seed, strength=1.0, **config)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }
    core = build(
        EngineConfig(model=str(model), dtype="float32", block_size=4, max_num_seqs=9, max_num_batched_tokens=24)
    )
    refs = {name: refer(folder, name) for name, folder in folders.items()}
    for ref in refs.values():
        core.load_adapter(ref)
    draw = random.Random(11)
    prompts = {
        f"{name} {size}": [draw.randrange(3, 512) for _ in range(size)]
        for name in [*CONFIGS, "base"]
        for size in (2, 19)
    }
    requests = [greedy(key, prompt, 6, adapter=refs.get(key.split()[0]), logprobs=1) for key, prompt in prompts.items()]
    tokens, logprobs = run(core, requests, apart=1)
    reference = peft_models(model, list(folders.values()))
    outputs = set()
    for key, prompt in prompts.items():
        name = key.split()[0]
        if name == "base":
            with reference.disable_adapter():
                expected, logits = transformers_greedy(reference, prompt, 6)
        else:
            reference.set_adapter(name)
            expected, logits = transformers_greedy(reference, prompt, 6)
        assert tokens[key] == expected, key
        for token, found, row in zip(expected, logprobs[key], logits, strict=True):
            assert found.logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=2e-4)
        outputs.add((len(prompt), tuple(expected)))
    assert len(outputs) > len(CONFIGS)  # the adapters do say different things


def test_a_batch_without_adapters_costs_nothing(tiny_model: Path) -> None:
    store = _store(tiny_model, {"a": 4})
    assert store.step([(None, 3), (None, 1)]) is None
    with pytest.raises(AdapterUnknown):
        store.step([("a", 1), ("never loaded", 1)])


def test_segments_name_each_adapters_rows_and_ranks(tiny_model: Path) -> None:
    store = _store(tiny_model, {"a": 4, "b": 2})
    step = store.step([("b", 2), (None, 1), ("a", 1), ("a", 3), ("b", 1)])
    assert step is not None
    assert step.batch.rows == 8
    assert step.batch.ranks == 6
    found = [(s.row, s.rows, s.offset, s.rank) for s in step.batch.segments]
    assert found == [(0, 2, 4, 2), (3, 4, 0, 4), (7, 1, 4, 2)]


def test_the_pack_is_kept_while_it_serves_and_is_not_too_wide(tiny_model: Path) -> None:
    store = _store(tiny_model, {"a": 64, "b": 64, "c": 32, "d": 64})
    first = store.step([("a", 1), ("b", 1)])
    second = store.step([("a", 1)])
    assert first is not None
    assert second is not None
    assert second.pack is first.pack
    third = store.step([("c", 1)])
    assert third is not None
    assert third.pack.ranks == 32 + 64 + 64  # a and b stay beside it
    fourth = store.step([("d", 1)])
    assert fourth is not None
    assert set(fourth.pack.places) >= {"d"}
    assert fourth.pack.ranks <= 64 + IDLE_RANKS_MAX
    store.remove("d")
    with pytest.raises(AdapterUnknown):
        store.step([("d", 1)])
    again = store.step([("a", 1)])
    assert again is not None
    assert set(again.pack.places) == {"a"}


def test_watchers_are_told_who_comes_and_goes(tiny_model: Path) -> None:
    store = _store(tiny_model, {"a": 4})
    told: list[tuple[str, str]] = []
    here: dict[str, Adapter] = {}

    def entered(adapter_id: str, adapter: Adapter) -> None:
        told.append(("entered", adapter_id))
        here[adapter_id] = adapter

    store.watch(entered, lambda adapter_id: told.append(("left", adapter_id)))
    store.add("b", _adapter(2))
    store.add("b", _adapter(2))  # it is there
    store.remove("a")
    store.remove("a")
    assert told == [("entered", "a"), ("entered", "b"), ("left", "a")]
    assert here["b"] is store.get("b")
    assert all(matrix.is_contiguous() for pair in here["b"].weights.values() for matrix in pair)


def test_an_adapter_that_a_watcher_cannot_take_does_not_come_in(tiny_model: Path) -> None:
    store = _store(tiny_model, {})
    told: list[str] = []

    def refuse(adapter_id: str, adapter: Adapter) -> None:
        raise MemoryError

    store.watch(lambda adapter_id, adapter: told.append("entered"), lambda adapter_id: told.append("left"))
    store.watch(refuse, lambda adapter_id: told.append("left by one that was never told"))
    with pytest.raises(MemoryError):
        store.add("a", _adapter(4))
    assert told == ["entered", "left"]
    assert "a" not in store


def _adapter(rank: int) -> Adapter:
    pair = (torch.ones(rank, 64), torch.ones(64, rank))
    return Adapter(digest=f"rank {rank}", rank=rank, targets=("o_proj",), weights={(1, "o_proj"): pair})


def _store(model: Path, ranks: dict[str, int]) -> LoraStore:
    store = LoraStore(ModelConfig.from_folder(model), form=form.cpu, device=torch.device("cpu"), dtype=torch.float32)
    for name, rank in ranks.items():
        store.add(name, _adapter(rank))
    return store
