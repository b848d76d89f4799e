"""From a number in [0, 1) to a token: where the cumulative distribution passes it.

Knows: weights in the order of the vocabulary. Does not know: where they come from, or what the number is.
"""

from __future__ import annotations

import numpy as np

from engine.rows import CHUNK, Doubles, Floats, Ids, Rows


class Whole:
    """The distributions of some rows over the whole vocabulary: weights, with the sums of their chunks.

    The weights lie in the sampler's scratch memory, so the next `Whole` ends this one's use.
    """

    def __init__(self, scores: Rows, highest: Floats, scales: Floats) -> None:
        """`highest` and `scales` [rows]: the best score, and one over the temperature."""
        self._scores = scores
        self._sums = scores.masses(highest, scales)
        self.totals: Doubles = self._sums.sum(1, dtype=np.float64)

    def draw(self, rows: Ids, numbers: Doubles) -> tuple[Ids, Floats]:
        """A token for each of these rows and its weight: first the chunk in which the number falls, then the place."""
        chunks, into = pass_at(self._sums[rows], numbers * self.totals[rows])
        weights = self._scores.chunk(rows, chunks)
        places, _ = pass_at(weights, into)
        tokens = np.minimum(chunks * CHUNK + places, self._scores.vocab - 1)
        return tokens, weights[np.arange(len(rows)), places]

    def above(self, rows: Ids, weights: Floats) -> Doubles:
        """[rows]: what the tokens weigh that are more likely than one of this weight, as a part of the whole."""
        return self._scores.mass_above(rows, weights) / self.totals[rows]


def pass_at(weights: Floats, targets: Doubles) -> tuple[Ids, Doubles]:
    """[rows]: the place at which each row's cumulative weight passes its target, and how far into it the target is.

    A target that rounding put at the total or beyond falls on the last place that has any weight.
    """
    cumulative = weights.cumsum(1, dtype=np.float64)
    targets = np.minimum(targets, np.nextafter(cumulative[:, -1], 0.0))
    places = (cumulative <= targets[:, None]).sum(1)
    np.minimum(places, weights.shape[1] - 1, out=places)
    rows = np.arange(len(places))
    return places, targets - (cumulative[rows, places] - weights[rows, places])
