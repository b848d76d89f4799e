"""Invoices by the clock: what is due, in order, once, whatever is killed, and one tenant's failure is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.accounts import Tenant
from billing.automation import LEASE_US, Automation, InvoiceAutomation, Outcome
from billing.duties import Duties
from billing.errors import ExportError
from billing.invoice import ExportResult, Invoice, InvoiceStatus
from billing.notes import CreditNote, NoteStatus
from billing.offers import ClassOffer
from billing.periods import Period, period_at, periods
from billing.schedule import due_spans
from billing.store import EventStore

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
FOREVER = 2**62


class Desk:
    """An exporter that remembers, and fails when told to."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fail: Exception | None = None

    def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult:
        if self.fail:
            raise self.fail
        self.made.append(invoice.id)
        return ExportResult(stripe_invoice_id=f"in_{invoice.id}", total_minor=invoice.total_minor, status="open")

    def credit(self, note: CreditNote, invoice: Invoice) -> str:
        if self.fail:
            raise self.fail
        self.made.append(note.id)
        return f"cn_{note.id}"

    def void(self, *_: Any) -> None:
        raise AssertionError("nothing is voided by the clock")

    void_credit = void


class Clerk:
    """The automation of one process, run when a test says so."""

    def __init__(self, house: Any, holder: str = "one", grace_us: int = HOUR_US) -> None:
        self.house, self.desk = house, Desk()
        self.store = EventStore(house.url)
        house.opened.append(self)
        self.automation = InvoiceAutomation(
            self.store,
            house.billing,
            house.shelf,
            self.desk,
            holder=holder,
            grace_us=grace_us,
            clock_us=house.clock,
        )

    def close(self) -> None:
        self.store.close()

    def run(self, mode: Automation = Automation.DRAFT, watermark_us: int = FOREVER, **more: Any) -> Outcome:
        outcome = self.automation.run(mode, watermark_us, **more)
        assert outcome is not None
        return outcome


def spanning(start_us: int, end_us: int) -> Invoice:
    return Invoice(
        id=f"i{start_us}",
        tenant="t",
        currency="usd",
        status=InvoiceStatus.VOID,
        period_start_us=start_us,
        period_end_us=end_us,
        cut_us=0,
        cut_seq=0,
        lines=(),
        total_minor=0,
        event_count=0,
        events_digest="",
        created_us=0,
    )


def later(house: Any, us: int) -> None:
    house.clock.now_us += us


def next_month(house: Any) -> Period:
    """The period that is over then; the clock stands two hours past it."""
    period = period_at(house.clock.now_us)
    house.clock.now_us = period.end_us + 2 * HOUR_US
    return period


def invoices(house: Any, tenant: str = "acme") -> list[tuple[int, int, str]]:
    return [(one.period_start_us, one.period_end_us, one.status.value) for one in house.billing.invoices(tenant)]


@given(st.integers(0, 400 * DAY_US), st.lists(st.tuples(st.integers(0, 420), st.integers(1, 60)), max_size=8))
def test_what_is_due_and_what_was_invoiced_tile_time(created_us: int, taken: list[tuple[int, int]]) -> None:
    now_us = 420 * DAY_US
    tenant = Tenant(id="t", name="T", currency="usd", created_us=created_us, timezone="Europe/Berlin")
    had = [spanning(start * DAY_US, (start + days) * DAY_US) for start, days in taken]
    found = list(due_spans(tenant, had, now_us))
    over = [p for p in periods(created_us, now_us, 1, "Europe/Berlin") if p.end_us <= now_us]
    assert all(a.end_us <= b.start_us for a, b in pairwise(found))
    for hour in range(0, now_us, 6 * HOUR_US):
        on = any(one.has(hour) for one in had)
        assert sum(span.has(hour) for span in found) == (any(p.has(hour) for p in over) and not on)


