"""What is refused of an adapter's folder, with which words, and that a refusal changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.adapters import CONFIG_FILE, WEIGHTS_FILE, digest_folder, read_adapter
from engine.models.config import ModelConfig
from engine.tensorfile import TensorFileError, parse_tensors
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
    "no kind": ({"peft_type": [["IA3"]]}, "only LORA"),
    "qalora": ({"use_qalora": True}, "QA-LoRA"),
    "alora": ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    "parameters": ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
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
    "rank that no number holds": ({"r": 10**400}, "r must be"),
    "alpha that no float holds": ({"lora_alpha": 10**400}, "lora_alpha must be"),
    "alpha that overflows": ({"lora_alpha": -1e300}, "lora_alpha must be"),
    "alpha by pattern that no float holds": ({"alpha_pattern": {"q_proj": 10**400}}, "q_proj must be"),
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
    "layers that are none": ({"layers_to_transform": [[0]]}, "layers_to_transform"),
    "unknown target": ({"target_modules": ["q_proj", "down_proj", "router"]}, "'router', which this model does"),
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
    "infinity": (lambda t: t[QUERY.format("A")][0, 0].fill_(float("-inf")), "not finite"),
    "saved module": (_set("base_model.model.lm_head.weight", torch.zeros(4)), "lm_head"),
    "trained bias": (_set("base_model.model.model.layers.0.self_attn.q_proj.bias", torch.zeros(64)), "not a LoRA"),
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


def _cut(folder: Path, end: int) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[:end])


def _header(folder: Path, edit: Callable[[dict[str, Any]], object], *, spaces: int = 0) -> None:
    """Change the header of the tensors' file, and leave their bytes as they are."""
    data = (folder / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode() + b" " * spaces
    (folder / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _entry(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: _header(folder, lambda header: header[QUERY.format("A")].update(changes))


def _link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def _replace(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / WEIGHTS_FILE).unlink()
        make(folder / WEIGHTS_FILE)

    return replace


def _grow(path: Path) -> None:
    """A file of a terabyte that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _pickle(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: _cut(folder, -1000), "truncated or damaged"),
    "truncated by a byte": (lambda folder: _cut(folder, -1), "truncated or damaged"),
    "truncated in the header": (lambda folder: _cut(folder, 100), "shorter than its header says"),
    "truncated before the header": (lambda folder: _cut(folder, 7), "shorter than its header says"),
    "bytes behind the end": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes() + b"0"),
        "bytes of no tensor",
    ),
    "huge header": (lambda folder: _header(folder, lambda header: None, spaces=1_100_000), "header is larger than"),
    "header that is no object": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes((2).to_bytes(8, "little") + b"[]"),
        "header is not a JSON object",
    ),
    "header with a name twice": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes((15).to_bytes(8, "little") + b'{"a":{},"a":{}}'),
        "header is not JSON",
    ),
    "tensor of another type": (_entry(dtype="C64"), "'C64', which is not supported"),
    "tensor of no type": (_entry(dtype=["F32"]), "is not supported"),
    "tensor of a larger type": (_entry(dtype="F64"), "not those of its shape"),
    "tensor of a larger shape": (_entry(shape=[4, 65]), "not those of its shape"),
    "tensor of a negative shape": (_entry(shape=[-4, -64]), "shape or place"),
    "tensor of a shape that overflows": (_entry(shape=[1 << 40, 1 << 40]), "not those of its shape"),
    "tensor of many dimensions": (_entry(shape=[1] * 100), "shape or place"),
    "tensor of a fractional shape": (_entry(shape=[4.0, 64.0]), "shape or place"),
    "tensor out of the file": (_entry(data_offsets=[0, 1 << 50]), "outside of the file"),
    "tensor before the file": (_entry(data_offsets=[-8, 1016]), "shape or place"),
    "tensor that ends before it begins": (_entry(data_offsets=[1024, 0]), "outside of the file"),
    "tensor on another": (_entry(data_offsets=[4096, 5120]), "bytes of no tensor, or of two"),
    "tensor without a place": (lambda folder: _header(folder, lambda h: h[QUERY.format("A")].clear()), "entry is not"),
    "tensor that is a number": (lambda folder: _header(folder, lambda h: h.update({QUERY.format("A"): 1})), "entry is"),
    "link": (lambda folder: _link(folder, WEIGHTS_FILE), "symbolic link"),
    "linked configuration": (lambda folder: _link(folder, CONFIG_FILE), "symbolic link"),
    "pipe without a writer": (_replace(os.mkfifo), "not a regular file"),
    "folder in place of the file": (_replace(Path.mkdir), "not a regular file"),
    "device": (_replace(lambda path: path.symlink_to("/dev/zero")), "symbolic link"),
    "terabyte": (_replace(_grow), "larger than any"),
    "empty": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""), "truncated or damaged"),
    "header of any length": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\xff" * 64), "truncated or damaged"),
    "pickle": (_pickle, "pickled"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "has no adapter_model.safetensors"),
    "no configuration": (lambda folder: (folder / CONFIG_FILE).unlink(), "has no adapter_config.json"),
    "not JSON": (lambda folder: (folder / CONFIG_FILE).write_text("{"), "not JSON"),
    "deep JSON": (lambda folder: (folder / CONFIG_FILE).write_text("[" * 100_000), "not JSON"),
    "number of a hundred thousand digits": (
        lambda folder: (folder / CONFIG_FILE).write_text('{"r": ' + "9" * 100_000 + "}"),
        "not JSON",
    ),
    "no UTF-8": (lambda folder: (folder / CONFIG_FILE).write_bytes(b'{"r": "\xff"}'), "not JSON"),
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


def test_another_base_is_named_where_the_shapes_are_another_models(folder: Path, model: ModelConfig) -> None:
    configure(folder, base_model_name_or_path="/secret-place/models/Big-7B (copy)/")
    assert read(folder, model).rank == 4  # a name alone is no reason
    change(folder, _set(QUERY.format("A"), torch.zeros(4, 65)))
    refused(folder, model, "need (4, 64); it was made for 'Big-7B copy'")


def test_every_type_of_number_that_an_adapter_comes_in_is_read(folder: Path, model: ModelConfig) -> None:
    expected = read(folder, model).weights[1, "down_proj"]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        change(folder, lambda t, dtype=dtype: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
        for found, right in zip(read(folder, model).weights[1, "down_proj"], expected, strict=True):
            assert found.dtype is torch.float32
            torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)


def test_what_is_kept_is_no_part_of_the_files_bytes(folder: Path, model: ModelConfig) -> None:
    """Which would stay in memory whole, and lie at any alignment."""
    _header(folder, lambda header: None, spaces=3)
    for pair in read(folder, model).weights.values():
        for matrix in pair:
            assert matrix.untyped_storage().nbytes() == matrix.nbytes
            assert matrix.data_ptr() % 16 == 0


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_changed_in_the_files_is_refused_or_read(
    data: st.DataObject, sound: Path, tiny_model: Path
) -> None:
    """Bytes flipped, cut out, doubled: nothing but `AdapterRejected` comes of it, and what is read is finite."""
    model = ModelConfig.from_folder(tiny_model)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(sound, folder, dirs_exist_ok=True)
        path = Path(folder) / data.draw(st.sampled_from([WEIGHTS_FILE, WEIGHTS_FILE, CONFIG_FILE]))
        raw = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(raw[:8], "little") if path.name == WEIGHTS_FILE else len(raw)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, min(header, len(raw)) - 1))
            match data.draw(st.sampled_from(["flip", "digit", "cut", "double"])):
                case "flip":
                    raw[at] ^= 1 << data.draw(st.integers(0, 7))
                case "digit":
                    raw[at : at + 1] = str(data.draw(st.integers(-1, 1 << 70))).encode()
                case "cut":
                    del raw[at : at + data.draw(st.integers(1, 60))]
                case "double":
                    raw[at:at] = raw[at : at + data.draw(st.integers(1, 60))]
            if not raw:
                break
        path.write_bytes(raw)
        reason, weights = "", {}
        try:
            weights = read(Path(folder), model).weights
        except AdapterRejected as error:
            reason = str(error)
    assert bool(reason) != bool(weights)
    assert folder not in reason
    assert all(matrix.isfinite().all() for pair in weights.values() for matrix in pair)


@given(garbage=st.binary(max_size=200), length=st.integers(0, (1 << 64) - 1))
@settings(max_examples=200, deadline=None)
def test_garbage_is_no_tensor_file(garbage: bytes, length: int) -> None:
    for head in (length.to_bytes(8, "little"), len(garbage).to_bytes(8, "little")):
        try:
            found = parse_tensors(np.frombuffer(head + garbage, np.uint8), header_bytes_max=100)
        except TensorFileError:
            continue
        assert found == {}


def test_a_digest_is_taken_without_torch(folder: Path) -> None:
    """The gateway takes it, and has no use for torch's memory."""
    program = f"import engine.adapters as a, sys, pathlib; print(a.digest_folder(pathlib.Path({str(folder)!r})))"
    program += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == digest_folder(folder), done.stderr
