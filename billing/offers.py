"""What people type as a price, checked and turned into components. Every fault is collected before anything is refused.

An *offer* tells prices as decimal text, for a million tokens, or for one image, second, call, request, month; and
tiers, packages and allowances in tokens, images, seconds, calls, requests.

Pure. Does not know: the price book.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from billing.checks import AMOUNT_MAX_FEMTO, Faults
from billing.money import NANO, format_price, parse_amount, parse_price
from billing.tiers import REQUIRED, TIERS_MAX, TOKENS, UNITS, Component, PriceModel, Tier, TokenClass

ANY = "*"
PRICE_MAX_NANO = 10**9 * NANO  # a thousand units a token: typing errors end here, and so do 64 bits
EACH_MAX_NANO = 10**3 * NANO  # of a call, an image, a package: as much as the dearest token
MONTH_MAX_NANO = 10**6 * NANO  # of an adapter for a month
QUANTITY_MAX = 10**12


class TierOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`up_to` is counted from the start of a period, this one included; the last tier has none."""

    price: str
    up_to: int | None = None


class ClassOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of one class: `price` where it is flat or by the package, `tiers` where graduated or by volume."""

    model: PriceModel = PriceModel.FLAT
    price: str | None = None
    tiers: tuple[TierOffer, ...] = ()
    package_size: int | None = None
    allowance: int = 0
    minimum: str | None = None


def check_price(
    model: str,
    effective_at_us: int,
    currency: str,
    per_million: Mapping[str, str],
    classes: Mapping[str, ClassOffer] | None = None,
    endpoint: str = "",
) -> tuple[Component, ...]:
    """The components, in the order of `TokenClass`. Raises `Invalid` with every fault.

    `per_million` prices prompt, cached and completion tokens flat, and `classes` any class, those three too.
    """
    classes = classes or {}
    faults = Faults()
    if model != ANY:
        faults.model("model", model)
    faults.time("effective_at", effective_at_us)
    faults.currency("currency", currency)
    if endpoint:
        faults.model("endpoint", endpoint)
    required = [token_class.value for token_class in REQUIRED]
    for name in per_million:
        if name not in required:
            faults.add(f"per_million.{name}", f"is unknown; known are {', '.join(required)}")
        elif name in classes:
            faults.add(f"per_million.{name}", "has a price in classes too")
    found: dict[TokenClass, Component] = {}
    for token_class in REQUIRED:
        name = token_class.value
        if name in per_million:
            nano = faults.money(f"per_million.{name}", per_million[name], parse_price, PRICE_MAX_NANO)
            found[token_class] = Component(token_class=token_class, tiers=(Tier(price_nano=nano),))
        elif name not in classes:
            faults.add(f"per_million.{name}", "is missing; write 0 for what costs nothing")
    for name, offer in classes.items():
        if name not in list(TokenClass):
            faults.add(f"classes.{name}", f"is unknown; known are {', '.join(TokenClass)}")
        elif name not in per_million:
            found[TokenClass(name)] = _component(faults, TokenClass(name), offer)
    faults.raise_if_any()
    return tuple(found[token_class] for token_class in TokenClass if token_class in found)


def offer_of(component: Component) -> ClassOffer:
    """A component as it was told: what `check_price` makes it of."""
    scale = UNITS[component.token_class].scale
    tiered = component.model in (PriceModel.GRADUATED, PriceModel.VOLUME)
    return ClassOffer(
        model=component.model,
        price=None if tiered else format_price(component.tiers[0].price_nano),
        tiers=tuple(_tier_offer(tier, scale) for tier in component.tiers) if tiered else (),
        package_size=component.package_size // scale or None,
        allowance=component.allowance // scale,
        minimum=component.minimum or None,
    )


def _tier_offer(tier: Tier, scale: int) -> TierOffer:
    return TierOffer(price=format_price(tier.price_nano), up_to=None if tier.up_to is None else tier.up_to // scale)


def simple(components: tuple[Component, ...]) -> bool:
    """Whether they are the three that every price has, and flat."""
    return len(components) == len(REQUIRED) and all(component.linear for component in components)


def _component(faults: Faults, token_class: TokenClass, offer: ClassOffer) -> Component:
    field, scale = f"classes.{token_class.value}", UNITS[token_class].scale
    if token_class is TokenClass.ADAPTER_MONTH and not _plain(offer):
        faults.add(field, "is charged by time: it has a flat price, without allowance and minimum")
    if (offer.package_size is not None) != (offer.model is PriceModel.PACKAGE):
        faults.add(f"{field}.package_size", "is for the model package, which needs it")
    package_size = 0 if offer.package_size is None else offer.package_size
    if offer.package_size is not None and not 1 <= package_size <= QUANTITY_MAX:
        faults.add(f"{field}.package_size", f"must lie between 1 and {QUANTITY_MAX}")
    if not 0 <= offer.allowance <= QUANTITY_MAX:
        faults.add(f"{field}.allowance", f"must lie between 0 and {QUANTITY_MAX}")
    if offer.minimum is not None:
        faults.money(f"{field}.minimum", offer.minimum, parse_amount, AMOUNT_MAX_FEMTO)
    return Component(
        token_class=token_class,
        model=offer.model,
        tiers=_tiers(faults, field, token_class, offer),
        package_size=package_size * scale,
        allowance=offer.allowance * scale,
        minimum=offer.minimum or "",
    )


def _plain(offer: ClassOffer) -> bool:
    return offer.model is PriceModel.FLAT and not offer.allowance and offer.minimum is None


def _tiers(faults: Faults, field: str, token_class: TokenClass, offer: ClassOffer) -> tuple[Tier, ...]:
    tiered = offer.model in (PriceModel.GRADUATED, PriceModel.VOLUME)
    most = PRICE_MAX_NANO if token_class in TOKENS and offer.model is not PriceModel.PACKAGE else EACH_MAX_NANO
    if token_class is TokenClass.ADAPTER_MONTH:
        most = MONTH_MAX_NANO
    if not tiered:
        if offer.tiers:
            faults.add(f"{field}.tiers", "are for the models graduated and volume")
        if offer.price is None:
            faults.add(f"{field}.price", "is missing; write 0 for what costs nothing")
            return (Tier(price_nano=0),)
        return (Tier(price_nano=faults.money(f"{field}.price", offer.price, parse_price, most)),)
    if offer.price is not None:
        faults.add(f"{field}.price", f"stands in the tiers of the model {offer.model}")
    if not 1 <= len(offer.tiers) <= TIERS_MAX:
        faults.add(f"{field}.tiers", f"must be 1 to {TIERS_MAX}")
    return tuple(
        Tier(
            price_nano=faults.money(f"{field}.tiers[{number}].price", tier.price, parse_price, most),
            up_to=_end(faults, f"{field}.tiers[{number}].up_to", offer, number, UNITS[token_class].scale),
        )
        for number, tier in enumerate(offer.tiers)
    )


def _end(faults: Faults, field: str, offer: ClassOffer, number: int, scale: int) -> int | None:
    up_to = offer.tiers[number].up_to
    if number == len(offer.tiers) - 1:
        if up_to is not None:
            faults.add(field, "must be absent: the last tier has no end")
        return None
    before = (offer.tiers[number - 1].up_to or 0) if number else 0
    if up_to is None or not before < up_to <= QUANTITY_MAX:
        faults.add(field, f"must be more than {before} and at most {QUANTITY_MAX}")
        return None
    return up_to * scale
