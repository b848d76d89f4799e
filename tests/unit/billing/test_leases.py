"""Two processes on one ledger never commit more than there is, whatever dies, expires or is asked back between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from billing.budgets import BudgetPeriod, BudgetScope
from billing.errors import InsufficientCredits, LeaseLost, LedgerUnavailable
from billing.gateways import Gateways
from billing.leases import ALIVE_US, Lease, LeaseTable
from billing.offers import ClassOffer
from billing.quotas import elapsed_s
from billing.service import Billing, Hold
from billing.service.leasing import IDLE_US, Ask
from billing.store import EventStore
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


def test_an_expired_gateway_is_fenced_and_knows_it_first(pair: Pair) -> None:
    pair.hold(pair.one, "a", 10, 5)
    pair.house.clock.now_us += 3599 * 10**6
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.other, "b", 90)
    pair.house.elapsed_s = pair.one._quotas.fence.from_s  # three quarters of its time are over
    rate = pair.one.quote("acme", "base", "base", pair.house.clock())
    with pytest.raises(LeaseLost):
        pair.one.open_hold("acme", "c", rate, 1, 0)
    assert pair.one.extend_hold("a", 50) == Hold(5, False)

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


def lease_nearly_all(pair: Pair) -> None:
    """Some of it is held, and nearly all leased."""
    for id, billing in (("a", pair.one), ("b", pair.other)):
        assert pair.hold(billing, id, 10).complete
        assert billing.exchange({BALANCE: Ask(30 * MICRO, 1)})[BALANCE].got
    assert sum(pair.rows().values()) > 70 * MICRO


def refused(pair: Pair, billing: Billing, id: str, prompt: int) -> bool:
    try:
        pair.hold(billing, id, prompt)
    except InsufficientCredits:
        return True
    return False


def take_all_there_is(pair: Pair, name: str = "more") -> int:
    """Micros that both together can still hold, one at a time."""
    taken = 0
    for _ in range(4):
        for billing in (pair.one, pair.other):
            while not refused(pair, billing, f"{name}{taken}", 1):
                taken += 1
            billing.give_what_is_wanted()
    return taken


def test_a_budget_that_is_lowered_voids_what_is_leased_and_idle(pair: Pair) -> None:
    fields: dict[str, Any] = {"scope": BudgetScope.TENANT, "period": BudgetPeriod.DAY, "currency": "usd"}
    made = pair.house.billing.set_budget("acme", name="b", amount="0.000100", **fields)
    for billing in (pair.one, pair.other):
        billing.refresh()
    for id, billing in (("a", pair.one), ("b", pair.other)):
        assert pair.hold(billing, id, 10).complete
    pair.house.billing.change_budget(made.id, amount="0.000030")
    for billing in (pair.one, pair.other):
        billing.refresh()
    assert take_all_there_is(pair) == 10  # 20 run
    pair.house.billing.change_budget(made.id, amount="0.000035")
    assert take_all_there_is(pair, "again") == 5


def test_usage_that_is_rated_late_voids_what_is_leased_and_idle(pair: Pair) -> None:
    lease_nearly_all(pair)
    event = pair.event("g1", "late", 50)
    event = UsageEvent(**{**{f: getattr(event, f) for f in event.__struct_fields__}, "images": 1})
    pair.house.billing.record([event])
    classes = {"image": ClassOffer(price="0")}
    pair.house.billing.set_price(
        model="*",
        effective_at_us=0,
        currency="usd",
        tenant="acme",
        per_million={"prompt": "1", "cached": "1", "completion": "2"},
        classes=classes,
    )
    assert pair.house.billing.rate_unrated() == 1
    for billing in (pair.one, pair.other):
        billing.refresh()
    assert take_all_there_is(pair) == 100 - 20 - 50


def test_a_true_up_voids_what_is_leased_and_idle(pair: Pair) -> None:
    lease_nearly_all(pair)
    for billing in (pair.one, pair.other):
        billing._books.ledger.true_up("acme", 50 * MICRO, 0)
        billing._fold([])
    assert take_all_there_is(pair) == 100 - 20 - 50


def test_a_charge_beyond_its_lease_is_found_at_the_next_look(pair: Pair) -> None:
    """Images are in no hold: they are charged all the same, and no gateway spends the money twice."""
    lease_nearly_all(pair)
    pair.one.record([pair.event("g1", "a", 10 + 70)])  # more than was leased
    for billing in (pair.one, pair.other):
        billing.tend()
    assert take_all_there_is(pair) == 100 - 80 - 10


def test_a_hard_budget_counts_what_ran_when_it_was_set(pair: Pair) -> None:
    pair.hold(pair.one, "a", 10, 5)
    settled = pair.event("g1", "s", 5)
    pair.hold(pair.one, "s", 5)
    pair.one.settle(settled)
    pair.house.billing.set_budget(
        "acme", name="b", scope=BudgetScope.TENANT, period=BudgetPeriod.DAY, amount="0.000040", currency="usd"
    )
    for billing in (pair.one, pair.other):
        billing.refresh()
        billing.tend()
    (state,) = pair.one.budgets("acme")
    assert (state.spent_femto, state.held_femto) == (5 * MICRO, 20 * MICRO)
    assert take_all_there_is(pair) == 15
    pair.one.record([settled])
    pair.one.release("a")
    assert pair.one.budgets("acme")[0].spent_femto == 5 * MICRO
    pair.house.billing.remove_budget(state.budget.id)
    pair.one.refresh()
    pair.one.tend()
    assert [quota.id for quota in pair.one._quotas.all()] == [BALANCE]


def test_who_is_alive_is_not_expired_by_a_clock_that_was_put_forward(pair: Pair) -> None:
    pair.hold(pair.one, "a", 60)
    pair.house.clock.now_us += 40 * 24 * HOUR_US  # of all, and nobody had a beat since
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.other, "b", 90)
    pair.house.elapsed_s += ALIVE_US / 1e6 - 1
    pair.one.tend()
    assert pair.one.alarms() == {}
    pair.house.clock.now_us += 40 * 24 * HOUR_US
    pair.house.elapsed_s += 2
    with pytest.raises(InsufficientCredits):
        pair.hold(pair.other, "b", 90)
    pair.house.elapsed_s += ALIVE_US / 1e6
    assert pair.hold(pair.other, "b", 90).complete


def test_the_clock_of_the_fence_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 7.0, time.CLOCK_MONOTONIC: 3.0}.__getitem__)
    assert elapsed_s() == 7.0


def test_leases_are_renewed_and_given_up_by_whoever_has_the_log(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody takes them as expired between the look at the row and its renewal."""
    held: list[str] = []
    exclusive = EventStore.exclusive

    @contextmanager
    def counted(self: EventStore) -> Iterator[Any]:
        with exclusive(self) as log:
            held.append("log")
            yield log
            held.pop()

    for name in ("renew", "leave", "leave_folder"):
        whole = getattr(LeaseTable, name)

        def alone(self: LeaseTable, *args: Any, whole: Any = whole) -> Any:
            assert held
            return whole(self, *args)

        monkeypatch.setattr(LeaseTable, name, alone)
    monkeypatch.setattr(EventStore, "exclusive", counted)
    gateways = Gateways(pair.one._store)
    gateways.claim("g2", "folder2", 0, 0)
    pair.one.tend()
    pair.one.retire()
    gateways.remove("g2", pair.house.clock())
    pair.house.billing.end_leases("folder2")
    with pair.one._store.connected() as connection:
        assert LeaseTable(connection).holders() == {}


def test_who_retires_with_charges_to_record_keeps_their_grants_from_expiring(pair: Pair) -> None:
    """A postpaid tenant's charges count in no quota, and use its grants all the same."""
    house = pair.house
    house.billing.create_tenant(id="later", name="Later", billing_mode="postpaid")
    end_us = house.clock() + HOUR_US
    house.billing.grant_credit("later", "1", "usd", "trial", expires_us=end_us)
    pair.one.refresh()
    event = house.event(tenant="later", prompt=5, completion=0, gateway="g1")
    pair.one.open_hold("later", event.event_id, pair.one.quote("later", "base", "base", event.ts_us), 5, 0)
    pair.one.settle(event)
    pair.one.retire()
    house.clock.now_us = end_us + HOUR_US
    pair.other.tend()
    assert pair.other.notice() == 0
    again = house.open()
    again.record([event])
    again.lease_as("g1", "folder1")
    assert [grant.used for grant in again.grants("later")] == [5 * MICRO]
