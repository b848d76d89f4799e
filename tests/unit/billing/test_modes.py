"""Invoices or meters: each charge is asked for in one way, whatever is switched when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.books import fact_of
from billing.errors import StripeNotConfigured
from billing.invoice import Invoice
from billing.modes import ExportMode, ExportModeSet, Modes, within
from billing.service import Billing
from tests.contract.test_stripe_export import Killed, _no_waiting
from tests.doubles.stripe.inprocess import InProcessClient
from tests.unit.billing.conftest import HOUR_US
from tests.unit.billing.test_meters import Dying, Works, works

__all__ = ["_no_waiting", "works"]


class Desk:
    """What an operator does with one tenant's hours, each of which is a period."""

    def __init__(self, works: Works) -> None:
        self.works, self.house = works, works.house
        self.invoices: list[str] = []
        self.since_us: int = self.house.clock.now_us - 300 * HOUR_US

    @property
    def billing(self) -> Billing:
        billing: Billing = self.house.billing
        return billing

    def switch(self, mode: ExportMode) -> None:
        """A server starts with another setting."""
        self.works.run(mode=mode)

    def cut(self) -> Invoice:
        """All time that no invoice has, up to now: the last stretch's invoice."""
        standing = [one for one in self.billing.invoices("acme") if one.status != "void"]
        starts_us, gaps = self.since_us, []
        for one in sorted(standing, key=lambda invoice: invoice.period_start_us):
            if starts_us < one.period_start_us:  # the invoice of that time was voided
                gaps.append((starts_us, one.period_start_us))
            starts_us = one.period_end_us
        return [self._cut(*gap) for gap in (*gaps, (starts_us, self.house.clock()))][-1]

    def _cut(self, start_us: int, end_us: int) -> Invoice:
        shelf, now_us = self.house.shelf, self.house.clock()
        invoice = self.billing.draft_invoice("acme", start_us, end_us, usage=shelf, watermark_us=now_us)
        self.billing.finalize_invoice(invoice.id)
        self.invoices.append(invoice.id)
        return invoice

    def export(self, invoice_id: str, client: InProcessClient | None = None) -> Invoice:
        meters = self.works.export(client)
        meters._exporter.refusal = meters.refusal
        return self.billing.export_invoice(invoice_id, meters._exporter)

    def metered(self) -> set[str]:
        """Requests that Stripe's meters have."""
        return {fact["identifier"].split(":")[0] for fact in self.works.double.state.all("metered")}

    def invoiced(self) -> dict[str, int]:
        """Invoices at Stripe that stand: ours → its total."""
        made = self.works.double.invoices()
        return {one["metadata"]["meterhouse_invoice"]: one["total"] for one in made if one["status"] != "void"}


@pytest.fixture
def desk(works: Works) -> Iterator[Desk]:
    works.house.set_price(prompt="100000", cached="100000", completion="100000")
    return Desk(works)


def test_the_middle_between_two_times_of_meters_is_invoiced_and_not_sent(desk: Desk) -> None:
    """Meters, invoices, meters again: what was used meanwhile and is on an exported invoice goes to no meter."""
    desk.switch(ExportMode.METER)
    first = desk.house.use()
    desk.switch(ExportMode.INVOICE)
    middle = desk.house.use()
    invoice = desk.export(desk.cut().id)
    desk.switch(ExportMode.METER)
    last = desk.house.use()
    desk.works.run()
    assert desk.metered() == {first.event_id, last.event_id}
    assert (invoice.event_count, invoice.total_minor) == (1, 150)
    assert middle.event_id not in desk.metered()


def test_what_was_not_cut_when_meters_began_is_on_an_invoice(desk: Desk) -> None:
    old = desk.house.use()
    desk.switch(ExportMode.METER)
    new = desk.house.use()
    desk.works.run()
    invoice = desk.export(desk.cut().id)  # of a period in which both were used
    assert (invoice.event_count, invoice.total_minor) == (1, 150)
    assert desk.metered() == {new.event_id}
    assert old.event_id not in desk.metered()
    late = desk.house.use(ts_us=old.ts_us)
    desk.works.run()
    assert late.event_id in desk.metered()
    nothing = desk.cut()
    with pytest.raises(StripeNotConfigured, match="meters"):
        desk.export(nothing.id)


