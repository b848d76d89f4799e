"""A model's weights as the layer plan wants them: named as in a folder, fused, in one dtype on one device.

Knows: the names of the tensors in a folder, their shapes, and which of them are fused. Does not know: what is done with
them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.modelcache import WeightsError
from engine.models.config import ModelConfig


class WeightStore:
    """Every tensor of the plan, allocated whole; those of a folder are copied into their part of it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Take the weights in as they come; raises `WeightsError` when one is missing, unknown or of another shape."""
        self.config = config
        self._tensors: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}  # by the folder's names; those not filled yet
        self._ignored = {"lm_head.weight"} if config.tie else set()
        self._known: set[str] = set()
        for name, (parts, width) in plan_of(config).items():
            rows = sum(parts.values())
            shape = (rows,) if width is None else (rows, width)
            tensor = self._tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            row = 0
            for part, count in parts.items():
                self._parts[part] = tensor[row : row + count]
                row += count
        self._known |= self._parts.keys()
        for name, tensor in weights:
            self._put(name, tensor)
        if self._parts:
            first = min(self._parts)
            raise WeightsError(f"The model lacks {len(self._parts)} tensors, among them {first!r}.")

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._ignored or name.endswith("rotary_emb.inv_freq"):
            return
        part = self._parts.pop(name, None)
        if part is None:
            why = "is there twice" if name in self._known else "has no place in this family's layers"
            raise WeightsError(f"The tensor {name!r} of the model {why}.")
        if tensor.shape != part.shape:
            raise WeightsError(
                f"The tensor {name!r} of the model is {tuple(tensor.shape)}, and by config.json {tuple(part.shape)}."
            )
        part.copy_(tensor)

    def take(self, name: str) -> torch.Tensor:
        """Given up to the caller, so that what he repacks is not held twice."""
        return self._tensors.pop(name)

    def take_optional(self, name: str) -> torch.Tensor | None:
        return self._tensors.pop(name, None)


def plan_of(config: ModelConfig) -> dict[str, tuple[dict[str, int], int | None]]:
    """Fused name → (the folder's names with their rows, in order; columns, None for a vector)."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    plan: dict[str, tuple[dict[str, int], int | None]] = {}

    def add(fused: str, parts: dict[str, int], columns: int | None) -> None:
        plan[fused] = (parts, columns)

    def linear(prefix: str, fused: str, parts: dict[str, int], columns: int, bias: bool) -> None:
        add(f"{prefix}{fused}.weight", {f"{prefix}{part}.weight": rows for part, rows in parts.items()}, columns)
        if bias:
            add(f"{prefix}{fused}.bias", {f"{prefix}{part}.bias": rows for part, rows in parts.items()}, None)

    def vector(name: str, size: int) -> None:
        add(name, {name: size}, None)

    add("model.embed_tokens.weight", {"model.embed_tokens.weight": config.vocab}, config.hidden)
    vector("model.norm.weight", config.hidden)
    if not config.tie:
        add("lm_head.weight", {"lm_head.weight": config.vocab}, config.hidden)
    for index in range(config.layers):
        layer = f"model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        vector(f"{layer}input_layernorm.weight", config.hidden)
        vector(f"{layer}post_attention_layernorm.weight", config.hidden)
        if config.qk_norm:
            vector(f"{attention}q_norm.weight", config.head_dim)
            vector(f"{attention}k_norm.weight", config.head_dim)
        linear(
            attention,
            "qkv_proj",
            {"q_proj": query, "k_proj": key, "v_proj": key},
            config.hidden,
            config.qkv_bias,
        )
        linear(attention, "o_proj", {"o_proj": config.hidden}, query, config.o_bias)
        linear(mlp, "gate_up_proj", {"gate_proj": config.ffn, "up_proj": config.ffn}, config.hidden, config.mlp_bias)
        linear(mlp, "down_proj", {"down_proj": config.hidden}, config.ffn, config.mlp_bias)
    return plan
