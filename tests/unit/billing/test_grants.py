"""Grants are used by priority, expiry and age; what is left expires once; a top-up is asked for once a crossing."""

from __future__ import annotations

from typing import Any

import pytest

from billing.accounts import BillingMode, TopUp
from billing.books import Books
from billing.errors import Conflict, InsufficientCredits, Invalid, NotFound
from billing.service import Billing, Hold
from billing.store import GENESIS, StoredEvent, chained
from tests.unit.billing.conftest import HOUR_US

USD = 10**15
MICRO = 10**9  # femto-units of 0.000001, the price of a prompt token


def grant(house: Any, amount: str, **more: Any) -> str:
    return str(house.billing.grant_credit("acme", amount, "usd", "test", **more).id)


def left(house: Any) -> list[tuple[str, int, int, int]]:
    return [(one.grant.id, one.used, one.expired, one.left) for one in house.billing.grants("acme")]


def rows(house: Any, kind: str) -> list[StoredEvent]:
    return [row for row in house.billing._store.read(limit=10_000) if row.type == kind]


def quote(house: Any) -> Any:
    return house.billing.quote("acme", "base", "base", house.clock())


def test_charges_use_grants_by_priority_then_expiry_then_age(house: Any) -> None:
    soon, later = house.clock() + HOUR_US, house.clock() + 2 * HOUR_US
    old = grant(house, "0.000010")
    young = grant(house, "0.000010")
    late = grant(house, "0.000010", expires_us=later)
    early = grant(house, "0.000010", expires_us=soon)
    first = grant(house, "0.000010", priority=10, expires_us=later)
    last = grant(house, "0.000010", priority=90, expires_us=soon)
    order = []
    for _ in range(6):
        before = {id: left_of for id, _, _, left_of in left(house)}
        house.use(prompt=10, completion=0)
        order += [id for id, _, _, left_of in left(house) if left_of < before[id]]
    assert order == [first, early, late, old, young, last]
    assert house.billing.balance("acme").available_femto == 0
    assert [one.left for one in house.restart().grants("acme")] == [0] * 6


def test_one_charge_uses_several_grants_and_the_next_grant_pays_what_is_owed(house: Any) -> None:
    grant(house, "0.000003")
    grant(house, "0.000004")
    house.use(prompt=10, completion=0)
    assert house.billing.balance("acme").available_femto == -3 * MICRO
    grant(house, "0.000005")
    assert house.billing.balance("acme").available_femto == 2 * MICRO
    assert [(used, rest) for _, used, _, rest in left(house)] == [
        (3 * MICRO, 0),
        (4 * MICRO, 0),
        (3 * MICRO, 2 * MICRO),
    ]


def test_what_is_left_expires_once_and_for_every_process(either_house: Any) -> None:
    house = either_house
    end_us = house.clock() + HOUR_US
    id = grant(house, "1", expires_us=end_us)
    house.use(prompt=10, completion=0)
    other = house.open()
    assert house.billing.notice() == 0
    house.clock.now_us = end_us
    assert house.billing.balance("acme").available_femto == 0  # at once, whoever books it
    with pytest.raises(InsufficientCredits):
        house.billing.open_hold("acme", "r", quote(house), 1, 1)
    assert [billing.notice() for billing in (house.billing, other, house.billing, other)] == [1, 0, 0, 0]
    (row,) = rows(house, "grant.expired")
    assert left(house) == [(id, 10 * MICRO, USD - 10 * MICRO, 0)]
    for billing in (house.billing, other, house.restart()):
        billing.refresh()
        balance = billing.balance("acme")
        assert (balance.expired_femto, balance.available_femto) == (USD - 10 * MICRO, 0)
        assert billing.notice() == 0
    assert rows(house, "grant.expired") == [row]


def test_a_hold_that_was_taken_before_keeps_its_grant_until_it_is_charged(house: Any) -> None:
    end_us = house.clock() + HOUR_US
    id = grant(house, "0.000100", expires_us=end_us)
    rate = quote(house)
    event = house.event(prompt=10, completion=20)
    assert house.billing.open_hold("acme", event.event_id, rate, 10, 20, ts_us=event.ts_us) == Hold(20, True)
    house.clock.now_us = end_us
    assert house.billing.extend_hold(event.event_id, 40) == Hold(20, False)  # what it has it keeps, and no more
    assert house.billing.notice() == 0  # the hold's money does not expire
    house.billing.settle(event)
    assert house.billing.notice() == 0  # nor while its charge is on the way
    house.billing.record([event])  # and this books what is left
    assert left(house) == [(id, 50 * MICRO, 50 * MICRO, 0)]
    assert len(rows(house, "grant.expired")) == 1
    assert house.billing.balance("acme").available_femto == 0