def test_a_period_is_drafted_once_after_the_grace_and_what_is_late_adjusts_the_next(house: Any) -> None:
    clerk = Clerk(house)
    house.use(prompt=1000, completion=0)
    late = house.event(prompt=1, completion=0)
    first = period_at(house.clock.now_us)
    house.clock.now_us = first.end_us + HOUR_US - 1000
    assert clerk.run() == Outcome()
    later(house, 2000)
    assert clerk.run(watermark_us=first.end_us - 1) == Outcome()  # its usage may be on its way
    outcome = clerk.run()
    assert len(outcome.drafted) == 1
    assert clerk.run() == Outcome()
    assert invoices(house) == [(first.start_us, first.end_us, "draft")]
    assert house.restart().invoice(outcome.drafted[0]).automatic
    house.shelf.kept.append(late)
    house.billing.record([late])
    clerk = Clerk(house)
    assert clerk.run() == Outcome()
    second = next_month(house)
    (id,) = clerk.run().drafted
    (line,) = house.billing.invoice(id).lines
    assert (line.late_of, line.quantity, house.billing.invoice(id).period_start_us) == (
        outcome.drafted[0],
        1,
        second.start_us,
    )


def test_missed_periods_are_caught_up_in_order_and_empty_ones_have_no_invoice(either_house: Any) -> None:
    house = either_house
    house.billing.create_tenant(id="idle", name="Idle")
    spans = []
    for used in (True, False, True):
        if used:
            house.use(prompt=10)
        spans.append(next_month(house))
    clerk = Clerk(house)
    assert len(clerk.run().drafted) == 2
    assert invoices(house) == [(span.start_us, span.end_us, "draft") for span in (spans[0], spans[2])]
    assert invoices(house, "idle") == []
    house.use(prompt=1, ts_us=spans[1].start_us)  # a month late, in a period that has no invoice
    assert len(clerk.run().drafted) == 1
    assert invoices(house)[-1] == (spans[1].start_us, spans[1].end_us, "draft")


def test_a_minimum_and_an_adapter_are_asked_for_without_any_usage(house: Any) -> None:
    house.set_price(classes={"adapter_month": ClassOffer(price="30")})
    house.billing.create_tenant(id="other", name="Other")
    house.billing.set_commitment("acme", "10")
    house.billing.add_adapter("other", name="pirate", path="/a", id="one", digest="d", base_model="base")
    next_month(house)
    clerk = Clerk(house)
    kinds = [house.billing.invoice(id).lines[0].kind.value for id in clerk.run().drafted]
    assert kinds == ["commitment", "adapter"]


def test_a_voided_period_and_a_manual_draft_are_left_to_people(house: Any) -> None:
    house.use(prompt=10)
    clerk = Clerk(house)
    span = next_month(house)
    (id,) = clerk.run().drafted
    house.billing.void_invoice(id)
    assert clerk.run(Automation.EXPORT) == Outcome()
    house.billing.draft_invoice("acme", span.start_us, span.end_us, usage=house.shelf, watermark_us=FOREVER)
    assert clerk.run(Automation.EXPORT) == Outcome()
    assert [status for *_, status in invoices(house)] == ["void", "draft"]


def test_one_tenants_failure_is_told_and_is_not_anothers(house: Any) -> None:
    house.billing.create_tenant(id="other", name="Other")
    unpriced = house.event(model="base", images=1)
    house.shelf.kept.append(unpriced)
    house.billing.record([unpriced])
    first = next_month(house)
    house.use(prompt=10)
    house.use(prompt=10, tenant="other")
    next_month(house)
    clerk = Clerk(house)
    outcome = clerk.run()
    (failure,) = outcome.failures
    assert (failure.step, failure.tenant, failure.period) == ("draft", "acme", first)
    assert "no charge" in failure.reason
    assert [house.billing.invoice(id).tenant for id in outcome.drafted] == ["other"]
    assert invoices(house) == []  # the later period waits for the one before it
    house.set_price(classes={"image": ClassOffer(price="1")}, effective_at_us=0)
    house.billing.rate_unrated()
    assert len(clerk.run().drafted) == 2
    assert [start for start, *_ in invoices(house)] == [first.start_us, first.end_us]


