"""Invoices: each charge on exactly one, whatever comes late, is voided, or is killed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from billing import taken
from billing.accounts import Tenant
from billing.charges import agrees
from billing.errors import (
    Conflict,
    ExportError,
    Invalid,
    LedgerDisagrees,
    NotFound,
    PeriodNotClosed,
    PeriodOverlaps,
    StripeNotConfigured,
    UnratedUsage,
)
from billing.invoice import ExportResult, Invoice, InvoiceStatus
from billing.ledger import UsageRated
from billing.service import Idempotency
from billing.store import EventStore
from billing.tariff import Tariff
from metering.events import UsageEvent

HOUR_US = 3_600_000_000
FOREVER = 2**62


class Desk:
    """An exporter that remembers, and fails when told to."""

    def __init__(self, fail: Exception | None = None, short: int = 0) -> None:
        self.fail, self.short = fail, short
        self.made: dict[str, int] = {}
        self.voided: list[str] = []

    def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult:
        if self.fail:
            raise self.fail
        self.made[invoice.id] = self.made.get(invoice.id, 0) + 1
        ids = {line.id: f"ii_{line.id}" for line in invoice.lines}
        return ExportResult(
            stripe_invoice_id=f"in_{invoice.id}", total_minor=invoice.total_minor - self.short, status="open", ids=ids
        )

    def void(self, invoice: Invoice, previous_ids: Mapping[str, str]) -> None:
        if self.fail:
            raise self.fail
        self.voided.append(invoice.id)


def period(house: Any) -> tuple[int, int]:
    """An hour that ended; the clock then stands in the next one."""
    start = house.clock.now_us
    return start, start + HOUR_US


def draft(house: Any, span: tuple[int, int], **more: Any) -> Invoice:
    house.clock.now_us = max(house.clock.now_us, span[1])
    made = house.billing.draft_invoice("acme", *span, **{"usage": house.shelf, "watermark_us": FOREVER, **more})
    assert isinstance(made, Invoice)
    return made


def lines(invoice: Invoice) -> list[tuple[str, str, int, int]]:
    return [(line.model, line.token_class.value, line.quantity, line.amount_minor) for line in invoice.lines]


def test_usage_times_prices_is_the_invoice(either_house: Any) -> None:
    house = either_house
    house.set_price("base", prompt="1000", cached="100", completion="2000")
    span = period(house)
    for _ in range(3):
        house.use(prompt=1000, cached=400, completion=500)
    house.use(prompt=7, completion=0, model="pirate", adapter="pirate")
    invoice = draft(house, span)
    assert lines(invoice) == [
        ("base", "cached", 1200, 12),
        ("base", "completion", 1500, 300),
        ("base", "prompt", 1800, 180),
        ("pirate", "prompt", 7, 1),
    ]
    exact = 1200 * 100 + 1500 * 2000 + 1800 * 1000 + 7 * 1000
    assert invoice.total_femto == exact * 10**9
    assert invoice.total_minor == 493 == sum(line.amount_minor for line in invoice.lines)
    assert house.billing.balance("acme").charged_femto == invoice.total_femto
    assert (invoice.status, invoice.event_count) == (InvoiceStatus.DRAFT, 4)
    assert house.restart().invoice(invoice.id) == invoice


def test_a_price_change_splits_lines_and_each_keeps_its_price(house: Any) -> None:
    span = period(house)
    house.use(prompt=10, completion=0)
    id = house.set_price(prompt="5")
    house.use(prompt=20, completion=0)
    invoice = draft(house, span)
    assert {(line.quantity, line.unit_price_nano, line.price_id == id) for line in invoice.lines} == {
        (10, 10**9, False),
        (20, 5 * 10**9, True),
    }


def test_requests_go_on_while_the_charges_of_a_period_are_rated(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a price set meanwhile does not reach them."""
    span = period(house)
    _, secret = house.billing.create_key("acme", "ci")
    for _ in range(3):
        house.use(prompt=10, completion=0)
    served: list[bool] = []

    def slow_agrees(rated: UsageRated, event: UsageEvent, tariff: Tariff) -> bool:
        if not served:
            house.set_price(prompt="5", effective_at_us=span[0])
        thread = threading.Thread(target=lambda: served.append(house.billing.authenticate(secret) is not None))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        return agrees(rated, event, tariff)

    monkeypatch.setattr(taken, "agrees", slow_agrees)
    invoice = draft(house, span)
    assert served == [True] * 3
    assert [(line.quantity, line.unit_price_nano) for line in invoice.lines] == [(30, 10**9)]


