"""Lengths in tokens, as they are asked for on the command line."""

from __future__ import annotations

import random
import re

import msgspec

_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


class Lengths(msgspec.Struct, frozen=True):
    """`128`, a range `100-300` (drawn evenly), or several of these, `30,200,800`, walked in turn."""

    parts: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises `ValueError` with a sentence."""
        parts = []
        for part in text.replace(" ", "").split(","):
            found = _PART.fullmatch(part)
            if found is None:
                raise ValueError(f"{part!r} is neither a number of tokens nor a range like 100-300")
            low, high = int(found[1]), int(found[2] or found[1])
            if not 1 <= low <= high:
                raise ValueError(f"{part!r} is no range of at least one token")
            parts.append((low, high))
        return cls(tuple(parts))

    def pick(self, index: int, rng: random.Random) -> int:
        """The length of request `index`."""
        return rng.randint(*self.parts[index % len(self.parts)])

    @property
    def longest(self) -> int:
        return max(high for _, high in self.parts)
