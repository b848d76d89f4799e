"""Draws one token for each sequence of a step from its logits.

Knows: what `SamplingParams` asks for and in which order it is done. Does not know: where logits come from or what
becomes of a token. Work that no sequence of the batch asks for is not done, and no row depends on another one.

Order: min_tokens and logit_bias, then repetition, presence and frequency penalties, then temperature, top_k, top_p
and min_p as transformers' warpers do them, then one draw. Log-probabilities are of the raw logits.

Randomness is one number in [0, 1) for a token, hashed from (seed, choice, position): a sequence draws the same
tokens alone, in any batch, and after it was preempted. It picks from the cumulative distribution in the order
of the vocabulary, so tokens of nearly equal probability need not be sorted.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.sequence import Sequence
from engine.types import SamplingParams, TokenLogprob

_CANDIDATES = 256  # the most likely tokens, among which top_p is looked for first: most nuclei are far smaller
_LEAST_LOGPROB = -9999.0  # OpenAI's word for "practically impossible"; JSON has no infinity

Entries = list[tuple[int, Iterable[int], float]]
"""(row, tokens of that row, a value for each)."""


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The token drawn for one sequence; `logprob` when it was asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Keeps nothing from step to step: all it needs is in the sequences."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = torch.device(device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """One token a row. `logits` [len(sequences), vocab_size] of any float type; they are not changed.

        A row that is not finite (a broken adapter) gives some token of the vocabulary and harms no other row.
        """
        params = [sequence.request.sampling for sequence in sequences]
        raw = logits.float()
        scores = self._processed(raw, sequences, params)
        tokens = self._draw(scores, sequences, params)
        logprobs = self._logprobs(raw, tokens, params)
        return [Sampled(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]

    # ---- what changes the distribution itself ----

    def _processed(self, raw: Tensor, sequences: list[Sequence], params: list[SamplingParams]) -> Tensor:
        """The logits after min_tokens, logit_bias and penalties; `raw` itself when no row asks for any."""
        rows = list(enumerate(zip(sequences, params, strict=True)))
        ends: Entries = [
            (row, {*self.eos_token_ids, *asked.stop_token_ids}, -math.inf)
            for row, (sequence, asked) in rows
            if sequence.num_sampled < asked.min_tokens
        ]
        biases: Entries = [
            (row, (token,), bias) for row, (_, asked) in rows for token, bias in asked.logit_bias.items()
        ]
        repeated: Entries = [
            (row, sequence.tokens, asked.repetition_penalty)
            for row, (sequence, asked) in rows
            if asked.repetition_penalty != 1.0
        ]
        present: Entries = [
            (row, set(sequence.output_tokens), -asked.presence_penalty)
            for row, (sequence, asked) in rows
            if asked.presence_penalty
        ]
        frequent: Entries = [
            (row, sequence.output_tokens, -asked.frequency_penalty)
            for row, (sequence, asked) in rows
            if asked.frequency_penalty
        ]
        if not (ends or biases or repeated or present or frequent):
            return raw
        scores = raw.clone()
        self._add(scores, ends + biases)
        self._divide(scores, repeated)
        self._add(scores, present + frequent)
        return scores

    def _add(self, scores: Tensor, entries: Entries) -> None:
        """Add each entry's value at its tokens, as often as they occur."""
        if not entries:
            return
        rows, tokens, values = self._flat(entries)
        scores.index_put_((rows, tokens), values, accumulate=True)

    def _divide(self, scores: Tensor, entries: Entries) -> None:
        """Repetition penalty (https://arxiv.org/abs/1909.05858): once for a token, however often it occurs."""
        if not entries:
            return
        rows, tokens, penalties = self._flat(entries)
        old = scores[rows, tokens]  # a token that occurs twice is read twice before it is written twice, alike
        scores[rows, tokens] = torch.where(old > 0, old / penalties, old * penalties)

    def _flat(self, entries: Entries) -> tuple[Tensor, Tensor, Tensor]:
        """(row, token, value) of every single token, as three tensors."""
        tokens = array("q")  # ten times quicker to fill than a tensor from a list
        counts = []
        for _, its_tokens, _ in entries:
            before = len(tokens)
            tokens.extend(its_tokens)
            counts.append(len(tokens) - before)
        rows = np.repeat(np.array([row for row, _, _ in entries], dtype=np.int64), counts)
        values = np.repeat(np.array([value for _, _, value in entries], dtype=np.float32), counts)
        ids = np.array(tokens, dtype=np.int64)
        return (
            torch.from_numpy(rows).to(self.device),
            torch.from_numpy(ids).to(self.device),
            torch.from_numpy(values).to(self.device),
        )

    # ---- the draw ----

    def _draw(self, scores: Tensor, sequences: list[Sequence], params: list[SamplingParams]) -> list[int]:
        random = [row for row, asked in enumerate(params) if asked.temperature > 0.0]
        if not random:
            return list(map(int, scores.argmax(-1).tolist()))
        whole = len(random) == len(params)
        tokens = [] if whole else list(map(int, scores.argmax(-1).tolist()))
        asked = [params[row] for row in random]
        numbers = [uniform(sequences[row]) for row in random]
        drawn = self._sample_rows(scores if whole else scores[self._ids(random)], asked, numbers)
        if whole:
            return drawn
        for row, token in zip(random, drawn, strict=True):
            tokens[row] = token
        return tokens

    def _sample_rows(self, scores: Tensor, params: list[SamplingParams], numbers: list[float]) -> list[int]:
        """Rows of temperature above 0: token where the cumulative weight passes `numbers[row]` of its total."""
        # The most likely token has logit 0 and weight 1, so no temperature can overflow.
        scaled = (scores - scores.amax(-1, keepdim=True)) / self._column([asked.temperature for asked in params])
        weights = scaled.exp()
        threshold = self._thresholds(scaled, weights, params)
        if threshold is not None:
            weights *= scaled >= threshold
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:]
        # A product may round up to the total, beyond the last token that has any weight.
        target = torch.minimum(self._column(numbers) * total, torch.nextafter(total, torch.zeros_like(total)))
        picked = torch.searchsorted(cumulative, target, right=True).clamp_(max=scores.shape[-1] - 1)
        return list(map(int, picked[:, 0].tolist()))

    def _thresholds(self, scaled: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor | None:
        """[rows, 1]: the scaled logit below which a token is cut by top_k, top_p or min_p; None: none asks.

        Tokens as likely as the last one kept are kept too, so that the order of a sort means nothing.
        """
        threshold = None
        if any(asked.min_p for asked in params):
            threshold = self._column([math.log(asked.min_p) if asked.min_p else -math.inf for asked in params])
        vocab = scaled.shape[-1]
        limited = [row for row, asked in enumerate(params) if 0 < asked.top_k < vocab or asked.top_p < 1.0]
        if not limited:
            return threshold
        everyone = len(limited) == len(params)
        rows = slice(None) if everyone else self._ids(limited)
        found = self._nucleus(scaled[rows], weights[rows], [params[row] for row in limited])
        if not everyone:
            spread = scaled.new_full((len(params), 1), -math.inf)
            spread[rows] = found
            found = spread
        return found if threshold is None else torch.maximum(threshold, found)

    def _nucleus(self, scaled: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor:
        """[rows, 1]: the least scaled logit that top_k (0: off) and then top_p keep.

        Looks among the most likely tokens first; only rows whose nucleus is larger are sorted whole.
        """
        vocab = scaled.shape[-1]
        limits = [asked.top_k if 0 < asked.top_k < vocab else -1 for asked in params]
        top_k = self._ids(limits)[:, None]
        top_p = self._column([asked.top_p for asked in params])
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        largest = max(limits)
        candidates = min(vocab, max(_CANDIDATES, largest + 1 if largest < 4 * _CANDIDATES else 0))
        found, certain = _nucleus_among(scaled.topk(candidates).values, total, top_k, top_p)
        unsure = [] if candidates == vocab else (~certain[:, 0]).nonzero()[:, 0].tolist()
        if unsure:
            rows = self._ids(unsure)
            ordered = _descending(scaled[rows])
            found[rows] = _nucleus_among(ordered, total[rows], top_k[rows], top_p[rows])[0]
        return found

    # ---- log-probabilities ----

    def _logprobs(self, raw: Tensor, tokens: list[int], params: list[SamplingParams]) -> list[TokenLogprob | None]:
        """Of the chosen token and the k most likely, for the rows that ask."""
        result: list[TokenLogprob | None] = [None] * len(params)
        rows = [row for row, asked in enumerate(params) if asked.logprobs is not None]
        if not rows:
            return result
        logprobs = raw[self._ids(rows)].log_softmax(-1)
        chosen = logprobs.gather(1, self._ids([tokens[row] for row in rows])[:, None])[:, 0].tolist()
        best = logprobs.topk(max(params[row].logprobs or 0 for row in rows))
        values, ids = best.values.tolist(), best.indices.tolist()
        for place, row in enumerate(rows):
            count = params[row].logprobs or 0
            top = [(int(ids[place][rank]), _finite(values[place][rank])) for rank in range(count)]
            result[row] = TokenLogprob(tokens[row], _finite(chosen[place]), top)
        return result

    # ---- tensors of a step ----

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _column(self, values: list[float]) -> Tensor:
        return self._floats(values)[:, None]


def uniform(sequence: Sequence) -> float:
    """The number in [0, 1) that decides the sequence's next token: 53 bits hashed from seed, choice and position.

    Without a seed the request's id takes its place, which no other request has.
    """
    seed = sequence.request.sampling.seed
    origin = sequence.request.id.encode() if seed is None else struct.pack("<q", seed)
    place = struct.pack("<?II", seed is None, sequence.index, sequence.num_sampled)
    digest = hashlib.blake2b(place + origin, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _descending(values: Tensor) -> Tensor:
    """Each row sorted, largest first. On a CPU numpy's vectorised sort is 15 times quicker than torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(descending=True).values


def _nucleus_among(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold as far as the most likely tokens tell, and whether the others could not change it.

    `ordered` [rows, candidates]: scaled logits, best first. `total` [rows, 1]: weight of the whole vocabulary.
    `top_k` and `top_p` [rows, 1]; a negative `top_k` is off. top_p is of what top_k left.
    """
    limited = top_k > 0
    kth = ordered.gather(1, top_k.clamp(1, ordered.shape[-1]) - 1)
    kept = (ordered >= kth) | ~limited
    weights = ordered.exp() * kept
    mass = torch.where(limited, weights.sum(-1, keepdim=True, dtype=torch.float64), total)
    before = weights.cumsum(-1) - weights  # of the tokens more likely than this one
    nucleus = kept & ((before < top_p * mass) | (top_p >= 1.0))
    last = nucleus.sum(-1, keepdim=True).clamp(min=1) - 1
    certain = torch.where(limited, ordered[:, -1:] < kth, ~nucleus[:, -1:])
    return ordered.gather(1, last), certain


def _finite(value: float) -> float:
    return value if value > _LEAST_LOGPROB else _LEAST_LOGPROB  # NaN too
