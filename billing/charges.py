"""A settled event and its price → the charge that the ledger keeps.

Pure. Does not know: which price applies, the store.
"""

from __future__ import annotations

from typing import NamedTuple

from billing.accounts import Tenant
from billing.ledger import UsageRated
from billing.positions import Positions, period_start
from billing.tariff import Tariff
from metering.events import UsageEvent


class Priced(NamedTuple):
    """What an event is charged, and at most until the ledger has it."""

    rated: UsageRated
    ceiling_femto: int


def rate(
    event: UsageEvent, event_hash: str, tenant: Tenant, tariff: Tariff, positions: Positions, *, later: bool
) -> Priced:
    """Charge the event at the positions that stand; they are not moved. `later`: it had no price at its settlement."""
    if tariff.flat:
        amount = tariff.flat_femto(event)
        return Priced(_rated(event, event_hash, tariff.price.id, amount, later), amount)
    start_us = period_start(tariff, event.ts_us, tenant.billing_anchor_day, tenant.timezone)
    at = positions.of(tenant.id, tariff, start_us)
    counted = tariff.counted(event)
    amount, ceiling = tariff.amounts_femto(counted, at)
    rated = _rated(event, event_hash, tariff.price.id, amount, later, _kept(counted), at, start_us)
    return Priced(rated, ceiling)


def move(positions: Positions, rated: UsageRated, tariff: Tariff) -> None:
    """Count a charge's units."""
    if rated.positions:
        positions.add(rated.tenant, tariff, rated.period_start_us, rated.quantities)


def agrees(rated: UsageRated, event: UsageEvent, tariff: Tariff) -> bool:
    """Whether the event costs by this price, at the positions that the charge keeps, what was charged."""
    if tariff.price.id != rated.price_id:
        return False
    if tariff.flat:
        return not rated.positions and str(tariff.flat_femto(event)) == rated.amount_femto
    counted = tariff.counted(event)
    if _kept(counted) != rated.quantities or rated.positions.keys() != set(tariff.tiered):
        return False
    return str(tariff.charge_femto(counted, rated.positions)) == rated.amount_femto


def _kept(counted: dict[str, int]) -> dict[str, int]:
    return {name: units for name, units in counted.items() if units}


def _rated(
    event: UsageEvent,
    event_hash: str,
    price_id: str,
    amount: int,
    later: bool,
    quantities: dict[str, int] | None = None,
    positions: dict[str, int] | None = None,
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
        price_id=price_id,
        amount_femto=str(amount),
        rated_later=later,
        key_id=event.key_id,
        gateway="" if later else event.gateway,
        quantities=quantities or {},
        positions=positions or {},
        period_start_us=start_us,
    )
