"""LoRA adapters as PEFT saves them: read whole and checked, or refused with the reason.

Knows: the folder's two files, PEFT's configuration and tensor names, and which of its features change the
arithmetic. Does not know: where the numbers go (`engine.lora`) or who may use an adapter. No text of an error
carries a path. torch is imported only where tensors are read, so the file names and a digest can be had without it.

Source: https://github.com/huggingface/peft (LoraConfig, lora.layer); rsLoRA: https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.config import ModelConfig
from engine.types import AdapterRef, AdapterRejected

if TYPE_CHECKING:
    import numpy as np
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 20
_PIECE = 32_000  # elements; torch uses one thread for less than 32,768

_SIDES = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"} | {
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
PROJECTIONS = tuple(_SIDES)
"""The linear layers an adapter may change, in the order of the computation."""

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,4})\.(self_attn|mlp)\.(\w+_proj)\.lora_([AB])\.weight", re.ASCII
)
# Patterns come from whoever made the adapter: only what Python's `re` matches in polynomial time is taken.
_SAFE_PATTERN = re.compile(r"(?:[\w^$\\-]|\.\*?){1,256}", re.ASCII)
_WILDCARDS_MAX = 2
_NUMBER_MAX = 1e30  # of a rank or alpha: whatever is done with it stays a float
_PATTERNS_MAX = 512  # each is tried on every module, while nobody's tokens are computed

# Features of PEFT that change what is computed, and are not computed here. Each is off when absent or falsy.
_UNSUPPORTED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "modules_to_save is not supported: an adapter may not replace layers",
    "lora_bias": "lora_bias is not supported",
    "fan_in_fan_out": "fan_in_fan_out is not supported",
    "trainable_token_indices": "trainable_token_indices is not supported",
    "target_parameters": "target_parameters is not supported",
    "layer_replication": "layer_replication is not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "velora_config": "VeLoRA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
}
# These start training from base weights that were changed too, and the folder does not hold the change.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter's numbers on the CPU, in the dtype they will be used in."""

    digest: str
    rank: int  # the largest of its modules
    targets: tuple[str, ...]
    weights: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
    """(layer, projection) → A [rank, inputs] and B [outputs, rank], B times the scaling."""
    packed: Any = None  # in the form of whoever computes with it, if that is not theirs; `weights` is empty then


def digest_folder(path: Path) -> str:
    """SHA-256 in hex over both files' bytes, each after its length (8 bytes, big-endian). Raises `AdapterRejected`."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with _opened(path, name) as (file, length):
            digest.update(length.to_bytes(8, "big"))
            while chunk := os.read(file, _CHUNK_BYTES):
                digest.update(chunk)
                length -= len(chunk)
        if length:
            raise AdapterRejected(f"the adapter's {name} changed while it was read")
    return digest.hexdigest()


def read_adapter(ref: AdapterRef, model: ModelConfig, *, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read and check the folder of `ref`; what is returned is what was digested. Raises `AdapterRejected`."""
    folder = Path(ref.path)
    raw_config = _read(folder, CONFIG_FILE, _CONFIG_BYTES_MAX)
    raw_weights = _read(folder, WEIGHTS_FILE, _header_bytes_max(model) + _tensor_bytes_max(model, max_rank))
    digest = _digest([raw_config, raw_weights])
    if ref.digest and ref.digest != digest:
        raise AdapterRejected("the adapter's files are not those that were registered (their digest differs)")
    config = _parse_config(raw_config.tobytes())
    tensors = _parse_tensors(raw_weights, _header_bytes_max(model))
    pairs = _pair(tensors)
    _check_targets(config, set(pairs), model)
    weights = {place: _module(place, a, b, config, model, max_rank, dtype) for place, (a, b) in sorted(pairs.items())}
    return Adapter(
        digest=digest,
        rank=max(len(a) for a, _ in weights.values()),
        targets=tuple(name for name in PROJECTIONS if any(name == found for _, found in weights)),
        weights=weights,
    )


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Projection → (inputs, outputs)."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "q_proj": (model.hidden, query),
        "k_proj": (model.hidden, key),
        "v_proj": (model.hidden, key),
        "o_proj": (query, model.hidden),
        "gate_proj": (model.hidden, model.ffn),
        "up_proj": (model.hidden, model.ffn),
        "down_proj": (model.ffn, model.hidden),
    }


