"""Budgets: what counts in which window, who is refused, and what is told once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from billing.budgets import KEPT_WINDOWS, Budget, BudgetPeriod, BudgetScope, window_at
from billing.errors import Conflict, InsufficientCredits, Invalid, NotFound
from billing.service import Hold
from tests.unit.billing.conftest import HOUR_US

MICRO = 10**9
DAY_US = 24 * HOUR_US


def us(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000


def budget(house: Any, amount: str = "0.000100", **more: Any) -> Budget:
    fields = {"name": "b", "scope": BudgetScope.TENANT, "period": BudgetPeriod.DAY, "currency": "usd", **more}
    made: Budget = house.billing.set_budget("acme", amount=amount, **fields)
    return made


def told(house: Any) -> list[tuple[str, int]]:
    payloads = [row.payload for row in house.billing._store.read(limit=10_000) if row.type == "budget.reached"]
    return [(fact["window"], fact["percent"]) for fact in map(msgspec.json.decode, payloads)]


def quote(house: Any) -> Any:
    return house.billing.quote("acme", "base", "base", house.clock())


@pytest.mark.parametrize(
    ("zone", "period", "at", "label", "hours"),
    [
        ("Europe/Berlin", "day", "2026-03-29T12:00+02:00", "2026-03-29", 23),
        ("Europe/Berlin", "day", "2026-10-25T00:00+02:00", "2026-10-25", 25),
        ("Europe/Berlin", "day", "2026-10-24T23:59:59+02:00", "2026-10-24", 24),
        ("Europe/Berlin", "week", "2026-10-25T23:59:59+01:00", "2026-10-19", 7 * 24 + 1),
        ("Europe/Berlin", "month", "2026-03-01T00:00+01:00", "2026-03-01", 31 * 24 - 1),
        ("Pacific/Apia", "day", "2026-11-30T10:59:59+00:00", "2026-11-30", 24),
        ("Pacific/Apia", "month", "2026-11-30T11:00:00+00:00", "2026-12-01", 31 * 24),
        ("America/Sao_Paulo", "day", "2018-11-04T05:00+00:00", "2018-11-04", 23),  # its midnight was skipped
        ("America/Havana", "day", "2024-11-03T04:30+00:00", "2024-11-03", 25),
        ("UTC", "week", "2026-11-30T00:00+00:00", "2026-11-30", 7 * 24),
    ],
)
def test_a_window_is_of_the_tenants_own_calendar(zone: str, period: str, at: str, label: str, hours: int) -> None:
    window = window_at(us(at), BudgetPeriod(period), zone)
    assert (window.label, window.end_us - window.start_us) == (label, hours * HOUR_US)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Apia", "Cuba"])
@pytest.mark.parametrize("period", BudgetPeriod)
def test_windows_tile_time(zone: str, period: BudgetPeriod) -> None:
    at, end_us = us("2011-06-01T00:00+00:00"), us("2013-06-01T00:00+00:00")
    while at < end_us:
        window = window_at(at, period, zone)
        assert window.start_us <= at < window.end_us
        assert window_at(window.end_us - 1, period, zone) == window
        following = window_at(window.end_us, period, zone)
        assert (following.start_us, following.label > window.label) == (window.end_us, True)
        local = datetime.fromtimestamp(window.start_us / 1e6, UTC).astimezone(ZoneInfo(zone)).date()
        assert local - datetime.fromisoformat(window.label).date() <= timedelta(days=1)  # a day may be skipped whole
        at = window.end_us


def test_a_hard_budget_refuses_by_name_and_stops_at_the_token(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    budget(house, name="daily")
    assert house.billing.open_hold("acme", "r", quote(house), 20, 1000) == Hold(40, False)
    assert house.billing.extend_hold("r", 1000) == Hold(40, False)
    with pytest.raises(InsufficientCredits) as caught:
        house.billing.open_hold("acme", "r2", quote(house), 1, 1)
    assert str(caught.value) == "The budget 'daily' does not cover this request."
    assert house.billing.balance("acme").held_femto == 100 * MICRO
    house.billing.release("r")
    assert house.billing.open_hold("acme", "r3", quote(house), 20, 30) == Hold(30, True)


@pytest.mark.parametrize(
    ("scope", "own", "others"),
    [
        (BudgetScope.TENANT, {}, []),
        (BudgetScope.KEY, {"key_id": "KEY"}, [{}, {"key_id": "other"}]),
        (BudgetScope.ADAPTER, {"adapter": "lora"}, [{}, {"adapter": "other"}, {"key_id": "KEY"}]),
    ],
)
def test_a_budget_counts_only_what_is_its_own(
    house: Any, scope: BudgetScope, own: dict[str, str], others: list[dict[str, str]]
) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    key = house.billing.create_key("acme", "k")[0].id
    named = {field: value.replace("KEY", key) for field, value in own.items()}
    subject = {BudgetScope.TENANT: "", BudgetScope.KEY: key, BudgetScope.ADAPTER: "lora"}[scope]
    made = budget(house, scope=scope, subject=subject)
    for number, fields in enumerate(others):
        more = {field: value.replace("KEY", key) for field, value in fields.items()}
        house.use(prompt=200, completion=0, **{"key_id": "k", **more})
        assert house.billing.open_hold("acme", f"o{number}", quote(house), 500, 0, **more).complete
    house.use(prompt=70, completion=0, **{"key_id": key, **named})
    assert house.billing.budget(made.id).spent_femto == 70 * MICRO
    for billing in (house.billing, house.restart()):
        with pytest.raises(InsufficientCredits):
            billing.open_hold("acme", "r", quote(house), 31, 0, **named)
        assert billing.open_hold("acme", "r", quote(house), 30, 0, **named).complete


def test_a_request_counts_in_the_window_in_which_it_began(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house)
    before = house.billing.budget(made.id).window
    house.clock.now_us = before.end_us - 10
    began_us = house.clock()
    house.billing.open_hold("acme", "e", quote(house), 60, 0, ts_us=began_us)
    house.clock.now_us = before.end_us
    assert house.billing.open_hold("acme", "r", quote(house), 100, 0).complete  # a new day, all of it
    house.billing.release("r")
    event = house.event(prompt=60, completion=0, event_id="e", ts_us=began_us)
    house.billing.settle(event)
    house.billing.record([event])
    after = house.billing.budget(made.id)
    assert (after.spent_femto, after.window.start_us) == (0, before.end_us)
    assert house.billing._books.budgets.spent(made.id, before.label) == 60 * MICRO


def test_what_is_settled_counts_before_it_is_recorded(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house)
    event = house.event(prompt=60, completion=0)
    house.billing.open_hold("acme", event.event_id, quote(house), 60, 0)
    house.billing.settle(event)
    assert (house.billing.budget(made.id).spent_femto, house.billing.budget(made.id).held_femto) == (60 * MICRO, 0)
    with pytest.raises(InsufficientCredits):
        house.billing.open_hold("acme", "r", quote(house), 41, 0)
    house.billing.record([event])
    assert house.billing.budget(made.id).spent_femto == 60 * MICRO


def test_thresholds_are_told_once_a_window_by_whoever_sees_them(either_house: Any) -> None:
    house = either_house
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house, hard=False, thresholds=(50, 100, 150))
    other = house.open()
    label = house.billing.budget(made.id).window.label
    house.use(prompt=49, completion=0)
    assert told(house) == []
    house.use(prompt=60, completion=0)
    assert told(house) == [(label, 50), (label, 100)]
    assert [one.notice() for one in (other, house.billing, house.restart(), other)] == [0] * 4
    house.use(prompt=1, completion=0)
    assert told(house) == [(label, 50), (label, 100)]
    house.clock.now_us += DAY_US
    house.use(prompt=50, completion=0)
    assert told(house)[2:] == [(house.billing.budget(made.id).window.label, 50)]


def test_a_changed_amount_keeps_what_was_spent_and_tells_again(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house, thresholds=(100,))
    house.use(prompt=100, completion=0)
    assert len(told(house)) == 1
    changed = house.billing.change_budget(made.id, amount="0.000200")
    assert changed.amount == "0.0002"
    assert house.billing.budget(made.id).left_femto == 100 * MICRO
    house.use(prompt=100, completion=0)
    assert len(told(house)) == 2
    house.billing.change_budget(made.id, hard=False)
    assert house.billing.open_hold("acme", "r", quote(house), 1000, 0).complete


def test_a_budget_that_is_taken_away_refuses_nothing_more(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house)
    house.billing.open_hold("acme", "r", quote(house), 100, 0)
    house.billing.remove_budget(made.id)
    assert house.billing.extend_hold("r", 50) == Hold(50, True)
    with pytest.raises(NotFound):
        house.billing.budget(made.id)
    house.billing.record([house.event(prompt=100, completion=50, event_id="r")])
    assert house.restart().budgets("acme") == []


def test_a_budget_taken_away_before_its_end_was_told_stops_nothing(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house)
    with pytest.raises(InsufficientCredits) as caught:
        house.billing.open_hold("acme", "r", quote(house), 1_000_000, 0)
    house.billing.exhausted(caught.value.quota)
    house.billing.remove_budget(made.id)
    assert [house.billing.notice(), house.billing.notice()] == [0, 0]
    house.billing.record([house.event(event_id="r")])


def test_a_quota_at_its_end_is_told_once(house: Any) -> None:
    def ends() -> int:
        return sum(row.type == "quota.exhausted" for row in house.billing._store.read(limit=10_000))

    budget(house)
    for _ in range(3):
        with pytest.raises(InsufficientCredits) as caught:
            house.billing.open_hold("acme", "r", quote(house), 1, 1)
        house.billing.exhausted(caught.value.quota)
        house.billing.notice()
    assert (caught.value.quota, ends()) == ("balance:acme", 1)
    house.billing.grant_credit("acme", "1", "usd", "more")
    with pytest.raises(InsufficientCredits) as caught:
        house.billing.open_hold("acme", "r", quote(house), 101, 0)
    house.billing.exhausted(caught.value.quota)
    assert [house.billing.notice(), house.restart().notice(), ends()] == [1, 0, 2]


def test_a_budgets_end_is_told_again_in_the_next_window_and_after_it_was_changed(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house)

    def at_its_end() -> int:
        with pytest.raises(InsufficientCredits) as caught:
            house.billing.open_hold("acme", "r", quote(house), 1000, 0)
        house.billing.exhausted(caught.value.quota)
        return int(house.billing.notice())

    for _ in range(5):
        assert [at_its_end(), at_its_end()] == [1, 0]
        house.clock.now_us += DAY_US
    assert len(house.billing._books.ledger.account("acme").exhausted) == 1  # not one for each day
    assert at_its_end() == 1
    house.billing.change_budget(made.id, amount="0.000200")
    house.restart()
    assert [at_its_end(), at_its_end()] == [1, 0]
    house.billing.grant_credit("acme", "1", "usd", "more")
    assert at_its_end() == 0  # it is the budget that is at its end
    house.billing.remove_budget(made.id)
    assert house.billing._books.ledger.account("acme").exhausted == set()


def test_old_windows_are_let_go(house: Any) -> None:
    house.billing.grant_credit("acme", "1", "usd", "plenty")
    made = budget(house)
    for _ in range(KEPT_WINDOWS + 5):
        house.use(prompt=100, completion=0)
        house.clock.now_us += DAY_US
    kept = house.billing._books.budgets._spent[made.id]
    assert len(kept) == KEPT_WINDOWS
    assert len({window for window, _ in told(house)}) == KEPT_WINDOWS + 5


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"amount": "-1"}, "amount"),
        ({"currency": "eur"}, "currency"),
        ({"subject": "x"}, "subject"),
        ({"scope": BudgetScope.ADAPTER}, "subject"),
        ({"scope": BudgetScope.KEY, "subject": "key-x"}, "subject"),
        ({"thresholds": (0,)}, "thresholds"),
        ({"thresholds": (50, 50)}, "thresholds"),
        ({"name": ""}, "name"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(house: Any, fields: dict[str, Any], at_fault: str) -> None:
    with pytest.raises(Invalid) as caught:
        budget(house, **fields)
    assert caught.value.field == at_fault
    with pytest.raises(NotFound):
        house.billing.change_budget("budget-x", amount="1")


def test_only_some_of_a_budget_can_be_changed(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = budget(house)
    with pytest.raises(Invalid):
        house.billing.change_budget(made.id, period="month")
    monkeypatch.setattr("billing.service.budgeting.BUDGETS_PER_TENANT", 1)
    with pytest.raises(Conflict):
        budget(house)
