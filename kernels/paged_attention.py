"""Causal attention over the paged KV cache, for decodes and prefill chunks in one batch.

Source: PagedAttention (https://arxiv.org/abs/2309.06180) with grouped query heads (https://arxiv.org/abs/2305.13245)
and the online softmax of FlashAttention (https://arxiv.org/abs/2205.14135).

Every form: `query` [tokens, heads, head_dim], rows of one sequence side by side, each row contiguous but not the
whole (it is a part of the fused projection); `cache` [blocks, block_size,
2 * kv_heads, head_dim], a token's key heads, then its value heads, this step's keys and values already written;
returns [tokens, heads, head_dim]. With a `window` a token sees itself and the window - 1 tokens before it.

What a block holds past its sequence's last token is never mixed in, but the CPU form multiplies it by zero: it must
be finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kernels.jit import jit, padded, tl


@dataclass(slots=True)
class AttentionBatch:
    """Whose rows are whose. One entry a sequence in each list; all layers of a step share one batch."""

    counts: list[int]  # its rows in this step, which are its last tokens
    contexts: list[int]  # its tokens in the cache, this step's included
    tables: list[list[int]]  # its blocks in order, at least as many as `contexts` takes
    prepared: dict[Any, Any] = field(default_factory=dict)  # what a form made of the lists, kept for the next layer


def reference(
    query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    """The oracle: one sequence at a time, softmax in float32."""
    kv_heads = cache.shape[2] // 2
    out = query.new_empty(query.shape)
    row = 0
    for count, context, table in zip(batch.counts, batch.contexts, batch.tables, strict=True):
        kv = cache[torch.tensor(table, device=cache.device)].flatten(0, 1)[:context].to(torch.float32)
        kv = kv.repeat_interleave(query.shape[1] // kv_heads, dim=1)  # [context, 2 * heads, head_dim]
        key, value = kv.chunk(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[row : row + count].to(torch.float32), key) * scale
        at = torch.arange(context - count, context, device=query.device)[:, None]
        seen = torch.arange(context, device=query.device)[None, :]
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[row : row + count] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
        row += count
    return out


# ---- CPU: sequences of like shape are padded to one call of scaled_dot_product_attention ----

_CALL = 4096
"""What one more call costs, in query-key pairs of padding: about 40 us on two cores."""


class _Group(NamedTuple):
    """Sequences computed by one call, padded to `rows` query rows and `keys` keys each."""

    size: int
    rows: int
    keys: slice  # of the gathered tokens
    source: torch.Tensor | slice  # blocks to gather, or where they lie side by side
    gathered: torch.Tensor | None  # what they are gathered into, layer after layer
    queries: torch.Tensor | None  # flat rows [size * rows], the last one repeated as padding; None: all, in order
    kept: torch.Tensor | None  # which of those are no padding; None: all
    mask: torch.Tensor | None  # added to the scores [size, 1, 1 or rows * queries a kv head, keys]; None: all is seen


def cpu(
    query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    """The query heads that share a key head are query rows of one head: nothing is repeated in memory."""
    groups: list[_Group] | None = batch.prepared.get(window)
    if groups is None:
        groups = batch.prepared[window] = _groups(query, cache, batch, window)
    if len(groups) == 1 and groups[0].queries is None:
        return _attend(groups[0], query, cache, scale)
    out = query.new_empty(query.shape)
    for group in groups:
        assert group.queries is not None  # only a group alone has none
        result = _attend(group, query[group.queries], cache, scale)
        if group.kept is None:
            out.index_copy_(0, group.queries, result)
        else:
            out.index_copy_(0, group.queries[group.kept], result[group.kept])
    return out


def _attend(group: _Group, query: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
    if isinstance(group.source, slice):
        blocks = cache[group.source]
    else:
        assert group.gathered is not None  # made with every source that is gathered
        blocks = torch.index_select(cache, 0, group.source, out=group.gathered)
    columns, head_dim = cache.shape[2:]
    kv_heads = columns // 2
    shared = query.shape[1] // kv_heads
    kv = blocks.view(group.size, -1, columns, head_dim)[:, group.keys].transpose(1, 2)
    rows = query.view(group.size, group.rows, kv_heads, shared, head_dim).permute(0, 2, 1, 3, 4)
    out = F.scaled_dot_product_attention(
        rows.reshape(group.size, kv_heads, group.rows * shared, head_dim),
        kv[:, :kv_heads],
        kv[:, kv_heads:],
        attn_mask=group.mask,
        scale=scale,
    )
    out = out.view(group.size, kv_heads, group.rows, shared, head_dim).permute(0, 2, 1, 3, 4)
    return out.reshape(query.shape)


def _groups(query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, window: int | None) -> list[_Group]:
    """Greedy over the sequences in order of size: one joins the group while padding is cheaper than a call."""
    block_size = cache.shape[1]
    firsts = [
        0 if window is None else max(0, context - count - window + 1) // block_size
        for count, context in zip(batch.counts, batch.contexts, strict=True)
    ]  # blocks before these are outside the window of every row
    spans = [context - first * block_size for context, first in zip(batch.contexts, firsts, strict=True)]
    order = sorted(range(len(spans)), key=lambda index: (batch.counts[index], spans[index]), reverse=True)
    members: list[list[int]] = []
    useful = 0
    for index in order:
        pairs = batch.counts[index] * spans[index]
        if members:
            rows, keys = batch.counts[members[-1][0]], max(spans[member] for member in members[-1])
            if (len(members[-1]) + 1) * rows * max(keys, spans[index]) <= 1.25 * (useful + pairs) + _CALL:
                members[-1].append(index)
                useful += pairs
                continue
        members.append([index])
        useful = pairs
    offsets = np.concatenate(([0], np.cumsum(batch.counts)))
    return [_group(sorted(group), offsets, firsts, query, cache, batch, window) for group in members]


def _group(
    members: list[int],
    offsets: np.ndarray[Any, np.dtype[np.int64]],
    firsts: list[int],
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    window: int | None,
) -> _Group:
    block_size = cache.shape[1]
    shared = query.shape[1] // (cache.shape[2] // 2)
    counts = np.array([batch.counts[index] for index in members])
    contexts = np.array([batch.contexts[index] for index in members])
    bases = np.array([firsts[index] for index in members]) * block_size
    rows = int(counts.max())
    blocks = int((contexts - bases - 1).max()) // block_size + 1
    source = [_window_of(batch.tables[index], firsts[index], blocks) for index in members]
    # Rows past a sequence's last repeat it: same query, same keys, thrown away.
    row = np.minimum(np.arange(rows)[None, :], counts[:, None] - 1)
    at = (contexts - counts)[:, None] + row
    begin = 0
    if window is not None and rows == 1 and len(members) == 1:
        begin = max(0, int(contexts[0] - window - bases[0]))  # exactly what is seen: no mask
    end = int((contexts - bases).max())
    seen = bases[:, None, None] + np.arange(begin, end)[None, None, :]
    visible = seen <= at[:, :, None]
    if window is not None:
        visible &= seen > (at - window)[:, :, None]
    mask = None
    if not visible.all():
        bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
        mask = bias[:, None] if rows == 1 else bias.repeat_interleave(shared, dim=1)[:, None]
    alone = len(members) == len(batch.counts)
    padding = bool((counts != rows).any())
    queries = torch.from_numpy((offsets[members][:, None] + row).reshape(-1))
    kept = torch.from_numpy((np.arange(rows)[None, :] < counts[:, None]).reshape(-1).nonzero()[0])
    place: torch.Tensor | slice
    gathered = None
    if len(members) == 1 and source[0] == list(range(source[0][0], source[0][0] + blocks)):
        place = slice(source[0][0], source[0][0] + blocks)
    else:
        place = torch.tensor(source).view(-1)
        gathered = cache.new_empty(len(place), *cache.shape[1:])
    return _Group(
        size=len(members),
        rows=rows,
        keys=slice(begin, end),
        source=place,
        gathered=gathered,
        queries=None if alone and not padding else queries,
        kept=kept if padding else None,
        mask=mask,
    )


def _window_of(table: list[int], first: int, blocks: int) -> list[int]:
    """`blocks` block ids from `first` on; a shorter table is padded by its own last block, never by another's."""
    part = table[first : first + blocks]
    return part + part[-1:] * (blocks - len(part))


