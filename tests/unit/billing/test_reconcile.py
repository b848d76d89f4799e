"""Reconciliation finds every place where two books part, and names the requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from billing.errors import Invalid
from billing.invoice import InvoiceStatus
from billing.provider import ProviderInvoice
from billing.reconcile import Chain, Difference, Report, Tokens
from metering.counts import CountRow, hour_of

HOUR_US = 3_600_000_000
FOREVER = 2**62


def reconcile(house: Any, **more: Any) -> Report:
    start = hour_of(house.clock.now_us) - 2 * HOUR_US
    report = house.billing.reconcile(start, start + 6 * HOUR_US, **{"usage": house.shelf, **more})
    assert isinstance(report, Report)
    return report


def journal(*rows: tuple[int, int, int, int], model: str = "base") -> list[CountRow]:
    return [CountRow("acme", model, hour_us, 1, *counts) for hour_us, *counts in rows]


def only(report: Report) -> Difference:
    (difference,) = report.differences
    assert not report.ok
    return difference


def of_lines(report: Report) -> Difference:
    """Lines that are not what they were: the invoice's document is not what it was either."""
    difference, document = report.differences
    assert (document.between, document.invoice_id) == ("invoice and its document", difference.invoice_id)
    return difference


def invoiced(house: Any) -> Any:
    start = hour_of(house.clock.now_us)
    house.clock.now_us = start + HOUR_US
    return house.billing.draft_invoice("acme", start, start + HOUR_US, usage=house.shelf, watermark_us=FOREVER)


def test_books_that_agree_have_no_difference(house: Any) -> None:
    event = house.use(prompt=10, cached=4, completion=5)
    hour = hour_of(event.ts_us)
    invoice = house.billing.finalize_invoice(invoiced(house).id)
    report = reconcile(
        house,
        journal_totals=journal((hour, 10, 4, 5)),
        stripe=lambda invoices: {one.id: there(total_minor=one.total_minor) for one in invoices},
    )
    assert report.ok
    (row,) = report.rows
    assert (row.tenant, row.model, row.hour_us) == ("acme", "base", hour)
    assert row.journal == row.stored == row.rated == row.invoiced == Tokens(1, 10, 4, 5)
    assert row.amount_femto == invoice.total_femto


def test_an_event_in_spool_and_store_counts_once(house: Any) -> None:
    shipped, waiting = house.use(), house.event()
    house.billing.record([waiting])
    report = reconcile(house, spool_events=[shipped, waiting])
    assert report.ok
    assert report.rows[0].stored == Tokens(2, 20, 0, 10)
    assert report.rows[0].invoiced == Tokens()


def test_an_event_of_another_hour_is_not_compared(house: Any) -> None:
    house.use(ts_us=house.clock.now_us - 10 * HOUR_US)
    assert reconcile(house) == Report(
        start_us=hour_of(house.clock.now_us) - 2 * HOUR_US,
        end_us=hour_of(house.clock.now_us) + 4 * HOUR_US,
        chain=Chain(from_seq=1, to_seq=3),
        rows=[],
        differences=[],
    )


def test_what_is_stored_and_not_charged_is_named(house: Any) -> None:
    event = house.event()
    house.shelf.kept.append(event)
    difference = only(reconcile(house))
    assert (difference.left, difference.event_ids) == ("stored, not charged", [event.event_id])
    assert (difference.tenant, difference.model, difference.hour_us) == ("acme", "base", hour_of(event.ts_us))


def test_what_is_charged_and_not_stored_is_named(house: Any) -> None:
    event = house.event()
    house.billing.record([event])
    difference = only(reconcile(house))
    assert (difference.left, difference.event_ids) == ("charged, not stored", [event.event_id])


