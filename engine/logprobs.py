"""Log-probabilities of raw logits: of sampled tokens and of a prompt's.

Knows: the softmax over the whole vocabulary, and the most likely tokens. Does not know: penalties, temperature, or
why somebody wants to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.rows import Floats, Ids, Rows, Scratch, padded_above, rows_of
from engine.types import TokenLogprob

_LEAST = -9999.0  # OpenAI's word for "practically impossible"; JSON has no infinity


class Logprobs:
    """The rows of a batch that want them: the sampled token's and the `counts[i]` most likely of row `rows[i]`."""

    def __init__(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        self._rows = np.array(rows, dtype=np.int64)
        self._counts = list(counts)

    def before(self, scores: Rows, *, kept: bool) -> Pending:
        """Take the raw logits; `kept`: a copy of them, for they are about to be changed."""
        whole = len(self._rows) == scores.count
        return Pending(self, scores if whole and not kept else scores.pick(self._rows))


class Pending:
    """Raw logits of the rows that want log-probabilities, until their tokens are drawn."""

    def __init__(self, wanted: Logprobs, raw: Rows) -> None:
        self._wanted = wanted
        self._raw = raw

    def of(self, tokens: Ids) -> list[TokenLogprob | None]:
        """One for each token of the whole batch; None for rows that do not want any."""
        rows, counts = self._wanted._rows, self._wanted._counts
        found: list[TokenLogprob | None] = [None] * len(tokens)
        entries = _entries(self._raw, tokens[rows], counts, [0] * len(rows))
        for row, entry in zip(rows.tolist(), entries, strict=True):
            found[row] = entry
        return found


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, tokens: Sequence[int], count: int, scratch: Scratch) -> list[TokenLogprob]:
    """Of each token that follows in a prompt, with its rank (1: the most likely) and the `count` most likely.

    `logits` [len(tokens), vocab] of any float type: those before each token.
    """
    with np.errstate(all="ignore"):
        raw = rows_of(logits, scratch)
        ids = np.array(tokens, dtype=np.int64)
        chosen = raw.read(np.arange(raw.count) * raw.vocab + ids)
        ranks = raw.count_above(chosen) + 1
        return _entries(raw, ids, [count] * raw.count, ranks.tolist())


def _entries(raw: Rows, tokens: Ids, counts: Sequence[int], ranks: Sequence[int]) -> list[TokenLogprob]:
    peaks = raw.block_peaks()
    highest = peaks.max(1)
    sums = raw.masses(highest, np.ones(raw.count, dtype=np.float32)).sum(1, dtype=np.float64)
    normaliser = highest + np.log(sums)
    chosen = _finite(raw.read(np.arange(raw.count) * raw.vocab + tokens) - normaliser).tolist()
    best, values = _best(raw, peaks, max(counts))
    best_ids, best_values = best.tolist(), _finite(values - normaliser[:, None]).tolist()
    return [
        TokenLogprob(token, chosen[row], list(zip(best_ids[row][:count], best_values[row][:count], strict=True)), rank)
        for row, (token, count, rank) in enumerate(zip(tokens.tolist(), counts, ranks, strict=True))
    ]


def _best(raw: Rows, peaks: Floats, count: int) -> tuple[Ids, Floats]:
    """Ids and logits [rows, count] of the most likely tokens, best first, of equal ones the lower id first."""
    if count == 0:
        return np.empty((raw.count, 0), dtype=np.int64), np.empty((raw.count, 0), dtype=np.float32)
    blocks = peaks.shape[1]
    starts = np.full(raw.count, -np.inf, dtype=np.float32)
    if blocks >= count:
        starts = np.partition(peaks, blocks - count, axis=1)[:, blocks - count]
    ids, values = padded_above(raw, starts)
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(values > _LEAST, values, _LEAST)  # NaN too
