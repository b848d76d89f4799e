"""Voids: an invoice that the payment provider may hold is ended there first, whatever is killed and whoever races."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import stripe

from billing.accounts import Tenant
from billing.errors import Conflict, ExportError, StripeNotConfigured
from billing.invoice import ExportResult, Invoice, InvoiceStatus
from billing.service import Billing, Idempotency
from billing.stripe import StripeExporter, StripeUnavailable
from tests.doubles.stripe import Fault, StripeDouble
from tests.unit.billing.test_service_invoices import Desk, draft, period


def final(house: Any) -> Invoice:
    """A final invoice with something on it."""
    house.set_price(prompt="1000000")
    span = period(house)
    house.use()
    made = house.billing.finalize_invoice(draft(house, span).id)
    assert isinstance(made, Invoice)
    return made


def exporter(double: StripeDouble) -> StripeExporter:
    return StripeExporter(double.api_key, double.url, sleep=lambda _: None)


def voided_there(double: StripeDouble) -> int:
    return sum(event["type"] == "invoice.voided" for event in double.state.events)


def voided_here(house: Any, invoice_id: str) -> int:
    return sum(row.type == "invoice.voided" for row in house.billing._store.scan(f"invoice:{invoice_id}"))


def test_an_exported_invoice_is_voided_there_and_here_and_its_usage_is_free_again(
    house: Any, stripe_double: StripeDouble
) -> None:
    invoice = final(house)
    exported = house.billing.export_invoice(invoice.id, exporter(stripe_double))
    void = house.billing.void_invoice(invoice.id, exporter(stripe_double))
    assert (void.status, void.stripe_invoice_id) == (InvoiceStatus.VOID, exported.stripe_invoice_id)
    assert house.restart().invoice(invoice.id).status is InvoiceStatus.VOID
    assert [one["status"] for one in stripe_double.invoices()] == ["void"]
    again = draft(house, (invoice.period_start_us, invoice.period_end_us))
    assert (again.event_count, again.total_minor) == (1, invoice.total_minor)
    with pytest.raises(Conflict, match="void"):
        house.billing.export_invoice(invoice.id, exporter(stripe_double))
    assert len(stripe_double.invoices()) == 1


def test_an_export_that_stopped_half_way_is_no_dead_end(house: Any, stripe_double: StripeDouble) -> None:
    invoice = final(house)
    stripe_double.faults.append(Fault("reset_before", "POST /v1/invoices/.*/finalize", times=3))
    with pytest.raises(StripeUnavailable):
        house.billing.export_invoice(invoice.id, exporter(stripe_double))
    assert house.restart().void_invoice(invoice.id, exporter(stripe_double)).status is InvoiceStatus.VOID
    assert stripe_double.invoices() == []


def test_an_invoice_voided_at_stripe_is_voided_here_on_request(house: Any, stripe_double: StripeDouble) -> None:
    """Its export was under way; without this it could be neither exported nor voided."""
    invoice = final(house)
    stripe_double.faults.append(Fault("reset_after", "POST /v1/invoices/.*/finalize"))
    stripe_double.faults.append(Fault("reset_before", "POST /v1/invoices/.*/finalize", times=2))
    with pytest.raises(StripeUnavailable):
        house.billing.export_invoice(invoice.id, exporter(stripe_double))
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.invoices.void_invoice(stripe_double.invoices()[0]["id"])
    with pytest.raises(Conflict, match="void it here too"):
        house.billing.export_invoice(invoice.id, exporter(stripe_double))
    assert house.billing.void_invoice(invoice.id, exporter(stripe_double)).status is InvoiceStatus.VOID


def test_a_paid_invoice_stays_what_it_is(house: Any, stripe_double: StripeDouble) -> None:
    invoice = final(house)
    exported = house.billing.export_invoice(invoice.id, exporter(stripe_double))
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.invoices.pay(str(exported.stripe_invoice_id))
    with pytest.raises(Conflict, match="credit note"):
        house.billing.void_invoice(invoice.id, exporter(stripe_double))
    assert house.billing.invoice(invoice.id) == exported


class Killed(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize("hours", [0, 30])
def test_killed_between_stripes_void_and_ours(house: Any, stripe_double: StripeDouble, hours: int) -> None:
    invoice = final(house)
    house.billing.export_invoice(invoice.id, exporter(stripe_double))

    class Dying(StripeExporter):
        def void(self, invoice: Invoice, previous_ids: Mapping[str, str]) -> None:
            super().void(invoice, previous_ids)
            raise Killed

    with pytest.raises(Killed):
        house.billing.void_invoice(invoice.id, Dying(stripe_double.api_key, stripe_double.url))
    assert house.restart().invoice(invoice.id).status is InvoiceStatus.EXPORTED
    stripe_double.clock.advance(hours=hours)
    assert house.billing.void_invoice(invoice.id, exporter(stripe_double)).status is InvoiceStatus.VOID
    assert house.billing.void_invoice(invoice.id, exporter(stripe_double)).status is InvoiceStatus.VOID
    assert (voided_there(stripe_double), voided_here(house, invoice.id)) == (1, 1)


def test_the_provider_is_not_asked_about_what_never_went_out(house: Any) -> None:
    desk = Desk()
    invoice = final(house)
    assert house.billing.void_invoice(invoice.id, desk).status is InvoiceStatus.VOID
    assert desk.voided == []


def test_a_void_that_fails_there_is_none_here(house: Any) -> None:
    invoice = final(house)
    house.billing.export_invoice(invoice.id, Desk())
    for fault in (ExportError("lost"), StripeNotConfigured("no key")):
        with pytest.raises(type(fault)):
            house.billing.void_invoice(invoice.id, Desk(fail=fault))
    with pytest.raises(Conflict, match="provider"):
        house.billing.void_invoice(invoice.id)
    assert house.billing.invoice(invoice.id).status is InvoiceStatus.EXPORTED


def test_a_key_that_went_missing_does_not_unsend_an_earlier_export(house: Any) -> None:
    invoice = final(house)
    with pytest.raises(ExportError):
        house.billing.export_invoice(invoice.id, Desk(fail=ExportError("lost")))
    with pytest.raises(StripeNotConfigured):
        house.billing.export_invoice(invoice.id, Desk(fail=StripeNotConfigured("no key")))
    with pytest.raises(Conflict, match="provider"):
        house.restart().void_invoice(invoice.id)


def test_a_repeated_void_gives_the_first_result(house: Any) -> None:
    once = Idempotency(key="v", payload_hash="1")
    desk, invoice = Desk(), final(house)
    house.billing.export_invoice(invoice.id, desk)
    first = house.billing.void_invoice(invoice.id, desk, idempotency=once)
    assert house.billing.void_invoice(invoice.id, Desk(fail=ExportError("down")), idempotency=once) == first
    assert desk.voided == [invoice.id]


class Racing(Desk):
    """Lets another process act while the provider is spoken to."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult:
        self.meanwhile()
        return super().export(invoice, tenant, previous_ids)

    def void(self, invoice: Invoice, previous_ids: Mapping[str, str]) -> None:
        super().void(invoice, previous_ids)
        self.meanwhile()