def test_a_back_dated_price_leaves_what_was_charged(house: Any) -> None:
    span = period(house)
    house.use(prompt=10, completion=0)
    house.set_price(prompt="5", effective_at_us=span[0])
    invoice = draft(house, span)
    assert [line.unit_price_nano for line in invoice.lines] == [10**9]


def test_the_period_is_half_open(house: Any) -> None:
    house.clock.now_us += HOUR_US
    span = period(house)
    for ts_us in (span[0] - 1, span[0], span[1] - 1, span[1]):
        house.use(prompt=1, completion=0, ts_us=ts_us)
    assert draft(house, span).event_count == 2
    assert draft(house, (span[1], span[1] + HOUR_US)).event_count == 1
    assert draft(house, (span[0] - HOUR_US, span[0])).event_count == 1


def test_another_tenants_usage_is_not_on_it(house: Any) -> None:
    house.billing.create_tenant(id="other", name="Other")
    span = period(house)
    house.use(tenant="other")
    assert draft(house, span).lines == ()


def test_an_open_period_is_refused(house: Any) -> None:
    span = period(house)
    house.use()
    with pytest.raises(PeriodNotClosed):
        house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)  # not over yet
    house.clock.now_us = span[1]
    with pytest.raises(PeriodNotClosed):
        house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=span[1] - 1)
    assert house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=span[1]).event_count == 1


def test_bad_periods_are_refused(house: Any) -> None:
    for span in ((5, 5), (6, 5), (-1, 5), (0, 2**63)):
        with pytest.raises(Invalid):
            house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)
    with pytest.raises(NotFound):
        house.billing.draft_invoice("nobody", 1, 2, usage=house.shelf, watermark_us=FOREVER)
    with pytest.raises(NotFound):
        house.billing.invoice("nothing")
    with pytest.raises(NotFound):
        house.billing.invoices("nobody")


def test_periods_do_not_overlap_but_touch(house: Any) -> None:
    start, end = period(house)
    draft(house, (start, end))
    for span in ((start, end), (start + 1, end - 1), (start - 5, start + 1), (end - 1, end + 5), (start - 5, end + 5)):
        with pytest.raises(PeriodOverlaps):
            draft(house, span)
    draft(house, (end, end + 5))
    draft(house, (start - 5, start))


def test_usage_the_ledger_has_not_recorded_yet_is_recorded_first(house: Any) -> None:
    span = period(house)
    event = house.event()
    house.shelf.kept.append(event)
    invoice = draft(house, span)
    assert invoice.event_count == 1
    house.billing.record([event])
    assert house.billing.balance("acme").charged_femto == invoice.total_femto


def test_usage_the_store_does_not_have_yet_holds_the_cut_up(house: Any) -> None:
    span = period(house)
    event = house.use()
    house.shelf.kept.clear()
    with pytest.raises(PeriodNotClosed):
        draft(house, span)
    assert house.billing.invoices() == []
    house.shelf.kept.append(event)
    assert draft(house, span).event_count == 1


def test_case_28_of_two_contents_the_one_that_was_charged_is_invoiced(house: Any) -> None:
    span = period(house)
    event = house.use(completion=5)
    house.shelf.kept.insert(0, msgspec.structs.replace(event, completion_tokens=500))
    house.shelf.kept.append(msgspec.structs.replace(event, completion_tokens=50))
    invoice = draft(house, span)
    assert invoice.event_count == 1
    assert {line.quantity for line in invoice.lines} == {10, 5}


def test_unrated_usage_stands_in_the_way_until_it_is_rated(house: Any) -> None:
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    span = period(house)
    house.use(tenant="euro")
    house.clock.now_us = span[1]
    with pytest.raises(UnratedUsage):
        house.billing.draft_invoice("euro", *span, usage=house.shelf, watermark_us=FOREVER)
    assert draft(house, span).lines == ()  # another tenant's do not
    price = house.set_price(currency="eur", prompt="3", cached="3", completion="3")
    assert house.billing.rate_unrated() == 1
    invoice = house.billing.draft_invoice("euro", *span, usage=house.shelf, watermark_us=FOREVER)
    assert {line.price_id for line in invoice.lines} == {price}
    assert invoice.total_femto == house.billing.balance("euro").charged_femto == 15 * 3 * 10**9


