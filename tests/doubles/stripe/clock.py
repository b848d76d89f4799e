"""The double's time: the machine's, moved by hand. Whole seconds, as everywhere in Stripe's API."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch. `advance` moves it, `freeze` stops it at a given second."""

    def __init__(self) -> None:
        self._offset = 0
        self._frozen: int | None = None

    def now(self) -> int:
        if self._frozen is not None:
            return self._frozen
        return int(time.time()) + self._offset

    def freeze(self, at: int) -> None:
        self._frozen = at

    def advance(self, *, seconds: int = 0, hours: int = 0) -> None:
        """Move forward; a frozen clock moves too and stays frozen."""
        step = seconds + 3600 * hours
        if self._frozen is not None:
            self._frozen += step
        else:
            self._offset += step
