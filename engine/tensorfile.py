"""The safetensors format, read from bytes of strangers: every tensor of it, or one clear refusal.

Knows: the header and what may be wrong with it. Does not know: what the tensors are for. The library's own reader
copies all the bytes while it holds the interpreter's lock, which would stop the steps of the engine for as long as a
large file takes; here a tensor is a view of the bytes.

Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFileError(Exception):
    """The bytes are not a safetensors file."""


def parse_tensors(data: np.ndarray, *, header_bytes_max: int) -> dict[str, torch.Tensor]:
    """Name → a view of `data` [bytes] uint8, at any alignment. Raises `TensorFileError` with the reason.

    The tensors must fill the file: no gap, no overlap, nothing behind the last one.
    """
    header, begin = _header(data, header_bytes_max)
    header.pop("__metadata__", None)
    places: list[tuple[int, int]] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        dtype, shape, first, end = _entry(entry)
        if not 0 <= first <= end <= len(data) - begin:
            raise TensorFileError("a tensor lies outside of the file")
        if math.prod(shape) * dtype.itemsize != end - first:
            raise TensorFileError("a tensor's bytes are not those of its shape")
        places.append((first, end))
        tensors[name] = _view(data, dtype, shape, begin + first)
    at = 0
    for first, end in sorted(places):
        if first != at:
            raise TensorFileError("there are bytes of no tensor, or of two")
        at = end
    if at != len(data) - begin:
        raise TensorFileError("there are bytes of no tensor")
    return tensors


def _header(data: np.ndarray, bytes_max: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    if len(data) < _LENGTH_BYTES or length > len(data) - _LENGTH_BYTES:
        raise TensorFileError("it is shorter than its header says")
    if length > bytes_max:
        raise TensorFileError("its header is larger than any that fits this model")
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise TensorFileError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise TensorFileError("its header is not a JSON object")
    return header, _LENGTH_BYTES + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entry(entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    """dtype, shape, and where the bytes begin and end, counted from behind the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError("a tensor's entry is not one")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise TensorFileError(f"a tensor's type is {str(dtype)[:20]!r}, which is not supported")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise TensorFileError("a tensor's shape or place is not one")
    if len(shape) > 8 or len(offsets) != 2:
        raise TensorFileError("a tensor's shape or place is not one")
    return _DTYPES[dtype], shape, offsets[0], offsets[1]


def _view(data: np.ndarray, dtype: torch.dtype, shape: list[int], first: int) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=first).view(shape)
