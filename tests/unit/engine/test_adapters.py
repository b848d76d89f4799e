"""What is refused of an adapter's folder, with which words, and that a refusal changes nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters import CONFIG_FILE, WEIGHTS_FILE, digest_folder, read_adapter
from engine.models.config import ModelConfig
from engine.types import AdapterRef, AdapterRejected
from tests.peft_adapters import make_adapter

QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def sound(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "sound"
    return make_adapter(tiny_model, folder, seed=1, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "secret-place"))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelConfig:
    return ModelConfig.from_folder(tiny_model)


def read(folder: Path, model: ModelConfig, *, max_rank: int = 8, digest: str = "", dtype: Any = torch.float32) -> Any:
    ref = AdapterRef(id="1", name="a", path=str(folder), digest=digest)
    return read_adapter(ref, model, max_rank=max_rank, dtype=dtype)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def test_a_sound_one_is_read(folder: Path, model: ModelConfig) -> None:
    adapter = read(folder, model, digest=digest_folder(folder))
    assert adapter.rank == 4
    assert adapter.targets == ("q_proj", "down_proj")
    assert set(adapter.weights) == {(layer, name) for layer in (0, 1) for name in ("q_proj", "down_proj")}
    stored = load_file(folder / WEIGHTS_FILE)
    a, b = adapter.weights[0, "q_proj"]
    assert torch.equal(a, stored[QUERY.format("A")])
    assert torch.equal(b, stored[QUERY.format("B")] * 2)


def test_the_digest_is_of_both_files_each_after_its_length(folder: Path) -> None:
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        data = (folder / name).read_bytes()
        digest.update(len(data).to_bytes(8, "big") + data)
    assert digest_folder(folder) == digest.hexdigest()


CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "lora_only"}, "bias"),
    "lora bias": ({"lora_bias": True}, "lora_bias"),
    "another kind": ({"peft_type": "IA3"}, "IA3"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "embedding": ({"target_modules": ["q_proj", "model.embed_tokens"]}, "embed_tokens"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "a target without tensors": ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "v_proj, which is a target"),
    "tensors without target": ({"target_modules": ["q_proj"]}, "down_proj, which is no target"),
    "layer left out": ({"layers_to_transform": [0]}, "layers.1.mlp.down_proj, which is no target"),
    "rank 0": ({"r": 0}, "r must be a positive whole number"),
    "rank of another type": ({"r": "4"}, "r must be"),
    "another rank than the tensors": ({"r": 5}, "this model and rank need (5, 128)"),
    "rank above the limit": ({"r": 9}, "at most 8"),
    "rank above the limit by pattern": ({"rank_pattern": {"q_proj": 9}}, "at most 8"),
    "infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number"),
    "alpha is null": ({"lora_alpha": None}, "lora_alpha must be a finite number"),
    "pattern that could run for ever": ({"alpha_pattern": {"(a*)*b": 1}}, "alpha_pattern"),
    "pattern with many wildcards": ({"alpha_pattern": {".*a.*a.*a": 1}}, "alpha_pattern"),
    "pattern that is none": ({"alpha_pattern": {"a\\": 1}}, "alpha_pattern"),
    "more patterns than are tried": ({"rank_pattern": {f"a{n}": 4 for n in range(513)}}, "more than 512 patterns"),
    "patterns of another type": ({"rank_pattern": [1]}, "rank_pattern is not an object"),
    "targets of another type": ({"target_modules": {"q_proj": 1}}, "target_modules"),
    "layers of another type": ({"layers_to_transform": "0"}, "layers_to_transform"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration_is_refused(name: str, folder: Path, model: ModelConfig) -> None:
    changes, words = CONFIGURATIONS[name]
    configure(folder, **changes)
    refused(folder, model, words)


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY.format("B")][3, 1] = float("nan")


def _rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _set(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no B": (lambda tensors: tensors.pop(QUERY.format("B")), "only one of lora_A and lora_B"),
    "no tensors": (lambda tensors: tensors.clear(), "no tensors"),
    "nan": (_nan, "not finite"),
    "another base": (_set(QUERY.format("A"), torch.zeros(4, 65)), "(4, 65)"),
    "a vector": (_set(QUERY.format("A"), torch.zeros(256)), "(256,)"),
    "whole numbers": (_set(QUERY.format("A"), torch.zeros(4, 64, dtype=torch.int8)), "floating-point"),
    "layer too many": (
        lambda t: t.update({QUERY.replace("0", "2").format(s): t[QUERY.format(s)].clone() for s in "AB"}),
        "layers.2.self_attn.q_proj",
    ),
    "head": (_set("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64)), "lm_head"),
    "magnitude": (_set(QUERY.format("magnitude_vector"), torch.zeros(4)), "DoRA"),
    "embedding": (_set("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4)), "embed_tokens"),
    "foreign": (_set("model.norm.weight", torch.zeros(4)), "'model.norm.weight'"),
    "projection of the wrong side": (
        _rename(QUERY.format("A"), QUERY.replace("self_attn", "mlp").format("A")),
        "not a LoRA matrix",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_refused(name: str, folder: Path, model: ModelConfig) -> None:
    edit, words = TENSORS[name]
    change(folder, edit)
    refused(folder, model, words)


def _truncate(folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])


def _pickle(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "truncated or damaged"),
    "empty": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""), "truncated or damaged"),
    "header of any length": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\xff" * 64), "truncated or damaged"),
    "pickle": (_pickle, "pickled"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "has no adapter_model.safetensors"),
    "no configuration": (lambda folder: (folder / CONFIG_FILE).unlink(), "has no adapter_config.json"),
    "not JSON": (lambda folder: (folder / CONFIG_FILE).write_text("{"), "not JSON"),
    "deep JSON": (lambda folder: (folder / CONFIG_FILE).write_text("[" * 100_000), "not JSON"),
    "not an object": (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "not a JSON object"),
    "huge configuration": (lambda folder: (folder / CONFIG_FILE).write_text(" " * 2_000_000), "larger than any"),
    "huge weights": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"0" * 10_000_000), "larger than any"),
    "no folder": (shutil.rmtree, "not a folder"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_refused(name: str, folder: Path, model: ModelConfig) -> None:
    edit, words = FILES[name]
    edit(folder)
    refused(folder, model, words)


def test_files_that_changed_since_they_were_registered_are_refused(folder: Path, model: ModelConfig) -> None:
    digest = digest_folder(folder)
    change(folder, lambda tensors: tensors[QUERY.format("A")].mul_(2))
    assert digest_folder(folder) != digest
    refused(folder, model, "digest", digest=digest)


def test_a_number_too_large_for_the_engines_dtype_is_refused(folder: Path, model: ModelConfig) -> None:
    change(folder, lambda tensors: tensors[QUERY.format("B")].fill_(5e4))  # times the scaling 2
    assert read(folder, model).rank == 4
    refused(folder, model, "not finite in float16", dtype=torch.float16)


def refused(folder: Path, model: ModelConfig, words: str, **options: Any) -> None:
    with pytest.raises(AdapterRejected) as caught:
        read(folder, model, **options)
    assert words in str(caught.value)
    assert "secret-place" not in str(caught.value)


def test_a_digest_is_taken_without_torch(folder: Path) -> None:
    """The gateway takes it, and has no use for torch's memory."""
    program = f"import engine.adapters as a, sys, pathlib; print(a.digest_folder(pathlib.Path({str(folder)!r})))"
    program += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == digest_folder(folder), done.stderr
