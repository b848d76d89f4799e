"""Rotary embedding (https://arxiv.org/abs/2104.09864, half-split as in Llama) and the write into the paged KV cache.

Every form: `qkv` [tokens, heads + 2 * kv_heads, head_dim] contiguous: query, key and value heads side by side.
Queries and keys are rotated in place, in float32; then keys and values go to the cache.

- `rotary` [tokens, 2, head_dim] float32: the cosines, and the sines with the first half negated, of each token's
  position; None for a layer without positions.
- `slots` [tokens] int64, all different: where in the cache each token goes, block * block_size + offset.
- `cache` [blocks, block_size, 2 * kv_heads, head_dim] contiguous: a token's key heads, then its value heads.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, padded, tl


def reference(qkv: torch.Tensor, rotary: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """The oracle: one token at a time, rotate_half written out."""
    kv_heads, half = cache.shape[2] // 2, cache.shape[3] // 2
    heads, block_size = qkv.shape[1] - 2 * kv_heads, cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if rotary is not None:
            cos, sin = rotary[token, 0], rotary[token, 1]
            turned = qkv[token, : heads + kv_heads].to(torch.float32)
            other = torch.cat((turned[:, half:], turned[:, :half]), dim=-1)
            qkv[token, : heads + kv_heads] = (turned * cos + other * sin).to(qkv.dtype)
        cache[slot // block_size, slot % block_size] = qkv[token, heads:]


def cpu(qkv: torch.Tensor, rotary: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor) -> None:
    kv_heads, size = cache.shape[2] // 2, cache.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    if rotary is not None:
        turned = qkv[:, : heads + kv_heads]
        turned.copy_(torch.addcmul(turned * rotary[:, :1], turned.roll(size // 2, -1), rotary[:, 1:]))
    cache.view(-1, 2 * kv_heads, size).index_copy_(0, slots, qkv[:, heads:])


def triton(qkv: torch.Tensor, rotary: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor) -> None:
    tokens, columns, size = qkv.shape
    kv_heads = cache.shape[2] // 2
    if tokens:
        kernel[(tokens, columns)](
            qkv,
            qkv if rotary is None else rotary,
            slots,
            cache,
            columns - 2 * kv_heads,
            kv_heads,
            size,
            rotary is not None,
            padded(size // 2),
        )


@jit
def kernel(
    qkv: tl.tensor,
    rotary: tl.tensor,
    slots: tl.tensor,
    cache: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a token and head; the two halves of the head are two blocks."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = SIZE // 2
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE + lane
    first = tl.load(source, mask=inside)
    second = tl.load(source + HALF, mask=inside)
    # One condition is known at compile time, the other is not.
    if HAS_ROTARY:  # noqa: SIM102
        if head < HEADS + KV_HEADS:
            angle = rotary + token * 2 * SIZE + lane
            low, high = first.to(tl.float32), second.to(tl.float32)
            first = low * tl.load(angle, mask=inside) + high * tl.load(angle + SIZE, mask=inside)
            second = high * tl.load(angle + HALF, mask=inside) + low * tl.load(angle + SIZE + HALF, mask=inside)
            first = first.to(qkv.dtype.element_ty)
            second = second.to(qkv.dtype.element_ty)
            tl.store(source, first, mask=inside)
            tl.store(source + HALF, second, mask=inside)
    if head >= HEADS:
        slot = tl.load(slots + token)
        target = cache + (slot * 2 * KV_HEADS + head - HEADS) * SIZE + lane
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
