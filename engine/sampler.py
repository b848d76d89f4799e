"""Draws one token for each sequence of a step from its logits.

Knows: what `SamplingParams` asks for and in which order it is done. Does not know: where logits come from or what
becomes of a token. Work that no sequence of the batch asks for is not done, and no row depends on another one.

Order: logit_bias, then repetition, presence and frequency penalties, then what is forbidden (`restrictions`), then
temperature, top_k, top_p and min_p as transformers' warpers do them, then one draw. Log-probabilities are of the raw
logits. Everything is done for all rows at once; what a batch asks for is gathered only when its sequences change.

One number in [0, 1) decides a token (`randomness`): it picks from the cumulative distribution in the order of the
vocabulary, so tokens of nearly equal probability need not be sorted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine import penalties, restrictions
from engine.cumulative import Whole, pass_at
from engine.logprobs import Logprobs, prompt_logprobs
from engine.nucleus import Limits, candidates
from engine.penalties import Penalties
from engine.randomness import stream_key, uniforms
from engine.restrictions import Restrictions
from engine.rows import Doubles, Floats, Ids, Rows, Scratch, rows_of
from engine.sequence import Sequence
from engine.shortlist import FEW, Shortlist, count_bits
from engine.types import TokenLogprob

if TYPE_CHECKING:
    from engine.grammar import Masks

_STEEPEST = 1e30  # one over the least temperature that is told from 0: float32 must hold it


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The token drawn for one sequence; `logprob` when it was asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Keeps the batch of the last step: what its rows ask for, and their tokens' counts."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._scratch = Scratch()
        self._batch: _Batch | None = None
        self._masks: Masks | None = None  # made for the first grammar, by when the library is loaded

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """One token a row. `logits` [len(sequences), vocab_size] of any float type; they may be changed.

        A row that is not finite (a broken adapter) gives some token of the vocabulary and harms no other row.
        """
        with np.errstate(all="ignore"):  # what such a row does
            batch = self._batch_of(sequences)
            scores = rows_of(logits, self._scratch)
            logprobs = None if batch.logprobs is None else batch.logprobs.before(scores, kept=batch.changes)
            batch.change(scores)
            tokens = batch.draw(scores, self._guide(scores, batch) if batch.matchers else None)
            if logprobs is None:
                return [Sampled(token) for token in tokens.tolist()]
            return list(map(Sampled, tokens.tolist(), logprobs.of(tokens)))

    def score_prompt(self, logits: Tensor, sequence: Sequence, first: int, tokens: list[int]) -> None:
        """Note in the sequence's group how likely these tokens of its prompt are, the first at position `first`.

        `logits` [len(tokens), vocab_size] before each of them; they may be changed. Doing it again does the same.
        """
        found, count = sequence.group.prompt_logprobs, sequence.sampling.prompt_logprobs
        assert found is not None
        assert count is not None
        found[first : first + len(tokens)] = prompt_logprobs(logits, tokens, count, self._scratch)

    def _guide(self, scores: Rows, batch: _Batch) -> Shortlist | None:
        """Leave a row with a grammar what that allows: after all else, so nothing lifts it. Rows that are left few
        tokens are not changed, but in the list."""
        if self._masks is None:
            from engine.grammar import Masks

            self._masks = Masks(self.vocab_size, self.eos_token_ids)
        bits = self._masks.fill(batch.matchers)
        few = (count_bits(bits) <= FEW) & (batch.guided_draws >= 0)
        if not few.all():
            scores.mask(batch.guided[~few], bits[~few])
        if not few.any():
            return None
        return Shortlist(scores, batch.guided[few], bits[few], batch.guided_draws[few])

    def _batch_of(self, sequences: list[Sequence]) -> _Batch:
        """The batch of the last step if these are its sequences, each with the token drawn then, else a new one.

        A step done again, and whatever else happens to a sequence between two steps, begins a new one.
        """
        batch = self._batch
        if batch is None or batch.sequences != sequences or not batch.go_on():
            batch = self._batch = _Batch(sequences, batch, eos_token_ids=self.eos_token_ids, vocab=self.vocab_size)
        return batch


class _Batch:
    """What the rows of a step ask for, as arrays."""

    def __init__(
        self, sequences: list[Sequence], earlier: _Batch | None, *, eos_token_ids: tuple[int, ...], vocab: int
    ) -> None:
        params = [sequence.sampling for sequence in sequences]
        self.sequences = list(sequences)
        self._lengths = [len(sequence.tokens) for sequence in sequences]
        self._bias_flat = np.array(
            [row * vocab + token for row, asked in enumerate(params) for token in asked.logit_bias], dtype=np.int64
        )
        self._bias = np.array([bias for asked in params for bias in asked.logit_bias.values()], dtype=np.float32)
        self._penalties: Penalties | None = None
        punished = [row for row, asked in enumerate(params) if penalties.asks(asked)]
        if punished:
            before = None if earlier is None else earlier._penalties
            self._penalties = Penalties(punished, [sequences[row] for row in punished], before)
        self._restrictions: Restrictions | None = None
        bound = [row for row, asked in enumerate(params) if restrictions.asks(asked)]
        if bound:
            known = None if earlier is None else earlier._restrictions
            self._restrictions = Restrictions(
                bound, [sequences[row] for row in bound], known, eos_token_ids=eos_token_ids, vocab=vocab
            )
        self.guided = np.array([row for row, one in enumerate(sequences) if one.matcher is not None], dtype=np.int64)
        self.matchers = [one.matcher for one in sequences if one.matcher is not None]
        telling = [row for row, asked in enumerate(params) if asked.logprobs is not None]
        self.logprobs = Logprobs(telling, [params[row].logprobs or 0 for row in telling]) if telling else None
        self._random = np.array([row for row, asked in enumerate(params) if asked.temperature > 0.0], dtype=np.int64)
        self._draws = _Draws([sequences[row] for row in self._random.tolist()], vocab) if len(self._random) else None
        # For each guided row its place in `_draws`, if it is drawn from all that its grammar leaves; else -1.
        free = {} if self._draws is None else {int(self._random[at]): at for at in self._draws.free.tolist()}
        self.guided_draws = np.array([free.get(row, -1) for row in self.guided.tolist()], dtype=np.int64)

    @property
    def changes(self) -> bool:
        """Whether any row's scores are not its raw logits."""
        asked = self._penalties is not None or self._restrictions is not None
        return asked or bool(len(self._bias)) or bool(self.matchers)

    def go_on(self) -> bool:
        """Take in the one token that each sequence has grown by; False: they have not."""
        lengths = [len(sequence.tokens) for sequence in self.sequences]
        if lengths != [length + 1 for length in self._lengths]:
            return False
        self._lengths = lengths
        if self._draws is not None:
            self._draws.positions += 1
        if self._penalties is not None:
            self._penalties.update()
        if self._restrictions is not None:
            self._restrictions.update()
        return True

    def change(self, scores: Rows) -> None:
        """What changes the distribution before temperature."""
        if len(self._bias):
            scores.add(self._bias_flat, self._bias)
        if self._penalties is not None:
            self._penalties.apply(scores)
        if self._restrictions is not None:
            self._restrictions.apply(scores)

    def draw(self, scores: Rows, short: Shortlist | None) -> Ids:
        """[rows]: a token each."""
        if self._draws is None:
            return scores.argmax()
        if len(self._random) == scores.count:
            return self._draws.draw(scores, short)
        tokens = scores.argmax()
        tokens[self._random] = self._draws.draw(scores.pick(self._random), short)
        return tokens


