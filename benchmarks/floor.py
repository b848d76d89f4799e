"""What no engine beats that reads its weights from memory: their bytes over the bandwidth measured here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.weights import load_weights


@dataclass(frozen=True)
class Floor:
    """Of one decode step at concurrency 1."""

    nbytes: float
    bandwidth: float  # bytes/s

    @property
    def step_s(self) -> float:
        return self.nbytes / self.bandwidth

    def __str__(self) -> str:
        return (
            f"{self.nbytes / 1e6:.0f} MB of weights / {self.bandwidth / 1e9:.1f} GB/s = {self.step_s * 1e3:.1f} ms a "
            f"step, at most {1 / self.step_s:.0f} tok/s at concurrency 1"
        )


def weight_bytes(model: Path, bits: float) -> float:
    """Of a model whose every weight has so many bits (scales of quantized ones left out)."""
    return bits / 8 * sum(tensor.numel() for _, tensor in load_weights(model))


def bandwidth(nbytes: float, *, for_s: float = 1.0) -> float:
    """Bytes/s of the fastest of many readings of so much memory, by every core.

    What a machine shared with others gives changes by the minute, nearly by two: measure beside what is compared.
    """
    buffer = torch.ones(int(nbytes) // 4, dtype=torch.float32)
    seconds = []
    until = time.perf_counter() + for_s
    while (began := time.perf_counter()) < until:
        buffer.sum()
        seconds.append(time.perf_counter() - began)
    return buffer.nbytes / min(seconds)


def floor(model: Path, bits: float) -> Floor:
    """The floor of a model whose every weight has so many bits, as the machine is now."""
    nbytes = weight_bytes(model, bits)
    return Floor(nbytes, bandwidth(nbytes))
