"""The parts a layer is built of that hold numbers: linear maps and rotary angles.

Knows: how weights lie in memory for each device. Does not know: what a layer is (`engine.models`), adapters
(`engine.lora`), or the operations between the parts (`kernels`).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from engine.models.config import RopeConfig


class Linear:
    """`x @ weight.T + bias` for `weight` [outputs, inputs].

    In bfloat16 on a CPU the weight is packed once into the layout oneDNN multiplies by, which streams it about 1.6
    times as fast for few rows; the plain copy is then not kept.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = _packs(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self._bias)


def _packs(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own gap
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Rotary:
    """Angles of rotary embedding for any position; nothing is tabled, so nothing grows with the context."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = frequencies(rope, head_dim).to(device)
        self._magnitude = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 → [tokens, 2, head_dim] float32: cosines, and sines with the first half negated."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32 radians a token, computed as transformers' `modeling_rope_utils` does."""
    inverse: torch.Tensor = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1's scaling)."""
    wavelength = 2 * math.pi / inverse
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    kept = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept) * inverse / rope.factor + kept * inverse
    scaled = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, scaled)


def _yarn(rope: RopeConfig, inverse: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are interpolated (YaRN)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    # In transformers' order: at position 100,000 one unit in the last place of a frequency is 0.01 radians.
    kept = 1 - ramp
    period = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    interpolated: torch.Tensor = 1.0 / (rope.factor * period) * (1 - kept)
    return interpolated + inverse * kept
