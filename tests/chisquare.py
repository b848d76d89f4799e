"""Pearson's chi-square test of drawn tokens, and the probabilities by transformers that they are held against."""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.types import SamplingParams


def limit(freedom: int) -> float:
    """Wilson and Hilferty's approximation of the 1 - 1e-6 quantile: above it once in a million times."""
    z = 4.753
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def follows(tokens: list[int], probabilities: torch.Tensor) -> bool:
    """Whether the draws are likely enough; a token of probability 0 never is. Rare tokens are counted as one."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    if int(counts[expected == 0].sum()):
        return False
    frequent = expected >= 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    used = wanted > 0
    statistic = float(((observed - wanted)[used] ** 2 / wanted[used]).sum())
    freedom = int(used.sum()) - 1
    return statistic <= (limit(freedom) if freedom else 1e-9)


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [rows, vocab] by transformers' warpers, in the order in which generate() applies them."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    changed: torch.Tensor = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), scores)
    return changed.double().softmax(-1)
