"""Tokens that a row may not say: min_tokens, bad_words, allowed_token_ids, alone and against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import build
from engine.fake import FakeTokenizer
from engine.restrictions import _LOWEST
from engine.rows import DeviceRows, HostRows, Rows, Scratch
from engine.sampler import Sampler
from engine.sequence import Sequence, SequenceGroup
from engine.tokens import Tokenizer
from engine.types import EngineConfig, EngineError, Request, SamplingParams
from tests.generation import run

VOCAB, EOS = 50, 7


def sequence(output: tuple[int, ...] = (), **fields: Any) -> Sequence:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 64} | fields))
    request = Request(id="r", prompt=[1, 2, 3], sampling=sampling)
    made = SequenceGroup(request, arrival=0, cache_root=b"").sequences[0]
    made.tokens.extend(output)
    return made


def descending(*first: int) -> torch.Tensor:
    """[1, VOCAB] logits: these tokens best, in this order, then the others by number."""
    order = [*first, *(token for token in range(VOCAB) if token not in first)]
    scores = torch.empty(1, VOCAB)
    scores[0, order] = torch.arange(VOCAB, 0, -1, dtype=torch.float32)
    return scores


def said(scores: torch.Tensor, *sequences: Sequence) -> list[int]:
    drawn = Sampler(VOCAB, (EOS,)).sample(scores.repeat(len(sequences), 1), list(sequences))
    return [one.token_id for one in drawn]


def test_nothing_but_what_is_allowed_is_said() -> None:
    scores = descending(10, 11, 12)
    assert said(scores, sequence(allowed_token_ids=(12, 30)), sequence(), sequence(allowed_token_ids=(40,))) == [
        12,
        10,
        40,
    ]
    rows = [sequence(temperature=2.0, seed=seed, allowed_token_ids=(4, 12, 30)) for seed in range(300)]
    assert set(said(torch.zeros(1, VOCAB), *rows)) == {4, 12, 30}


def test_a_word_of_one_token_is_never_said_and_a_longer_one_is_not_completed() -> None:
    scores = descending(10, 11, 12)
    words = ((10,), (20, 21, 11))
    for output, expected in (((), 11), ((20, 21), 12), ((9, 20, 21), 12), ((20, 22), 11), ((21,), 11)):
        assert said(scores, sequence(output, bad_words_token_ids=words)) == [expected]


def test_a_word_begins_in_the_output_not_in_the_prompt() -> None:
    assert said(descending(10, 11), sequence(bad_words_token_ids=((3, 10),))) == [10]


def test_words_of_many_rows_and_lengths_do_not_mix() -> None:
    scores = descending(10, 11, 12)
    rows = [
        sequence((5, 6), bad_words_token_ids=((5, 6, 10), (6, 11))),
        sequence((5, 6)),
        sequence((6,), bad_words_token_ids=((5, 6, 10),)),
        sequence((6,), bad_words_token_ids=((6, 10), (10,), (11,))),
    ]
    assert said(scores, *rows) == [12, 10, 10, 12]


def test_words_and_min_tokens_follow_a_batch_step_by_step() -> None:
    """The state that is kept from step to step says what a new sampler says of the same tokens."""
    scores = descending(10, EOS, 11)
    drawer = Sampler(VOCAB, (EOS,))
    rows = [
        sequence(bad_words_token_ids=((10, 10, 10), (10, 10, EOS), (11, 10)), min_tokens=4),
        sequence(min_tokens=2, stop_token_ids=(10,)),
        sequence(),
    ]
    texts: list[list[int]] = [[], [], []]
    for _ in range(7):
        fresh = Sampler(VOCAB, (EOS,)).sample(scores.expand(3, -1), rows)
        drawn = drawer.sample(scores.expand(3, -1), rows)
        assert drawn == fresh
        for row, one, text in zip(rows, drawn, texts, strict=True):
            row.tokens.append(one.token_id)
            text.append(one.token_id)
    assert texts[0] == [10, 10, 11, 11, EOS, 10, 10]
    assert texts[1] == [11, 11, 10, 10, 10, 10, 10]
    assert texts[2] == [10] * 7


def test_what_is_allowed_outlasts_words_and_min_tokens() -> None:
    scores = descending(10, EOS, 11)
    assert said(scores, sequence(allowed_token_ids=(EOS,), min_tokens=3)) == [EOS]
    rows = [
        sequence(temperature=1.0, top_p=0.9, seed=seed, allowed_token_ids=(20, 21), bad_words_token_ids=((20,), (21,)))
        for seed in range(50)
    ]
    assert set(said(scores, *rows)) == {20, 21}


def test_no_bias_lifts_a_restriction() -> None:
    fields: dict[str, Any] = {"logit_bias": {10: 100.0, EOS: 100.0}, "presence_penalty": -2.0}
    scores = descending(11)
    assert said(scores, sequence((10,), bad_words_token_ids=((10,),), min_tokens=2, **fields)) == [11]
    assert said(scores, sequence((10,), allowed_token_ids=(11, 12), **fields)) == [11]


@pytest.mark.parametrize("form", ["host", "device"])
def test_rows_are_written_where_they_lie(form: str) -> None:
    scores = torch.zeros(2, 5)
    rows: Rows = HostRows(scores.numpy(), Scratch()) if form == "host" else DeviceRows(scores)
    rows.write(np.array([1, 7]), _LOWEST)
    rows.add(np.array([0, 9]), np.array([1.5, -1.0], dtype=np.float32))
    rows.clear(np.array([1]))
    assert scores[0].tolist() == [1.5, np.float32(_LOWEST), 0, 0, 0]
    assert scores[1].tolist() == [-np.inf] * 5


# ---- words as tokens ----


def test_words_are_read_as_vllm_reads_them(default_model: Path) -> None:
    tokenizer = Tokenizer(default_model)
    (plain,) = tokenizer.encode("dog")
    (spaced,) = tokenizer.encode(" dog")
    assert tokenizer.bad_words(["dog"]) == tokenizer.bad_words(["  dog"]) == ((plain,), (spaced,))
    both = tokenizer.bad_words(["New York"])
    assert [tokenizer.decode(word) for word in both] == ["New York", " New York"]
    longer = next(
        word
        for word in ("(", "ouch", "zxqv", "ing")
        if len(tokenizer.encode(" " + word)) != len(tokenizer.encode(word))
    )
    assert tokenizer.bad_words([longer]) == (tuple(tokenizer.encode(longer)),)
    with pytest.raises(ValueError, match="without any token"):
        FakeTokenizer().bad_words([" "])


def test_words_and_lists_through_the_engine(tiny_model: Path) -> None:
    core = build(EngineConfig(model=str(tiny_model), dtype="float32", device="cpu", block_size=4, threads=1))
    prompt = core.tokenizer.encode("the quick brown")
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def answer(**fields: Any) -> list[int]:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **fields)
        return run(core, [Request(id="r", prompt=prompt, sampling=sampling)])[0]["r"]

    expected = run(core, [Request(id="r", prompt=prompt, sampling=plain)])[0]["r"]
    word = core.tokenizer.decode(expected[2:5])
    tokens = core.tokenizer.encode(word)
    changed = answer(bad_words=(word,))
    assert not any(changed[place : place + len(tokens)] == tokens for place in range(len(changed)))
    assert set(answer(allowed_token_ids=(5, 6))) <= {5, 6}
    with pytest.raises(EngineError, match="allowed_token_ids"):
        core.add(Request(id="x", prompt=prompt, sampling=SamplingParams(allowed_token_ids=(1 << 20,))))
    with pytest.raises(EngineError, match="surrogate"):
        core.add(Request(id="x", prompt=prompt, sampling=SamplingParams(bad_words=("\ud800",))))
    assert core.step() is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": (" \n",)}, "bad_words"),
        ({"bad_words": ("x" * 129,)}, "bad_words"),
        ({"bad_words": ("x",) * 65}, "bad_words"),
        ({"bad_words_token_ids": ((),)}, "bad_words_token_ids"),
        ({"bad_words_token_ids": ((1, 100),)}, "bad_words_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * 16385}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], field: str) -> None:
    ((named, reason),) = SamplingParams(**fields).validate(100)
    assert named == field
    assert reason
