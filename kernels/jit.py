"""Triton where it is installed, and nothing where it is not.

A CPU-only install has no Triton: kernels are then defined as plain functions that nobody calls. `tl` is a name the
kernels' bodies use, so it exists either way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# Multiply-adds may be fused: Triton's default up to 3.9, which warns that it will change. The results stay ours.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

__all__ = ["AVAILABLE", "jit", "padded", "tl"]

AVAILABLE = triton is not None


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit`, or the function as it is."""
    return triton.jit(function) if AVAILABLE else function


def padded(size: int, least: int = 1) -> int:
    """The power of two that a Triton block of `size` elements takes."""
    return max(least, 1 << (size - 1).bit_length())
