"""Two processes on one ledger never commit more than there is, whatever dies, expires or is asked back between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from billing.budgets import BudgetPeriod, BudgetScope
from billing.errors import InsufficientCredits, LeaseLost, LedgerUnavailable
from billing.gateways import Gateways
from billing.leases import ALIVE_US, Lease, LeaseTable
from billing.service import Billing, Hold
from billing.service.leasing import IDLE_US, Ask
from metering.events import UsageEvent
from tests.unit.billing.conftest import HOUR_US

MICRO = 10**9  # a prompt token; a completion token is two
BALANCE = "balance:acme"


class Pair:
    """Two gateways, g1 and g2, on the house's ledger; a balance of `micros` prompt tokens."""

    def __init__(self, house: Any, micros: int = 100) -> None:
        self.house = house
        house.billing.grant_credit("acme", f"{micros}e-6", "usd", "test")
        self.one: Billing = house.open()
        self.other: Billing = house.open()
        self.one.lease_as("g1", "folder1", expiry_s=3600)
        self.other.lease_as("g2", "folder2", expiry_s=3600)

    def rows(self, quota: str = BALANCE) -> dict[str, int]:
        with self.one._store.connected() as connection:
            return {lease.gateway: lease.amount for lease in LeaseTable(connection).of_quota(quota).values()}

    def put(self, lease: Lease) -> None:
        with self.one._store.connected(write=True) as connection:
            LeaseTable(connection).put(lease)

    def hold(self, billing: Billing, id: str, prompt: int, want: int = 0, **more: Any) -> Hold:
        """By the way of the door: ask for what is lacking, then hold."""
        rate = billing.quote("acme", "base", "base", self.house.clock())
        lacks = billing.lacking("acme", rate, prompt, want, ts_us=self.house.clock(), **more)
        if lacks:
            least = billing.lacking("acme", rate, prompt, min(want, 1), ts_us=self.house.clock(), **more)
            billing.exchange({quota: Ask(femto, least.get(quota, 1)) for quota, femto in lacks.items()})
        return billing.open_hold("acme", id, rate, prompt, want, **more)

    def event(self, gateway: str, id: str, prompt: int, completion: int = 0) -> UsageEvent:
        event: UsageEvent = self.house.event(prompt=prompt, completion=completion, event_id=id, gateway=gateway)
        return event

    def check(self) -> None:
        """What is leased is covered by what the books leave, and what is committed by what is leased."""
        self.one.refresh()
        left = self.one._quotas.find(BALANCE).left_at(self.house.clock())
        assert sum(self.rows().values()) <= left
        for gateway, billing in (("g1", self.one), ("g2", self.other)):
            quota = billing._quotas.find(BALANCE)
            assert quota.committed <= (quota.lease or 0) <= self.rows().get(gateway, 0)


@pytest.fixture
def pair(either_house: Any) -> Pair:
    return Pair(either_house)


def test_nothing_is_held_that_is_not_leased(pair: Pair) -> None:
    rate = pair.one.quote("acme", "base", "base", pair.house.clock())
    with pytest.raises(InsufficientCredits):
        pair.one.open_hold("acme", "r", rate, 1, 0)
    assert pair.hold(pair.one, "r", 10, 10).complete
    pair.check()
    assert pair.one.exchange({}) == {}


def test_two_together_hold_no_more_than_there_is(pair: Pair) -> None:
    assert pair.hold(pair.one, "a", 40).complete
    assert pair.hold(pair.other, "b", 10).complete
    pair.check()
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.other, "c", 51)
    for _ in range(3):  # what lies idle with the one goes to the other, which asked for it
        pair.one.give_what_is_wanted()
    assert pair.hold(pair.other, "c", 50).complete
    assert sum(pair.rows().values()) == 100 * MICRO
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.one, "d", 1)
    pair.check()


def test_crumbs_of_several_come_together_to_one_token(pair: Pair) -> None:
    """Neither has enough for a completion token, both together have."""
    for id, billing in (("a", pair.one), ("b", pair.other)):
        assert pair.hold(billing, id, 49).complete
        billing.exchange({}, [BALANCE])
    pair.put(Lease(quota=BALANCE, gateway="g1", amount=50 * MICRO))
    pair.one._quotas.find(BALANCE).lease = 50 * MICRO
    answer = pair.other.exchange({BALANCE: Ask(2 * MICRO, 2 * MICRO)})[BALANCE]
    assert (answer.got, answer.waits) == (0, True)
    answer = pair.one.exchange({BALANCE: Ask(MICRO, 2 * MICRO)})[BALANCE]  # it is short itself, and lets its crumb go
    assert answer.got == 0
    assert pair.other.exchange({BALANCE: Ask(2 * MICRO, 2 * MICRO)})[BALANCE].got == 2 * MICRO
    assert pair.other.extend_hold("b", 0) == Hold(0, True)
    assert not pair.other.exchange({BALANCE: Ask(2 * MICRO, 2 * MICRO)})[BALANCE].waits  # the other is short too
    pair.check()


