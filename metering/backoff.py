"""How long to wait before the next try: longer each time, and not all at the same moment.

Knows: full pauses double from `min_s` to `max_s`, and each one waited is drawn from the upper half of its full length,
so that many who failed together do not come back together ("equal jitter",
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). Does not know: what is tried, how to wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """The pauses of one row of failures after another. `draw(low, high)` is where the chance comes from."""

    def __init__(self, min_s: float, max_s: float, draw: Callable[[float, float], float] = random.uniform) -> None:
        self._min_s, self._max_s, self._draw = min_s, max_s, draw
        self._full_s = min_s

    def next_s(self) -> float:
        """The pause after one more failure."""
        full_s = self._full_s
        self._full_s = min(2 * full_s, self._max_s)
        return self._draw(full_s / 2, full_s)

    def reset(self) -> None:
        """It worked: the next failure is the first again."""
        self._full_s = self._min_s
