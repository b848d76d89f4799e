"""Inputs that every form of an operation is compared on: odd sizes, mixed batches, scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.lora import LoraBatch, LoraSegment, LoraWeights
from kernels.paged_attention import AttentionBatch

BLOCK_SIZE = 4


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention(
    sizes: Sequence[tuple[int, int]], *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scattered: bool
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Query, cache and batch for sequences of (rows, context); every block no sequence owns is NaN.

    The query is a part of the fused projection, as in the model.
    """
    needs = [-(-context // BLOCK_SIZE) for _, context in sizes]
    blocks = sum(needs) + 3
    order = list(range(blocks))
    if scattered:
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(5)).tolist()
    tables = []
    for need in needs:
        tables.append(order[:need])
        order = order[need:]
    cache = numbers(blocks, BLOCK_SIZE, 2 * kv_heads, head_dim, seed=1, dtype=dtype)
    cache[torch.tensor(order)] = float("nan")
    counts = [count for count, _ in sizes]
    fused = numbers(sum(counts), heads + 2 * kv_heads, head_dim, seed=2, dtype=dtype)
    return (
        fused[:, :heads],
        cache,
        AttentionBatch(counts=counts, contexts=[context for _, context in sizes], tables=tables),
    )


def lora(
    rows_and_adapters: Sequence[tuple[int, int | None]],
    ranks: Sequence[int],
    *,
    inputs: int,
    outputs: Sequence[int],
    skipped: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, LoraWeights, LoraBatch]:
    """y, x, weights and batch; `skipped` columns of y lie between the slices' and belong to none."""
    offsets = [sum(ranks[:index]) for index in range(len(ranks))]
    segments, row = [], 0
    for rows, adapter in rows_and_adapters:
        if adapter is not None:
            segments.append(LoraSegment(row=row, rows=rows, offset=offsets[adapter], rank=ranks[adapter]))
        row += rows
    columns, column = [], 0
    for size in outputs:
        columns.append(column)
        column += size + skipped
    weights = LoraWeights(
        shrink=numbers(len(outputs), sum(ranks), inputs, seed=3, dtype=dtype) / inputs**0.5,
        expand=tuple(numbers(sum(ranks), size, seed=4 + i, dtype=dtype) for i, size in enumerate(outputs)),
        columns=tuple(columns),
    )
    y = numbers(row, column, seed=8, dtype=dtype)
    x = numbers(row, inputs, seed=9, dtype=dtype)
    return y, x, weights, LoraBatch(rows=row, ranks=sum(ranks), segments=segments)