def test_a_request_that_began_after_the_expiry_does_not_use_the_grant(house: Any) -> None:
    end_us = house.clock() + HOUR_US
    grant(house, "0.000100", expires_us=end_us)
    fresh = grant(house, "0.000100")
    event = house.event(prompt=10, completion=0, ts_us=end_us)
    house.billing.record([event])
    assert [used for _, used, _, _ in left(house)] == [0, 10 * MICRO]
    assert left(house)[1][0] == fresh


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [({"priority": -1}, "priority"), ({"priority": 101}, "priority"), ({"expires_us": 5}, "expires_at")],
)
def test_a_grant_that_makes_no_sense_is_refused(house: Any, fields: dict[str, Any], at_fault: str) -> None:
    with pytest.raises(Invalid) as caught:
        grant(house, "1", **fields)
    assert caught.value.field == at_fault
    assert left(house) == []


def test_a_ledger_of_the_older_code_folds_to_what_it_was() -> None:
    """Rows as they were written before there were priorities, expiries, keys and gateways in them."""
    payloads = [
        (
            "tenant.created",
            '{"type":"tenant.created","tenant":{"created_us":1,"currency":"usd","default_adapter":null,"id":"acme",'
            '"limits":{},"name":"Acme","status":"active","stripe_customer_id":null}}',
        ),
        (
            "credit.granted",
            '{"type":"credit.granted","grant":{"amount":"0.000003","created_us":2,"currency":"usd","id":"g2",'
            '"reason":"r","tenant":"acme"}}',
        ),
        (
            "credit.granted",
            '{"type":"credit.granted","grant":{"amount":"0.000009","created_us":3,"currency":"usd","id":"g3",'
            '"reason":"r","tenant":"acme"}}',
        ),
        (
            "usage.rated",
            '{"type":"usage.rated","adapter":"","amount_femto":"5000000000","cached_tokens":0,"completion_tokens":0,'
            '"event_hash":"h","event_id":"e","model":"base","price_id":"p","prompt_tokens":5,"settled_us":9,'
            '"tenant":"acme","ts_us":8}',
        ),
    ]
    books, previous = Books(), GENESIS
    for seq, (kind, payload) in enumerate(payloads, start=1):
        row = StoredEvent(seq, "s", seq, kind, payload, "a", seq, None, None, None, "")
        row = StoredEvent(*row.content(), chained(previous, row))
        previous = row.hash
        books.apply(row)
    account = books.ledger.account("acme")
    assert (account.granted, account.charged, account.expired, account.owed) == (12 * MICRO, 5 * MICRO, 0, 0)
    assert account.credit.spendable(10**18) == 7 * MICRO
    assert [state.left for state in account.credit.grants.values()] == [0, 7 * MICRO]
    assert books.accounts.tenant("acme").billing_mode is BillingMode.PREPAID


# -- top-ups ----------------------------------------------------------------------------------------------------------


def low(house: Any) -> Billing:
    """A tenant whose balance has just fallen to 0.00005, below its threshold of 0.0001."""
    house.billing.update_tenant("acme", top_up=TopUp(threshold="0.0001", amount="0.0002"))
    house.billing.grant_credit("acme", "0.00015", "usd", "start")
    house.use(prompt=100, completion=0)
    billing: Billing = house.billing
    return billing


