"""The native matrix product from Python: packed weights, and products of float32 tensors with them.

Knows: how tensors are handed to `kernels/cpu/matmul.h`, and that they must be contiguous in a row and on the CPU. Does
not know: a model; a whole step is one native call of its own.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from kernels.memory import Arena


class Format(IntEnum):
    """How a weight is kept; `int8` and `int4` in groups of 32 inputs with a scale of their own."""

    f32 = 0
    bf16 = 1
    int8 = 2
    int4 = 3


class Epilogue(IntEnum):
    """What becomes of a product y: out = y, out += y, or out = silu(gate) * up over the halves of y."""

    store = 0
    add = 1
    swiglu = 2


class CWeight(ctypes.Structure):
    """`meterhouse::Weight`."""

    _fields_ = [
        ("format", c_int32),
        ("gated", c_int32),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("data", c_void_p),
    ]


class CJob(ctypes.Structure):
    """`meterhouse::Job`; `alive` holds what its addresses point to."""

    alive: object

    _fields_ = [
        ("weight", POINTER(CWeight)),
        ("x", c_void_p),
        ("ldx", c_int64),
        ("rows", c_int64),
        ("out", c_void_p),
        ("ldo", c_int64),
        ("epilogue", c_int32),
        ("bias", c_void_p),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the argument types of the functions that this file calls."""
    signatures: dict[str, tuple[object, list[object]]] = {
        "meterhouse_pool_create": (c_void_p, [c_int32, c_int32]),
        "meterhouse_pool_destroy": (None, [c_void_p]),
        "meterhouse_pool_check": (c_int64, [c_int32, c_int32, c_int64, c_int64]),
        "meterhouse_scratch_create": (c_void_p, []),
        "meterhouse_scratch_destroy": (None, [c_void_p]),
        "meterhouse_packed_bytes": (c_int64, [c_int32, c_int64, c_int64, c_int32]),
        "meterhouse_pack": (
            None,
            [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p],
        ),
        "meterhouse_multiply": (None, [c_void_p, POINTER(CJob), c_int64, c_void_p]),
        "meterhouse_multiply_in_turn": (None, [c_void_p, POINTER(CJob), c_int64, c_void_p]),
        "meterhouse_available_forms": (c_int32, []),
        "meterhouse_use_forms": (None, [c_int32]),
        "meterhouse_check_forms": (c_int32, [c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Pool:
    """Threads and buffers for products: the caller and `threads - 1` workers. One caller at a time."""

    def __init__(self, library: ctypes.CDLL, threads: int | None = None, *, spin_us: int = 40) -> None:
        self.library = declare(library)
        self.threads = threads or torch.get_num_threads()
        self.pool: int = self.library.meterhouse_pool_create(self.threads, spin_us)
        self.scratch: int = self.library.meterhouse_scratch_create()
        weakref.finalize(self, _destroy, self.library, self.pool, self.scratch)


def _destroy(library: ctypes.CDLL, pool: int, scratch: int) -> None:
    library.meterhouse_scratch_destroy(scratch)
    library.meterhouse_pool_destroy(pool)


def packed_bytes(library: ctypes.CDLL, format: Format, outputs: int, inputs: int, *, gated: bool = False) -> int:
    """What a weight takes when it is packed."""
    return int(declare(library).meterhouse_packed_bytes(format, outputs, inputs, gated))


class Packed:
    """A weight [outputs, inputs] packed for the native product; `gated`: gates above, what they gate below."""

    def __init__(
        self, pool: Pool, weight: Tensor, format: Format, *, gated: bool = False, arena: Arena | None = None
    ) -> None:
        if weight.dtype not in (torch.float32, torch.bfloat16):
            weight = weight.float()
        weight = weight.contiguous()
        self.format, self.gated = format, gated
        self.outputs, self.inputs = weight.shape
        if gated and self.outputs % 2:
            raise ValueError(f"a gated weight has as many gates as outputs to gate, not {self.outputs} rows in all")
        size = packed_bytes(pool.library, format, self.outputs, self.inputs, gated=gated)
        self.data = (arena or Arena(size)).take(size)
        bits = weight.element_size() * 8
        pool.library.meterhouse_pack(
            *(pool.pool, format, gated, weight.data_ptr(), bits, self.inputs, self.outputs, self.inputs),
            self.data.data_ptr(),
        )
        self.struct = CWeight(format, gated, self.outputs, self.inputs, self.data.data_ptr())

    def job(
        self,
        x: Tensor,
        out: Tensor,
        epilogue: Epilogue = Epilogue.store,
        *,
        bias: Tensor | None = None,
    ) -> CJob:
        """The product of x [rows, inputs] into out [rows, outputs] ([rows, outputs / 2] for swiglu), for `multiply`."""
        width = self.outputs // 2 if epilogue is Epilogue.swiglu else self.outputs
        _require(x, (x.shape[0], self.inputs), "x")
        _require(out, (x.shape[0], width), "out")
        if epilogue is Epilogue.swiglu and not self.gated:
            raise ValueError("swiglu needs a gated weight")
        if bias is not None:
            _require(bias, (self.outputs,), "bias")
        job = CJob(
            *(ctypes.pointer(self.struct), x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), out.stride(0)),
            epilogue,
            None if bias is None else bias.data_ptr(),
        )
        job.alive = (self, x, out, bias)
        return job


def _require(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != shape or tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be float32 {list(shape)} with contiguous rows")


def multiply(pool: Pool, jobs: Sequence[CJob]) -> None:
    """All jobs in one parallel region; none may read or write what another one writes."""
    pool.library.meterhouse_multiply(pool.pool, (CJob * len(jobs))(*jobs), len(jobs), pool.scratch)


def multiply_in_turn(pool: Pool, jobs: Sequence[CJob]) -> None:
    """One job after the other, each in a region of its own."""
    pool.library.meterhouse_multiply_in_turn(pool.pool, (CJob * len(jobs))(*jobs), len(jobs), pool.scratch)