def test_a_charge_that_is_rated_otherwise_now_is_not_invoiced(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    span = period(house)
    house.use()
    monkeypatch.setattr("billing.tariff.Tariff.flat_femto", lambda tariff, event: 1)
    with pytest.raises(LedgerDisagrees):
        draft(house, span)
    assert house.billing.invoices() == []


def test_late_usage_goes_to_the_next_invoice_once(either_house: Any) -> None:
    house = either_house
    first_span = period(house)
    house.use(prompt=1, completion=0)
    late = house.event(prompt=2, completion=0)
    first = draft(house, first_span)
    house.shelf.kept.append(late)
    house.billing.record([late])
    second = draft(house, (first_span[1], first_span[1] + HOUR_US))
    third = draft(house, (second.period_end_us, second.period_end_us + HOUR_US))
    assert [one.event_count for one in (first, second, third)] == [1, 1, 0]
    (line,) = second.lines
    assert (line.late_of, line.quantity) == (first.id, 2)
    assert (line.period_start_us, line.period_end_us) == first_span
    assert house.restart().invoices("acme") == [first, second, third]


def test_late_usage_and_own_usage_are_lines_apart(house: Any) -> None:
    first_span = period(house)
    late = house.event(prompt=2, completion=0)
    first = draft(house, first_span)
    house.shelf.kept.append(late)
    house.billing.record([late])
    house.clock.now_us = first_span[1] + 1
    house.use(prompt=3, completion=0)
    second = draft(house, (first_span[1], first_span[1] + HOUR_US))
    assert [(line.late_of, line.quantity) for line in second.lines] == [("", 3), (first.id, 2)]


def test_what_was_on_a_void_invoice_is_free_again(house: Any) -> None:
    """Also what was late on it; and what another invoice has stays there."""
    span = period(house)
    house.use(prompt=1, completion=0)
    late = house.event(prompt=2, completion=0)
    later_still = house.event(prompt=4, completion=0)
    first = draft(house, span)
    house.shelf.kept.append(late)
    house.billing.record([late])
    second = draft(house, (span[1], span[1] + HOUR_US))
    house.shelf.kept.append(later_still)
    house.billing.record([later_still])
    third = draft(house, (span[1] + HOUR_US, span[1] + 2 * HOUR_US))
    assert [sum(line.quantity for line in one.lines) for one in (first, second, third)] == [1, 2, 4]

    house.billing.void_invoice(second.id)
    second_again = draft(house, (span[1], span[1] + HOUR_US))
    assert [(line.late_of, line.quantity) for line in second_again.lines] == [(first.id, 2)]

    house.billing.void_invoice(first.id)
    first_again = draft(house, span)
    assert [(line.late_of, line.quantity) for line in first_again.lines] == [("", 1)]
    standing = [one for one in house.billing.invoices() if one.status is not InvoiceStatus.VOID]
    assert sum(one.total_femto for one in standing) == house.billing.balance("acme").charged_femto


def test_a_draft_becomes_final_and_is_exported_once(house: Any) -> None:
    span = period(house)
    house.use()
    invoice = draft(house, span)
    desk = Desk()
    with pytest.raises(Conflict):
        house.billing.export_invoice(invoice.id, desk)
    final = house.billing.finalize_invoice(invoice.id)
    assert (final.status, final.lines) == (InvoiceStatus.FINALIZED, invoice.lines)
    assert house.billing.finalize_invoice(invoice.id) == final
    exported = house.billing.export_invoice(invoice.id, desk)
    assert (exported.status, exported.stripe_invoice_id) == (InvoiceStatus.EXPORTED, f"in_{invoice.id}")
    assert exported.stripe_ids == {line.id: f"ii_{line.id}" for line in invoice.lines}
    assert house.billing.export_invoice(invoice.id, desk) == exported
    assert desk.made == {invoice.id: 1}
    for refused in (house.billing.void_invoice, house.billing.finalize_invoice):
        with pytest.raises(Conflict):
            refused(invoice.id)
    assert exported.export_started_us is not None
    assert house.restart().invoice(invoice.id) == exported


def test_an_export_that_failed_is_begun_again_and_not_voided_meanwhile(house: Any) -> None:
    span = period(house)
    invoice = house.billing.finalize_invoice(draft(house, span).id)
    with pytest.raises(ExportError):
        house.billing.export_invoice(invoice.id, Desk(fail=ExportError("lost")))
    with pytest.raises(Conflict):
        house.restart().void_invoice(invoice.id)
    assert house.billing.export_invoice(invoice.id, Desk()).status is InvoiceStatus.EXPORTED


def test_without_a_key_nothing_was_sent_and_the_invoice_may_be_voided(house: Any) -> None:
    span = period(house)
    invoice = house.billing.finalize_invoice(draft(house, span).id)
    with pytest.raises(StripeNotConfigured):
        house.billing.export_invoice(invoice.id, Desk(fail=StripeNotConfigured("no key")))
    assert house.billing.invoice(invoice.id) == invoice
    assert house.billing.void_invoice(invoice.id).status is InvoiceStatus.VOID
    assert house.billing.void_invoice(invoice.id).status is InvoiceStatus.VOID
    with pytest.raises(Conflict):
        house.billing.finalize_invoice(invoice.id)


def test_another_total_is_not_an_export(house: Any) -> None:
    span = period(house)
    invoice = house.billing.finalize_invoice(draft(house, span).id)
    with pytest.raises(ExportError):
        house.billing.export_invoice(invoice.id, Desk(short=1))
    assert house.billing.invoice(invoice.id).status is InvoiceStatus.FINALIZED


def test_two_exports_at_once_are_one(house: Any) -> None:
    span = period(house)
    invoice = house.billing.finalize_invoice(draft(house, span).id)

    class Reentrant(Desk):
        def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult:
            with pytest.raises(Conflict):
                house.billing.export_invoice(invoice.id, Desk())
            return super().export(invoice, tenant, previous_ids)

    assert house.billing.export_invoice(invoice.id, Reentrant()).status is InvoiceStatus.EXPORTED


def test_invoice_commands_are_idempotent(house: Any) -> None:
    span = period(house)
    house.use()
    desk = Desk()
    first = draft(house, span, idempotency=Idempotency(key="d", payload_hash="h"))
    steps: list[Any] = [
        lambda: draft(house, span, idempotency=Idempotency(key="d", payload_hash="h")),
        lambda: house.billing.finalize_invoice(first.id, idempotency=Idempotency(key="f", payload_hash="h")),
        lambda: house.billing.export_invoice(first.id, desk, idempotency=Idempotency(key="e", payload_hash="h")),
    ]
    results = [step() for step in steps]
    assert results[0] == first
    house.restart()
    assert [step() for step in steps] == results
    assert [one.status for one in results] == ["draft", "finalized", "exported"]
    assert desk.made == {first.id: 1}
    assert len(house.billing.invoices()) == 1


def test_another_process_cuts_the_same_period_once(house: Any) -> None:
    span = period(house)
    house.use()
    other = house.open()
    draft(house, span)
    with pytest.raises(PeriodOverlaps):
        other.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)