# ---- files ----


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """A descriptor of the file and its size. Nothing else is read: a link may lead anywhere, a pipe has no end."""
    file = -1
    try:
        if not folder.is_dir():
            raise AdapterRejected("the adapter's path is not a folder that the engine can read")
        file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise AdapterRejected(f"the adapter's {name} is not a regular file")
        yield file, found.st_size
    except OSError as error:
        raise AdapterRejected(_why_closed(folder, name, error)) from error
    finally:
        if file >= 0:
            os.close(file)


def _why_closed(folder: Path, name: str, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"the adapter's {name} is a symbolic link; the folder must hold the file itself"
    if error.errno != errno.ENOENT:
        return f"the adapter's {name} cannot be read ({error.strerror})"
    if name == WEIGHTS_FILE and os.path.lexists(folder / "adapter_model.bin"):
        return f"the adapter is pickled (adapter_model.bin), which can run code; save it as {WEIGHTS_FILE}"
    return f"the adapter has no {name}"


def _read(folder: Path, name: str, bytes_max: int) -> np.ndarray:
    """The whole file [bytes] uint8. Long calls release the interpreter's lock: steps go on meanwhile."""
    import numpy as np

    with _opened(folder, name) as (file, length):
        if length > bytes_max:
            raise AdapterRejected(f"the adapter's {name} is larger than any that fits this model ({bytes_max} bytes)")
        data = np.empty(length, np.uint8)
        done = 0
        while done < length and (count := os.readv(file, [data.data[done:]])):
            done += count
    if done < length:
        raise AdapterRejected(f"the adapter's {name} changed while it was read")
    return data


def _digest(files: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for data in files:
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data.data)
    return digest.hexdigest()


def _header_bytes_max(model: ModelConfig) -> int:
    return 2048 * model.layers + (1 << 20)


def _tensor_bytes_max(model: ModelConfig, max_rank: int) -> int:
    """What every projection at the highest rank takes in float32."""
    return 4 * sum(inputs + outputs for inputs, outputs in shapes(model).values()) * model.layers * max_rank


# ---- configuration ----


@dataclass(frozen=True, slots=True)
class _LoraConfig:
    rank: int
    alpha: float
    rank_pattern: dict[re.Pattern[str], Any]
    alpha_pattern: dict[re.Pattern[str], Any]
    rslora: bool
    targets: str | list[str]
    excluded: str | list[str]
    layers: frozenset[int] | None  # None: all
    base: str  # what the base model was called where it was trained

    def scaling(self, module: str, rank: int) -> float:
        alpha: float = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _parse_config(data: bytes) -> _LoraConfig:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterRejected(f"the adapter's {CONFIG_FILE} is not JSON") from error
    if not isinstance(raw, dict):
        raise AdapterRejected(f"the adapter's {CONFIG_FILE} is not a JSON object")
    _refuse_unsupported(raw)
    patterns = {name: _patterns(raw, name) for name in ("rank_pattern", "alpha_pattern")}
    config = _LoraConfig(
        rank=_number(raw, "r", 8, whole=True),
        alpha=_number(raw, "lora_alpha", 8),
        rslora=bool(raw.get("use_rslora")),
        targets=raw.get("target_modules") or [],
        excluded=raw.get("exclude_modules") or [],
        layers=_layers(raw.get("layers_to_transform")),
        base=_base_name(raw.get("base_model_name_or_path")),
        **patterns,
    )
    for name, value in (("target_modules", config.targets), ("exclude_modules", config.excluded)):
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise AdapterRejected(f"{name} is neither a text nor a list of texts")
    return config


def _layers(value: Any) -> frozenset[int] | None:
    layers = [value] if isinstance(value, int) else value or None
    if layers is None:
        return None
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise AdapterRejected("layers_to_transform is not a list of layer numbers")
    return frozenset(layers)


def _base_name(value: Any) -> str:
    """The last part of a name or path, as far as it may be shown."""
    name = re.split(r"[/\\]", value.rstrip("/\\"))[-1] if isinstance(value, str) else ""
    return re.sub(r"[^\w .+-]", "", name, flags=re.ASCII)[:60]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    kind = raw.get("peft_type", "LORA")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        shown = f" {kind[:40]!r}" if isinstance(kind, str) else " no text"
        raise AdapterRejected(f"the adapter's type is{shown}; only LORA is supported")
    for feature, reason in _UNSUPPORTED.items():
        if raw.get(feature):
            raise AdapterRejected(reason)
    if raw.get("bias", "none") != "none":
        raise AdapterRejected("an adapter that trains biases is not supported (bias must be 'none')")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterRejected(f"init_lora_weights {start[:40]!r} changes the base weights, which is not supported")


def _number(raw: dict[str, Any], name: str, default: int, *, whole: bool = False) -> Any:
    value = raw.get(name, default)
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not -_NUMBER_MAX < value < _NUMBER_MAX or (whole and value < 1):
        raise AdapterRejected(f"{name} must be a {'positive whole' if whole else 'finite'} number")
    return value


def _patterns(raw: dict[str, Any], name: str) -> dict[re.Pattern[str], Any]:
    """Each pattern for the end of a module's name, as PEFT's `get_pattern_key` reads it, with its value."""
    patterns = raw.get(name) or {}
    if not isinstance(patterns, dict):
        raise AdapterRejected(f"{name} is not an object")
    if len(patterns) > _PATTERNS_MAX:
        raise AdapterRejected(f"{name} has more than {_PATTERNS_MAX} patterns")
    compiled = {}
    for pattern in patterns:
        if not _SAFE_PATTERN.fullmatch(pattern) or pattern.count(".*") > _WILDCARDS_MAX:
            raise AdapterRejected(f"{name} must use module names, or patterns of names with at most two '.*'")
        value = _number(patterns, pattern, 0, whole=name == "rank_pattern")
        try:
            compiled[re.compile(rf"(.*\.)?({pattern})$")] = value
        except re.error as error:
            raise AdapterRejected(f"{name} holds a pattern that is none") from error
    return compiled


def _by_pattern(patterns: dict[re.Pattern[str], Any], module: str, default: Any) -> Any:
    """The first that matches, as PEFT chooses."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def _check_targets(config: _LoraConfig, found: set[tuple[int, str]], model: ModelConfig) -> None:
    """The file must hold what the configuration says it does, no less and no more."""
    names = [config.targets] if isinstance(config.targets, str) else config.targets
    for name in names:
        if name.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens"):
            raise AdapterRejected(f"{name.rsplit('.', 1)[-1]} cannot be a target; the attention and MLP layers can")
    if isinstance(config.targets, str) and config.targets != "all-linear":
        return  # a regular expression from outside is not run: the tensors themselves say what is targeted
    if isinstance(config.excluded, str):
        return
    targets, excluded = frozenset(names), frozenset(config.excluded)
    ends = {(layer, name): _ends(layer, name) for layer in range(model.layers) for name in PROJECTIONS}
    if config.targets != "all-linear" and (strange := targets.difference(*ends.values())):
        raise AdapterRejected(f"target_modules names {min(strange)[:80]!r}, which this model does not have")
    expected = {
        place
        for place, names_of in ends.items()
        if config.layers is None or place[0] in config.layers
        if config.targets == "all-linear" or not targets.isdisjoint(names_of)
        if excluded.isdisjoint(names_of)
    }
    if missing := sorted(expected - found):
        raise AdapterRejected(f"the adapter lacks the tensors of {_module_name(*missing[0])}, which is a target")
    if odd := sorted(found - expected):
        raise AdapterRejected(f"the adapter has tensors of {_module_name(*odd[0])}, which is no target")


def _ends(layer: int, projection: str) -> set[str]:
    """The names by which PEFT finds this module: its own, and its last parts."""
    parts = _module_name(layer, projection).split(".")
    return {".".join(parts[first:]) for first in range(len(parts))}


def _module_name(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.{_SIDES[projection]}.{projection}"


# ---- tensors ----


def _parse_tensors(data: np.ndarray, header_bytes_max: int) -> dict[str, torch.Tensor]:
    from engine.tensorfile import TensorFileError, parse_tensors

    try:
        return parse_tensors(data, header_bytes_max=header_bytes_max)
    except TensorFileError as error:
        raise AdapterRejected(f"the adapter's {WEIGHTS_FILE} is truncated or damaged: {error}") from error


def _pair(tensors: dict[str, torch.Tensor]) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    """(layer, projection) → (A, B), refusing every tensor that is neither."""
    sides: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or _SIDES.get(match[3]) != match[2]:
            raise AdapterRejected(_why_unknown(name))
        sides.setdefault((int(match[1]), match[3]), {})[match[4]] = tensor
    for (layer, projection), found in sides.items():
        if len(found) != 2:
            raise AdapterRejected(f"{_module_name(layer, projection)} has only one of lora_A and lora_B")
    if not sides:
        raise AdapterRejected("the adapter has no tensors")
    return {place: (found["A"], found["B"]) for place, found in sides.items()}


def _why_unknown(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not supported"
    for layer in ("lm_head", "embed_tokens"):
        if layer in name:
            return f"{layer} cannot be a target; the attention and MLP layers can"
    return f"the tensor {name[:120]!r} is not a LoRA matrix of an attention or MLP layer"


def _module(
    place: tuple[int, str],
    a: torch.Tensor,
    b: torch.Tensor,
    config: _LoraConfig,
    model: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and the scaled B in `dtype`, after every check of shape, rank and number."""
    module = _module_name(*place)
    if place[0] >= model.layers:
        raise AdapterRejected(f"{module} does not exist: the model has {model.layers} layers")
    inputs, outputs = shapes(model)[place[1]]
    rank = _by_pattern(config.rank_pattern, module, config.rank)
    if rank > max_rank:
        raise AdapterRejected(f"{module} has rank {rank}; the engine takes at most {max_rank}")
    for side, tensor, shape in (("lora_A", a, (rank, inputs)), ("lora_B", b, (outputs, rank))):
        if not tensor.is_floating_point():
            raise AdapterRejected(f"{module} {side} is not of floating-point numbers")
        if tuple(tensor.shape) != shape:
            made_for = f"; it was made for {config.base!r}" if config.base else ""
            raise AdapterRejected(
                f"{module} {side} is {tuple(tensor.shape)}; this model and rank need {shape}{made_for}"
            )
    return _kept(a, 1.0, module, dtype), _kept(b, config.scaling(module, rank), module, dtype)


def _kept(stored: torch.Tensor, scale: float, module: str, dtype: torch.dtype) -> torch.Tensor:
    """Times `scale` in `dtype`, where a number may no longer fit: infinity would reach others through masked products.

    A copy, and no part of the file's bytes, which go. In pieces that torch computes without its threads: those would
    wait for the cores that the steps are computed on.
    """
    import torch

    kept = torch.empty(stored.shape, dtype=dtype)
    source, target = stored.reshape(-1), kept.view(-1)
    for first in range(0, len(target), _PIECE):
        piece = target[first : first + _PIECE].copy_(source[first : first + _PIECE].float() * scale)
        if not piece.isfinite().all():
            raise AdapterRejected(f"{module} holds a number that is not finite in {str(dtype).removeprefix('torch.')}")
    return kept