def test_a_charge_leaves_the_lease_of_the_gateway_that_ran_it(pair: Pair) -> None:
    pair.hold(pair.one, "a", 40)
    before = pair.rows()["g1"]
    event = pair.event("g1", "a", 30)
    pair.one.settle(event)
    assert pair.rows() == {"g1": before}
    pair.other.record([event])  # whoever records it
    assert pair.rows() == {"g1": before - 30 * MICRO}
    pair.one.refresh()
    quota = pair.one._quotas.find(BALANCE)
    assert (quota.lease, quota.committed) == (before - 30 * MICRO, 0)
    pair.check()


def test_what_a_dead_gateway_held_is_nobodys_until_its_requests_are_settled(pair: Pair) -> None:
    pair.hold(pair.one, "a", 60)
    pair.one.exchange({}, [BALANCE])
    for _ in range(2):
        with pytest.raises(InsufficientCredits):
            pair.hold(pair.other, "b", 41)
    assert pair.hold(pair.other, "b", 40).complete
    # g1 was killed. Its folder's next server settles what was open from the journal, records it, and leases anew.
    again = pair.house.open()
    again.record([pair.event("g1", "a", 25)])
    assert pair.rows()["g1"] == 35 * MICRO
    again.lease_as("g1", "folder1")
    assert "g1" not in pair.rows()
    pair.one = again
    assert pair.hold(pair.other, "c", 35).complete
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.other, "d", 1)
    pair.check()


@pytest.mark.parametrize("how", ["ended", "removed", "renamed"])
def test_a_folder_that_is_given_up_gives_its_leases_back(pair: Pair, how: str) -> None:
    pair.hold(pair.one, "a", 60)
    gateways = Gateways(pair.one._store)
    if how == "removed":
        gateways.claim("g1", "folder1", 0, 0)
        gateways.remove("g1", pair.house.clock())
    elif how == "ended":
        pair.other.end_leases("folder1")
    else:
        pair.house.open().lease_as("g9", "folder1")
    assert pair.rows() == {}
    assert pair.hold(pair.other, "b", 100).complete


def test_an_expired_gateway_is_fenced_and_knows_it_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.hold(pair.one, "a", 10, 5)
    pair.house.clock.now_us += 3599 * 10**6
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.other, "b", 90)
    now_s = pair.one._quotas.fence.from_s
    monkeypatch.setattr("billing.quotas.time.monotonic", lambda: now_s)  # three quarters of its time are over
    rate = pair.one.quote("acme", "base", "base", pair.house.clock())
    with pytest.raises(LeaseLost):
        pair.one.open_hold("acme", "c", rate, 1, 0)
    assert pair.one.extend_hold("a", 50) == Hold(5, False)
    monkeypatch.undo()

    pair.house.clock.now_us += 2 * 10**6
    assert pair.hold(pair.other, "b", 90).complete  # now it may be taken
    assert "g1" not in pair.rows()
    pair.one.tend()  # it is there after all: what it has committed it enters anew, and no more
    assert pair.one.alarms() == {"lease_lost": 1}
    assert pair.rows()["g1"] == 20 * MICRO == pair.one._quotas.find(BALANCE).lease
    assert pair.one.extend_hold("a", 50) == Hold(5, False)
    pair.one.release("a")
    pair.one.tend()
    assert pair.one.alarms() == {"lease_lost": 1}


def test_idle_leases_go_back_after_a_while_and_at_the_end(pair: Pair) -> None:
    pair.hold(pair.one, "a", 10)
    pair.hold(pair.one, "b", 10)
    pair.one.release("b")
    pair.one.tend()
    assert pair.rows()["g1"] > 10 * MICRO
    pair.house.clock.now_us += IDLE_US
    pair.one.tend()
    assert pair.rows() == {"g1": 10 * MICRO}
    pair.one.retire()
    assert pair.rows() == {"g1": 10 * MICRO}  # it is committed: the next server on the folder will know what of it
    pair.one.release("a")
    pair.one.retire()
    assert pair.rows() == {}


def test_nothing_under_a_lease_may_use_a_grant_that_has_expired(either_house: Any) -> None:
    house = either_house
    end_us = house.clock() + HOUR_US
    house.billing.grant_credit("acme", "100e-6", "usd", "trial", expires_us=end_us)
    pair = Pair(house, micros=10)
    pair.hold(pair.one, "a", 20)
    assert (pair.one._quotas.find(BALANCE).lease or 0) > 20 * MICRO
    pair.hold(pair.other, "b", 5)
    house.clock.now_us = end_us
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.one, "c", 1)
    event = pair.event("g1", "a", 20)
    event = UsageEvent(**{**{f: getattr(event, f) for f in event.__struct_fields__}, "ts_us": end_us - 1})
    pair.one.settle(event)
    pair.one.record([event])
    assert [one.left for one in pair.one.grants("acme")] == [80 * MICRO, 10 * MICRO]  # b's is not known yet
    pair.other.release("b")
    pair.one.tend()
    pair.other.tend()
    house.clock.now_us += 2 * 10**6
    assert pair.one.notice() + pair.other.notice() == 1
    assert pair.one.balance("acme").expired_femto == 80 * MICRO
    pair.other.refresh()
    assert pair.hold(pair.other, "d", 10).complete
    pair.check()


