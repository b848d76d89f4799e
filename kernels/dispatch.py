"""Which form of each operation runs on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels import jit, kv_write, lora, paged_attention, rms_norm, silu_mul
from kernels.lora import LoraBatch, LoraWeights
from kernels.paged_attention import AttentionBatch

Tensor = torch.Tensor


class Operations(NamedTuple):
    """The operations of a step, all for one device; each file's docstring gives shapes."""

    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rope_kv_write: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, AttentionBatch, float, int | None], Tensor]
    lora: Callable[[Tensor, Tensor, LoraWeights, LoraBatch], None]


REFERENCE = Operations(
    rms_norm.reference, silu_mul.reference, kv_write.reference, paged_attention.reference, lora.reference
)
CPU = Operations(rms_norm.cpu, silu_mul.cpu, kv_write.cpu, paged_attention.cpu, lora.cpu)
TRITON = Operations(rms_norm.triton, silu_mul.triton, kv_write.triton, paged_attention.triton, lora.triton)


def operations(device: torch.device) -> Operations:
    """The fast forms for a device: `RuntimeError` on a GPU without Triton, the oracle on a device of no known kind."""
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":  # AMD's devices call themselves cuda too
        if not jit.AVAILABLE:
            raise RuntimeError("a GPU needs Triton, which is not installed: pip install 'meterhouse[gpu]'")
        return TRITON
    return REFERENCE
