"""SwiGLU's elementwise half (https://arxiv.org/abs/2002.05202): silu(gate) * up.

Every form: `gate_up` [rows, 2 * size] contiguous, the gate's columns first; returns [rows, size].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.jit import jit, tl


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The oracle: silu rounded to the dtype before the product, as transformers' LlamaMLP does."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.float32)
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up


def cpu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def triton(gate_up: torch.Tensor) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = 1024
    if rows:
        kernel[(rows, -(-size // block))](out, gate_up, size, block)
    return out


@jit
def kernel(out: tl.tensor, gate_up: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + column, (activated * up).to(dtype), mask=inside)