def test_what_was_recorded_before_a_switch_is_delivered_behind_it(desk: Desk) -> None:
    desk.switch(ExportMode.METER)
    event = desk.house.use()
    with pytest.raises(Killed):
        desk.works.export(Dying(desk.works.double, 1, "after")).run()
    desk.works.later(1)
    desk.switch(ExportMode.INVOICE)
    after = desk.house.use()
    assert desk.metered() == {event.event_id}
    assert desk.works.at_stripe() == {"meterhouse_prompt": 10, "meterhouse_completion": 5}
    desk.works.export(mode=None).run()
    assert desk.metered() == {event.event_id}
    assert desk.cut().event_count == 1
    assert after.event_id not in desk.metered()


def test_nothing_is_asked_and_nothing_written_where_meters_were_never_used(desk: Desk) -> None:
    desk.house.use()
    before = desk.house.billing.metered().seq
    export = desk.works.export(mode=ExportMode.INVOICE)
    export.run()
    export.run()
    assert (desk.works.double.calls, desk.house.billing.metered().seq) == ([], before)
    assert not desk.house.billing.metered().known


def test_a_ledger_whose_meters_had_begun_before_switches_were_written(desk: Desk) -> None:
    """What meters had taken, or were about to, is theirs; the rest is on invoices, and nothing is sent twice."""
    desk.switch(ExportMode.METER)
    sent = desk.house.use()
    desk.works.run()
    position = desk.works.export().position()
    assert position is not None
    between = desk.house.use()
    modes = desk.house.billing._books.modes
    modes.__init__()  # type: ignore[misc]  # as the log of older code has it: no switch in it
    invoice = desk.cut()  # as it was cut then: with all of it
    assert invoice.event_count == 2
    desk.switch(ExportMode.METER)
    assert desk.house.billing.metered().stretches[0] == (position.from_seq, position.done_seq)
    with pytest.raises(StripeNotConfigured, match=f"{sent.event_id} on it is the meters'"):
        desk.export(invoice.id)
    desk.billing.void_invoice(invoice.id)
    new = desk.house.use()
    desk.works.run()
    assert desk.metered() == {sent.event_id, new.event_id}
    assert desk.export(desk.cut().id).event_count == 1
    assert between.event_id not in desk.metered()


def test_an_invoice_of_older_code_left_nothing_out(desk: Desk) -> None:
    desk.house.use()
    invoice = desk.cut()
    row = next(row for row in desk.works.export()._store.read(0) if row.type == "invoice.drafted")
    old = row.payload.replace(',"left_out":[]', "").replace('"left_out":[],', "")
    assert "left_out" not in old
    fact: Any = fact_of(
        type(row)(*(old if name == "payload" else getattr(row, name) for name in row.__struct_fields__))
    )
    assert fact.invoice.left_out == ()
    assert invoice.id == fact.invoice.id


def test_a_switch_that_is_none_writes_nothing(house: Any) -> None:
    billing: Billing = house.billing
    for mode in (ExportMode.INVOICE, ExportMode.METER, ExportMode.METER, ExportMode.INVOICE, ExportMode.INVOICE):
        billing.set_export_mode(mode)
    rows = [row for row in billing._store.read(0) if row.type == "export_mode.set"]
    assert len(rows) == 2
    again = house.open()
    assert again.metered() == billing.metered()
    assert [again.metered().has(row.seq) for row in rows] == [False, True]


@given(st.lists(st.sampled_from(["meter", "invoice", "charge"]), max_size=30))
def test_each_number_is_in_at_most_one_stretch_and_stays_there(history: list[str]) -> None:
    modes, expected, mode = Modes(), {}, "invoice"
    for seq, what in zip(itertools.count(1), history, strict=False):
        if what == "charge":
            expected[seq] = mode == "meter"
        else:
            mode = what
            modes.apply(ExportModeSet(mode=ExportMode(what), at_us=0), seq)
        metered = modes.metered(seq)
        assert {number: metered.has(number) for number in expected} == expected
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(metered.stretches))
        through, walked = 0, set()
        while (stretch := metered.next_after(through)) is not None:
            assert not within(through, [stretch])
            walked |= set(range(stretch[0] + 1, stretch[1] + 1))
            through = stretch[1]
        assert {number for number in expected if number in walked} == {n for n, yes in expected.items() if yes}
