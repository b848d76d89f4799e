"""Margin: exact, whole, and to whom each hour's cost goes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import Invalid
from billing.margin import (
    DIMENSIONS,
    Charged,
    CostRate,
    CostRates,
    CostRateSet,
    NoCostRate,
    Spent,
    grouped,
    margin,
    whole_femto,
)
from billing.money import FEMTO
from metering.counts import HOUR_US
from metering.events import Outcome, UsageEvent

RATE = CostRate(
    id="c1",
    currency="usd",
    compute_second="0.001",
    kv_block_second="0.0000001",
    hour="3",
    effective_at_us=0,
    recorded_us=0,
)


def rates(*entered: CostRate) -> CostRates:
    found = CostRates()
    for rate in entered or (RATE,):
        found.apply(CostRateSet(rate=rate))
    return found


def event(n: int, hour: int = 0, compute_us: int = 0, kv_block_us: int = 0, **fields: Any) -> UsageEvent:
    return UsageEvent(
        **{
            "event_id": f"e{n}",
            "ts_us": hour * HOUR_US + n + 1,
            "settled_us": 1,
            "tenant": "acme",
            "key_id": "k",
            "model": "m",
            "base_model": "m",
            "endpoint": "chat.completions",
            "gateway": "g",
            "outcome": Outcome.FINISHED,
            "compute_us": compute_us,
            "kv_block_us": kv_block_us,
            **fields,
        }
    )


def rows(events: list[UsageEvent], charges: Sequence[Charged] = (), hours: int = 1, **more: Any) -> list[Spent]:
    known = {"acme": "usd", "other": "usd", **more.pop("currencies", {})}
    return margin(events, charges, known, more.pop("rates", rates()), 0, hours * HOUR_US, "usd")


def test_a_cell_costs_what_it_used_and_its_share_of_the_hour() -> None:
    found = rows(
        [event(1, compute_us=1_000_000, kv_block_us=10_000_000), event(2, compute_us=2_000_000, tenant="other")],
        [Charged(5, "acme", "m", "", 7 * FEMTO)],
    )
    assert [(row.tenant, row.requests, row.charged_femto) for row in found] == [("acme", 1, 7 * FEMTO), ("other", 1, 0)]
    assert found[0].cost_femto == FEMTO // 1000 + FEMTO // 10**6 + FEMTO
    assert found[1].cost_femto == 2 * FEMTO // 1000 + 2 * FEMTO


def test_an_hour_in_which_nobody_computed_is_nobodys() -> None:
    found = rows([event(1, compute_us=1)], hours=3)
    assert [(row.tenant, row.hour_us // HOUR_US, row.cost_femto) for row in found[1:]] == [
        ("", 1, 3 * FEMTO),
        ("", 2, 3 * FEMTO),
    ]


def test_a_rate_counts_from_its_time_and_the_newest_wins() -> None:
    later = CostRate(
        id="c2",
        currency="usd",
        compute_second="0",
        kv_block_second="0",
        hour="5",
        effective_at_us=HOUR_US,
        recorded_us=9,
    )
    typo = CostRate(
        id="c3",
        currency="usd",
        compute_second="0",
        kv_block_second="0",
        hour="4",
        effective_at_us=HOUR_US,
        recorded_us=10,
    )
    found = rows([], hours=2, rates=rates(RATE, later, typo))
    assert [row.cost_femto // FEMTO for row in found] == [3, 4]


def test_a_missing_rate_is_an_error_and_not_nothing() -> None:
    with pytest.raises(NoCostRate, match="eur"):
        rows([event(1, compute_us=1)], currencies={"acme": "eur"})
    with pytest.raises(NoCostRate):
        margin([], [], {}, CostRates(), 0, HOUR_US, "usd")


CELLS = st.lists(
    st.tuples(
        st.sampled_from(["acme", "other"]),
        st.sampled_from(["", "a"]),
        st.integers(0, 3),
        st.integers(0, 10**9),
        st.integers(0, 10**12),
    ),
    max_size=30,
)


@given(CELLS)
def test_the_rows_sum_to_the_exact_total_however_they_are_grouped(drawn: list[tuple[str, str, int, int, int]]) -> None:
    events = [
        event(n, hour, compute, blocks, tenant=tenant, adapter=adapter)
        for n, (tenant, adapter, hour, compute, blocks) in enumerate(drawn)
    ]
    found = rows(events, hours=4)
    computed = sum(one.compute_us for one in events)
    held = sum(one.kv_block_us for one in events)
    busy = {one.ts_us // HOUR_US for one in events if one.compute_us}
    shared = 3 * FEMTO * (len(busy) + (4 - len(busy)))  # every hour is somebody's or nobody's
    exact = Fraction(computed * FEMTO, 1000 * 10**6) + Fraction(held * FEMTO, 10**7 * 10**6) + shared
    assert sum(row.cost_femto for row in found) == exact
    for by in ((), ("tenant",), ("hour", "adapter"), DIMENSIONS):
        sums = grouped(found, by)
        assert sum(row.cost_femto for row in sums) == exact
        assert sum(whole_femto(sums)) == round(exact)
        assert all(abs(whole - row.cost_femto) < 1 for whole, row in zip(whole_femto(sums), sums, strict=True))


def test_rates_are_entered_and_kept(house: Any) -> None:
    entered = {"currency": "usd", "compute_second": "0.001", "kv_block_second": "0", "hour": "1", "effective_at_us": 0}
    rate = house.billing.set_cost_rate(**entered)
    assert house.restart().cost_rates() == [rate]
    with pytest.raises(Invalid) as caught:
        house.billing.set_cost_rate(**{**entered, "hour": "-1", "currency": "xxx", "compute_second": "a"})
    assert {field for field, _ in caught.value.faults} == {"hour", "currency", "compute_second"}
    used = house.use(prompt=10, compute_us=500_000)
    hour = used.ts_us // HOUR_US * HOUR_US
    (row,) = house.billing.margin(hour, hour + 1, usage=house.shelf)
    assert (row.tenant, row.requests, row.cost_femto) == ("acme", 1, FEMTO + FEMTO // 2000)
    assert row.charged_femto > 0