class _Draws:
    """The rows of temperature above 0: from scores to tokens."""

    def __init__(self, sequences: list[Sequence], vocab: int) -> None:
        params = [sequence.sampling for sequence in sequences]
        self._keys = np.array([stream_key(one.request, one.index) for one in sequences], dtype=np.uint64)
        self.positions = np.array([sequence.num_sampled for sequence in sequences], dtype=np.int64)
        self._scales = np.array([min(1.0 / one.temperature, _STEEPEST) for one in params], dtype=np.float32)
        top_k = np.array([one.top_k if one.top_k < vocab else 0 for one in params], dtype=np.int64)
        top_p = np.array([one.top_p for one in params], dtype=np.float64)
        min_p = np.array([math.log(one.min_p) if one.min_p else -math.inf for one in params], dtype=np.float32)
        limited = (top_k > 0) | (top_p < 1.0) | (min_p > -math.inf)
        self.free = np.flatnonzero(~limited)
        self._some = np.flatnonzero(limited)
        self._top_p = top_p
        self._limits = Limits(
            top_k=top_k[limited], top_p=top_p[limited], min_p=min_p[limited], scales=self._scales[limited]
        )

    def draw(self, scores: Rows, short: Shortlist | None) -> Ids:
        numbers = uniforms(self._keys, self.positions)
        if not len(self._some) and short is None:
            return _draw_from_all(scores, self._scales, numbers)
        if not len(self.free):
            return self._draw_limited(scores, numbers)
        tokens = np.empty(scores.count, dtype=np.int64)
        free = self.free
        if short is not None:
            tokens[short.places] = short.draw(self._scales[short.places], numbers[short.places])
            free = np.setdiff1d(free, short.places)
        if len(free):
            tokens[free] = _draw_from_all(scores.pick(free), self._scales[free], numbers[free])
        if len(self._some):
            tokens[self._some] = self._draw_limited(scores.pick(self._some), numbers[self._some])
        return tokens

    def _draw_limited(self, scores: Rows, numbers: Doubles) -> Ids:
        """From the tokens that top_k, top_p and min_p keep."""
        found = candidates(scores, self._limits)
        drawn = np.zeros(scores.count, dtype=np.int64)
        for group in found.groups:
            places, _ = pass_at(group.weights, numbers[group.rows] * group.weights.sum(1, dtype=np.float64))
            drawn[group.rows] = group.tokens[np.arange(len(places)), places]
        if found.whole is not None and len(found.wide):
            drawn[found.wide] = self._draw_wide(found.whole, found.places, self._some[found.wide])
        return drawn

    def _draw_wide(self, whole: Whole, places: Ids, rows: Ids) -> Ids:
        """From a nucleus that nobody has seen: from the whole vocabulary, until it is a token of the nucleus."""
        keys, positions, top_p = self._keys[rows], self.positions[rows], self._top_p[rows]
        drawn = np.zeros(len(rows), dtype=np.int64)
        left, attempt = np.arange(len(rows)), 0
        while len(left):
            drawn[left], weights = whole.draw(places[left], uniforms(keys[left], positions[left], attempt))
            left, attempt = left[whole.above(places[left], weights) >= top_p[left]], attempt + 1
        return drawn


def _draw_from_all(scores: Rows, scales: Floats, numbers: Doubles) -> Ids:
    whole = Whole(scores, scores.block_peaks().max(1), scales)
    return whole.draw(np.arange(scores.count), numbers)[0]
