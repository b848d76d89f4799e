"""Rating written the plain way, one class after the other: `billing.tariff` must equal it to the last digit."""

from __future__ import annotations

from collections.abc import Mapping

from billing.prices import PriceVersion
from billing.rating import quantities
from billing.tiers import TokenClass, cost_femto, dearest_femto, dearest_once_femto
from metering.events import UsageEvent


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


def _worked_on(event: UsageEvent) -> bool:
    """Whether anything was done: what was cut while it was queued is no request that anybody pays for."""
    return bool(event.prompt_tokens or event.completion_tokens or event.images or event.audio_ms)
