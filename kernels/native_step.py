"""One step of the model as one call of the native library: its plan, its weights, its batches.

Knows: the structures of `kernels/cpu/plan.h` field by field, and who keeps which memory alive. Does not know: model
families, sequences, or where weights come from. The call releases the interpreter's lock; all else is Python.

Words: a **plan** is what stays (sizes, weights), a **batch** what one step computes. Weights are packed once, in one of
four formats, and their plain form is not kept here.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, field

import torch

from kernels.memory import Arena
from kernels.native_matmul import CWeight, Format, Packed, Pool

PARTS = ("gemm", "lora", "attention", "head", "other")
"""What `NativeStep.part_ns` tells apart; `Part` in cpu/plan.h."""

PROJECTIONS = 7
LANES = 16
HEAD_DIM_MAX = 512


_WEIGHTS = ("qkv", "o", "gate_up", "down")
_VECTORS = (*(f"{name}_bias" for name in _WEIGHTS), "input_norm", "post_norm", "query_norm", "key_norm")


class _Layer(Structure):
    _fields_ = [
        *((name, CWeight) for name in _WEIGHTS),
        *((name, c_void_p) for name in _VECTORS),
        ("window", c_int64),
        ("rope", c_int64),
    ]


class _Plan(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")),
        ("block_size", c_int64),
        ("blocks", c_int64),
        ("kv_bfloat16", c_int64),
        ("embedding_bfloat16", c_int64),
        ("eps", c_float),
        ("rope_magnitude", c_float),
        ("frequencies", c_void_p),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", CWeight),
        ("layer", POINTER(_Layer)),
    ]


class _LoraPair(Structure):
    _fields_ = [("shrink", CWeight), ("expand", CWeight)]


class _Segment(Structure):
    _fields_ = [("row", c_int64), ("rows", c_int64), ("pairs", c_void_p)]


class _StepInput(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("sequences", c_int64),
        ("sequence", c_void_p),
        ("tables", c_void_p),
        ("wanted", c_int64),
        ("wanted_rows", c_void_p),
        ("segments", c_int64),
        ("segment", c_void_p),
        ("cache", c_void_p),
        ("logits", c_void_p),
        ("part_ns", c_void_p),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """One layer's weights; vectors are float32."""

    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    window: int | None = None  # tokens a token sees, itself included
    rope: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePlan:
    """A model: sizes in elements, `frequencies` [head_dim / 2] in radians a token."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope_magnitude: float
    frequencies: torch.Tensor
    embedding: torch.Tensor  # [vocab, hidden], float32 or bfloat16
    norm: torch.Tensor
    head: Packed
    layers: list[NativeLayer]
    kv_dtype: torch.dtype  # float32 or bfloat16


class NativeAdapter:
    """An adapter's packed matrices; `pairs` maps (layer, projection) to A [rank, inputs] and B [outputs, rank]."""

    def __init__(
        self,
        pool: Pool,
        layers: int,
        pairs: Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]],
        format: Format,
    ) -> None:
        self._packed: list[Packed] = []
        arena = Arena()
        self._pairs = (_LoraPair * (layers * PROJECTIONS))()
        for (layer, projection), (a, b) in pairs.items():
            shrink, expand = (Packed(pool, matrix, format, arena=arena) for matrix in (a, b))
            self._packed += shrink, expand
            self._pairs[layer * PROJECTIONS + projection] = _LoraPair(shrink.struct, expand.struct)
        self.address = ctypes.addressof(self._pairs)
        self.nbytes = sum(weight.data.nbytes for weight in self._packed)


@dataclass(slots=True)
class NativeBatch:
    """One step's rows, those of one sequence side by side, and so those of one adapter."""

    tokens: list[int]
    sequences: list[int]  # four numbers each: first row, first position, rows, first block in `tables`
    tables: list[int]  # the sequences' blocks in order, one sequence after the other
    wanted: list[int]  # rows whose logits are wanted, ascending
    segments: list[tuple[int, int, NativeAdapter]] = field(default_factory=list)  # first row, rows, adapter


class NativeStep:
    """Computes steps of one model. Not thread-safe."""

    def __init__(self, pool: Pool, plan: NativePlan, *, block_size: int, blocks: int) -> None:
        """Raises `MemoryError`."""
        self._pool = pool
        self._plan = plan  # keeps the weights alive
        self._vectors: list[torch.Tensor] = []
        self._layers = (_Layer * len(plan.layers))(*map(self._layer, plan.layers))
        self._native = _Plan(
            layers=len(plan.layers),
            hidden=plan.hidden,
            heads=plan.heads,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            ffn=plan.ffn,
            vocab=plan.vocab,
            block_size=block_size,
            blocks=blocks,
            kv_bfloat16=plan.kv_dtype is torch.bfloat16,
            embedding_bfloat16=plan.embedding.dtype is torch.bfloat16,
            eps=plan.eps,
            rope_magnitude=plan.rope_magnitude,
            frequencies=self._vector(plan.frequencies),
            embedding=plan.embedding.data_ptr(),
            norm=self._vector(plan.norm),
            head=plan.head.struct,
            layer=self._layers,
        )
        library = pool.library
        create = library.meterhouse_step_create
        create.restype = c_void_p
        self._handle = c_void_p(create(byref(self._native), c_void_p(pool.pool)))
        if not self._handle:
            raise MemoryError("no memory for a step")
        self._run = library.meterhouse_step_run
        weakref.finalize(self, library.meterhouse_step_destroy, self._handle)
        self.part_ns: array[int] | None = None
        """Set to `array("q", bytes(8 * len(PARTS)))` to have the time of each of `PARTS` added up in it."""

    def run(self, batch: NativeBatch, cache: torch.Tensor, logits: torch.Tensor) -> None:
        """Write the step's keys and values to `cache`, and the logits of `batch.wanted` to `logits`.

        `cache` [layers, blocks, …] contiguous, in the layout of cpu/attention.h; `logits` [wanted, vocab] float32,
        contiguous. Raises `MemoryError`, with nothing but the cache's new slots changed.
        """
        flat = [array("i", values) for values in (batch.tokens, batch.sequences, batch.tables, batch.wanted)]
        tokens, sequences, tables, wanted = (values.buffer_info()[0] for values in flat)
        segments = (_Segment * len(batch.segments))(
            *(_Segment(row, rows, adapter.address) for row, rows, adapter in batch.segments)
        )
        given = _StepInput(
            rows=len(batch.tokens),
            tokens=tokens,
            sequences=len(batch.sequences) // 4,
            sequence=sequences,
            tables=tables,
            wanted=len(batch.wanted),
            wanted_rows=wanted,
            segments=len(batch.segments),
            segment=ctypes.addressof(segments),
            cache=cache.data_ptr(),
            logits=logits.data_ptr(),
            part_ns=None if self.part_ns is None else self.part_ns.buffer_info()[0],
        )
        if self._run(self._handle, byref(given)):
            raise MemoryError("no memory for a step of so many tokens")

    def _layer(self, layer: NativeLayer) -> _Layer:
        weights = {name: getattr(layer, name).struct for name in _WEIGHTS}
        vectors = {name: self._vector(getattr(layer, name)) for name in _VECTORS}
        return _Layer(**weights, **vectors, window=layer.window or 0, rope=layer.rope)

    def _vector(self, vector: torch.Tensor | None) -> int | None:
        """Its address, in float32; it is kept alive."""
        if vector is None:
            return None
        self._vectors.append(vector.to(torch.float32).contiguous())
        return self._vectors[-1].data_ptr()
