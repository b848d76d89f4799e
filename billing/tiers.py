"""What a quantity of one class costs: flat, graduated, volume or by the package, with an allowance and a minimum.

A *component* is the price of one class. Quantities are whole numbers of the class's base unit (a token, a millisecond,
a microsecond, an image, a call), and every amount is a whole number of femto-units.

Where a component is not linear, an amount depends on where in the period's quantity the units stand: `cost_femto`
takes the *position*, the units of the period before them. The allowance is the period's first units; tiers and
packages count what comes after it.

    flat        each unit at one price
    graduated   each unit at the price of the tier in which it stands
    volume      all units at the price of the tier in which the last of them stands
    package     every package that was begun, whole

Graduated and package amounts telescope: a(0, x) + a(x, y) = a(0, x + y), whatever the steps. Volume's do not: what the
end of a period says differs from what was charged on the way, and the invoice books the difference.

Pure. Does not know: which price applies, what a period is.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from billing.money import FEMTO, NANO, parse_amount

FEMTO_PER_NANO = FEMTO // NANO
TIERS_MAX = 50


class TokenClass(StrEnum):
    """What is priced apart: tokens by their kind, and what else a request or a month can have."""

    PROMPT = "prompt"  # prompt tokens that were computed
    CACHED = "cached"  # prompt tokens reused from the prefix cache
    COMPLETION = "completion"
    CACHE_WRITE = "cache_write"  # prompt tokens kept in the cache because the client asked for it
    REASONING = "reasoning"  # completion tokens that think
    IMAGE = "image"
    AUDIO_SECOND = "audio_second"
    TOOL_CALL = "tool_call"
    REQUEST = "request"  # one that was worked on
    COMPUTE_SECOND = "compute_second"  # of the engine's steps
    ADAPTER_MONTH = "adapter_month"  # an adapter that stands for a whole billing period


class Unit(msgspec.Struct, frozen=True):
    """How a class is counted and how its price is told."""

    base: str  # what is counted
    per: int  # how many of them a price is for
    scale: int  # how many of them one unit of a person's tier or allowance is


_TOKENS = Unit("token", 10**6, 1)
UNITS: dict[TokenClass, Unit] = {
    TokenClass.PROMPT: _TOKENS,
    TokenClass.CACHED: _TOKENS,
    TokenClass.COMPLETION: _TOKENS,
    TokenClass.CACHE_WRITE: _TOKENS,
    TokenClass.REASONING: _TOKENS,
    TokenClass.IMAGE: Unit("image", 1, 1),
    TokenClass.AUDIO_SECOND: Unit("millisecond", 1000, 1000),
    TokenClass.TOOL_CALL: Unit("call", 1, 1),
    TokenClass.REQUEST: Unit("request", 1, 1),
    TokenClass.COMPUTE_SECOND: Unit("microsecond", 10**6, 10**6),
    TokenClass.ADAPTER_MONTH: Unit("month", 1, 1),
}
TOKENS = tuple(token_class for token_class, unit in UNITS.items() if unit is _TOKENS)
REQUIRED = (TokenClass.PROMPT, TokenClass.CACHED, TokenClass.COMPLETION)


class PriceModel(StrEnum):
    """How the price of a unit depends on how many there are."""

    FLAT = "flat"
    GRADUATED = "graduated"
    VOLUME = "volume"
    PACKAGE = "package"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """`price_nano` is for `Unit.per` base units, a package's for one package; `up_to` None: to no end."""

    price_nano: int
    up_to: int | None = None  # base units of the period, this one included


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one class. Flat and package have one tier; tiers rise and the last has no end."""

    token_class: TokenClass
    model: PriceModel = PriceModel.FLAT
    tiers: tuple[Tier, ...]
    package_size: int = 0  # base units
    allowance: int = 0  # base units of each period that cost nothing
    minimum: str = ""  # exact decimal text: what a whole period in which there were any costs at least; empty: 0

    @property
    def linear(self) -> bool:
        """Whether a unit costs the same wherever in the period it stands."""
        return self.model is PriceModel.FLAT and not self.allowance and not self.minimum

    @property
    def minimum_femto(self) -> int:
        return parse_amount(self.minimum) if self.minimum else 0


def unit_femto(token_class: TokenClass, price_nano: int) -> int:
    """A price → what one base unit costs, exactly."""
    return price_nano * FEMTO_PER_NANO // UNITS[token_class].per


def cost_femto(component: Component, position: int, quantity: int) -> int:
    """What `quantity` base units cost of which `position` of the period come before; the minimum apart."""
    first = max(0, position - component.allowance)
    last = max(0, position + quantity - component.allowance)
    match component.model:
        case PriceModel.FLAT:
            return (last - first) * unit_femto(component.token_class, component.tiers[0].price_nano)
        case PriceModel.GRADUATED:
            return _graduated(component, last) - _graduated(component, first)
        case PriceModel.VOLUME:
            return (last - first) * unit_femto(component.token_class, _tier_of(component, last).price_nano)
        case PriceModel.PACKAGE:
            begun = _packages(component, last) - _packages(component, first)
            return begun * component.tiers[0].price_nano * FEMTO_PER_NANO


def dearest_femto(component: Component, position: int = 0) -> int:
    """The most that each further unit can cost, wherever past `position` it comes to stand; a package's rounded up."""
    if component.model is PriceModel.PACKAGE:
        return -(-component.tiers[0].price_nano * FEMTO_PER_NANO // component.package_size)
    past = max(0, position - component.allowance)
    able = [tier for tier in component.tiers if tier.up_to is None or tier.up_to > past]
    return max(unit_femto(component.token_class, tier.price_nano) for tier in able)


def dearest_once_femto(component: Component) -> int:
    """What comes to `dearest_femto` of every unit, once: the package that a request's first unit may begin."""
    return component.tiers[0].price_nano * FEMTO_PER_NANO if component.model is PriceModel.PACKAGE else 0


def _graduated(component: Component, quantity: int) -> int:
    total = below = 0
    for tier in component.tiers:
        top = quantity if tier.up_to is None else min(quantity, tier.up_to)
        total += (top - below) * unit_femto(component.token_class, tier.price_nano)
        below = top
        if top == quantity:
            break
    return total


def _tier_of(component: Component, quantity: int) -> Tier:
    return next(tier for tier in component.tiers if tier.up_to is None or quantity <= tier.up_to)


def _packages(component: Component, quantity: int) -> int:
    return -(-quantity // component.package_size)
