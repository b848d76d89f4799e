"""Text token by token against its naive definition: decode everything, cut before the stop string that ends first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokens import Detokenizer, Tokenizer
from engine.types import SamplingParams

WORDS = ("the dog", " naïve café", "東京", "👍🏽", "👩‍👩‍👧", "\n\n", " a", "<|im_end|>", "e\u0301", "")


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer: Path) -> Tokenizer:
    return Tokenizer(tiny_tokenizer)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def check(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> None:
    """Every piece goes on with the text that is due, nothing is held that no stop string could begin with."""
    whole = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    due, stop = naive(whole, list(params.stop), params.include_stop_str_in_output)
    longest = max(map(len, params.stop), default=1)
    detokenizer = Detokenizer(tokenizer, params)
    given_out, matched = "", None
    for place, token in enumerate(ids, start=1):
        piece, matched = detokenizer.push(token)
        given_out += piece
        assert due.startswith(given_out)  # never half a character, never too much
        if matched is not None:
            break
        so_far = tokenizer.decode(ids[:place], skip_special_tokens=params.skip_special_tokens)
        complete = so_far if whole.startswith(so_far) else so_far.rstrip("\ufffd")
        assert len(given_out) >= len(complete) - (longest - 1) - 3  # 3: bytes of a character that may yet be whole
    assert (given_out + detokenizer.flush(), matched) == (due, stop)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_with_stop_strings_out_of_their_own_text(tiny: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 511), max_size=40), label="ids")
    skip = data.draw(st.booleans(), label="skip_special_tokens")
    text = tiny.decode(ids, skip_special_tokens=skip).replace("\ufffd", "")
    places = st.integers(0, max(0, len(text) - 1))
    stops = [
        text[start : start + data.draw(st.integers(1, 6))] or "x"
        for start in data.draw(st.lists(places, min_size=0, max_size=4), label="starts")
    ]
    stops += data.draw(st.lists(st.text(min_size=1, max_size=4), max_size=2), label="others")
    stops = [stop for stop in stops if "\ufffd" not in stop]
    include = data.draw(st.booleans(), label="include")
    check(tiny, ids, SamplingParams(stop=tuple(stops), skip_special_tokens=skip, include_stop_str_in_output=include))


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=12),
    stops=st.lists(st.sampled_from([*WORDS[:-1], "dog the", "京👍", "\n\n\n", "é", "👧👩", "a the"]), max_size=4),
    include=st.booleans(),
)
def test_texts_of_many_scripts(tiny: Tokenizer, words: list[str], stops: list[str], include: bool) -> None:
    ids = tiny.encode("".join(words))
    check(tiny, ids, SamplingParams(stop=tuple(stops), skip_special_tokens=False, include_stop_str_in_output=include))
