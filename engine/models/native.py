"""The one layer plan as the native library computes it: a step is one call (`kernels.native_step`).

Knows: which weights the plan takes in which format, and the resident adapters in packed form. Does not know: how a step
is computed, or when this path is taken (`engine.runner`).
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import torch

from engine.adapters import PROJECTIONS, Adapter
from engine.layers import frequencies
from engine.models.batch import Batch
from engine.models.config import LayerPlan, ModelConfig
from engine.models.store import WeightStore
from engine.types import AdapterUnknown
from kernels.memory import Arena
from kernels.native_matmul import Format, Packed, Pool
from kernels.native_step import (
    HEAD_DIM_MAX,
    LANES,
    NativeAdapter,
    NativeBatch,
    NativeLayer,
    NativePlan,
    NativeStep,
)


def unsupported(config: ModelConfig, *, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the native step cannot compute this model; None: it can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if config.head_dim % LANES or config.head_dim > HEAD_DIM_MAX:
        return f"it takes heads of a multiple of {LANES} up to {HEAD_DIM_MAX}, not of {config.head_dim}"
    if dtype is torch.bfloat16 and block_size % 2:
        return f"it takes blocks of an even number of tokens in bfloat16, not of {block_size}"
    return None


class NativeLlama:
    """A model in the native library, in float32 or bfloat16, or with weights of 8 or 4 bits."""

    def __init__(self, store: WeightStore, pool: Pool, *, dtype: torch.dtype, quantization: str) -> None:
        """Pack the weights out of the store. `quantization`: none, int8 or int4."""
        self.config = store.config
        self._pool = pool
        self._plain = Format.f32 if dtype is torch.float32 else Format.bf16
        self._format = self._plain if quantization == "none" else Format[quantization]
        self._dtype = dtype
        self._plan = self._make_plan(store)
        self._adapters: dict[str, NativeAdapter] = {}
        self._logits = torch.empty(0, self.config.vocab)
        self._step: NativeStep | None = None

    def _make_plan(self, store: WeightStore) -> NativePlan:
        """Packed in the order of the computation, so that they are read as one stream."""
        config, arena = self.config, Arena()
        layers = [self._layer(store, index, plan, arena) for index, plan in enumerate(config.plan)]
        embedding = store.take("model.embed_tokens.weight")
        head = embedding if config.tie else store.take("lm_head.weight")
        return NativePlan(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn,
            vocab=config.vocab,
            eps=config.eps,
            rope_magnitude=config.rope.attention_factor,
            frequencies=frequencies(config.rope, config.head_dim),
            embedding=embedding,
            norm=store.take("model.norm.weight"),
            head=Packed(self._pool, head, self._format, arena=arena),
            layers=layers,
            kv_dtype=self._dtype,
        )

    def _layer(self, store: WeightStore, index: int, plan: LayerPlan, arena: Arena) -> NativeLayer:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def pack(name: str, *, gated: bool = False) -> Packed:
            return Packed(self._pool, store.take(f"{name}.weight"), self._format, gated=gated, arena=arena)

        return NativeLayer(
            qkv=pack(f"{attention}qkv_proj"),
            o=pack(f"{attention}o_proj"),
            gate_up=pack(f"{mlp}gate_up_proj", gated=True),
            down=pack(f"{mlp}down_proj"),
            input_norm=store.take(f"{prefix}input_layernorm.weight"),
            post_norm=store.take(f"{prefix}post_attention_layernorm.weight"),
            query_norm=store.take_optional(f"{attention}q_norm.weight"),
            key_norm=store.take_optional(f"{attention}k_norm.weight"),
            qkv_bias=store.take_optional(f"{attention}qkv_proj.bias"),
            o_bias=store.take_optional(f"{attention}o_proj.bias"),
            gate_up_bias=store.take_optional(f"{mlp}gate_up_proj.bias"),
            down_bias=store.take_optional(f"{mlp}down_proj.bias"),
            window=plan.window,
            rope=plan.rope,
        )

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the base model's weights."""
        layers = [w.data.nbytes for layer in self._plan.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(layers) + self._plan.head.data.nbytes

    @property
    def part_ns(self) -> array[int] | None:
        """Where the time of each of `kernels.native_step.PARTS` is added up; None: nowhere."""
        assert self._step is not None
        return self._step.part_ns

    @part_ns.setter
    def part_ns(self, sums: array[int] | None) -> None:
        assert self._step is not None
        self._step.part_ns = sums

    def attach(self, cache: torch.Tensor, block_size: int) -> None:
        """The cache that steps write to, [layers, blocks, …] as `engine.kvcache` made it for this path."""
        self._cache = cache
        self._step = NativeStep(self._pool, self._plan, block_size=block_size, blocks=cache.shape[1])

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the step's keys and values, and return the wanted rows' logits [rows, vocab] float32.

        They lie in one buffer, which the next step overwrites.
        """
        assert self._step is not None  # attached before the first step
        if len(self._logits) < len(batch.wanted):
            self._logits = torch.empty(len(batch.wanted), self.config.vocab)
        logits = self._logits[: len(batch.wanted)]
        sequences: list[int] = []
        tables: list[int] = []
        row = 0
        for start, count, table in zip(batch.starts, batch.counts, batch.tables, strict=True):
            sequences += row, start, count, len(tables)
            tables += table
            row += count
        native = NativeBatch(batch.tokens, sequences, tables, batch.wanted, self._segments(batch))
        self._step.run(native, self._cache, logits)
        return logits

    def _segments(self, batch: Batch) -> list[tuple[int, int, NativeAdapter]]:
        segments: list[tuple[int, int, NativeAdapter]] = []
        row, previous = 0, None
        for adapter_id, count in zip(batch.users, batch.counts, strict=True):
            if adapter_id is not None:
                if adapter_id == previous:  # side by side with the rows before
                    first, rows, adapter = segments.pop()
                    segments.append((first, rows + count, adapter))
                elif adapter_id in self._adapters:
                    segments.append((row, count, self._adapters[adapter_id]))
                else:
                    raise AdapterUnknown("the request's adapter is not loaded")
            previous = adapter_id
            row += count
        return segments

    # Resident adapters, as `engine.lora.LoraStore.watch` tells of them

    def pack_adapter(self, adapter: Adapter) -> Adapter:
        """The adapter in packed form and no other. Takes no thread of the steps: they may go on meanwhile."""
        packed = self._packed(adapter, Pool(self._pool.library, 1))
        return replace(adapter, weights={}, packed=packed)

    def adapter_entered(self, adapter_id: str, adapter: Adapter) -> None:
        self._adapters[adapter_id] = adapter.packed or self._packed(adapter, self._pool)

    def adapter_left(self, adapter_id: str) -> None:
        del self._adapters[adapter_id]

    def _packed(self, adapter: Adapter, pool: Pool) -> NativeAdapter:
        pairs = {(layer, PROJECTIONS.index(projection)): pair for (layer, projection), pair in adapter.weights.items()}
        return NativeAdapter(pool, self.config.layers, pairs, self._plain)
