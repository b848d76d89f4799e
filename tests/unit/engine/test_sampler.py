"""The sampler against transformers' processors and against the distribution it has to draw from."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.nucleus import Limits, candidates
from engine.randomness import stream_key, uniforms
from engine.rows import Scratch, rows_of
from engine.sampler import Sampled, Sampler
from engine.sequence import Sequence, SequenceGroup
from engine.types import Request, SamplingParams
from tests import chisquare
from tests.chisquare import warped

VOCAB = 1000
EOS = 7


def sequence(
    sampling: SamplingParams | None = None,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    request_id: str = "r",
    index: int = 0,
) -> Sequence:
    request = Request(id=request_id, prompt=list(prompt), sampling=sampling or SamplingParams(), n=index + 1)
    made = SequenceGroup(request, arrival=0, cache_root=b"").sequences[index]
    made.tokens.extend(output)
    return made


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, (EOS,))


def tokens(drawn: list[Sampled]) -> list[int]:
    return [one.token_id for one in drawn]


def changed_scores(scores: torch.Tensor, sequences: list[Sequence], drawer: Sampler | None = None) -> torch.Tensor:
    """The scores after everything that comes before temperature."""
    drawer = drawer or sampler(scores.shape[-1])
    changed = scores.clone()
    drawer._batch_of(sequences).change(rows_of(changed, Scratch()))
    return changed


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=64, **fields)


# ---- greedy, and what changes the distribution ----


def test_greedy_is_the_most_likely_token() -> None:
    scores = logits(4)
    expected = scores.argmax(-1).tolist()
    for dtype in (torch.float32, torch.float64):
        assert tokens(sampler().sample(scores.to(dtype), [sequence(greedy())] * 4)) == expected


def test_end_and_stop_tokens_wait_for_min_tokens() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, EOS], scores[0, 8], scores[0, 9] = 30.0, 20.0, 10.0
    params = greedy(min_tokens=2, stop_token_ids=(8,))
    for output, expected in (((), 9), ((5,), 9), ((5, 5), EOS)):
        assert tokens(sampler().sample(scores.clone(), [sequence(params, output=output)])) == [expected]


def test_bias_forces_and_forbids() -> None:
    scores = logits(2)
    favourite = int(scores[1].argmax())
    forced, banned = greedy(logit_bias={42: 100.0}), greedy(logit_bias={favourite: -100.0})
    second = int(scores[1].topk(2).indices[1])
    assert tokens(sampler().sample(scores, [sequence(forced), sequence(banned)])) == [42, second]


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 40), max_size=20),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.5, 0.7]),
)
def test_penalties_against_their_definitions(
    prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    scores = logits(2, vocab=41)
    expected = scores[0].clone()
    for token in range(41):
        if token in prompt or token in output:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        expected[token] -= presence * (token in output) + frequency * output.count(token)
    params = greedy(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    pair = [sequence(params, prompt=tuple(prompt), output=tuple(output)), sequence(greedy())]
    changed = changed_scores(scores, pair)
    torch.testing.assert_close(changed[0], expected)
    assert torch.equal(changed[1], scores[1])


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = logits(1)
    one = sequence(greedy(repetition_penalty=1.7), prompt=(3, 3, 9), output=(20, 21, 20))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([one.tokens]), scores.clone())
    assert torch.equal(changed_scores(scores, [one]), expected)


# ---- the distribution ----


GRID = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(temperature=1.0, top_k=700),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(temperature=1.0, top_p=0.05),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.1, top_k=50, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=VOCAB * 2, top_p=0.5),
)


def kept_tokens(scores: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """[rows, vocab]: which tokens the sampler may draw where it knows them all."""
    vocab = scores.shape[-1]
    limits = Limits(
        top_k=np.array([one.top_k if one.top_k < vocab else 0 for one in params]),
        top_p=np.array([one.top_p for one in params]),
        min_p=np.array([math.log(one.min_p) if one.min_p else -math.inf for one in params], dtype=np.float32),
        scales=np.array([1 / one.temperature for one in params], dtype=np.float32),
    )
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    with np.errstate(all="ignore"):
        found = candidates(rows_of(scores.clone(), Scratch()), limits)
    for group in found.groups:
        for row, ids, weights in zip(group.rows, group.tokens, group.weights, strict=True):
            kept[row, ids[weights > 0]] = True
    kept[found.wide] = True
    kept[(limits.top_k == 0) & (limits.top_p == 1.0) & (limits.min_p == -np.inf)] = True  # never asked of candidates
    return kept


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
def test_what_is_kept_equals_transformers(scale: float) -> None:
    scores = logits(len(GRID), seed=3) * scale
    kept = kept_tokens(scores, list(GRID))
    for row, params in enumerate(GRID):
        expected = warped(scores[row : row + 1], params)[0] > 0
        assert int((kept[row] != expected).sum()) == 0, params


@pytest.mark.parametrize("vocab", [49152, 32003])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_what_is_kept_of_a_large_vocabulary_equals_transformers(
    monkeypatch: pytest.MonkeyPatch, vocab: int, scale: float
) -> None:
    """From the first look, from the second, and for tokens drawn from a nucleus that nobody has seen."""
    monkeypatch.setattr("engine.nucleus._WIDE", 2.0)
    grid = [*GRID, SamplingParams(top_p=0.999), SamplingParams(top_p=0.6, min_p=1e-4), SamplingParams(top_k=5000)]
    scores = logits(len(grid), seed=4, vocab=vocab) * scale
    kept = kept_tokens(scores, grid)
    for row, params in enumerate(grid):
        expected = warped(scores[row : row + 1], params)[0] > 0
        # Where thousands of tokens are about as likely, float32 sums put the border of top_p some tokens apart.
        assert int((kept[row] != expected).sum()) <= 1e-4 * vocab, params


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    scores = torch.zeros(2, VOCAB)  # all alike: more ties than candidates
    kept = kept_tokens(scores, [SamplingParams(top_k=3), SamplingParams(top_p=0.1)])
    assert kept.sum(-1).tolist() == [VOCAB, VOCAB]


@pytest.mark.parametrize("params", GRID, ids=str)
def test_draws_follow_the_warped_distribution(params: SamplingParams) -> None:
    draws, vocab = 20_000, 60
    params = msgspec.structs.replace(params, top_k=min(params.top_k, 40))
    scores = logits(1, seed=5, vocab=vocab)
    rows = [sequence(params, request_id=f"request-{number}") for number in range(draws)]
    drawn = tokens(sampler(vocab).sample(scores.repeat(draws, 1), rows))
    assert chisquare.follows(drawn, warped(scores, params)[0])


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_p=0.95), SamplingParams(top_p=0.4), SamplingParams(top_k=900)],
    ids=str,
)
def test_draws_from_a_large_vocabulary_follow_the_warped_distribution(params: SamplingParams) -> None:
    """Nearly flat: a nucleus of thousands, which is drawn from without being known."""
    rows, steps, vocab = 40, 100, 5000
    scores = logits(1, seed=6, vocab=vocab) * 0.3
    drawer, drawn = sampler(vocab), list[int]()
    sequences = [sequence(params, request_id=f"request-{number}") for number in range(rows)]
    for _ in range(steps):
        new = tokens(drawer.sample(scores.repeat(rows, 1), sequences))
        drawn += new
        for one, token in zip(sequences, new, strict=True):
            one.tokens.append(token)
    groups = torch.arange(vocab) % 200  # too many tokens to count each: sums of 25
    probabilities = torch.zeros(200, dtype=torch.float64).index_add_(0, groups, warped(scores, params)[0])
    assert chisquare.follows([token % 200 for token in drawn], probabilities)
    assert all(warped(scores, params)[0][token] > 0 for token in set(drawn))


def test_extreme_temperatures_and_numbers_stay_inside_the_kept_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = logits(3)
    for cold in (1e-30, 1e-300):
        params = SamplingParams(temperature=cold)
        assert tokens(sampler().sample(scores.clone(), [sequence(params)] * 3)) == scores.argmax(-1).tolist()
    best = [set(row.topk(2).indices.tolist()) for row in scores]
    possible = scores.clone()
    possible[:, 900:] = -math.inf
    for number in (0.0, 1.0 - 2.0**-53):
        monkeypatch.setattr("engine.sampler.uniforms", lambda keys, *_, number=number: np.full(len(keys), number))
        drawn = tokens(sampler().sample(scores.clone(), [sequence(SamplingParams(top_k=2))] * 3))
        assert all(token in kept for token, kept in zip(drawn, best, strict=True))
        drawn = tokens(sampler().sample(possible.clone(), [sequence(SamplingParams())] * 3))
        assert all(token < 900 for token in drawn)


# ---- streams ----


def test_a_seeded_stream_is_the_same_alone_and_in_any_batch() -> None:
    kinds = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9, temperature=0.7),
        SamplingParams(seed=3, top_k=10),
        SamplingParams(seed=1, min_p=0.05, top_p=0.999, temperature=2.0),
        greedy(),
        SamplingParams(seed=-(2**63), repetition_penalty=1.2, presence_penalty=0.5),
        SamplingParams(seed=5, logprobs=4),
    ] * 3
    sequences = [sequence(params, output=tuple(range(row % 4)), index=row % 2) for row, params in enumerate(kinds)]
    scores = logits(len(sequences), seed=11, vocab=49152)
    drawer = Sampler(49152, (EOS,))
    together = drawer.sample(scores, sequences)
    for row, one in enumerate(sequences):
        assert drawer.sample(scores[row : row + 1], [one])[0] == together[row]
    backwards = list(range(len(sequences)))[::-1]
    assert drawer.sample(scores[backwards], [sequences[row] for row in backwards]) == together[::-1]


def number(one: Sequence, attempt: int = 0) -> float:
    """What decides the next token of a sequence."""
    keys = np.array([stream_key(one.request, one.index)], dtype=np.uint64)
    return float(uniforms(keys, np.array([one.num_sampled]), attempt)[0])


def test_seed_choice_position_and_attempt_each_change_the_draw() -> None:
    seeded = SamplingParams(seed=9)
    base = number(sequence(seeded))
    assert base == number(sequence(seeded, request_id="another"))
    others = [
        number(sequence(SamplingParams(seed=10))),
        number(sequence(seeded, index=1)),
        number(sequence(seeded, output=(5,))),
        number(sequence(seeded), attempt=1),
        number(sequence(SamplingParams(), request_id="a")),
        number(sequence(SamplingParams(), request_id="b")),
    ]
    assert len({base, *others}) == 7
    assert number(sequence(seeded, output=(5,))) == number(sequence(seeded, prompt=(1,) * 9, output=(6,)))


@pytest.mark.parametrize("along", ["seeds", "positions", "attempts"])
def test_the_numbers_are_uniform_and_not_correlated(along: str) -> None:
    count = 20_000
    if along == "seeds":
        drawn = np.array([number(sequence(SamplingParams(seed=seed))) for seed in range(count)])
    elif along == "positions":
        drawn = uniforms(np.full(count, 42, dtype=np.uint64), np.arange(count))
    else:
        key, place = np.array([42], dtype=np.uint64), np.array([3])
        drawn = np.array([uniforms(key, place, attempt)[0] for attempt in range(count)])
    assert 0 <= drawn.min() < drawn.max() < 1
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    assert ((counts - count / 50) ** 2 / (count / 50)).sum() < chisquare.limit(49)
    pairs = np.histogram2d(drawn[:-1], drawn[1:], bins=10, range=((0, 1), (0, 1)))[0]
    assert ((pairs - count / 100) ** 2 / (count / 100)).sum() < chisquare.limit(99)


# ---- log-probabilities ----


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits(3)
    params = [greedy(logprobs=3, logit_bias={42: 100.0}), SamplingParams(temperature=0.5, logprobs=0), greedy()]
    expected = scores.log_softmax(-1)
    drawn = sampler().sample(scores, [sequence(one) for one in params])
    first, second, third = (one.logprob for one in drawn)
    assert first is not None
    assert second is not None
    assert third is None
    assert first.token_id == drawn[0].token_id == 42
    assert first.logprob == pytest.approx(float(expected[0, 42]), abs=1e-5)
    best = expected[0].topk(3)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert second.top == []
    assert second.logprob == pytest.approx(float(expected[1, drawn[1].token_id]), abs=1e-5)


def test_a_broken_row_harms_no_other_and_gives_finite_logprobs() -> None:
    scores = logits(4)
    healthy = [sequence(SamplingParams(seed=row, top_p=0.9, logprobs=2)) for row in range(4)]
    expected = sampler().sample(scores, healthy)
    scores[1] = math.nan
    scores[2, 5] = math.inf
    drawn = sampler().sample(scores, healthy)
    assert [drawn[0], drawn[3]] == [expected[0], expected[3]]
    for one in drawn:
        assert 0 <= one.token_id < VOCAB
        assert one.logprob is not None
        assert all(math.isfinite(value) for value in (one.logprob.logprob, *(each for _, each in one.logprob.top)))
    assert 0 <= tokens(sampler().sample(scores, [sequence(greedy())] * 4))[1] < VOCAB
