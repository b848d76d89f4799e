"""The tokens that top_k, top_p and min_p keep, found without sorting the vocabulary.

Knows: what transformers' warpers keep, in their order: top_k, then top_p of what it left, then min_p. Tokens as likely
as the last one kept are kept too, so that the order of a sort means nothing. Does not know: sequences or randomness.

A row looks at the tokens from a threshold up, taken from the peaks of its blocks so that a few hundred are there; that
is enough for nearly all rows. Of the others, those of a wide nucleus need not know it: a token drawn from the whole
vocabulary belongs to it if what is more likely weighs less than top_p (as in https://arxiv.org/abs/2501.01005's
kernels), and most do. The rest look again from a threshold that is certainly low enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cumulative import Whole
from engine.rows import Doubles, Floats, Ids, Rows, padded_above

_LIKELY = 384  # tokens that are looked at first for top_p: most nuclei are smaller
_WIDE = 0.25  # the top_p from which on drawing until it fits, 1 / top_p times on average, is quicker than sorting


@dataclass(frozen=True, slots=True)
class Limits:
    """What each row asks for, [rows] each."""

    top_k: Ids  # 0: off
    top_p: Doubles  # 1: off
    min_p: Floats  # its logarithm; -inf: off
    scales: Floats  # one over the temperature

    def of(self, rows: Ids) -> Limits:
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.scales[rows])


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be drawn in some of the rows: token ids [rows, most], ascending, and their weights, 0 for none."""

    rows: Ids
    tokens: Ids
    weights: Floats


@dataclass(frozen=True, slots=True)
class Found:
    """Each row is in one of the groups or wide: then a token drawn from all is to be judged, by what is above it."""

    groups: list[Candidates]
    wide: Ids
    whole: Whole | None  # the rows whose top_p is of the whole vocabulary
    places: Ids  # [wide]: their rows in `whole`


def candidates(scores: Rows, limits: Limits) -> Found:
    """What may be drawn in each row."""
    peaks = scores.block_peaks()
    highest = peaks.max(1)
    whole, place, total = _totals(scores, highest, limits)
    floors = _floors(highest, limits)
    starts = np.maximum(_starts(peaks, limits), floors)
    tokens, scaled = _scaled(scores, starts, highest, limits)
    threshold, certain = _threshold(scaled, total, limits)
    certain |= starts <= floors
    if certain.all():
        rows = np.arange(scores.count)
        return Found([Candidates(rows, tokens, _weights(scaled, threshold))], rows[:0], whole, rows[:0])
    is_wide = ~certain & (limits.top_k == 0) & (limits.min_p == -np.inf) & (limits.top_p >= _WIDE)
    known, wide, rest = (np.flatnonzero(rows) for rows in (certain, is_wide, ~(certain | is_wide)))
    groups = [Candidates(known, tokens[known], _weights(scaled[known], threshold[known]))]
    if len(rest):
        groups.append(_look_again(scores.pick(rest), limits.of(rest), rest, highest[rest], total[rest], floors[rest]))
    return Found(groups, wide, whole, place[wide])


def _look_again(scores: Rows, limits: Limits, rows: Ids, highest: Floats, total: Doubles, floors: Floats) -> Candidates:
    starts = np.maximum(_low_starts(scores, limits, highest, total), floors)
    tokens, scaled = _scaled(scores, starts, highest, limits)
    threshold, _ = _threshold(scaled, total, limits)
    return Candidates(rows, tokens, _weights(scaled, threshold))


def _scaled(scores: Rows, starts: Floats, highest: Floats, limits: Limits) -> tuple[Ids, Floats]:
    """Ids and scaled scores [rows, most] of what is at least its row's start: score - highest over temperature."""
    tokens, likely = padded_above(scores, starts)
    return tokens, (likely - highest[:, None]) * limits.scales[:, None]


def _floors(highest: Floats, limits: Limits) -> Floats:
    """[rows]: scores below which nothing need be seen: min_p would not keep it, and it does not count for top_p.

    A little lower than min_p says, for rounding must cut nothing.
    """
    floors = highest + limits.min_p / limits.scales
    floors -= np.float32(1e-5) * (1 + np.abs(floors))
    counts = (limits.top_k > 0) & (limits.top_p < 1.0)  # top_p is of all that top_k left
    return np.where(counts, np.float32(-np.inf), floors)


def _totals(scores: Rows, highest: Floats, limits: Limits) -> tuple[Whole | None, Ids, Doubles]:
    """The rows whose top_p is of the whole vocabulary; [rows] each, which of them it is; [rows] its total, else 0."""
    wanted = np.flatnonzero((limits.top_p < 1.0) & (limits.top_k == 0))
    place, total = np.zeros(scores.count, dtype=np.int64), np.zeros(scores.count)
    if not len(wanted):
        return None, place, total
    some = scores if len(wanted) == scores.count else scores.pick(wanted)
    whole = Whole(some, highest[wanted], limits.scales[wanted])
    place[wanted], total[wanted] = np.arange(len(wanted)), whole.totals
    return whole, place, total


def _starts(peaks: Floats, limits: Limits) -> Floats:
    """[rows]: scores that at least top_k tokens reach, or some hundreds for top_p; of a small vocabulary all."""
    blocks = peaks.shape[1]
    if blocks < 2 * _LIKELY:
        return np.full(len(peaks), -np.inf, dtype=np.float32)
    wanted = np.where(limits.top_k > 0, np.minimum(limits.top_k, blocks), _LIKELY)
    starts = np.sort(peaks, axis=1)[np.arange(len(peaks)), blocks - wanted]
    return np.where((limits.top_k > 0) | (limits.top_p < 1.0), starts, np.float32(-np.inf))


def _low_starts(scores: Rows, limits: Limits, highest: Floats, total: Doubles) -> Floats:
    """[rows]: scores low enough: the top_k-th; else from where all that is left out cannot weigh 1 - top_p."""
    kth = [scores.kth(row, k) if k else -np.inf for row, k in enumerate(limits.top_k.tolist())]
    spare = (1.0 - limits.top_p) * total / scores.vocab
    bounds = highest + np.log(0.5 * spare) / limits.scales
    return np.where(limits.top_k > 0, np.array(kth), bounds).astype(np.float32)


def _threshold(scaled: Floats, total: Doubles, limits: Limits) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[rows]: the least that is kept, as far as these tokens tell, and whether no other could change it.

    `scaled` as of `_scaled`; `total` as of `_totals`.
    """
    ordered = np.sort(scaled, axis=1)[:, ::-1]
    rows, limited = np.arange(len(ordered)), limits.top_k > 0
    last = np.minimum(limits.top_k, ordered.shape[1]) - 1
    kth = np.where(limited, ordered[rows, last], -np.inf)
    threshold = np.maximum(kth, limits.min_p)
    certain = (limits.top_k <= (scaled > -np.inf).sum(1)) & limited
    if (limits.top_p < 1.0).any():
        kept = ordered >= kth[:, None]
        weights = np.exp(ordered, dtype=np.float64) * kept
        cumulative = weights.cumsum(1)
        aim = limits.top_p * np.where(limited, cumulative[:, -1], total)
        nucleus = kept & (cumulative - weights < aim[:, None])
        nucleus |= kept & (limits.top_p >= 1.0)[:, None]
        threshold = np.maximum(threshold, ordered[rows, np.maximum(nucleus.sum(1), 1) - 1])
        certain |= ~limited & (cumulative[:, -1] >= aim)
    return threshold.astype(np.float32), certain


def _weights(scaled: Floats, threshold: Floats) -> Floats:
    return np.exp(scaled) * (scaled >= threshold[:, None])
