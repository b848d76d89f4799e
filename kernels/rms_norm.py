"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467), with the residual added first where there is one.

Every form: `x` [rows, size], `weight` [size], `residual` [rows, size] or None. Returns (normed, sum), where `sum` is
`x + residual` (`x` itself without a residual) in x's dtype and `normed` is of the sum. Moments are in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.jit import jit, padded, tl


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: transformers' LlamaRMSNorm, rounding where it rounds."""
    total = x if residual is None else x + residual
    wide = total.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), total


def cpu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` and `residual` contiguous."""
    rows, size = x.shape
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if rows:
        kernel[(rows,)](
            normed, total, x, x if residual is None else residual, weight, eps, size, residual is not None, padded(size)
        )
    return normed, total


@jit
def kernel(
    normed: tl.tensor,
    total: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    wide = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if HAS_RESIDUAL:
        wide += tl.load(residual + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * SIZE + column, wide.to(dtype), mask=inside)
        wide = wide.to(dtype).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    scaled = (wide * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + column, (scaled * gain).to(dtype), mask=inside)
