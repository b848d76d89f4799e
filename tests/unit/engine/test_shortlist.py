"""Rows that are left few tokens are drawn as all others are, only sooner."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.grammar import Masks
from engine.rows import HostRows, Scratch
from engine.sampler import Sampler
from engine.sequence import Sequence, SequenceGroup
from engine.shortlist import FEW, Shortlist, count_bits
from engine.types import Request, SamplingParams

VOCAB = 1003
EOS = 7
WIDTH = -(-VOCAB // 32) * 4


class Allowing:
    """A matcher that always allows the same."""

    stuck: str | None = None

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def fill(self, address: int, nbytes: int) -> None:
        raise AssertionError("not asked for here")


def bits_of(tokens: np.ndarray) -> np.ndarray:
    flags = np.zeros(WIDTH * 8, dtype=np.uint8)
    flags[tokens] = 1
    return np.packbits(flags, bitorder="little")


def guided(name: str, tokens: np.ndarray | None, **sampling) -> Sequence:
    request = Request(id=name, prompt=[1, 2], sampling=SamplingParams(**{"max_tokens": 64} | sampling))
    made = SequenceGroup(request, arrival=0, cache_root=b"").sequences[0]
    made.matcher = None if tokens is None else Allowing(tokens)
    return made


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """With masks as the sequences' matchers say."""
    monkeypatch.setattr(Masks, "fill", lambda _, matchers: np.stack([bits_of(one.tokens) for one in matchers]))
    return Sampler(VOCAB, (EOS,))


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_bits_become_tokens_in_order() -> None:
    sets = [np.array([0, 31, 32, 95, 1002]), np.array([500]), np.arange(3, 259)]
    bits = np.stack([bits_of(tokens) for tokens in sets])
    assert count_bits(bits).tolist() == [5, 1, 256]
    scores = HostRows(np.zeros((5, VOCAB), dtype=np.float32), Scratch())
    short = Shortlist(scores, np.array([4, 0, 2]), bits, np.arange(3))
    scales = np.ones(3, dtype=np.float32)
    for number, expected in ((0.0, [0, 500, 3]), (0.5, [32, 500, 131]), (1 - 2**-53, [1002, 500, 258])):
        assert short.draw(scales, np.full(3, number)).tolist() == expected


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
def test_a_short_row_is_drawn_from_the_distribution_that_is_left(sampler: Sampler, temperature: float) -> None:
    allowed = np.array([3, 64, 65, 700, 1001])
    scores = logits(1)
    expected = torch.softmax(scores[0, torch.from_numpy(allowed)].double() / temperature, 0).numpy()
    rows = 4000
    sequences = [guided(f"r{number}", allowed, temperature=temperature) for number in range(rows)]
    drawn = [one.token_id for one in sampler.sample(scores.repeat(rows, 1), sequences)]
    counts = np.array([drawn.count(token) for token in allowed.tolist()])
    assert counts.sum() == rows
    kept = expected * rows >= 5
    chi2 = (((counts - expected * rows) ** 2) / (expected * rows))[kept].sum()
    assert chi2 < 20  # 4 degrees of freedom: one in two thousand


@pytest.mark.parametrize("size", [1, FEW, FEW + 1, VOCAB])
def test_a_row_says_the_same_in_any_company(sampler: Sampler, size: int) -> None:
    allowed = np.sort(np.random.default_rng(size).choice(VOCAB, size, replace=False))
    scores = logits(5, seed=size)
    company = [
        guided("r", allowed, seed=5, logprobs=1),
        guided("free", None),
        guided("limited", np.array([8, 9]), top_k=3),
        guided("greedy", np.array([10, 700]), temperature=0.0),
        guided("one", np.array([77])),
    ]
    together = sampler.sample(scores.clone(), company)
    [alone] = sampler.sample(scores[:1].clone(), [guided("r", allowed, seed=5, logprobs=1)])
    assert together[0] == alone
    assert alone.token_id in allowed
    assert alone.logprob.logprob == pytest.approx(scores[0].log_softmax(-1)[alone.token_id].item(), abs=1e-4)
    assert together[2].token_id in (8, 9)
    assert together[3].token_id == (10 if scores[3, 10] > scores[3, 700] else 700)
    assert together[4].token_id == 77
    [free] = sampler.sample(scores[1:2].clone(), [guided("free", None)])
    assert together[1] == free


def test_a_row_that_is_not_finite_says_something_that_is_allowed(sampler: Sampler) -> None:
    scores = logits(3)
    scores[0, :] = float("nan")
    scores[1, 5] = float("inf")
    drawn = sampler.sample(scores, [guided(name, np.array([5, 6, 900])) for name in "abc"])
    assert all(one.token_id in (5, 6, 900) for one in drawn)
