"""Rating: tokens of one request × one price version = exact femto-units.

Pure. Does not know: balances, where events come from, which price applies.
"""

from __future__ import annotations

from billing.money import cost
from billing.prices import Rate, TokenClass
from metering.events import UsageEvent


def quantities(event: UsageEvent) -> dict[TokenClass, int]:
    """The event's tokens by priced class. A cached prompt token is priced as cached and only so."""
    return {
        TokenClass.PROMPT: event.prompt_tokens - event.cached_tokens,
        TokenClass.CACHED: event.cached_tokens,
        TokenClass.COMPLETION: event.completion_tokens,
    }


def amount_femto(event: UsageEvent, rate: Rate) -> int:
    """What the request costs, exactly."""
    return sum(cost(tokens, rate.of(token_class)) for token_class, tokens in quantities(event).items())
