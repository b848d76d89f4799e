"""How many refused commands of one admin are written down: the ledger keeps everything for ever, so a program that asks
again and again for what it may not have must not fill it.

Each admin has so many at once, and one more every few seconds. What is left out is counted in the next that is written
down, so the audit says how often it was.

Knows: numbers. Does not know: what was refused.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

AT_ONCE = 60
EVERY_S = 10.0


class _Allowance(msgspec.Struct):
    left: float
    at_s: float
    omitted: int = 0


class Refusals:
    """By actor, of whom there are as many as there are admin keys. For one event loop."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._of: dict[str, _Allowance] = {}

    def noted(self, actor: str) -> int | None:
        """How many of the actor's were left out since the last that was written down; None: leave this one out too."""
        now_s = self._clock_s()
        allowance = self._of.setdefault(actor, _Allowance(AT_ONCE, now_s))
        allowance.left = min(AT_ONCE, allowance.left + (now_s - allowance.at_s) / EVERY_S)
        allowance.at_s = now_s
        if allowance.left < 1:
            allowance.omitted += 1
            return None
        allowance.left -= 1
        omitted, allowance.omitted = allowance.omitted, 0
        return omitted
