"""Which tokens each row may not say now: min_tokens, bad_words, allowed_token_ids.

Knows: what is forbidden until when, kept from step to step as flat arrays over the batch. Does not know: how a row
draws. All that forbids tokens is done here, after everything else that changes scores: nothing lifts it.

`allowed_token_ids` is hard: the score of any other token is -inf. min_tokens and bad_words are soft: their tokens get
one finite score below all others, weight 0 beside any other token. Where they leave nothing of what is allowed they
give way, and the row still says something that is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence as Collection

import numpy as np

from engine.rows import Ids, Rows
from engine.sequence import Sequence
from engine.types import SamplingParams

_LOWEST = -1e30  # finite, and below any logit by more than exp can tell from nothing


def asks(params: SamplingParams) -> bool:
    return bool(params.min_tokens or params.bad_words_token_ids or params.allowed_token_ids is not None)


class Restrictions:
    """Of one batch. `update` takes in each new token."""

    def __init__(
        self,
        rows: Collection[int],
        sequences: Collection[Sequence],
        earlier: Restrictions | None,
        *,
        eos_token_ids: Collection[int],
        vocab: int,
    ) -> None:
        """`rows`: where in the batch the `sequences` stand, all of which ask for something of this."""
        params = [sequence.sampling for sequence in sequences]
        every = list(zip(rows, params, strict=True))
        self._lengths = np.array([sequence.num_sampled for sequence in sequences], dtype=np.int64)
        ends = [
            (number, row * vocab + token, one.min_tokens)
            for number, (row, one) in enumerate(every)
            if one.min_tokens
            for token in sorted({*eos_token_ids, *one.stop_token_ids})
        ]
        self._end_numbers, self._ends, self._end_until = np.array(ends, dtype=np.int64).reshape(-1, 3).T
        self._last_until = int(self._end_until.max(initial=0))
        self._words = _Words(every, sequences, vocab)
        known: dict[Sequence, Ids] = (
            {} if earlier is None else earlier._ids
        )  # thousands of ids are not read again with every new batch
        self._ids: dict[Sequence, Ids] = {
            sequence: known[sequence] if sequence in known else np.array(ids, dtype=np.int64)
            for sequence in sequences
            if (ids := sequence.sampling.allowed_token_ids) is not None
        }
        row_of = dict(zip(sequences, rows, strict=True))
        self._limited = np.array([row_of[sequence] for sequence in self._ids], dtype=np.int64)
        allowed = [ids + row_of[sequence] * vocab for sequence, ids in self._ids.items()]
        self._allowed = np.concatenate(allowed) if allowed else np.empty(0, dtype=np.int64)

    def update(self) -> None:
        """Take in the last token of every sequence."""
        self._lengths += 1
        self._words.update()

    def apply(self, scores: Rows) -> None:
        """Lower what the rows may not say. A mask from elsewhere (a grammar's) is hard too, and belongs behind this."""
        if len(self._ends) and int(self._lengths.min()) < self._last_until:
            scores.write(self._ends[self._lengths[self._end_numbers] < self._end_until], _LOWEST)
        self._words.apply(scores)
        if len(self._limited):
            kept = scores.read(self._allowed)
            scores.clear(self._limited)
            scores.write(self._allowed, kept)


class _Words:
    """bad_words: a word's last token is forbidden where its first ones are the last that were sampled (as in vLLM)."""

    def __init__(
        self, every: Collection[tuple[int, SamplingParams]], sequences: Collection[Sequence], vocab: int
    ) -> None:
        words = [(number, row, word) for number, (row, one) in enumerate(every) for word in one.bad_words_token_ids]
        self._always = np.array([row * vocab + word[0] for _, row, word in words if len(word) == 1], dtype=np.int64)
        longer = [(number, row, word) for number, row, word in words if len(word) > 1]
        self._numbers = np.array([number for number, _, _ in longer], dtype=np.int64)
        self._lasts = np.array([row * vocab + word[-1] for _, row, word in longer], dtype=np.int64)
        self._sequences = list(sequences)
        depth = max((len(word) - 1 for _, _, word in longer), default=0)
        # -1 stands for any token in a word's beginning, -2 for none in what was sampled so far.
        self._firsts = np.array([_padded(word[:-1], depth, -1) for _, _, word in longer], dtype=np.int64)
        self._tails = np.array(
            [_padded(sequence.output_tokens[-depth:], depth, -2) for sequence in sequences] if depth else [],
            dtype=np.int64,
        )

    def update(self) -> None:
        if len(self._tails):
            self._tails[:, :-1] = self._tails[:, 1:]
            self._tails[:, -1] = [sequence.tokens[-1] for sequence in self._sequences]

    def apply(self, scores: Rows) -> None:
        if len(self._always):
            scores.write(self._always, _LOWEST)
        if len(self._tails):
            met = ((self._firsts == self._tails[self._numbers]) | (self._firsts == -1)).all(1)
            scores.write(self._lasts[met], _LOWEST)


def _padded(tokens: Collection[int], length: int, filler: int) -> list[int]:
    return [filler] * (length - len(tokens)) + list(tokens)