def test_usage_that_stays_on_its_way_is_a_failure_after_a_while(house: Any) -> None:
    clerk = Clerk(house)
    missing = house.event(prompt=1)
    house.billing.record([missing])
    next_month(house)
    assert clerk.run() == Outcome()
    later(house, 7 * HOUR_US)
    (failure,) = clerk.run().failures
    assert "does not have yet" in failure.reason


@pytest.mark.parametrize("mode", [Automation.DRAFT, Automation.FINALIZE, Automation.EXPORT])
def test_each_mode_goes_as_far_as_it_says_and_what_fails_is_begun_again(house: Any, mode: Automation) -> None:
    house.use(prompt=10)
    next_month(house)
    clerk = Clerk(house)
    clerk.desk.fail = ExportError("away")
    outcome = clerk.run(mode)
    assert [failure.step for failure in outcome.failures] == ["export"] * (mode is Automation.EXPORT)
    clerk.desk.fail = None
    clerk.run(mode)
    clerk.run(mode)
    status = {Automation.DRAFT: "draft", Automation.FINALIZE: "finalized", Automation.EXPORT: "exported"}[mode]
    assert [found for *_, found in invoices(house)] == [status]
    assert len(clerk.desk.made) == (mode is Automation.EXPORT)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["draft_due", "finalize_invoice", "export_invoice"])
def test_killed_at_any_step_and_begun_again_by_another(
    house: Any, step: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.billing.create_tenant(id="other", name="Other")
    for tenant in ("acme", "other"):
        house.use(prompt=10, tenant=tenant)
    next_month(house)
    dying = Clerk(house)
    real: Callable[..., Any] = getattr(house.billing, step)

    def killed(*args: Any, **more: Any) -> Any:
        if when == "after":
            real(*args, **more)
        raise Killed

    monkeypatch.setattr(house.billing, step, killed)
    with pytest.raises(Killed):
        dying.run(Automation.EXPORT)
    monkeypatch.undo()
    house.restart()
    other = Clerk(house, "two")
    other.run(Automation.EXPORT)
    assert [[status for *_, status in invoices(house, id)] for id in ("acme", "other")] == [["exported"]] * 2
    made = [*dying.desk.made, *other.desk.made]
    assert len(set(made)) == 2
    assert all(one.status is InvoiceStatus.EXPORTED for one in house.billing.invoices())


def test_credit_notes_of_exported_invoices_go_along(house: Any) -> None:
    house.set_price(prompt="1000000")
    house.use(prompt=10)
    next_month(house)
    clerk = Clerk(house)
    (id,) = clerk.run(Automation.FINALIZE).finalized
    note = house.billing.issue_credit_note(id, reason="r", amount="1")
    assert clerk.run(Automation.FINALIZE).credited == []
    clerk.desk.fail = ExportError("away")
    assert [failure.step for failure in clerk.run(Automation.EXPORT).failures] == ["export"]
    clerk.desk.fail = None
    assert clerk.run(Automation.EXPORT).credited == [note.id]
    assert clerk.run(Automation.EXPORT) == Outcome()
    assert house.billing.credit_note(note.id).status is NoteStatus.EXPORTED


def test_one_process_at_a_time_and_the_lease_of_a_dead_one_ends(house: Any) -> None:
    house.use(prompt=10)
    next_month(house)
    clerk = Clerk(house)
    assert Duties(clerk.store).take("invoices", "dead", house.clock(), LEASE_US) is not None
    assert clerk.automation.run(Automation.DRAFT, FOREVER) is None
    later(house, LEASE_US + 1)
    assert len(clerk.run().drafted) == 1
    house.use(prompt=10)
    next_month(house)
    assert clerk.run(stopping=lambda: True) == Outcome()
