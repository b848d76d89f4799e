"""Faults on demand: which call goes wrong, and whether its effect took place before it did."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "rate_limit",  # 429, nothing done, not cached by key
    "error_before",  # 500 instead of the effect, cached by key
    "error_after",  # 500 after the effect, cached by key
    "gateway_before",  # 502 without Stripe's envelope; the request never reached the API
    "gateway_after",  # 502 without Stripe's envelope; the effect took place
    "garbled_after",  # the effect, then 200 with a body that is not JSON
    "reset_before",  # connection reset, nothing done
    "reset_after",  # connection reset after the effect
    "hang_before",  # silence of `seconds`, then the effect: the key is in use meanwhile
    "hang_after",  # the effect, then silence of `seconds`
    "key_mismatch",  # 400: our key was used with other parameters; nothing done. A call without one is not struck
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]  # Literal keeps its members there


@dataclass
class Fault:
    """Strikes `times` calls that match the pattern `route` (`"POST /v1/invoiceitems"`), from the `nth` on (from 0)."""

    kind: Kind
    route: str = ".*"
    nth: int = 0
    times: int = 1
    seconds: float = 1.0

    def strikes(self, method: str, path: str) -> bool:
        """Whether this call is struck. Counts the calls that match, so ask once for each."""
        if not re.fullmatch(self.route, f"{method} {path}"):
            return False
        if self.nth > 0:
            self.nth -= 1
            return False
        if self.times <= 0:
            return False
        self.times -= 1
        return True
