"""Anything in batches, none of which is empty."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in order, at most `size` at a time; no more of them are drawn than the batch has."""
    drawn = iter(items)
    while batch := list(itertools.islice(drawn, size)):
        yield batch
