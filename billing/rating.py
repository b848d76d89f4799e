"""Rating by the three prices that every version has, exactly; and what a request may not have without a price.

What a request has of a class that no token stands for (an image, a second of audio) must have a price. All classes,
tiers, packages: `billing.tariff`.

Pure. Does not know: balances, where counts come from, which price applies.
"""

from __future__ import annotations

from typing import Protocol

from billing.money import cost
from billing.prices import PriceVersion, Rate, TokenClass

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


class Media(Protocol):
    """What a request has that no token stands for."""

    @property
    def images(self) -> int: ...
    @property
    def audio_ms(self) -> int: ...


def unpriced(event: Media, price: PriceVersion) -> TokenClass | None:
    """A class that the request has, that must have a price, and has none."""
    if not (event.images or event.audio_ms):
        return None
    priced = price.by_class()
    counts = {TokenClass.IMAGE: event.images, TokenClass.AUDIO_SECOND: event.audio_ms}
    return next((one for one in MUST_BE_PRICED if counts[one] and one not in priced), None)
