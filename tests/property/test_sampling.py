"""A row's tokens are its own: whatever the batch, its order, its size, and what happens between two steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.rows import DeviceRows, HostRows, Scratch
from engine.sampler import Sampler
from engine.sequence import Sequence, SequenceGroup
from engine.types import Request, SamplingParams

VOCABS = (41, 1000, 32003, 49152)
_LOGITS = {
    vocab: (torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).bfloat16().float()
    for vocab in VOCABS
}
"""Rounded as a bfloat16 head gives them: ties are frequent."""

sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
        "top_k": st.sampled_from([0, 0, 1, 40, 700]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1e-5]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -1.0]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 5: -100.0}]),
        "min_tokens": st.sampled_from([0, 3]),
        "bad_words_token_ids": st.sampled_from([(), ((4,), (1, 2), (2, 2, 2))]),
        "allowed_token_ids": st.sampled_from([None, None, (1, 2, 3, 4)]),
        "logprobs": st.sampled_from([None, None, 0, 4]),
        "seed": st.sampled_from([None, 1, -7]),
    }
)


def start(number: int, fields: dict[str, Any]) -> Sequence:
    request = Request(
        id=f"request {number}",
        prompt=[1 + number % 5, 2, 2, 9],
        sampling=SamplingParams(max_tokens=99, **fields),
        n=1 + number % 2,
    )
    return SequenceGroup(request, arrival=number, cache_root=b"").sequences[-1]


def alone(vocab: int, one: Sequence, row: int) -> Any:
    return Sampler(vocab, (7,)).sample(_LOGITS[vocab][row : row + 1].clone(), [one])[0]


@settings(max_examples=60, deadline=None)
@given(vocab=st.sampled_from(VOCABS), asked=st.lists(sampling, min_size=1, max_size=9), data=st.data())
def test_rows_come_go_and_move_and_each_says_what_it_says_alone(
    vocab: int, asked: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Each step samples some of the sequences in some order, with one sampler that keeps state; a row left out is as
    one preempted or paused. A fresh sampler, given that row only, must say the same."""
    drawer = Sampler(vocab, (7,))
    sequences = [start(number, fields) for number, fields in enumerate(asked)]
    numbers = list(range(len(sequences)))
    batch = numbers
    for step in range(6):
        if data.draw(st.booleans(), label="the batch changes"):
            batch = data.draw(st.permutations(numbers), label="order")[: data.draw(st.integers(1, len(numbers)))]
        rows = [(number + step) % 24 for number in batch]
        expected = [alone(vocab, sequences[number], row) for number, row in zip(batch, rows, strict=True)]
        drawn = drawer.sample(_LOGITS[vocab][rows], [sequences[number] for number in batch])
        assert drawn == expected
        if data.draw(st.booleans(), label="the step is done again"):
            assert drawer.sample(_LOGITS[vocab][rows], [sequences[number] for number in batch]) == expected
        for number, one in zip(batch, drawn, strict=True):
            sequences[number].tokens.append(one.token_id)


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_passes_on_a_device_are_those_of_the_host(vocab: int) -> None:
    """On a CPU here: torch's form and numpy's, of the same rows."""
    scores = _LOGITS[vocab][:5].clone()
    host, device = HostRows(scores.clone().numpy(), Scratch()), DeviceRows(scores.clone())
    some = np.array([3, 0])
    assert np.array_equal(host.argmax(), device.argmax())
    assert np.array_equal(host.pick(some).argmax(), device.pick(some).argmax())
    peaks = host.block_peaks()
    assert np.array_equal(peaks, device.block_peaks())
    assert host.kth(1, 17) == device.kth(1, 17)
    thresholds = np.array([2.0, 4.0, 0.0, -1.0, 50.0], dtype=np.float32)
    for ours, theirs in zip(host.above(thresholds), device.above(thresholds), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(host.count_above(thresholds), device.count_above(thresholds))
    scales = np.array([1.0, 0.5, 2.0, 1.0, 3.0], dtype=np.float32)
    np.testing.assert_allclose(
        host.masses(peaks.max(1), scales), device.masses(peaks.max(1), scales), rtol=1e-5, atol=1e-7
    )
    numbers = np.array([0, (vocab - 1) // 256])
    np.testing.assert_allclose(host.chunk(some, numbers), device.chunk(some, numbers), rtol=1e-5)
    weights = np.array([0.01, 0.2], dtype=np.float32)
    np.testing.assert_allclose(host.mass_above(some, weights), device.mass_above(some, weights), rtol=1e-4)
    flat = np.array([0, 5, vocab + 3])
    assert np.array_equal(host.read(flat), device.read(flat))
    host.write(flat, host.read(flat) + 1)
    device.write(flat, device.read(flat) + 1)
    assert np.array_equal(host.read(flat), device.read(flat))