def test_an_invoice_cut_while_this_one_was_being_cut_is_noticed(house: Any) -> None:
    """The other one took late usage that this one had counted: nothing may be on both."""
    span = period(house)
    late = house.event()
    draft(house, span)
    house.shelf.kept.append(late)
    house.billing.record([late])
    other = house.open()
    after = span[1]
    house.clock.now_us = after + 3 * HOUR_US

    class Interrupting:
        def events(self, *args: Any, **more: Any) -> Any:
            if len(house.billing.invoices()) == 1:
                other.draft_invoice("acme", after, after + HOUR_US, usage=house.shelf, watermark_us=FOREVER)
                house.billing.refresh()
            return house.shelf.events(*args, **more)

    second = (after + HOUR_US, after + 2 * HOUR_US)
    with pytest.raises(Conflict):
        draft(house, second, usage=Interrupting())
    assert draft(house, second).event_count == 0
    assert sum(one.event_count for one in house.billing.invoices()) == 1


def test_the_same_period_cut_twice_at_once_overlaps(house: Any) -> None:
    span = period(house)
    other = house.open()

    class Interrupting:
        def events(self, *args: Any, **more: Any) -> Any:
            if not other.invoices():
                other.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)
            return house.shelf.events(*args, **more)

    with pytest.raises(PeriodOverlaps):
        draft(house, span, usage=Interrupting())