# ---- Triton: one program a tile of query rows and key head ----


def triton(
    query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    shared = query.shape[1] // kv_heads
    block_m = max(padded(shared, 16), 16 if max(batch.counts, default=1) == 1 else 64)
    prepared = batch.prepared.get("tiles")
    if prepared is None:
        prepared = batch.prepared["tiles"] = _tiles(batch, block_m // shared, query.device)
    tiles, tables = prepared
    out = query.new_empty(query.shape)
    if len(tiles):
        kernel[(len(tiles), kv_heads)](
            out,
            query,
            cache,
            tables,
            tiles,
            scale,
            query.stride(0),
            tables.stride(0),
            kv_heads,
            shared,
            head_dim,
            cache.shape[1],
            0 if window is None else window,
            block_m,
            64 if head_dim <= 128 else 32,
            padded(head_dim, 16),
        )
    return out


def _tiles(batch: AttentionBatch, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[tiles, 5] int32 (sequence, first flat row, rows, position of the first row, end of keys) and [seqs, blocks]."""
    tiles: list[tuple[int, int, int, int, int]] = []
    start = 0
    for sequence, (count, context) in enumerate(zip(batch.counts, batch.contexts, strict=True)):
        for first in range(0, count, rows):
            size = min(rows, count - first)
            position = context - count + first
            tiles.append((sequence, start + first, size, position, position + size))
        start += count
    longest = max((len(table) for table in batch.tables), default=1)
    tables = np.zeros((len(batch.tables), longest), dtype=np.int32)
    for row, table in zip(tables, batch.tables, strict=True):
        row[: len(table)] = table
    return (
        torch.tensor(tiles, dtype=torch.int32).view(-1, 5).to(device, non_blocking=True),
        torch.from_numpy(tables).to(device, non_blocking=True),
    )


@jit
def kernel(
    out: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """BLOCK_M rows are (token, query head of the group) pairs; keys come BLOCK_N at a time through the table."""
    tile = tiles + tl.program_id(0) * 5
    head = tl.program_id(1)
    sequence = tl.load(tile).to(tl.int64)
    start = tl.load(tile + 1).to(tl.int64)
    rows = tl.load(tile + 2)
    position = tl.load(tile + 3)
    end = tl.load(tile + 4)

    pair = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_D)
    row = pair // SHARED
    at = position + row
    place = (head * SHARED + pair % SHARED) * SIZE
    held = (row < rows)[:, None] & (lane < SIZE)[None, :]
    source = query + (start + row) * query_stride + place
    q = tl.load(source[:, None] + lane[None, :], mask=held, other=0.0)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for first in range(begin, end, BLOCK_N):
        seen = first + tl.arange(0, BLOCK_N)
        inside = seen < end
        block = tl.load(tables + sequence * table_stride + seen // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        token = (block * BLOCK_SIZE + seen % BLOCK_SIZE) * 2 * KV_HEADS
        there = inside[:, None] & (lane < SIZE)[None, :]
        k = tl.load(cache + (token + head)[:, None] * SIZE + lane[None, :], mask=there, other=0.0)
        v = tl.load(cache + (token + KV_HEADS + head)[:, None] * SIZE + lane[None, :], mask=there, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = inside[None, :] & (seen[None, :] <= at[:, None])
        if WINDOW > 0:
            visible = visible & (seen[None, :] > at[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        # A row may see nothing of its first keys: its maximum stays -inf, and exp must not make NaN of it.
        new = tl.maximum(best, tl.max(scores, axis=1))
        calm = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(scores - calm[:, None])
        decay = tl.exp(best - calm)
        total = total * decay + tl.sum(weights, axis=1)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (start + row) * KV_HEADS * SHARED * SIZE + place
    tl.store(target[:, None] + lane[None, :], mixed.to(q.dtype), mask=held)
