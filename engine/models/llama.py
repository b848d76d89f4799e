"""The one layer plan in torch: pre-norm attention and SwiGLU, for every family of `engine.models.config`.

Knows: the order of operations of a forward pass over flat tokens of many sequences. Does not know: sequences,
sampling, or how an operation is computed. `engine.models.native` computes the same plan in one native call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.layers import Linear, Rotary
from engine.lora import LoraStep
from engine.models.batch import Batch
from engine.models.config import LayerPlan
from engine.models.store import WeightStore
from kernels.dispatch import Operations
from kernels.paged_attention import AttentionBatch


@dataclass(slots=True)
class _Rows:
    """A batch on the device."""

    tokens: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64, where in the cache their keys and values go
    wanted: torch.Tensor  # [rows] int64
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

    def __init__(self, store: WeightStore, *, operations: Operations, device: torch.device) -> None:
        """Take the weights out of the store."""
        config = self.config = store.config
        self._device = device
        self._operations = operations
        self._scale = config.head_dim**-0.5
        self._rotary = Rotary(config.rope, config.head_dim, device)
        self._embedding = store.take("model.embed_tokens.weight")
        self._norm = store.take("model.norm.weight")
        self._head = Linear(self._embedding if config.tie else store.take("lm_head.weight"))
        self._layers = [self._layer(store, index, plan) for index, plan in enumerate(config.plan)]

    @staticmethod
    def _layer(store: WeightStore, index: int, plan: LayerPlan) -> _Layer:
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

    def forward(self, batch: Batch, cache: torch.Tensor, lora: LoraStep | None) -> torch.Tensor:
        """Write the step's keys and values to `cache` [layers, blocks, block_size, 2 * kv_heads, head_dim].

        Returns the logits of the wanted rows [rows, vocab] float32.
        """
        rows = self._rows(batch, cache.shape[2], lora)
        operations, eps = self._operations, self.config.eps
        rotary = self._rotary(rows.positions)
        x = F.embedding(rows.tokens, self._embedding)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed, residual = operations.rms_norm(x, layer.input_norm, eps, residual)
            attended = self._attend(index, layer, normed, rotary, rows, cache[index])
            x = layer.o(attended)
            if lora is not None:
                lora.apply(index, "o", x, attended)
            normed, residual = operations.rms_norm(x, layer.post_norm, eps, residual)
            x = self._feed_forward(index, layer, normed, lora)
        if not batch.wanted:
            return x.new_empty(0, self.config.vocab, dtype=torch.float32)
        if residual is not None:
            residual = residual[rows.wanted]
        normed, _ = operations.rms_norm(x[rows.wanted], self._norm, eps, residual)
        return self._head(normed).to(torch.float32)

    def _attend(
        self, index: int, layer: _Layer, x: torch.Tensor, rotary: torch.Tensor, rows: _Rows, cache: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden] → [tokens, heads * head_dim]."""
        config, operations = self.config, self._operations
        projected = layer.qkv(x)
        if rows.lora is not None:
            rows.lora.apply(index, "qkv", projected, x)
        heads = projected.view(len(x), -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._normalise(heads[:, : config.heads], layer.query_norm)
            self._normalise(heads[:, config.heads : config.heads + config.kv_heads], layer.key_norm)
        operations.rope_kv_write(heads, rotary if layer.plan.rope else None, rows.slots, cache)
        query = heads[:, : config.heads]
        out = operations.paged_attention(query, cache, rows.attention, self._scale, layer.plan.window)
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

    def _rows(self, batch: Batch, block_size: int, lora: LoraStep | None) -> _Rows:
        positions, slots = [], []
        for start, count, table in zip(batch.starts, batch.counts, batch.tables, strict=True):
            position = np.arange(start, start + count)
            first = start // block_size
            block = np.asarray(table[first:])
            slots.append(block[position // block_size - first] * block_size + position % block_size)
            positions.append(position)
        return _Rows(
            tokens=self._put(np.asarray(batch.tokens)),
            positions=self._put(np.concatenate(positions)),
            slots=self._put(np.concatenate(slots)),
            wanted=self._put(np.asarray(batch.wanted)),
            attention=AttentionBatch(
                counts=batch.counts,
                contexts=[start + count for start, count in zip(batch.starts, batch.counts, strict=True)],
                tables=batch.tables,
            ),
            lora=lora,
        )

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device, non_blocking=True)
