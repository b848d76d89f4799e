"""Low-rank updates of many adapters in one batch (https://arxiv.org/abs/2106.09685, batched as in
https://arxiv.org/abs/2310.18547): `y += shrink and expand of x` by each row's own adapter.

The adapters of a batch lie side by side: adapter `a` owns ranks [offset, offset + rank) of one packed rank axis, the
same in every module. Modules that share their input (query, key and value; gate and up) are slices of one operation.

Every form: `y` [rows, outputs] is added to in place; `x` [rows, inputs]; `y` and `x` contiguous. Rows without an
adapter are left as they are, and no number of one adapter reaches a row of another, not even infinity times zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from kernels.jit import jit, padded, tl


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The packed adapters of one operation. Ranks that an adapter does not use are zero; scaling is in `expand`."""

    shrink: torch.Tensor  # [slices, ranks, inputs]
    expand: tuple[torch.Tensor, ...]  # a slice each [ranks, its outputs], finite
    columns: tuple[int, ...]  # where each slice's outputs begin in y


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Rows that lie side by side and use one adapter, and its place on the rank axis."""

    row: int
    rows: int
    offset: int
    rank: int


@dataclass(slots=True)
class LoraBatch:
    """Which rows use which ranks; all modules of a step share one batch."""

    rows: int
    ranks: int  # the length of the packed rank axis
    segments: list[LoraSegment]
    prepared: dict[str, Any] = field(default_factory=dict)  # what a form made of the segments


def reference(y: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """The oracle: one segment and one slice at a time."""
    for segment in batch.segments:
        rows = slice(segment.row, segment.row + segment.rows)
        ranks = slice(segment.offset, segment.offset + segment.rank)
        for index, (expand, column) in enumerate(zip(weights.expand, weights.columns, strict=True)):
            shrunk = x[rows] @ weights.shrink[index, ranks].T
            y[rows, column : column + expand.shape[1]] += shrunk @ expand[ranks]


def cpu(y: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """One dense product over all ranks of all slices, other adapters' ranks cleared, one product a slice back."""
    foreign = batch.prepared.get("foreign")
    if foreign is None:
        foreign = batch.prepared["foreign"] = _foreign(batch)
    shrunk = F.linear(x, weights.shrink.flatten(0, 1))
    shrunk = shrunk.view(batch.rows, -1, batch.ranks).masked_fill_(foreign, 0.0)
    for index, (expand, column) in enumerate(zip(weights.expand, weights.columns, strict=True)):
        y[:, column : column + expand.shape[1]].addmm_(shrunk[:, index], expand)


def _foreign(batch: LoraBatch) -> torch.Tensor:
    """[rows, 1, ranks] bool: true where a rank is not of the row's adapter."""
    foreign = torch.ones(batch.rows, 1, batch.ranks, dtype=torch.bool)
    for segment in batch.segments:
        foreign[segment.row : segment.row + segment.rows, :, segment.offset : segment.offset + segment.rank] = False
    return foreign


# ---- Triton: one program a tile of rows of one adapter; shrink to [slices, rows, rank], then expand ----

_BLOCK_M = 16


def triton(y: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    tiles = batch.prepared.get("tiles")
    if tiles is None:
        tiles = batch.prepared["tiles"] = _tiles(batch, x.device)
    if not len(tiles):
        return
    slices, ranks, inputs = weights.shrink.shape
    block_r = padded(max(segment.rank for segment in batch.segments), 16)
    shrunk = x.new_empty(slices, batch.rows, block_r)
    shrink_kernel[(len(tiles), slices)](
        shrunk, x, weights.shrink, tiles, batch.rows, ranks, inputs, _BLOCK_M, block_r, min(64, padded(inputs, 16))
    )
    for index, (expand, column) in enumerate(zip(weights.expand, weights.columns, strict=True)):
        outputs = expand.shape[1]
        block_n = min(64, padded(outputs, 16))
        expand_kernel[(len(tiles), -(-outputs // block_n))](
            y, shrunk[index], expand, tiles, y.stride(0), column, outputs, _BLOCK_M, block_r, block_n
        )


def _tiles(batch: LoraBatch, device: torch.device) -> torch.Tensor:
    """[tiles, 4] int32: first row, rows, rank offset, rank."""
    tiles = [
        (row, min(_BLOCK_M, segment.row + segment.rows - row), segment.offset, segment.rank)
        for segment in batch.segments
        for row in range(segment.row, segment.row + segment.rows, _BLOCK_M)
    ]
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4).to(device, non_blocking=True)


@jit
def shrink_kernel(
    shrunk: tl.tensor,
    x: tl.tensor,
    shrink: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    ranks: tl.tensor,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tile = tiles + tl.program_id(0) * 4
    part = tl.program_id(1).to(tl.int64)
    row = tl.load(tile).to(tl.int64) + tl.arange(0, BLOCK_M)
    held = tl.arange(0, BLOCK_M) < tl.load(tile + 1)
    rank = tl.arange(0, BLOCK_R)
    own = rank < tl.load(tile + 3)
    place = part * ranks + tl.load(tile + 2) + rank
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < INPUTS
        a = tl.load(x + row[:, None] * INPUTS + k[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        b = tl.load(shrink + place[None, :] * INPUTS + k[:, None], mask=own[None, :] & inside[:, None], other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    target = shrunk + (part * rows + row[:, None]) * BLOCK_R + rank[None, :]
    tl.store(target, total.to(x.dtype.element_ty), mask=held[:, None])


@jit
def expand_kernel(
    y: tl.tensor,
    shrunk: tl.tensor,
    expand: tl.tensor,
    tiles: tl.tensor,
    y_stride: tl.tensor,
    column: tl.tensor,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    tile = tiles + tl.program_id(0) * 4
    row = tl.load(tile).to(tl.int64) + tl.arange(0, BLOCK_M)
    held = tl.arange(0, BLOCK_M) < tl.load(tile + 1)
    rank = tl.arange(0, BLOCK_R)
    own = rank < tl.load(tile + 3)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < OUTPUTS
    place = (tl.load(tile + 2) + rank).to(tl.int64)
    a = tl.load(shrunk + row[:, None] * BLOCK_R + rank[None, :], mask=held[:, None], other=0.0)
    b = tl.load(expand + place[:, None] * OUTPUTS + n[None, :], mask=own[:, None] & inside[None, :], other=0.0)
    target = y + row[:, None] * y_stride + column + n[None, :]
    there = held[:, None] & inside[None, :]
    base = tl.load(target, mask=there, other=0.0)
    added = tl.dot(a, b, input_precision="ieee")
    tl.store(target, (base.to(tl.float32) + added).to(base.dtype), mask=there)
