"""The rows whose grammar leaves a few tokens: those are looked at, and not the rest of the vocabulary.

Knows: how bits become token ids, and how one of few is drawn. Does not know: grammars, and which rows may be drawn so.
Most of what a grammar allows is few: marks, digits, the next letters of a name. Such a row is drawn in a tenth of the
time of a free one.
"""

from __future__ import annotations

import numpy as np

from engine.cumulative import pass_at
from engine.rows import Bits, Doubles, Floats, Ids, Rows

FEW = 256
_WORD = 32  # bits that are looked at together


class Shortlist:
    """What some rows may say, in the order of the vocabulary, with their scores."""

    def __init__(self, scores: Rows, rows: Ids, bits: Bits, places: Ids) -> None:
        """`bits` [len(rows), bytes] as `Rows.mask` has them, at least one of each row set, and at most `FEW`.

        `places`: what the caller calls these rows.
        """
        self.places = places
        numbers, ids = _set_bits(bits)
        sizes = np.bincount(numbers, minlength=len(rows))
        self._sizes = sizes
        self._ids = np.zeros((len(rows), int(sizes.max())), dtype=np.int64)
        self._scores = np.full(self._ids.shape, -np.inf, dtype=np.float32)
        at = np.arange(len(ids)) - np.repeat(sizes.cumsum() - sizes, sizes)
        self._ids[numbers, at] = ids
        self._scores[numbers, at] = scores.read(rows[numbers] * scores.vocab + ids)

    def draw(self, scales: Floats, numbers: Doubles) -> Ids:
        """[rows]: the token where the cumulative weight passes `numbers` of its total; of a row that is not finite one
        of those allowed."""
        weights = np.exp((self._scores - self._scores.max(1, keepdims=True)) * scales[:, None])
        places, _ = pass_at(weights, numbers * weights.sum(1, dtype=np.float64))
        return self._ids[np.arange(len(places)), np.minimum(places, self._sizes - 1)]


def count_bits(bits: Bits) -> Ids:
    """[rows]: how many are set in each."""
    counts: Ids = np.bitwise_count(bits.view(np.uint32)).sum(1, dtype=np.int64)
    return counts


def _set_bits(bits: Bits) -> tuple[Ids, Ids]:
    """(row, number) of each bit that is set, in order."""
    rows, words = bits.view(np.uint32).nonzero()
    in_words = np.unpackbits(bits.reshape(len(bits), -1, 4)[rows, words], axis=1, bitorder="little")
    which, places = in_words.nonzero()
    return rows[which], words[which] * _WORD + places