def test_a_budget_is_leased_as_a_balance_is(pair: Pair) -> None:
    pair.house.billing.set_budget(
        "acme",
        name="b",
        scope=BudgetScope.TENANT,
        period=BudgetPeriod.DAY,
        amount="0.000030",
        currency="usd",
    )
    for billing in (pair.one, pair.other):
        billing.refresh()
    assert pair.hold(pair.one, "a", 20).complete
    pair.one.exchange({}, [quota.id for quota in pair.one._quotas.all()])
    with pytest.raises(InsufficientCredits) as caught:
        pair.hold(pair.other, "b", 11)
    assert caught.value.budget == "b"
    assert pair.hold(pair.other, "b", 10).complete
    (quota,) = [quota for quota in pair.one._quotas.all() if quota.budget]
    assert sum(pair.rows(quota.id).values()) == 30 * MICRO
    pair.one.settle(pair.event("g1", "a", 5))
    pair.one.record([pair.event("g1", "a", 5)])
    assert pair.rows(quota.id) == {"g1": 15 * MICRO, "g2": 10 * MICRO}


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exchange_that_fails_leaves_less_and_never_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The database says no, or says nothing although it has done it: memory never has more than the row."""
    pair.hold(pair.one, "a", 10)
    exclusive = pair.one._store.exclusive

    def broken() -> Any:
        class Broken:
            def __enter__(self) -> Any:
                if when == "before":
                    raise LedgerUnavailable("away")
                self.inner: Any = exclusive()
                return self.inner.__enter__()

            def __exit__(self, *error: Any) -> None:
                self.inner.__exit__(*error)
                raise LedgerUnavailable("no answer")

        return Broken()

    with monkeypatch.context() as failing:
        failing.setattr(pair.one._store, "exclusive", broken)
        with pytest.raises(LedgerUnavailable):
            pair.one.exchange({BALANCE: Ask(5 * MICRO, MICRO)}, [BALANCE])
    pair.check()
    pair.one.exchange({}, [BALANCE])
    assert pair.rows() == {"g1": 10 * MICRO}


def test_a_gateway_that_was_not_seen_lately_is_not_waited_for(pair: Pair) -> None:
    pair.hold(pair.one, "a", 100)
    assert pair.other.exchange({BALANCE: Ask(MICRO, MICRO)})[BALANCE].waits
    pair.house.clock.now_us += ALIVE_US
    assert not pair.other.exchange({BALANCE: Ask(MICRO, MICRO)})[BALANCE].waits


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_things_keeps_the_sum(house: Any, seed: int) -> None:
    """Random requests on both, killed and started again at random: at the end all that was billed was there."""
    draw, pair = random.Random(seed), Pair(house, micros=300)
    open_: dict[str, tuple[str, int]] = {}

    def gateway() -> tuple[str, Billing]:
        return ("g1", pair.one) if draw.random() < 0.5 else ("g2", pair.other)

    def begin() -> None:
        name, billing = gateway()
        id = f"r{len(open_)}-{draw.random()}"
        prompt, want = draw.randint(0, 20), draw.randint(0, 20)
        try:
            covered = pair.hold(billing, id, prompt, want).covered_tokens
        except InsufficientCredits:
            return
        open_[id] = (name, prompt + 1000 * covered)

    def end() -> None:
        if open_:
            id = draw.choice(sorted(open_))
            name, packed = open_.pop(id)
            billing = pair.one if name == "g1" else pair.other
            event = pair.event(name, id, draw.randint(0, packed % 1000), draw.randint(0, packed // 1000))
            billing.settle(event)
            if draw.random() < 0.7:
                billing.record([event])
            else:
                late.append(event)

    def die() -> None:
        events = [event for event in late if event.gateway == "g1"]
        late[:] = [event for event in late if event.gateway != "g1"]
        for id, (name, packed) in list(open_.items()):
            if name == "g1":
                events.append(pair.event("g1", id, packed % 1000, packed // 1000))
                del open_[id]
        again = house.open()
        again.record(events)
        again.lease_as("g1", "folder1", expiry_s=3600)
        pair.one = again

    late: list[UsageEvent] = []
    steps: list[Callable[[], object]] = [begin, begin, begin, end, end, die]
    steps += [lambda: gateway()[1].give_what_is_wanted(), lambda: gateway()[1].tend()]
    for _ in range(120):
        draw.choice(steps)()
        pair.check()
    while open_:
        end()
    pair.one.record(late)
    pair.other.refresh()
    balance = pair.other.balance("acme")
    assert balance.available_femto >= 0
    assert balance.held_femto == 0
    for billing in (pair.one, pair.other):
        billing.refresh()
        billing.retire()
    assert pair.rows() == {}
