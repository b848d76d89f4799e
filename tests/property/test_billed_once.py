"""Each charge is asked for exactly once: on one invoice at Stripe or by Stripe's meters, whatever happens in between.

Switches between invoices and meters, usage that is new or late, cuts, exports, voids, deliveries, and kills of each of
these at any call, in any order. What a meter has, no invoice at Stripe ever has; and when at last everything was
delivered, cut and exported, every charge is in one of the two, whole.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from billing.errors import BillingError
from billing.invoice import InvoiceStatus, owner
from billing.modes import ExportMode
from billing.owners import Owners
from migrations.runner import migrate_ledger
from tests.contract.test_stripe_export import Killed
from tests.unit.billing.conftest import HOUR_US, House
from tests.unit.billing.test_meters import Dying, Works
from tests.unit.billing.test_modes import Desk

CLASSES = 2  # meter events of one request: prompt and completion
COST = {"prompt": 10, "completion": 5}
BLANK = Path(tempfile.mkdtemp(prefix="meterhouse-billed-once-")) / "ledger.sqlite3"


def blank() -> Path:
    """A ledger of its own."""
    if not BLANK.exists():
        migrate_ledger(f"sqlite:///{BLANK}")
    folder = Path(tempfile.mkdtemp(dir=BLANK.parent))
    return Path(shutil.copy(BLANK, folder / "ledger.sqlite3"))


class BilledOnce(RuleBasedStateMachine):
    """One tenant, one double of Stripe."""

    def __init__(self) -> None:
        super().__init__()
        self.path = blank()
        self.house = House(f"sqlite:///{self.path}", self.path.parent)
        self.house.billing.create_tenant(id="acme", name="Acme")
        self.house.set_price(prompt="100000", cached="100000", completion="100000")
        self.works = Works(self.house)
        self.works.later(40)  # late usage began behind the price as well
        self.desk = Desk(self.works)
        self.mode = ExportMode.INVOICE

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.works.double.drop()
            for store in self.works.stores:
                store.close()
            for billing in self.house.opened:
                billing.close()
            shutil.rmtree(self.path.parent)

    # -- what may happen --------------------------------------------------------------------------

    @rule(late_h=st.integers(0, 30))
    def use(self, late_h: int) -> None:
        self.house.use(**COST, ts_us=self.house.clock() - late_h * HOUR_US)

    @rule(mode=st.sampled_from(ExportMode))
    def switch(self, mode: ExportMode) -> None:
        self.mode = mode
        self.works.run(mode=mode)

    @rule()
    def deliver(self) -> None:
        self.works.run(mode=self.mode)

    @rule(call=st.integers(0, 8), when=st.sampled_from(["before", "after"]), mode=st.sampled_from(ExportMode))
    def deliver_and_die(self, call: int, when: str, mode: ExportMode) -> None:
        self.mode = mode
        try:
            self.works.export(Dying(self.works.double, call, when), mode=mode, batch=3).run()
        except Killed:
            self.works.later(0.1)  # its lease runs out

    @rule(hours=st.integers(1, 3))
    def wait(self, hours: int) -> None:
        self.works.later(hours)

    @rule()
    def cut(self) -> None:
        self.desk.cut()

    @precondition(lambda self: self.desk.invoices)
    @rule(which=st.integers(0, 9), call=st.integers(0, 14), when=st.sampled_from(["", "before", "after"]))
    def export(self, which: int, call: int, when: str) -> None:
        client = Dying(self.works.double, call, when) if when else None
        with contextlib.suppress(Killed, BillingError):
            self.desk.export(self.desk.invoices[which % len(self.desk.invoices)], client)

    @precondition(lambda self: self.desk.invoices)
    @rule(which=st.integers(0, 9))
    def void(self, which: int) -> None:
        exporter = self.works.export()._exporter
        with contextlib.suppress(BillingError):
            self.house.billing.void_invoice(self.desk.invoices[which % len(self.desk.invoices)], exporter)

    @rule()
    def restart(self) -> None:
        self.house.restart()

    # -- what must hold ---------------------------------------------------------------------------

    def owned(self, ids: set[str]) -> dict[str, str]:
        """Requests that stand on one of these invoices."""
        billing = self.house.billing
        invoices = billing.invoices("acme")
        found, owners = {}, Owners(invoices)
        for seq, rated in billing._rated("acme", 0):
            one = owner(rated.ts_us, seq, invoices)
            assert owners.of(rated.ts_us, seq) == one
            if one is not None and one.id in ids:
                found[rated.event_id] = one.id
        return found

    @invariant()
    def never_twice(self) -> None:
        assert not self.desk.metered() & set(self.owned(set(self.desk.invoiced())))

    def settle(self) -> None:
        """All that is left to do is done."""
        self.works.later(0.1)
        self.works.run(mode=self.mode)
        self.desk.cut()
        for invoice in self.house.billing.invoices("acme"):
            if invoice.status in (InvoiceStatus.FINALIZED, InvoiceStatus.EXPORTED):
                with contextlib.suppress(*([BillingError] if not invoice.event_count else [])):
                    self.desk.export(invoice.id)
        metered, invoiced = self.desk.metered(), self.owned(set(self.desk.invoiced()))
        assert not metered & set(invoiced)
        assert metered | set(invoiced) == {event.event_id for event in self.house.shelf.kept}
        facts: list[Any] = self.works.double.state.all("metered")
        assert len(facts) == CLASSES * len(metered)
        for id, total in self.desk.invoiced().items():
            assert total == 150 * sum(one == id for one in invoiced.values())


BilledOnce.TestCase.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBilledOnce = BilledOnce.TestCase