def test_two_contents_of_one_id_are_told_and_the_charged_one_counts(house: Any) -> None:
    event = house.use(completion=5)
    house.shelf.kept.insert(0, msgspec.structs.replace(event, completion_tokens=500))
    report = reconcile(house)
    difference = only(report)
    assert (difference.between, difference.tenant, difference.event_ids) == ("event content", "acme", [event.event_id])
    assert report.rows[0].stored == report.rows[0].rated == Tokens(1, 10, 0, 5)


def test_a_second_content_that_the_store_set_aside_is_told(house: Any) -> None:
    events = [house.use(completion=5) for _ in range(3)]
    house.shelf.second += [msgspec.structs.replace(event, completion_tokens=500) for event in events[:2]]
    report = reconcile(house)
    difference = only(report)
    assert difference.left == "conflict: more than one content"
    assert (difference.tenant, difference.model, difference.hour_us) == ("acme", "base", hour_of(events[0].ts_us))
    assert difference.event_ids == [event.event_id for event in events[:2]]
    assert report.rows[0].stored == Tokens(3, 30, 0, 15)
    assert house.billing.reconcile(1, 2, usage=house.shelf).ok  # of another hour


def test_the_chain_of_the_ledger_is_reported(house: Any) -> None:
    house.use()
    checked = reconcile(house).chain
    assert checked == Chain(from_seq=1, to_seq=3)
    house.clock.now_us += 100 * HOUR_US
    house.use()
    assert reconcile(house).chain == Chain(from_seq=4, to_seq=4)  # what can be about the range


def test_a_charge_for_another_content_is_told(house: Any) -> None:
    event = house.use(completion=5)
    house.shelf.kept[:] = [msgspec.structs.replace(event, completion_tokens=6)]
    assert only(reconcile(house)).left == "charged for another content"


@pytest.mark.parametrize("kept", [True, False])
def test_usage_without_a_charge_is_told(house: Any, kept: bool) -> None:
    house.billing.create_tenant(id="euro", name="Euro", currency="eur")
    event = house.use(tenant="euro")
    if not kept:
        house.shelf.kept.clear()
    difference = only(reconcile(house))
    assert difference.left == ("unrated: no price" if kept else "unrated, not stored")
    assert difference.event_ids == [event.event_id]


def test_the_engine_having_sampled_more_than_was_settled_is_told(house: Any) -> None:
    hour = hour_of(house.use(prompt=10, completion=5).ts_us)
    difference = only(reconcile(house, journal_totals=journal((hour, 10, 0, 6))))
    assert difference.between == "engine journal and usage store"
    assert (difference.left, difference.right) == (
        "10 prompt, 0 cached, 6 completion",
        "10 prompt, 0 cached, 5 completion",
    )
    assert not reconcile(house, journal_totals=[]).ok
    assert not reconcile(house, journal_totals=journal((hour, 10, 0, 5), (hour + HOUR_US, 1, 0, 0))).ok


def test_hours_with_requests_under_way_are_not_compared_with_the_journal(house: Any) -> None:
    event = house.use(prompt=10, completion=5)
    hour = hour_of(event.ts_us)
    rows = journal((hour, 11, 0, 5))
    assert reconcile(house, journal_totals=rows, open_from_us=event.ts_us + 1).ok
    assert not reconcile(house, journal_totals=rows, open_from_us=hour + HOUR_US).ok


def test_a_journal_is_of_one_gateway_among_others(house: Any) -> None:
    mine, _ = house.use(prompt=10, completion=5), house.use(prompt=7, completion=1, gateway="other")
    hour = hour_of(mine.ts_us)
    assert reconcile(house, journal_totals=journal((hour, 10, 0, 5)), gateway="g").ok
    assert reconcile(house, journal_totals=journal((hour, 17, 0, 6)), gateway="g").ok  # it had another name before
    assert not reconcile(house, journal_totals=journal((hour, 11, 0, 5)), gateway="g").ok
    assert not reconcile(house, journal_totals=journal((hour, 10, 0, 5)), gateway="third").ok


