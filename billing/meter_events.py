"""Meter events: what a charge is in the words of Stripe's meters.

One meter for each class, and its values are the class's base units (`tiers.UNITS`), as the charge has them: what the
price of the charge counts apart, each unit once. A meter's name says its unit where the class's own does not: audio is
told in milliseconds, compute time in microseconds, all others in pieces.

A meter is a sum and no more. Stripe prices it as *it* is told to: tiers, allowances, minimums and prices by model of
our price book do not go with it.

Pure. https://docs.stripe.com/api/billing/meter-event/create
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from billing.books import fact_of
from billing.ledger import UsageRated
from billing.rating import quantities
from billing.store import StoredEvent
from billing.tiers import UNITS, TokenClass

PREFIX = "meterhouse"
IDENTIFIER_MAX = 100


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """The meter of one class."""

    kind: str  # the class
    event_name: str
    unit: str  # what its values count
    display_name: str


def _meter(token_class: TokenClass) -> Meter:
    unit, kind = UNITS[token_class], token_class.value
    named = kind if unit.scale == 1 else f"{kind.removesuffix('_second')}_{unit.base}"
    shown = kind.removesuffix("_second").replace("_", " ")
    return Meter(
        kind=kind, event_name=f"{PREFIX}_{named}", unit=unit.base, display_name=f"Meterhouse {shown} ({unit.base}s)"
    )


METERS = {one.kind: one for one in map(_meter, TokenClass) if one.kind != TokenClass.ADAPTER_MONTH}
"""By class: all that a charge can have. A month of an adapter is no charge: it stays on invoices."""


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One meter event: what one request has of one class, in base units."""

    identifier: str
    seq: int
    event_id: str
    tenant: str
    model: str
    kind: str
    quantity: int
    ts_us: int


def event_name(kind: str) -> str:
    """The name of the meter that sums this class."""
    return METERS[kind].event_name


def identifier(event_id: str, kind: str) -> str:
    """The same for the same tokens, for ever; at most 100 characters."""
    plain = f"{event_id}:{kind}"
    return plain if len(plain) <= IDENTIFIER_MAX else hashlib.sha256(plain.encode()).hexdigest()


def units_of(seq: int, rated: UsageRated) -> list[Unit]:
    """A charge's units by class; nothing for a class of which it has none."""
    counted = rated.quantities or {token_class.value: tokens for token_class, tokens in quantities(rated).items()}
    return [
        Unit(
            identifier=identifier(rated.event_id, kind),
            seq=seq,
            event_id=rated.event_id,
            tenant=rated.tenant,
            model=rated.model,
            kind=kind,
            quantity=units,
            ts_us=rated.ts_us,
        )
        for kind, units in counted.items()
        if units
    ]


def units(rows: Iterable[StoredEvent]) -> list[Unit]:
    """The meter events of the charges among some rows, in their order."""
    return [
        unit
        for row in rows
        if row.type == "usage.rated" and isinstance(fact := fact_of(row), UsageRated)
        for unit in units_of(row.seq, fact)
    ]