def test_an_export_that_meets_a_void_of_another_process_takes_back_what_it_made(house: Any) -> None:
    invoice, other = final(house), house.open()
    desk = Racing(lambda: other.void_invoice(invoice.id, Desk()))
    with pytest.raises(Conflict, match="nothing of it stands"):
        house.billing.export_invoice(invoice.id, desk)
    assert desk.voided == [invoice.id]
    assert house.billing.invoice(invoice.id).status is InvoiceStatus.VOID


def test_a_void_that_meets_an_export_of_another_process_is_begun_again(house: Any) -> None:
    invoice, other = final(house), house.open()
    with pytest.raises(ExportError):
        house.billing.export_invoice(invoice.id, Desk(fail=ExportError("lost")))

    def export(by: Billing = other) -> object:
        by.refresh()
        return by.export_invoice(invoice.id, Desk())

    with pytest.raises(Conflict, match="try again"):
        house.billing.void_invoice(invoice.id, Racing(export))
    assert house.billing.invoice(invoice.id).status is InvoiceStatus.EXPORTED
    assert house.billing.void_invoice(invoice.id, Desk()).status is InvoiceStatus.VOID


def test_an_invoice_is_not_voided_while_this_process_exports_it(house: Any) -> None:
    invoice = final(house)
    told: list[Exception] = []

    def try_void() -> None:
        with pytest.raises(Conflict, match="being exported") as caught:
            house.billing.void_invoice(invoice.id, Desk())
        told.append(caught.value)

    exported = house.billing.export_invoice(invoice.id, Racing(try_void))
    assert len(told) == 1
    assert house.billing.invoice(invoice.id) == exported
