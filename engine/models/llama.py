"""The one layer plan: pre-norm attention and SwiGLU, for every family of `engine.models.config`.

Knows: the names of the tensors in a folder, which of them are fused, and the order of operations of a forward pass
over flat tokens of many sequences. Does not know: sequences, sampling, or how an operation is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.layers import Linear, Rotary
from engine.lora import LoraStep
from engine.modelcache import WeightsError
from engine.models.config import LayerPlan, ModelConfig
from kernels.dispatch import Operations
from kernels.paged_attention import AttentionBatch


@dataclass(slots=True)
class Batch:
    """One step's tokens, those of one sequence side by side."""

    tokens: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64, where in the cache their keys and values go
    sampled: torch.Tensor  # [rows] int64, the tokens whose logits are wanted
    attention: AttentionBatch
    lora: LoraStep | None  # None: no row has an adapter


@dataclass(slots=True)
class _Layer:
    plan: LayerPlan
    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A model on one device, in one dtype."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        operations: Operations,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Take the weights in as they come; raises `WeightsError` when one is missing, unknown or of another shape."""
        self.config = config
        self._operations = operations
        self._scale = config.head_dim**-0.5
        store = _Store(config, device, dtype)
        for name, tensor in weights:
            store.put(name, tensor)
        store.check()
        self._rotary = Rotary(config.rope, config.head_dim, device)
        self._embedding = store.take("model.embed_tokens.weight")
        self._norm = store.take("model.norm.weight")
        self._head = Linear(self._embedding if config.tie else store.take("lm_head.weight"))
        self._layers = [self._layer(store, index, plan) for index, plan in enumerate(config.plan)]

    @staticmethod
    def _layer(store: _Store, index: int, plan: LayerPlan) -> _Layer:
        def take(part: str) -> torch.Tensor:
            return store.take(f"model.layers.{index}.{part}")

        def linear(part: str) -> Linear:
            return Linear(take(f"{part}.weight"), store.take_optional(f"model.layers.{index}.{part}.bias"))

        return _Layer(
            plan=plan,
            input_norm=take("input_layernorm.weight"),
            qkv=linear("self_attn.qkv_proj"),
            query_norm=store.take_optional(f"model.layers.{index}.self_attn.q_norm.weight"),
            key_norm=store.take_optional(f"model.layers.{index}.self_attn.k_norm.weight"),
            o=linear("self_attn.o_proj"),
            post_norm=take("post_attention_layernorm.weight"),
            gate_up=linear("mlp.gate_up_proj"),
            down=linear("mlp.down_proj"),
        )

    def forward(self, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Write the step's keys and values to `cache` [layers, blocks, block_size, 2 * kv_heads, head_dim].

        Returns the logits of the sampled tokens [rows, vocab] float32.
        """
        operations, eps = self._operations, self.config.eps
        rotary = self._rotary(batch.positions)
        x = F.embedding(batch.tokens, self._embedding)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed, residual = operations.rms_norm(x, layer.input_norm, eps, residual)
            attended = self._attend(index, layer, normed, rotary, batch, cache[index])
            x = layer.o(attended)
            if batch.lora is not None:
                batch.lora.apply(index, "o", x, attended)
            normed, residual = operations.rms_norm(x, layer.post_norm, eps, residual)
            x = self._feed_forward(index, layer, normed, batch.lora)
        if not len(batch.sampled):
            return x.new_empty(0, self.config.vocab, dtype=torch.float32)
        if residual is not None:
            residual = residual[batch.sampled]
        normed, _ = operations.rms_norm(x[batch.sampled], self._norm, eps, residual)
        return self._head(normed).to(torch.float32)

    def _attend(
        self, index: int, layer: _Layer, x: torch.Tensor, rotary: torch.Tensor, batch: Batch, cache: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden] → [tokens, heads * head_dim]."""
        config, operations = self.config, self._operations
        projected = layer.qkv(x)
        if batch.lora is not None:
            batch.lora.apply(index, "qkv", projected, x)
        heads = projected.view(len(x), -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._normalise(heads[:, : config.heads], layer.query_norm)
            self._normalise(heads[:, config.heads : config.heads + config.kv_heads], layer.key_norm)
        operations.rope_kv_write(heads, rotary if layer.plan.rope else None, batch.slots, cache)
        query = heads[:, : config.heads]
        out = operations.paged_attention(query, cache, batch.attention, self._scale, layer.plan.window)
        return out.view(len(x), -1)

    def _normalise(self, heads: torch.Tensor, weight: torch.Tensor) -> None:
        """Each head by itself, in place (Qwen3's QK-norm)."""
        normed, _ = self._operations.rms_norm(heads.reshape(-1, heads.shape[-1]), weight, self.config.eps, None)
        heads.copy_(normed.view(heads.shape))

    def _feed_forward(self, index: int, layer: _Layer, x: torch.Tensor, lora: LoraStep | None) -> torch.Tensor:
        projected = layer.gate_up(x)
        if lora is not None:
            lora.apply(index, "gate_up", projected, x)
        activated = self._operations.silu_mul(projected)
        out = layer.down(activated)
        if lora is not None:
            lora.apply(index, "down", out, activated)
        return out


class _Store:
    """Every tensor of the plan, allocated whole; those of a folder are copied into their part of it."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}  # by the folder's names; those not filled yet
        self._ignored = {"lm_head.weight"} if config.tie else set()
        self._known: set[str] = set()
        for name, (parts, width) in _plan(config).items():
            rows = sum(parts.values())
            shape = (rows,) if width is None else (rows, width)
            tensor = self._tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            row = 0
            for part, count in parts.items():
                self._parts[part] = tensor[row : row + count]
                row += count
        self._known |= self._parts.keys()

    def put(self, name: str, tensor: torch.Tensor) -> None:
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

    def check(self) -> None:
        if self._parts:
            first = min(self._parts)
            raise WeightsError(f"The model lacks {len(self._parts)} tensors, among them {first!r}.")

    def take(self, name: str) -> torch.Tensor:
        """Given up to the caller, so that what he repacks is not held twice."""
        return self._tensors.pop(name)

    def take_optional(self, name: str) -> torch.Tensor | None:
        return self._tensors.pop(name, None)


def _plan(config: ModelConfig) -> dict[str, tuple[dict[str, int], int | None]]:
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
