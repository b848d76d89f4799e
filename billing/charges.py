"""A settled event and its price → the charge that the ledger keeps.

Pure. Does not know: which price applies, the store.
"""

from __future__ import annotations

from typing import NamedTuple

from billing.accounts import Tenant
from billing.ledger import UsageRated
from billing.positions import Positions, period_start
from billing.prices import PriceVersion, TokenClass
from billing.rating import amount_femto, ceiling_femto, charge_femto, priced_quantities, tiered
from metering.events import UsageEvent


class Priced(NamedTuple):
    """What an event is charged, and at most until the ledger has it."""

    rated: UsageRated
    ceiling_femto: int


def rate(
    event: UsageEvent, event_hash: str, tenant: Tenant, price: PriceVersion, positions: Positions, *, later: bool
) -> Priced:
    """Charge the event at the positions that stand; they are not moved. `later`: it had no price at its settlement."""
    if not price.components:
        amount = amount_femto(event, price.rate)
        return Priced(_rated(event, event_hash, price, amount, later), amount)
    start_us = period_start(price, event.ts_us, tenant.billing_anchor_day, tenant.timezone)
    at = positions.of(tenant.id, price, start_us)
    counted = priced_quantities(event, price)
    rated = _rated(
        event, event_hash, price, charge_femto(price, counted, at), later, counted=counted, at=at, start_us=start_us
    )
    return Priced(rated, ceiling_femto(price, counted, at))


def move(positions: Positions, rated: UsageRated, price: PriceVersion) -> None:
    """Count a charge's units."""
    if rated.positions:
        counted = {TokenClass(name): units for name, units in rated.quantities.items()}
        positions.add(rated.tenant, price, rated.period_start_us, counted)


def agrees(rated: UsageRated, event: UsageEvent, price: PriceVersion) -> bool:
    """Whether the event costs by this price, at the positions that the charge keeps, what was charged."""
    if price.id != rated.price_id:
        return False
    if not price.components:
        return not rated.positions and str(amount_femto(event, price.rate)) == rated.amount_femto
    counted = priced_quantities(event, price)
    if _kept(counted) != rated.quantities or {one.token_class for one in tiered(price)} != set(rated.positions):
        return False
    at = {TokenClass(name): position for name, position in rated.positions.items()}
    return str(charge_femto(price, counted, at)) == rated.amount_femto


def _kept(counted: dict[TokenClass, int]) -> dict[str, int]:
    return {token_class.value: units for token_class, units in counted.items() if units}


def _rated(
    event: UsageEvent,
    event_hash: str,
    price: PriceVersion,
    amount: int,
    later: bool,
    *,
    counted: dict[TokenClass, int] | None = None,
    at: dict[TokenClass, int] | None = None,
    start_us: int = 0,
) -> UsageRated:
    return UsageRated(
        event_id=event.event_id,
        event_hash=event_hash,
        ts_us=event.ts_us,
        settled_us=event.settled_us,
        tenant=event.tenant,
        model=event.model,
        adapter=event.adapter,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        price_id=price.id,
        amount_femto=str(amount),
        rated_later=later,
        key_id=event.key_id,
        gateway="" if later else event.gateway,
        quantities=_kept(counted or {}),
        positions={token_class.value: position for token_class, position in (at or {}).items()},
        period_start_us=start_us,
    )