def test_usage_recorded_while_the_ledger_is_read_for_a_cut_is_billed_once(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = period(house)
    house.use(prompt=1, completion=0)
    late = house.event(prompt=2, completion=0)
    scan = EventStore.scan

    def interrupted(self: EventStore, *args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        house.shelf.kept.append(late)
        house.billing.record([late])
        return scan(self, *args, **more)

    monkeypatch.setattr(EventStore, "scan", interrupted)
    invoice = draft(house, span)
    after = draft(house, (span[1], span[1] + HOUR_US))
    assert [sum(line.quantity for line in one.lines) for one in (invoice, after)] == [3, 0]  # cut again, behind it


def test_a_cut_reads_far_enough_back_over_months(house: Any) -> None:
    """Late usage recorded long before the period, and what a void invoice had long ago, are found."""
    month = 30 * 24 * HOUR_US
    start = house.clock.now_us
    spans = [(start + n * month, start + (n + 1) * month) for n in range(6)]
    house.use(prompt=1, completion=0)
    late = house.event(prompt=2, completion=0)
    first = draft(house, spans[0])
    house.shelf.kept.append(late)
    house.billing.record([late])
    house.clock.now_us = spans[3][1]
    far = draft(house, spans[3])  # two months were never invoiced
    assert [(line.late_of, line.quantity) for line in far.lines] == [(first.id, 2)]
    house.billing.void_invoice(far.id)
    later = draft(house, spans[5])
    assert [(line.late_of, line.quantity) for line in later.lines] == [(first.id, 2)]


def test_usage_recorded_during_a_cut_by_a_clock_that_is_ahead_is_on_the_next_invoice(house: Any) -> None:
    """Who cuts is 40 days ahead; another gateway records by the right clock while the cut is read."""
    start, month = house.clock.now_us, 30 * 24 * HOUR_US
    house.use(prompt=1, completion=0)
    right = house.clock.now_us
    late = house.event(prompt=2, completion=0)
    gateway = house.open()

    class Interrupting:
        def events(self, *args: Any, **more: Any) -> Any:
            if late not in house.shelf.kept:
                found = list(house.shelf.events(*args, **more))
                house.shelf.kept.append(late)
                ahead, house.clock.now_us = house.clock.now_us, right
                gateway.record([late])
                house.clock.now_us = ahead
                return iter(found)
            return house.shelf.events(*args, **more)

    house.clock.now_us = start + 40 * 24 * HOUR_US
    first = draft(house, (start, start + month), usage=Interrupting())
    second = draft(house, (start + month, start + 2 * month))
    assert [(line.late_of, line.quantity) for line in first.lines] == [("", 1)]
    assert [(line.late_of, line.quantity) for line in second.lines] == [(first.id, 2)]


def test_the_digest_says_what_exactly_was_invoiced(house: Any) -> None:
    span = period(house)
    event = house.use()
    first = draft(house, span)
    house.billing.void_invoice(first.id)
    again = draft(house, span)
    assert again.events_digest == first.events_digest
    house.billing.void_invoice(again.id)
    more = house.event(ts_us=event.ts_us)
    house.shelf.kept.append(more)
    house.billing.record([more])
    assert draft(house, span).events_digest != first.events_digest


def test_more_than_64_bits_of_money_survive_the_store(house: Any) -> None:
    house.set_price("base", prompt="1000000000", cached="0", completion="0")
    span = period(house)
    house.use(prompt=10**9, completion=0)
    invoice = draft(house, span)
    assert invoice.total_femto == 10**9 * 10**18
    kept = house.restart().invoice(invoice.id)
    assert (kept.total_femto, kept.total_minor) == (10**27, 10**14)
    assert house.billing.balance("acme").charged_femto == 10**27
