"""Rating: tokens × one price version = exact femto-units.

Pure. Does not know: balances, where tokens come from, which price applies.
"""

from __future__ import annotations

from typing import Protocol

from billing.money import cost
from billing.prices import Rate, TokenClass


class Counted(Protocol):
    """Tokens of one request, or summed over requests of one price: money is linear in them."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


def quantities(usage: Counted) -> dict[TokenClass, int]:
    """The tokens by priced class. A cached prompt token is priced as cached and only so."""
    return {
        TokenClass.PROMPT: usage.prompt_tokens - usage.cached_tokens,
        TokenClass.CACHED: usage.cached_tokens,
        TokenClass.COMPLETION: usage.completion_tokens,
    }


def amount_femto(usage: Counted, rate: Rate) -> int:
    """What the tokens cost, exactly."""
    return sum(cost(tokens, rate.of(token_class)) for token_class, tokens in quantities(usage).items())
