"""Text of a given number of tokens.

Knows: how to come to an exact count with any tokenizer, by counting. Does not know: what the text is for. Without a
tokenizer a word is taken for a token, which is nearly so for the common words used here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

TRIES_MAX = 64

_COMMON = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had they
you were their one all we can her has there been if more when will would who so no out up into do any your
what some could them only other new time about these two may then first my now such like our over man me even
most made after also did many before must through back years where much way well down should because each just
those people how too little state good very make world still own see men work long get here between both life
being under never day same another know while last might us great old year off come since against go came
right used take three
"""
WORDS = _COMMON.split()
MARKS_MAX = 8
MARKS = (".", ",", "!", "?", ";", ":", "-", "a", "0")


class TextTokenizer(Protocol):
    """What is needed of `engine.tokens.Tokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class FillError(ValueError):
    """There is no text of that many tokens; the sentence says why."""


class Filler:
    """Makes texts. `tokenizer` None: by words."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self.exact = tokenizer is not None
        self._words, self._tokens_per_word = WORDS, 1.0
        if tokenizer is not None:
            single = [word for word in WORDS if self._adds_one(tokenizer, word)]
            self._words = single if len(single) >= 8 else WORDS
            self._tokens_per_word = max(1.0, len(tokenizer.encode(" ".join(self._words))) / len(self._words))

    def text(
        self, tokens: int, rng: random.Random, *, head: str = "", count: Callable[[str], int] | None = None
    ) -> str:
        """A text that begins with `head` and for which `count` gives `tokens`. Raises `FillError`.

        `count` is the number of tokens of a prompt that holds the text, and may count more than the text alone.
        """
        if count is None:
            return " ".join(
                [*([head] if head else []), *rng.choices(self._words, k=max(1, tokens - len(head.split())))]
            )
        least = count(head or self._words[0])
        if least > tokens:
            raise FillError(f"a prompt of {tokens} tokens is too short: the least that can be sent has {least}")
        words = [head] if head else []
        for _ in range(TRIES_MAX):
            text = " ".join(words)
            missing = tokens - count(text)
            if missing < 0:
                del words[max(len(words) + missing, 1) :]  # a word has at least one token
            elif missing <= MARKS_MAX and (whole := self._topped_up(text, tokens, count)) is not None:
                return whole
            else:
                words += rng.choices(self._words, k=max(1, int(missing / self._tokens_per_word)))
        raise FillError(f"no text of exactly {tokens} tokens was found with this tokenizer")

    def _topped_up(self, text: str, tokens: int, count: Callable[[str], int]) -> str | None:
        """The text with marks after it, each one token more, until it has `tokens`; None where none is one more."""
        while (have := count(text)) != tokens:
            longer = next((text + mark for mark in MARKS if count(text + mark) == have + 1), None)
            if longer is None:
                return None
            text = longer
        return text

    @staticmethod
    def _adds_one(tokenizer: TextTokenizer, word: str) -> bool:
        return len(tokenizer.encode(f"and {word}")) == len(tokenizer.encode("and")) + 1
