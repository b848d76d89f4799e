"""Margin: what was charged less what it took, per tenant, model, adapter and hour.

What it took is measured in each event (engine time, KV-cache blocks times how long), and priced by cost rates: so much
a second of compute, so much a second of a block, and so much an hour whatever runs. An hour's fixed cost is shared by
those who computed in it, in proportion to their engine time; an hour in which nobody did is nobody's, in a row of its
own. Integers and fractions; what is shown is rounded once, to femto-units, so that the rows sum to the exact total.

Pure. Does not know: where events, charges and rates are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec

from billing.checks import Faults
from billing.errors import Conflict
from billing.money import FEMTO, parse_amount
from metering.counts import HOUR_US, hour_of
from metering.events import UsageEvent

RATE_MAX_FEMTO = 10**6 * FEMTO
SECOND_US = 1_000_000
DIMENSIONS = ("tenant", "model", "adapter", "hour")


class NoCostRate(Conflict):
    """Nothing says what an hour cost: a missing rate is never 0."""


class CostRate(msgspec.Struct, frozen=True, kw_only=True):
    """What the house pays, from `effective_at_us` on: exact decimal text in units of the currency. Never changed, only
    followed by another."""

    id: str
    currency: str
    compute_second: str
    kv_block_second: str
    hour: str
    effective_at_us: int
    recorded_us: int


class CostRateSet(msgspec.Struct, frozen=True, kw_only=True, tag="cost_rate.set"):
    rate: CostRate


class CostRates:
    """Every rate ever set."""

    def __init__(self) -> None:
        self.rates: list[CostRate] = []

    def apply(self, fact: CostRateSet) -> None:
        self.rates.append(fact.rate)

    def at(self, currency: str, hour_us: int) -> CostRate:
        """The rate of an hour: the one that became effective last, at its beginning. Raises `NoCostRate`."""
        known = [rate for rate in self.rates if rate.currency == currency and rate.effective_at_us <= hour_us]
        if not known:
            raise NoCostRate(
                f"no cost rate in {currency} is effective at the beginning of this range: enter one (`margin rate`)"
            )
        return max(enumerate(known), key=lambda pair: (pair[1].effective_at_us, pair[0]))[1]


def check_cost_rate(currency: str, amounts: Mapping[str, str], effective_at_us: int) -> None:
    """Raise `Invalid` with every fault."""
    faults = Faults()
    faults.currency("currency", currency)
    faults.time("effective_at", effective_at_us)
    for name, amount in amounts.items():
        faults.money(name, amount, parse_amount, RATE_MAX_FEMTO)
    faults.raise_if_any()


class Charged(msgspec.Struct, frozen=True):
    """What one request was charged, and in which currency."""

    ts_us: int
    tenant: str
    model: str
    adapter: str
    amount_femto: int


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """One row: sums of one cell, or of several. `tenant` is empty for hours in which nobody computed."""

    tenant: str
    model: str
    adapter: str
    hour_us: int
    currency: str
    requests: int = 0
    compute_us: int = 0
    kv_block_us: int = 0
    charged_femto: int = 0
    cost_femto: Fraction = Fraction(0)


Cell = tuple[str, str, str, int]


def margin(
    events: Iterable[UsageEvent],
    charges: Iterable[Charged],
    currencies: Mapping[str, str],
    rates: CostRates,
    start_us: int,
    end_us: int,
    idle_currency: str,
) -> list[Spent]:
    """Every cell of [start, end), whole hours. `currencies` are the tenants'. Raises `NoCostRate`."""
    requests: dict[Cell, int] = defaultdict(int)
    compute: dict[Cell, int] = defaultdict(int)
    blocks: dict[Cell, int] = defaultdict(int)
    charged: dict[Cell, int] = defaultdict(int)
    busy: dict[int, int] = defaultdict(int)  # engine time of an hour
    for event in events:
        cell = event.tenant, event.model, event.adapter, hour_of(event.ts_us)
        requests[cell] += 1
        compute[cell] += event.compute_us
        blocks[cell] += event.kv_block_us
        busy[cell[3]] += event.compute_us
    for charge in charges:
        charged[charge.tenant, charge.model, charge.adapter, hour_of(charge.ts_us)] += charge.amount_femto
    rows = [
        Spent(
            tenant=cell[0],
            model=cell[1],
            adapter=cell[2],
            hour_us=cell[3],
            currency=currencies[cell[0]],
            requests=requests[cell],
            compute_us=compute[cell],
            kv_block_us=blocks[cell],
            charged_femto=charged[cell],
            cost_femto=_cost(rates.at(currencies[cell[0]], cell[3]), compute[cell], blocks[cell], busy[cell[3]]),
        )
        for cell in sorted({*requests, *charged})
    ]
    return rows + [_idle(rates, hour, idle_currency) for hour in range(start_us, end_us, HOUR_US) if not busy[hour]]


def _cost(rate: CostRate, compute_us: int, kv_block_us: int, busy_us: int) -> Fraction:
    """Femto-units of one cell: its own use, and its share of the hour."""
    used = Fraction(parse_amount(rate.compute_second) * compute_us, SECOND_US)
    held = Fraction(parse_amount(rate.kv_block_second) * kv_block_us, SECOND_US)
    share = Fraction(parse_amount(rate.hour) * compute_us, busy_us) if busy_us else Fraction(0)
    return used + held + share


def _idle(rates: CostRates, hour_us: int, currency: str) -> Spent:
    cost = Fraction(parse_amount(rates.at(currency, hour_us).hour))
    return Spent(tenant="", model="", adapter="", hour_us=hour_us, currency=currency, cost_femto=cost)


def grouped(rows: Iterable[Spent], by: Sequence[str]) -> list[Spent]:
    """Sums over what is not in `by`, currencies apart; those dimensions are empty, or 0, in the result."""
    sums: dict[tuple[str, str, str, int, str], Spent] = {}
    for row in rows:
        key = (
            row.tenant if "tenant" in by else "",
            row.model if "model" in by else "",
            row.adapter if "adapter" in by else "",
            row.hour_us if "hour" in by else 0,
            row.currency,
        )
        sum_ = sums.get(key)
        sums[key] = _plus(sum_, row) if sum_ else _keyed(row, key)
    return [sums[key] for key in sorted(sums)]


def _keyed(row: Spent, key: tuple[str, str, str, int, str]) -> Spent:
    tenant, model, adapter, hour_us, _ = key
    return msgspec.structs.replace(row, tenant=tenant, model=model, adapter=adapter, hour_us=hour_us)


def _plus(one: Spent, other: Spent) -> Spent:
    return msgspec.structs.replace(
        one,
        requests=one.requests + other.requests,
        compute_us=one.compute_us + other.compute_us,
        kv_block_us=one.kv_block_us + other.kv_block_us,
        charged_femto=one.charged_femto + other.charged_femto,
        cost_femto=one.cost_femto + other.cost_femto,
    )


def whole_femto(rows: Sequence[Spent]) -> list[int]:
    """Each row's cost in whole femto-units that sum to the rounded exact total (largest remainder, earlier first)."""
    floors = [math.floor(row.cost_femto) for row in rows]
    short = round(sum((row.cost_femto for row in rows), Fraction(0))) - sum(floors)
    by_remainder = sorted(range(len(rows)), key=lambda n: (floors[n] - rows[n].cost_femto, n))
    for n in by_remainder[:short]:
        floors[n] += 1
    return floors
