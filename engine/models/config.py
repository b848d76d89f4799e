"""What a model's config.json says, as the one layer plan that every family is built from.

Knows: the families (Llama, Mistral, Qwen2/2.5, Qwen3, SmolLM), where their configurations differ, and the RoPE
scalings. Does not know: torch, weights, or how a layer is computed. A family is a row of configuration: adding
one that fits the plan adds no code to `engine.models.llama`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.modelcache import WeightsError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""The `model_type`s that fit the plan. SmolLM and SmolLM2 are Llamas by their own configuration."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding (https://arxiv.org/abs/2104.09864) and how it is stretched past its trained length."""

    theta: float
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: the length before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as the bounds of the ramp
    attention_factor: float = 1.0  # yarn: what cos and sin are multiplied by


class LayerPlan(msgspec.Struct, frozen=True):
    """In what one layer may differ from the next."""

    rope: bool = True  # False: a layer without positions (SmolLM3)
    window: int | None = None  # sliding window in tokens, the current one included


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one decoder-only transformer. Sizes in elements, positions in tokens."""

    name: str  # the folder's name
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: RopeConfig
    max_position: int
    plan: tuple[LayerPlan, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie: bool = False  # lm_head is the embedding
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # as stored

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the end tokens). Raises `WeightsError`."""
        raw = _read_json(folder / "config.json", required=True)
        generation = _read_json(folder / "generation_config.json", required=False)
        return cls.from_dict(raw, name=folder.name, generation=generation)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, name: str, generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """The same from dictionaries already read."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise WeightsError(f"The model family {family!r} is not supported; supported are {', '.join(FAMILIES)}.")
        _refuse_unsupported(raw)
        heads = _count(raw, "num_attention_heads")
        hidden = _count(raw, "hidden_size")
        kv_heads = _count(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise WeightsError(f"config.json has {heads} attention heads over {kv_heads} key-value heads.")
        head_dim = _count(raw, "head_dim", hidden // heads)
        if head_dim % 2:
            raise WeightsError(f"config.json has an odd head_dim ({head_dim}); rotary embeddings need an even one.")
        layers = _count(raw, "num_hidden_layers")
        max_position = _count(raw, "max_position_embeddings")
        biased = bool(raw.get("attention_bias", False))
        return cls(
            name=name,
            family=family,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=_count(raw, "intermediate_size"),
            vocab=_count(raw, "vocab_size"),
            eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw, family, max_position),
            max_position=max_position,
            plan=_plan(raw, family, layers),
            qkv_bias=family == "qwen2" or biased,
            o_bias=family != "qwen2" and biased,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tie=bool(raw.get("tie_word_embeddings", family == "smollm3")),
            eos_token_ids=end_tokens(raw, generation or {}),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if not required:
            return {}
        raise WeightsError(f"The model folder has no {path.name}.") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path.name} of the model cannot be read as JSON.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path.name} of the model is not a JSON object.")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """What would be computed wrongly in silence if it were ignored."""
    architectures = raw.get("architectures") or []
    if architectures and not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise WeightsError(f"{architectures[0]} is not a language model that generates text.")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise WeightsError(f"Weights quantised by {method!r} are not supported; use the plain or the GGUF form.")
    if raw.get("hidden_act", "silu") != "silu":
        raise WeightsError(f"The activation {raw['hidden_act']!r} is not supported; only silu is.")


def _count(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WeightsError(f"config.json needs a positive whole number as {field}, not {value!r}.")
    return value


def end_tokens(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation configuration's end tokens, else the model's: what transformers' `generate` goes by."""
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _plan(raw: Mapping[str, Any], family: str, layers: int) -> tuple[LayerPlan, ...]:
    """Per layer: rotary or not, windowed or not, by the rules of each family's transformers configuration."""
    window = raw.get("sliding_window")
    ropes = [True] * layers
    if family == "smollm3":
        interval = raw.get("no_rope_layer_interval", 4)
        listed = raw.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
        ropes = [bool(rope) for rope in listed[:layers]]
    if family == "mistral":
        windowed = [window is not None] * layers
    elif family in ("qwen2", "qwen3", "smollm3") and raw.get("use_sliding_window") and window is not None:
        first = raw.get("max_window_layers", 28)
        default = [not rope for rope in ropes] if family == "smollm3" else [layer >= first for layer in range(layers)]
        types = raw.get("layer_types")
        windowed = [kind == "sliding_attention" for kind in types] if types else default
    else:
        windowed = [False] * layers
    if len(ropes) != layers or len(windowed) != layers:
        raise WeightsError(f"config.json lists another number of layer types than its {layers} layers.")
    if any(windowed) and (not isinstance(window, int) or window < 1):
        raise WeightsError(f"config.json needs a positive whole number as sliding_window, not {window!r}.")
    return tuple(
        LayerPlan(rope=rope, window=window if slides else None) for rope, slides in zip(ropes, windowed, strict=True)
    )


def _rope(raw: Mapping[str, Any], family: str, max_position: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise WeightsError("RoPE parameters that differ by layer type are not supported.")
    theta = given.get("rope_theta", raw.get("rope_theta", 2_000_000.0 if family == "smollm3" else 10_000.0))
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise WeightsError("A partial rotary embedding is not supported.")
    kind = given.get("rope_type", given.get("type", "default"))
    try:
        if kind == "default":
            return RopeConfig(theta=float(theta))
        if kind == "linear":
            return RopeConfig(theta=float(theta), kind=kind, factor=float(given["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta=float(theta),
                kind=kind,
                factor=float(given["factor"]),
                original_max_position=int(given.get("original_max_position_embeddings") or max_position),
                low_freq_factor=float(given["low_freq_factor"]),
                high_freq_factor=float(given["high_freq_factor"]),
            )
        if kind == "yarn":
            return _yarn(float(theta), given, max_position)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"The RoPE scaling {kind!r} in config.json lacks or garbles a parameter.") from error
    raise WeightsError(f"The RoPE scaling {kind!r} is not supported; default, linear, llama3 and yarn are.")


def _yarn(theta: float, given: Mapping[str, Any], max_position: int) -> RopeConfig:
    """https://arxiv.org/abs/2309.00071, with transformers' reading of the optional parameters."""
    original = int(given.get("original_max_position_embeddings") or max_position)
    factor = float(given.get("factor") or max_position / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    attention = given.get("attention_factor")
    if attention is None:
        all_dims = given.get("mscale_all_dim")
        scale = given.get("mscale")
        attention = magnitude(scale) / magnitude(all_dims) if scale and all_dims else magnitude(1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=float(attention),
    )
