"""Repetition, presence and frequency penalties, with the counts of each row's tokens kept from step to step.

Knows: which different tokens each penalised row holds and how often it sampled each. One step costs as much as there
are different tokens, whatever the vocabulary and however long the text. Does not know: logits' other fates, or rows
that ask for no penalty.

Repetition divides or multiplies (https://arxiv.org/abs/1909.05858), once for each token of prompt and output;
presence and frequency subtract, for sampled tokens only, as in OpenAI's reference.
"""

from __future__ import annotations

from collections.abc import Sequence as Collection

import numpy as np

from engine.rows import Floats, Ids, Rows
from engine.sequence import Sequence
from engine.types import SamplingParams

_ROOM = 64  # different tokens that fit beyond those a row has when its batch is made


def asks(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


class Penalties:
    """Of one batch. `update` takes in each new token; a new batch takes over the counts of the one before."""

    def __init__(self, rows: Collection[int], sequences: Collection[Sequence], earlier: Penalties | None) -> None:
        """`rows`: where in the batch the `sequences` stand, all of which ask for a penalty."""
        self._rows = np.array(rows, dtype=np.int64)
        self._sequences = list(sequences)
        self._number = {sequence: number for number, sequence in enumerate(sequences)}
        self._lengths = [len(sequence.tokens) for sequence in sequences]  # what is counted of each
        if earlier is not None:
            earlier._catch_up()
        held = [self._take_over(sequence, earlier) for sequence in sequences]
        self._sizes = np.array([len(tokens) for tokens, _ in held], dtype=np.int64)
        room = int(self._sizes.max()) + _ROOM
        # Beyond its size a row repeats its first token, count and all: doing that one again changes nothing.
        self._tokens = np.empty((len(held), room), dtype=np.int64)
        self._counts = np.empty((len(held), room), dtype=np.float32)
        for number, (tokens, counts) in enumerate(held):
            self._tokens[number, : len(tokens)], self._tokens[number, len(tokens) :] = tokens, tokens[0]
            self._counts[number, : len(tokens)], self._counts[number, len(tokens) :] = counts, counts[0]
        params = [sequence.sampling for sequence in sequences]
        self._repetition = _column([one.repetition_penalty for one in params])
        self._presence = _column([one.presence_penalty for one in params])
        self._frequency = _column([one.frequency_penalty for one in params])

    def _catch_up(self) -> None:
        """Count what its sequences have said since the last step, if that is the one token that a step gives."""
        if [len(sequence.tokens) for sequence in self._sequences] == [length + 1 for length in self._lengths]:
            self.update()

    def _take_over(self, sequence: Sequence, earlier: Penalties | None) -> tuple[Ids, Floats]:
        """Its different tokens and how often each was sampled, from the batch before where that knows them."""
        number = None if earlier is None else earlier._number.get(sequence)
        if earlier is None or number is None or earlier._lengths[number] != len(sequence.tokens):
            return _counted(sequence.tokens, sequence.num_prompt)
        size = earlier._sizes[number]
        return earlier._tokens[number, :size], earlier._counts[number, :size]

    def update(self) -> None:
        """Count the last token of every sequence."""
        new = np.array([sequence.tokens[-1] for sequence in self._sequences], dtype=np.int64)
        self._lengths = [length + 1 for length in self._lengths]
        places = (self._tokens == new[:, None]).argmax(1)
        numbers = np.arange(len(new))
        known = self._tokens[numbers, places] == new
        if not known.all():
            self._append(numbers[~known], new[~known])
        self._counts[numbers[known], places[known]] += 1
        first = numbers[known & (places == 0)]
        if len(first):
            beyond = np.arange(self._tokens.shape[1]) >= self._sizes[first, None]
            self._counts[first] += beyond

    def _append(self, numbers: Ids, tokens: Ids) -> None:
        if int(self._sizes.max()) == self._tokens.shape[1]:
            grown = ((0, 0), (0, self._tokens.shape[1]))
            self._tokens = np.pad(self._tokens, grown, mode="edge")
            self._counts = np.pad(self._counts, grown, mode="edge")
            self._repeat_first()
        places = self._sizes[numbers]
        self._tokens[numbers, places] = tokens
        self._counts[numbers, places] = 1
        self._sizes[numbers] += 1

    def _repeat_first(self) -> None:
        beyond = np.arange(self._tokens.shape[1]) >= self._sizes[:, None]
        self._tokens = np.where(beyond, self._tokens[:, :1], self._tokens)
        self._counts = np.where(beyond, self._counts[:, :1], self._counts)

    def apply(self, scores: Rows) -> None:
        """Change the scores of the tokens that each row has seen."""
        flat = self._tokens + (self._rows * scores.vocab)[:, None]
        old = scores.read(flat.reshape(-1)).reshape(flat.shape)
        new = np.where(old > 0, old / self._repetition, old * self._repetition)
        new -= self._presence * (self._counts > 0)
        new -= self._frequency * self._counts
        scores.write(flat.reshape(-1), new.reshape(-1))


def _counted(tokens: list[int], num_prompt: int) -> tuple[Ids, Floats]:
    """The different tokens of a text, and how often each stands behind its prompt."""
    array = np.array(tokens, dtype=np.int64)
    different, inverse = np.unique(array, return_inverse=True)
    return different, np.bincount(inverse[num_prompt:], minlength=len(different)).astype(np.float32)


def _column(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float32)[:, None]