def test_a_top_up_is_asked_for_once_a_crossing(either_house: Any) -> None:
    house = either_house
    billing = low(house)
    (row,) = rows(house, "top_up.requested")
    other = house.open()
    house.use(prompt=10, completion=0)
    assert [one.notice() for one in (billing, other, house.restart(), other)] == [0] * 4
    assert rows(house, "top_up.requested") == [row]
    asked = house.billing._books.ledger.account("acme").topping_up
    assert (asked.amount, asked.threshold, int(asked.balance_femto)) == ("0.0002", "0.0001", 50 * MICRO)

    house.billing.grant_credit("acme", "0.0002", "usd", "paid", top_up=asked.id)
    with pytest.raises(Conflict):
        house.billing.grant_credit("acme", "0.0002", "usd", "paid again", top_up=asked.id)
    assert house.billing.balance("acme").available_femto == 240 * MICRO
    house.use(prompt=150, completion=0)
    assert len(rows(house, "top_up.requested")) == 2  # a new crossing


def test_a_grant_that_stays_below_the_threshold_does_not_ask_again(house: Any) -> None:
    low(house)
    house.billing.grant_credit("acme", "0.00001", "usd", "little")
    house.use(prompt=1, completion=0)
    house.billing.notice()
    assert len(rows(house, "top_up.requested")) == 1
    house.billing.update_tenant("acme", top_up=TopUp(threshold="0.0001", amount="5"))
    house.use(prompt=1, completion=0)
    assert len(rows(house, "top_up.requested")) == 2  # another arrangement asks for itself


def test_a_top_up_that_nobody_asked_for_is_not_answered(house: Any) -> None:
    with pytest.raises(NotFound):
        house.billing.grant_credit("acme", "1", "usd", "paid", top_up="topup-x")


def test_a_charge_whose_notice_was_lost_in_a_crash_is_told_by_the_next_one(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr("billing.service.notices.NoticeService.notice", lambda _: 0)
        low(house)
    assert rows(house, "top_up.requested") == []
    assert house.restart().notice() == 1
    assert len(rows(house, "top_up.requested")) == 1


# -- postpaid ---------------------------------------------------------------------------------------------------------


def test_a_postpaid_tenant_needs_no_balance_and_owes(house: Any) -> None:
    house.billing.update_tenant("acme", billing_mode=BillingMode.POSTPAID)
    assert house.billing.open_hold("acme", "r", quote(house), 10, 1000) == Hold(1000, True)
    house.billing.release("r")
    grant(house, "0.000010")
    house.use(prompt=100, completion=0)
    balance = house.billing.balance("acme")
    assert (balance.charged_femto, balance.owed_femto, balance.available_femto) == (100 * MICRO, 90 * MICRO, 0)
    grant(house, "0.000020")  # a gift: what is owed is on the invoice
    assert house.billing.balance("acme").available_femto == 20 * MICRO


def test_a_monthly_cap_stops_at_the_token_and_begins_anew_with_the_tenants_month(house: Any) -> None:
    house.billing.update_tenant(
        "acme", billing_mode=BillingMode.POSTPAID, monthly_cap="0.000100", timezone="Pacific/Apia"
    )
    house.use(prompt=30, completion=0)
    rate = quote(house)
    assert house.billing.open_hold("acme", "r", rate, 10, 1000) == Hold(30, False)
    with pytest.raises(InsufficientCredits) as caught:
        house.billing.open_hold("acme", "r2", rate, 1, 0)
    assert str(caught.value) == "The budget 'monthly cap' does not cover this request."
    (state,) = house.billing.budgets("acme")
    assert (state.spent_femto, state.held_femto, state.left_femto) == (30 * MICRO, 70 * MICRO, 0)
    house.clock.now_us = state.window.end_us
    assert house.billing.extend_hold("r", 1000) == Hold(30, False)  # it counts in the month in which it began
    assert house.billing.open_hold("acme", "r3", rate, 10, 1000) == Hold(45, False)


@pytest.mark.parametrize(
    ("changes", "at_fault"),
    [
        ({"monthly_cap": "5"}, "monthly_cap"),
        ({"billing_mode": "postpaid", "monthly_cap": "-5"}, "monthly_cap"),
        ({"billing_mode": "postpaid", "top_up": TopUp(threshold="1", amount="1")}, "top_up"),
        ({"top_up": TopUp(threshold="1", amount="0")}, "top_up.amount"),
        ({"billing_mode": "later"}, "billing_mode"),
    ],
)
def test_an_arrangement_that_makes_no_sense_is_refused(house: Any, changes: dict[str, Any], at_fault: str) -> None:
    with pytest.raises(Invalid) as caught:
        house.billing.update_tenant("acme", **changes)
    assert caught.value.field == at_fault