def test_an_invoice_whose_lines_are_not_its_charges_is_told(house: Any) -> None:
    house.use()
    invoice = invoiced(house)
    assert reconcile(house).ok
    short = msgspec.structs.replace(invoice.lines[0], quantity=invoice.lines[0].quantity - 1)
    house.billing._books.invoices.by_id[invoice.id] = msgspec.structs.replace(
        invoice, lines=(short, *invoice.lines[1:])
    )
    difference = of_lines(reconcile(house))
    assert (difference.between, difference.invoice_id) == ("invoice lines and ledger", invoice.id)


def test_late_usage_is_compared_with_the_invoice_it_came_on(house: Any) -> None:
    late = house.event(prompt=2)
    first = invoiced(house)
    house.shelf.kept.append(late)
    house.billing.record([late])
    second = invoiced(house)
    assert (first.event_count, second.event_count) == (0, 1)
    report = reconcile(house)
    assert report.ok
    assert report.rows[0].invoiced == report.rows[0].rated
    house.billing._books.invoices.by_id[second.id] = msgspec.structs.replace(second, lines=())
    assert of_lines(reconcile(house)).invoice_id == second.id


def there(**fields: Any) -> ProviderInvoice:
    """What a provider holds."""
    return ProviderInvoice(**{"id": "in_1", "status": "open", "total_minor": 7, **fields})


def test_what_the_provider_holds_is_compared_for_exported_invoices_of_the_period(house: Any) -> None:
    house.use()
    invoice = house.billing.finalize_invoice(invoiced(house).id)

    def stand(status: InvoiceStatus) -> None:
        house.billing._books.invoices.by_id[invoice.id] = msgspec.structs.replace(
            invoice, status=status, total_minor=7, stripe_invoice_id="in_1", basis=None
        )

    def told(**fields: Any) -> Report:
        return reconcile(house, stripe=lambda invoices: {one.id: there(**fields) for one in invoices})

    stand(InvoiceStatus.EXPORTED)
    assert reconcile(house).ok  # not asked for
    assert told().ok
    assert only(told(total_minor=8)).right == "in_1 total 8"
    assert only(told(status="paid")).right == "in_1 status paid instead of open"
    assert only(told(faults=("line x twice",))).right == "in_1 line x twice"
    assert only(told(status="void")).invoice_id == invoice.id
    assert only(reconcile(house, stripe=lambda invoices: {})).right == "nothing"
    for status, theirs in ((InvoiceStatus.PAID, "paid"), (InvoiceStatus.UNCOLLECTIBLE, "uncollectible")):
        stand(status)
        assert told(status=theirs).ok
        assert not told().ok
    house.clock.now_us += 100 * HOUR_US
    assert told(total_minor=8).ok


def test_an_invoice_that_is_void_here_must_be_void_there(house: Any) -> None:
    house.use()
    invoice = invoiced(house)
    house.billing.void_invoice(invoice.id)
    again = house.billing.draft_invoice(
        "acme", invoice.period_start_us, invoice.period_end_us, usage=house.shelf, watermark_us=FOREVER
    )
    void = msgspec.structs.replace(house.billing.invoice(invoice.id), stripe_invoice_id="in_1")
    house.billing._books.invoices.by_id[invoice.id] = void
    assert reconcile(house, stripe=lambda invoices: {}).ok
    assert reconcile(house, stripe=lambda invoices: {void.id: there(status="void")}).ok
    difference = only(reconcile(house, stripe=lambda invoices: {void.id: there()}))
    assert (difference.left, difference.right) == ("void", "in_1 status open")
    assert again.total_minor == invoice.total_minor


def test_the_period_is_checked_and_widened_to_whole_hours(house: Any) -> None:
    for start, end in ((5, 5), (6, 5), (-1, 5)):
        with pytest.raises(Invalid):
            house.billing.reconcile(start, end, usage=house.shelf)
    report = house.billing.reconcile(HOUR_US + 1, 2 * HOUR_US + 1, usage=house.shelf)
    assert (report.start_us, report.end_us) == (HOUR_US, 3 * HOUR_US)
