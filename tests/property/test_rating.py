"""Rating and holds: exact, and never more billed than granted, in whatever order things happen."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from billing.accounts import Accounts, Tenant, TenantCreated
from billing.budgets import Budgets
from billing.errors import InsufficientCredits, NoPrice
from billing.holds import Holds
from billing.ledger import CreditGranted, Grant, Ledger, Spender, UsageRated
from billing.money import format_amount
from billing.prices import PriceBook, PriceSet, PriceVersion, Rate
from billing.quotas import QuotaBook
from billing.rating import amount_femto, quantities
from metering.events import Outcome, UsageEvent

prices = st.integers(0, 10**12)
rates = st.builds(Rate, price_id=st.just("p"), currency=st.just("usd"), prompt=prices, cached=prices, completion=prices)


def event(prompt: int, cached: int, completion: int, id: str = "e") -> UsageEvent:
    return UsageEvent(
        event_id=id,
        ts_us=1,
        settled_us=2,
        tenant="t",
        key_id="k",
        model="m",
        base_model="m",
        endpoint="completions",
        gateway="g",
        outcome=Outcome.FINISHED,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
    )


@given(rates, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_an_amount_is_the_exact_sum_of_its_classes(rate: Rate, fresh: int, cached: int, completion: int) -> None:
    one = event(fresh + cached, cached, completion)
    per_token = [Fraction(price, 10**9) / 10**6 for price in (rate.prompt, rate.cached, rate.completion)]
    exact = sum((a * b for a, b in zip(per_token, (fresh, cached, completion), strict=True)), Fraction(0))
    assert Fraction(amount_femto(one, rate), 10**15) == exact
    assert sum(quantities(one).values()) == one.prompt_tokens + one.completion_tokens


names = st.sampled_from(["*", "base", "pirate", "poet"])
versions = st.builds(
    dict,
    tenant=st.sampled_from([None, "acme", "other"]),
    model=names,
    effective_at_us=st.integers(0, 6),
    recorded_us=st.integers(0, 6),
    currency=st.sampled_from(["usd", "eur"]),
)


@given(st.lists(versions, max_size=12), names.filter(lambda name: name != "*"), st.integers(0, 6), st.integers(0, 6))
def test_the_book_gives_what_the_rule_says(
    entries: list[dict[str, Any]], model: str, ts_us: int, known_us: int
) -> None:
    """The rule written the slow way: filter all, then order by nearness, time and sequence."""
    book, made = PriceBook(), made_of(entries)
    for price in made:
        book.apply(PriceSet(price=price))
    assert looked_up(book, model, ts_us, known_us) == by_the_rule(made, model, ts_us, known_us)


@given(st.lists(versions, max_size=12), names.filter(lambda name: name != "*"))
def test_what_the_book_remembers_of_a_look_up_is_right_after_every_new_version(
    entries: list[dict[str, Any]], model: str
) -> None:
    book, made = PriceBook(), made_of(entries)
    for number, price in enumerate(made, 1):
        book.apply(PriceSet(price=price))
        for ts_us in range(8):
            assert looked_up(book, model, ts_us, ts_us) == by_the_rule(made[:number], model, ts_us, ts_us)


def made_of(entries: list[dict[str, Any]]) -> list[PriceVersion]:
    found = []
    for number, entry in enumerate(entries):
        rate = Rate(price_id=str(number), currency=entry["currency"], prompt=1, cached=1, completion=1)
        fields = {name: value for name, value in entry.items() if name != "currency"}
        found.append(PriceVersion(id=str(number), rate=rate, **fields))
    return found


def looked_up(book: PriceBook, model: str, ts_us: int, known_us: int) -> PriceVersion | None:
    try:
        return book.resolve("acme", model, "base", "usd", ts_us=ts_us, known_us=known_us)
    except NoPrice:
        return None


def by_the_rule(made: list[PriceVersion], model: str, ts_us: int, known_us: int) -> PriceVersion | None:
    order = [("acme", model), ("acme", "*"), (None, model), (None, "base"), (None, "*")]
    able = [
        one
        for one in made
        if (one.tenant, one.model) in order
        and one.rate.currency == "usd"
        and one.effective_at_us <= ts_us
        and one.recorded_us <= known_us
    ]
    return min(
        able,
        key=lambda one: (order.index((one.tenant, one.model)), -one.effective_at_us, -int(one.id)),
        default=None,
    )


class Till(RuleBasedStateMachine):
    """Requests of one tenant in any interleaving: opened, extended, cut, settled, recorded, granted more.

    What is sampled never exceeds what was covered at that moment, as the engine's ceiling sees to.
    """

    def __init__(self) -> None:
        super().__init__()
        accounts = Accounts()
        accounts.apply(TenantCreated(tenant=Tenant(id="t", name="T", currency="usd", created_us=0)))
        self.ledger = Ledger(accounts)
        self.holds = Holds(self.ledger)
        (self.balance,) = self.quotas = QuotaBook(accounts, self.ledger, Budgets(accounts)).applying("t", "k", "", 1)
        self.granted = 0
        self.billed = 0
        self.running: dict[str, list[int]] = {}  # id → prompt, covered, sampled
        self.rate_of: dict[str, Rate] = {}
        self.settled: list[tuple[UsageEvent, int]] = []
        self.next_id = 0

    @rule(amount=st.integers(1, 10**15))
    def grant(self, amount: int) -> None:
        grant = Grant(
            id=f"g{self.granted}", tenant="t", amount=format_amount(amount), currency="usd", reason="r", created_us=0
        )
        self.ledger.apply(CreditGranted(grant=grant))
        self.granted += amount

    @rule(rate=rates, prompt=st.integers(0, 2000), want=st.integers(0, 2000))
    def open(self, rate: Rate, prompt: int, want: int) -> None:
        id = f"r{self.next_id}"
        self.next_id += 1
        before = self.balance.available(1)
        needed = prompt * rate.dearest_prompt() + min(want, 1) * rate.completion
        if needed > before:
            with pytest.raises(InsufficientCredits):
                self.holds.open(Spender("t"), id, self.quotas, rate, prompt, want, ts_us=1, now_us=1)
            assert self.balance.available(1) == before
            return
        hold = self.holds.open(Spender("t"), id, self.quotas, rate, prompt, want, ts_us=1, now_us=1)
        assert min(want, 1) <= hold.covered_tokens <= want
        if not hold.complete:
            assert self.balance.available(1) < rate.completion  # not one token more was affordable
        self.running[id] = [prompt, hold.covered_tokens, 0]
        self.rate_of[id] = rate

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(0, 500))
    def extend(self, data: st.DataObject, more: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running[id]
        hold = self.holds.extend(id, run[1] + more, now_us=1)
        assert run[1] <= hold.covered_tokens <= run[1] + more
        if not hold.complete:
            assert self.balance.available(1) < self.rate_of[id].completion
        run[1] = hold.covered_tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        run = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        run[2] = data.draw(st.integers(run[2], run[1]))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        prompt, _, sampled = self.running.pop(id)
        computed = data.draw(st.integers(0, prompt))
        cached = data.draw(st.integers(0, computed))
        if data.draw(st.booleans()):
            self.holds.reprice_prompt(id, computed, cached)
        one = event(computed, cached, sampled, id)
        amount = amount_femto(one, self.rate_of[id])
        assert amount <= self.holds.release(id)
        self.ledger.settle(id, "h", Spender("t"), amount, self.quotas)
        self.billed += amount
        self.settled.append((one, amount))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[id]
        self.holds.release(id)
        assert self.holds.release(id) == 0

    @precondition(lambda self: self.settled)
    @rule()
    def record(self) -> None:
        one, amount = self.settled.pop()
        fact = UsageRated(
            event_id=one.event_id,
            event_hash="h",
            ts_us=1,
            settled_us=2,
            tenant="t",
            model="m",
            adapter="",
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
            completion_tokens=one.completion_tokens,
            price_id="p",
            amount_femto=str(amount),
        )
        self.ledger.apply(fact)

    @invariant()
    def never_more_than_was_granted(self) -> None:
        balance = self.ledger.balance("t", "usd", 1)
        assert balance.granted_femto == self.granted
        assert balance.charged_femto == self.billed <= self.granted
        assert balance.available_femto >= 0
        assert balance.held_femto >= 0
        assert balance.available_femto == self.granted - self.billed - balance.held_femto
        if not self.running:
            assert balance.held_femto == 0
        assert self.ledger.account("t").pending == self.balance.pending == sum(amount for _, amount in self.settled)


TestTill = Till.TestCase
TestTill.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
