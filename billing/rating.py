"""Rating: what a request has of each class, and what that costs by one price version, exactly.

A class that is part of another is priced apart only where it has a price of its own: reasoning tokens out of
completion, cache writes out of prompt; then the other is counted without it. What a request has of a class that no
token stands for (an image, a second of audio) must have a price; a call of a tool, a request, compute time cost
something only where they have one.

Pure. Does not know: balances, where counts come from, which price applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from billing.money import cost
from billing.prices import PriceVersion, Rate, TokenClass
from billing.tiers import Component, cost_femto, dearest_femto, dearest_once_femto
from metering.events import UsageEvent

MUST_BE_PRICED = (TokenClass.IMAGE, TokenClass.AUDIO_SECOND)


class Counted(Protocol):
    """Tokens of one request, or summed over requests of one price: a flat price is linear in them."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


def quantities(usage: Counted) -> dict[TokenClass, int]:
    """The tokens of the three classes that every price has. A cached prompt token is priced as cached and only so."""
    return {
        TokenClass.PROMPT: usage.prompt_tokens - usage.cached_tokens,
        TokenClass.CACHED: usage.cached_tokens,
        TokenClass.COMPLETION: usage.completion_tokens,
    }


def amount_femto(usage: Counted, rate: Rate) -> int:
    """What the tokens cost by an exact rate."""
    return sum(cost(tokens, rate.of(token_class)) for token_class, tokens in quantities(usage).items())


def priced_quantities(event: UsageEvent, price: PriceVersion) -> dict[TokenClass, int]:
    """Base units of each class that the version prices, the three that every price has always among them."""
    found = quantities(event)
    if not price.components:
        return found
    apart = {
        TokenClass.CACHE_WRITE: event.cache_write_tokens,
        TokenClass.REASONING: event.reasoning_tokens,
        TokenClass.IMAGE: event.images,
        TokenClass.AUDIO_SECOND: event.audio_ms,
        TokenClass.TOOL_CALL: event.tool_calls,
        TokenClass.REQUEST: int(_worked_on(event)),
        TokenClass.COMPUTE_SECOND: max(0, event.compute_us),  # it is measured, so it may be wrong, but never a credit
    }
    for component in price.components:
        if component.token_class in apart:
            found[component.token_class] = apart[component.token_class]
    found[TokenClass.PROMPT] -= found.get(TokenClass.CACHE_WRITE, 0)
    found[TokenClass.COMPLETION] -= found.get(TokenClass.REASONING, 0)
    return found


def unpriced(event: UsageEvent, price: PriceVersion) -> TokenClass | None:
    """A class that the request has, that must have a price, and has none."""
    if not (event.images or event.audio_ms):
        return None
    priced = price.by_class()
    counts = {TokenClass.IMAGE: event.images, TokenClass.AUDIO_SECOND: event.audio_ms}
    return next((one for one in MUST_BE_PRICED if counts[one] and one not in priced), None)


def charge_femto(
    price: PriceVersion, counted: Mapping[TokenClass, int], positions: Mapping[TokenClass, int] | None = None
) -> int:
    """What quantities cost when so many units of the period come before them."""
    at = positions or {}
    return sum(
        cost_femto(component, at.get(token_class, 0), counted[token_class])
        for token_class, component in price.by_class().items()
        if counted.get(token_class)
    )


def ceiling_femto(
    price: PriceVersion, counted: Mapping[TokenClass, int], positions: Mapping[TokenClass, int] | None = None
) -> int:
    """The most that they can cost at these positions or at later ones; what they cost where all is linear."""
    at = positions or {}
    return sum(
        counted[token_class] * dearest_femto(component, at.get(token_class, 0)) + dearest_once_femto(component)
        for token_class, component in price.by_class().items()
        if counted.get(token_class)
    )


def tiered(price: PriceVersion) -> tuple[Component, ...]:
    """The components whose amounts depend on the period's quantity."""
    return tuple(component for component in price.components if not component.linear)


def _worked_on(event: UsageEvent) -> bool:
    """Whether anything was done: what was cut while it was queued is no request that anybody pays for."""
    return bool(event.prompt_tokens or event.completion_tokens or event.images or event.audio_ms)
