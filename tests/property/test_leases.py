"""Several gateways, one ledger: no more is ever committed than the books leave, whatever lowers what they leave."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from billing.budgets import BudgetPeriod, BudgetScope
from billing.errors import BillingError, InsufficientCredits, LeaseLost, NoPrice
from billing.leases import LeaseTable
from billing.offers import ClassOffer
from billing.periods import period_at
from billing.service import Billing
from billing.service.leasing import Ask
from metering.events import UsageEvent
from tests.unit.billing.conftest import HOUR_US, House

MICRO = 10**9
NAMES = ("g1", "g2")
gateways = st.sampled_from(NAMES)
amounts = st.integers(1, 60)


class Gateways(RuleBasedStateMachine):
    """Two gateways and an operator. `open` is what runs: id → gateway, prompt tokens, covered completion tokens."""

    template: Path

    @initialize(micros=st.integers(20, 120), lasting=st.booleans())
    def begin(self, micros: int, lasting: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copyfile(self.template, self.folder / "ledger.sqlite3")
        self.house = House(f"sqlite:///{self.folder}/ledger.sqlite3", self.folder)
        self.house.billing.create_tenant(id="acme", name="Acme")
        self.price()
        self.grant(micros, lasting)
        self.alive: dict[str, Billing] = {}
        self.open: dict[str, tuple[str, int, int]] = {}
        self.unrecorded: list[UsageEvent] = []
        self.given_up: set[str] = set()
        self.count, self.image_has_price, self.months = 0, False, 0
        for name in NAMES:
            self.start(name)

    def teardown(self) -> None:
        if hasattr(self, "house"):
            for billing in self.house.opened:
                billing.close()
            shutil.rmtree(self.folder)

    def price(self, **classes: ClassOffer) -> None:
        """A period in which there is any call of a tool costs something: its invoice is trued up."""
        minimum = ClassOffer(price="0", minimum="0.000015")
        per_million = {"prompt": "1", "cached": "1", "completion": "2"}
        self.house.billing.set_price(
            model="*",
            effective_at_us=0,
            currency="usd",
            tenant="acme",
            per_million=per_million,
            classes={"tool_call": minimum, **classes},
        )

    def start(self, name: str) -> None:
        """Record what its folder still has, then serve."""
        billing = self.house.open()
        mine = [event for event in self.unrecorded if event.gateway == name]
        mine += [self.event(id) for id in list(self.open) if self.open[id][0] == name]
        billing.record(mine)
        self.house.shelf.kept += mine
        self.unrecorded = [event for event in self.unrecorded if event.gateway != name]
        self.open = {id: one for id, one in self.open.items() if one[0] != name}
        billing.lease_as(name, f"folder-{name}", expiry_s=3600)
        self.alive[name] = billing
        if name in self.given_up:  # others had its money: what its orphans cost they learn when they look
            self.given_up.discard(name)
            self.tend()

    def event(self, id: str) -> UsageEvent:
        name, prompt, covered = self.open[id]
        return self.house.event(prompt=prompt, completion=covered, event_id=id, gateway=name, tool_calls=1)

    def known(self) -> None:
        """Every gateway has read the log, as it does every two seconds."""
        for billing in (self.house.billing, *self.alive.values()):
            billing.refresh()

    def committed(self, quota_id: str) -> int:
        with self.house.billing._store.connected() as connection:
            rows = LeaseTable(connection).of_quota(quota_id)
        total = 0
        for name in NAMES:
            billing = self.alive.get(name)
            if billing is not None:
                found = billing._quotas.get(quota_id)
                total += 0 if found is None else found.committed
            elif name in rows:
                total += rows[name].amount
        return total

    def nothing_is_overspent(self, billing: Billing, before: dict[str, int]) -> None:
        self.house.billing.refresh()
        for quota in billing._quotas.applying("acme", "k", "", self.house.clock()):
            total = self.committed(quota.id)
            if total > before.get(quota.id, 0):  # something was committed of it: then it was there
                assert total <= self.house.billing._quotas.find(quota.id).left_at(self.house.clock())

    def ask(self, billing: Billing, lacks: dict[str, int]) -> None:
        if lacks:
            billing.exchange({id: Ask(femto, min(femto, 2 * MICRO)) for id, femto in lacks.items()})

    # -- requests ---------------------------------------------------------------------------------

    @rule(name=gateways, prompt=st.integers(0, 20), want=st.integers(0, 20))
    def hold(self, name: str, prompt: int, want: int) -> None:
        billing = self.alive.get(name)
        if billing is None:
            return
        self.known()
        ts_us = self.house.clock()
        try:
            rate = billing.quote("acme", "base", "base", ts_us)
        except NoPrice:  # the clock stands before the price was set
            return
        before = {id.id: self.committed(id.id) for id in billing._quotas.all()}
        self.ask(billing, billing.lacking("acme", rate, prompt, want, key_id="k", ts_us=ts_us))
        self.count += 1
        id = f"r{self.count}"
        try:
            hold = billing.open_hold("acme", id, rate, prompt, want, key_id="k", ts_us=ts_us)
        except (InsufficientCredits, LeaseLost):
            return
        self.open[id] = (name, prompt, hold.covered_tokens)
        self.nothing_is_overspent(billing, before)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.integers(1, 20))
    def extend(self, data: st.DataObject, more: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        name, prompt, covered = self.open[id]
        billing = self.alive.get(name)
        if billing is None:
            return
        self.known()
        before = {quota.id: self.committed(quota.id) for quota in billing._quotas.all()}
        self.ask(billing, billing.lacking_more(id, more))
        self.open[id] = (name, prompt, billing.extend_hold(id, covered + more).covered_tokens)
        self.nothing_is_overspent(billing, before)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), at_once=st.booleans(), by=gateways)
    def end(self, data: st.DataObject, at_once: bool, by: str) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        name = self.open[id][0]
        if name not in self.alive:
            return
        event = self.event(id)
        del self.open[id]
        self.alive[name].settle(event)
        self.unrecorded.append(event)
        if at_once:
            self.record(by)

    @rule(by=gateways)
    def record(self, by: str) -> None:
        """Whoever records: the charge leaves the lease of whoever ran it."""
        if by in self.alive:
            mine = [event for event in self.unrecorded if event.gateway in self.alive]
            self.alive[by].record(mine)
            self.house.shelf.kept += mine
            self.unrecorded = [event for event in self.unrecorded if event.gateway not in self.alive]

    # -- gateways ---------------------------------------------------------------------------------

    @rule()
    def tend(self) -> None:
        for billing in self.alive.values():
            billing.tend()

    @rule(name=gateways)
    def give(self, name: str) -> None:
        if name in self.alive:
            self.alive[name].give_what_is_wanted()

    @precondition(lambda self: len(self.alive) == 2)
    @rule(name=gateways)
    def die(self, name: str) -> None:
        del self.alive[name]

    @precondition(lambda self: len(self.alive) < 2)
    @rule(given_up=st.booleans())
    def come_back(self, given_up: bool) -> None:
        (name,) = set(NAMES) - set(self.alive)
        if given_up:
            with self.house.billing._store.exclusive() as log:
                LeaseTable(log.connection).leave(name)
            self.given_up.add(name)
        self.start(name)

    @rule(hours=st.sampled_from((-72, -1, 1, 72)))
    def step(self, hours: int) -> None:
        """The clock is put forward or back; no time passes."""
        self.house.clock.now_us += hours * HOUR_US

    # -- the operator -----------------------------------------------------------------------------

    @rule(micros=amounts, lasting=st.booleans())
    def grant(self, micros: int, lasting: bool) -> None:
        expires_us = None if lasting else self.house.clock() + HOUR_US // 2
        self.house.billing.grant_credit("acme", f"{micros}e-6", "usd", "more", expires_us=expires_us)

    @rule()
    def notice(self) -> None:
        for billing in self.alive.values():
            billing.notice()

    @rule(micros=amounts, hard=st.booleans())
    def set_budget(self, micros: int, hard: bool) -> None:
        billing = self.house.billing
        standing = billing.budgets("acme")
        amount = f"0.{micros:06d}"
        if standing:
            billing.change_budget(standing[0].budget.id, amount=amount, hard=hard)
        else:
            period = BudgetPeriod.MONTH
            billing.set_budget(
                "acme", name="b", scope=BudgetScope.TENANT, period=period, amount=amount, currency="usd", hard=hard
            )
        self.known()
        self.tend()  # what runs already is entered

    @rule()
    def remove_budget(self) -> None:
        for standing in self.house.billing.budgets("acme"):
            self.house.billing.remove_budget(standing.budget.id)

    @rule(images=st.integers(1, 3))
    def usage_without_a_price(self, images: int) -> None:
        if not self.image_has_price:
            event = self.house.event(prompt=0, completion=0, images=images, tool_calls=1, gateway="g1")
            self.house.billing.record([event])
            self.house.shelf.kept.append(event)

    @rule()
    def rate_it_late(self) -> None:
        if not self.image_has_price:
            self.image_has_price = True
            self.price(image=ClassOffer(price="0.000010"))
        self.house.billing.rate_unrated()

    @precondition(lambda self: self.image_has_price and self.months < 2)
    @rule(void=st.booleans())
    def invoice(self, void: bool) -> None:
        """A month is over, and is trued up; a void invoice gives it back."""
        self.record("g1")
        self.record("g2")
        self.house.billing.rate_unrated()
        period = period_at(self.house.clock.now_us)
        self.house.clock.now_us = period.end_us
        self.months += 1
        billing = self.house.billing
        try:
            invoice = billing.draft_invoice(
                "acme", period.start_us, period.end_us, usage=self.house.shelf, watermark_us=2**62
            )
        except BillingError:  # nothing to invoice, or a later one stands already
            return
        billing.finalize_invoice(invoice.id)
        if void:
            billing.void_invoice(invoice.id)


def test_nothing_is_committed_that_is_not_left(sqlite_template: Path) -> None:
    machine: Any = type("Machine", (Gateways,), {"template": sqlite_template})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))
