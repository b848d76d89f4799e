"""The Stripe double, judged by the official SDK: its types, its error classes, its webhook check."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import stripe
from stripe import StripeClient, Webhook

from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.server import ROUTES
from tests.doubles.stripe.state import Route

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def customer(stripe_client: StripeClient) -> stripe.Customer:
    return stripe_client.v1.customers.create({"name": "Acme", "metadata": {"meterhouse_tenant": "acme"}})


@pytest.fixture
def draft(stripe_client: StripeClient, customer: stripe.Customer) -> stripe.Invoice:
    return stripe_client.v1.invoices.create(
        {
            "customer": customer.id,
            "currency": "usd",
            "auto_advance": False,
            "pending_invoice_items_behavior": "exclude",
            "metadata": {"meterhouse_invoice": "inv-1"},
        }
    )


def _item(client: StripeClient, draft: stripe.Invoice, **more: Any) -> stripe.InvoiceItem:
    params: Any = {"customer": draft.customer, "invoice": draft.id, "currency": draft.currency, **more}
    return client.v1.invoice_items.create(params)


def _assert_shaped(thing: Any) -> None:
    """Every field answered is one the SDK's type has, and every field the type requires is answered."""
    annotations = {name: str(kind) for name, kind in type(thing).__annotations__.items() if name != "OBJECT_NAME"}
    answered = set(thing.to_dict())
    required = {name for name, kind in annotations.items() if "Optional" not in kind and "None" not in kind}
    assert answered <= set(annotations), answered - set(annotations)
    assert required <= answered, required - answered


# -- parameters -----------------------------------------------------------------------------------------------------

KNOWN_PARAMS = {  # endpoint of the double → the SDK's type for it
    "POST /v1/customers": stripe.params.CustomerCreateParams,
    "GET /v1/customers": stripe.params.CustomerListParams,
    "GET /v1/customers/search": stripe.params.CustomerSearchParams,
    "GET /v1/customers/([^/]+)": stripe.params.CustomerRetrieveParams,
    "POST /v1/customers/([^/]+)": stripe.params.CustomerUpdateParams,
    "POST /v1/invoices": stripe.params.InvoiceCreateParams,
    "GET /v1/invoices": stripe.params.InvoiceListParams,
    "GET /v1/invoices/search": stripe.params.InvoiceSearchParams,
    "GET /v1/invoices/([^/]+)": stripe.params.InvoiceRetrieveParams,
    "POST /v1/invoices/([^/]+)": stripe.params.InvoiceUpdateParams,
    "GET /v1/invoices/([^/]+)/lines": stripe.params.InvoiceLineItemListParams,
    "POST /v1/invoices/([^/]+)/finalize": stripe.params.InvoiceFinalizeInvoiceParams,
    "POST /v1/invoices/([^/]+)/pay": stripe.params.InvoicePayParams,
    "POST /v1/invoices/([^/]+)/void": stripe.params.InvoiceVoidInvoiceParams,
    "POST /v1/invoices/([^/]+)/mark_uncollectible": stripe.params.InvoiceMarkUncollectibleParams,
    "POST /v1/invoiceitems": stripe.params.InvoiceItemCreateParams,
    "GET /v1/invoiceitems": stripe.params.InvoiceItemListParams,
    "GET /v1/invoiceitems/([^/]+)": stripe.params.InvoiceItemRetrieveParams,
    "POST /v1/invoiceitems/([^/]+)": stripe.params.InvoiceItemUpdateParams,
    "POST /v1/credit_notes": stripe.params.CreditNoteCreateParams,
    "GET /v1/credit_notes": stripe.params.CreditNoteListParams,
    "GET /v1/credit_notes/([^/]+)": stripe.params.CreditNoteRetrieveParams,
    "POST /v1/credit_notes/([^/]+)/void": stripe.params.CreditNoteVoidCreditNoteParams,
    "POST /v1/billing/meters": stripe.params.billing.MeterCreateParams,
    "GET /v1/billing/meters": stripe.params.billing.MeterListParams,
    "GET /v1/billing/meters/([^/]+)": stripe.params.billing.MeterRetrieveParams,
    "POST /v1/billing/meters/([^/]+)/deactivate": stripe.params.billing.MeterDeactivateParams,
    "POST /v1/billing/meters/([^/]+)/reactivate": stripe.params.billing.MeterReactivateParams,
    "GET /v1/billing/meters/([^/]+)/event_summaries": stripe.params.billing.MeterListEventSummariesParams,
    "POST /v1/billing/meter_events": stripe.params.billing.MeterEventCreateParams,
    "POST /v1/billing/meter_event_adjustments": stripe.params.billing.MeterEventAdjustmentCreateParams,
    "GET /v1/events": stripe.params.EventListParams,
    "GET /v1/events/([^/]+)": stripe.params.EventRetrieveParams,
}


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.method != "DELETE"], ids=lambda r: r.method + r.path
)
def test_the_double_accepts_nothing_that_stripe_does_not_know(route: Route) -> None:
    assert set(route.schema) <= set(KNOWN_PARAMS[f"{route.method} {route.path}"].__annotations__)


# -- objects ------------------------------------------------------------------------------------------------------


def test_every_object_has_the_shape_of_the_sdks_type(
    stripe_client: StripeClient, stripe_double: StripeDouble, customer: stripe.Customer, draft: stripe.Invoice
) -> None:
    item = _item(stripe_client, draft, amount=500)
    finalized = stripe_client.v1.invoices.finalize_invoice(draft.id)
    note = stripe_client.v1.credit_notes.create({"invoice": draft.id, "amount": 100})
    meter = stripe_client.v1.billing.meters.create(
        {"display_name": "Tokens", "event_name": "tokens", "default_aggregation": {"formula": "sum"}}
    )
    metered = stripe_client.v1.billing.meter_events.create(
        {"event_name": "tokens", "payload": {"stripe_customer_id": customer.id, "value": "3"}}
    )
    now = stripe_double.clock.now() // 60 * 60
    summary = stripe_client.v1.billing.meters.event_summaries.list(
        meter.id, {"customer": customer.id, "start_time": now - 3600, "end_time": now + 60}
    ).data[0]
    event = stripe_client.v1.events.list({"type": "invoice.finalized"}).data[0]
    for thing in (customer, item, finalized, finalized.lines.data[0], note, meter, metered, summary, event):
        _assert_shaped(thing)
    assert stripe_client.v1.events.retrieve(event.id).data.object["id"] == draft.id
    assert isinstance(item.quantity_decimal, Decimal)


def test_the_life_of_an_invoice(stripe_client: StripeClient, draft: stripe.Invoice) -> None:
    assert (draft.status, draft.total, draft.number) == ("draft", 0, None)
    _item(stripe_client, draft, amount=1000, description="a")
    _item(stripe_client, draft, amount=-300, description="credit")
    open_one = stripe_client.v1.invoices.finalize_invoice(draft.id)
    assert (open_one.status, open_one.total, open_one.amount_due) == ("open", 700, 700)
    assert open_one.number
    assert [line.amount for line in open_one.lines.data] == [-300, 1000]
    paid = stripe_client.v1.invoices.pay(draft.id)
    assert (paid.status, paid.amount_paid, paid.amount_remaining) == ("paid", 700, 0)
    with pytest.raises(stripe.InvalidRequestError) as caught:
        stripe_client.v1.invoices.pay(draft.id)
    assert caught.value.code == "invoice_already_paid"


@pytest.mark.parametrize("end", ["void_invoice", "mark_uncollectible"])
def test_an_open_invoice_can_be_given_up_and_a_draft_cannot(
    stripe_client: StripeClient, draft: stripe.Invoice, end: str
) -> None:
    _item(stripe_client, draft, amount=1000)
    with pytest.raises(stripe.InvalidRequestError):
        getattr(stripe_client.v1.invoices, end)(draft.id)
    stripe_client.v1.invoices.finalize_invoice(draft.id)
    ended = getattr(stripe_client.v1.invoices, end)(draft.id)
    assert ended.status == {"void_invoice": "void", "mark_uncollectible": "uncollectible"}[end]


def test_a_finalized_invoice_takes_no_item_and_is_not_finalized_again(
    stripe_client: StripeClient, draft: stripe.Invoice
) -> None:
    item = _item(stripe_client, draft, amount=1000)
    stripe_client.v1.invoices.finalize_invoice(draft.id)
    for refused in (
        lambda: _item(stripe_client, draft, amount=1),
        lambda: stripe_client.v1.invoice_items.update(item.id, {"amount": 1}),
        lambda: stripe_client.v1.invoice_items.delete(item.id),
        lambda: stripe_client.v1.invoices.finalize_invoice(draft.id),
        lambda: stripe_client.v1.invoices.delete(draft.id),
        lambda: stripe_client.v1.invoices.update(draft.id, {"description": "new"}),
    ):
        with pytest.raises(stripe.InvalidRequestError) as caught:
            refused()
        assert caught.value.http_status == 400
    stripe_client.v1.invoices.update(draft.id, {"metadata": {"note": "still allowed"}})
    assert stripe_client.v1.invoices.retrieve(draft.id).total == 1000


def test_a_draft_can_be_deleted_and_is_gone(stripe_client: StripeClient, draft: stripe.Invoice) -> None:
    _item(stripe_client, draft, amount=1000)
    assert stripe_client.v1.invoices.delete(draft.id).deleted
    with pytest.raises(stripe.InvalidRequestError) as caught:
        stripe_client.v1.invoices.retrieve(draft.id)
    assert (caught.value.http_status, caught.value.code) == (404, "resource_missing")
    with pytest.raises(stripe.InvalidRequestError):
        _item(stripe_client, draft, amount=1)


def test_an_empty_draft_is_not_finalized(stripe_client: StripeClient, draft: stripe.Invoice) -> None:
    with pytest.raises(stripe.InvalidRequestError) as caught:
        stripe_client.v1.invoices.finalize_invoice(draft.id)
    assert caught.value.code == "invoice_no_customer_line_items"


@pytest.mark.parametrize("amount", [0, 49])
def test_what_is_too_small_to_charge_is_paid_at_once_with_its_total_unchanged(
    stripe_client: StripeClient, draft: stripe.Invoice, amount: int
) -> None:
    _item(stripe_client, draft, amount=amount)
    done = stripe_client.v1.invoices.finalize_invoice(draft.id)
    assert (done.status, done.total, done.amount_due, done.ending_balance) == ("paid", amount, 0, amount)


# -- items --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "unit", "amount"),
    [("2", "816.5", 1633), ("100000000", "0.00000012", 12), ("1000", "0.0005", 1), ("3", "-0.5", -2), ("0", "7", 0)],
)
def test_decimal_quantities_and_prices_round_once(
    stripe_client: StripeClient, draft: stripe.Invoice, quantity: str, unit: str, amount: int
) -> None:
    item = _item(stripe_client, draft, quantity_decimal=quantity, unit_amount_decimal=unit)
    assert item.amount == amount
    assert item.pricing is not None
    assert item.pricing.unit_amount_decimal == Decimal(unit)


@pytest.mark.parametrize("unit", ["1.2E-7", "0.0000000000001", "1e-07", "abc", ""])
def test_a_decimal_in_exponent_form_or_too_fine_is_refused(
    stripe_client: StripeClient, draft: stripe.Invoice, unit: str
) -> None:
    with pytest.raises(stripe.InvalidRequestError) as caught:
        _item(stripe_client, draft, quantity_decimal="1", unit_amount_decimal=unit)
    assert caught.value.param == "unit_amount_decimal"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"amount": 1, "unit_amount_decimal": "2"}, "amount"),
        ({}, "amount"),
        ({"amount": 100_000_000}, "amount"),
        ({"amount": 1, "currency": "eur"}, "currency"),
        ({"amount": 1, "colour": "red"}, "colour"),
        ({"amount": "1.5"}, "amount"),
        ({"amount": 1, "period": {"start": 20, "end": 10}}, "period[end]"),
        ({"amount": 1, "metadata": {"k" * 41: "v"}}, "metadata[" + "k" * 41 + "]"),
    ],
)
def test_what_an_item_may_not_be(
    stripe_client: StripeClient, draft: stripe.Invoice, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(stripe.InvalidRequestError) as caught:
        _item(stripe_client, draft, **more)
    assert caught.value.param == param
    assert stripe_client.v1.invoice_items.list({"invoice": draft.id}).data == []


def test_at_most_250_items_and_lists_page_through_them_newest_first(
    stripe_client: StripeClient, draft: stripe.Invoice
) -> None:
    made = [_item(stripe_client, draft, amount=n).id for n in range(250)]
    with pytest.raises(stripe.InvalidRequestError, match="250"):
        _item(stripe_client, draft, amount=1)
    first = stripe_client.v1.invoice_items.list({"invoice": draft.id})
    assert (len(first.data), first.has_more) == (10, True)
    listed = [
        item.id for item in stripe_client.v1.invoice_items.list({"invoice": draft.id, "limit": 100}).auto_paging_iter()
    ]
    assert listed == made[::-1]
    backwards = stripe_client.v1.invoice_items.list({"invoice": draft.id, "limit": 3, "ending_before": listed[5]})
    assert [item.id for item in backwards.data] == listed[2:5]
    shown = stripe_client.v1.invoices.retrieve(draft.id)
    assert (len(shown.lines.data), shown.lines.has_more, shown.total) == (10, True, sum(range(250)))
    lines = list(stripe_client.v1.invoices.line_items.list(draft.id, {"limit": 100}).auto_paging_iter())
    assert len(lines) == 250
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.invoices.list({"limit": 101})


def test_one_customer_one_currency_at_a_time(stripe_client: StripeClient, draft: stripe.Invoice) -> None:
    with pytest.raises(stripe.InvalidRequestError, match="combine currencies"):
        stripe_client.v1.invoices.create({"customer": str(draft.customer), "currency": "eur"})


def test_three_decimal_currencies_end_in_zero(stripe_client: StripeClient, customer: stripe.Customer) -> None:
    draft = stripe_client.v1.invoices.create({"customer": customer.id, "currency": "kwd"})
    with pytest.raises(stripe.InvalidRequestError):
        _item(stripe_client, draft, amount=1001)
    assert _item(stripe_client, draft, amount=1000).amount == 1000


# -- customers and search -----------------------------------------------------------------------------------------


def test_search_finds_by_metadata_and_only_after_a_while(
    stripe_client: StripeClient, stripe_double: StripeDouble, customer: stripe.Customer
) -> None:
    query: Any = {"query": "metadata['meterhouse_tenant']:'acme'"}
    assert stripe_client.v1.customers.search(query).data == []
    stripe_double.clock.advance(seconds=60)
    assert [found.id for found in stripe_client.v1.customers.search(query).data] == [customer.id]
    assert [found.id for found in stripe_client.v1.customers.list().data] == [customer.id]


def test_a_customer_can_be_changed_and_deleted(stripe_client: StripeClient, customer: stripe.Customer) -> None:
    changed = stripe_client.v1.customers.update(customer.id, {"name": "Acme 2", "metadata": {"meterhouse_tenant": ""}})
    assert (changed.name, changed.metadata.to_dict()) == ("Acme 2", {})
    stripe_client.v1.customers.delete(customer.id)
    assert stripe_client.v1.customers.retrieve(customer.id).deleted
    with pytest.raises(stripe.InvalidRequestError) as caught:
        stripe_client.v1.invoices.create({"customer": customer.id, "currency": "usd"})
    assert caught.value.param == "customer"


def test_expand_replaces_an_id_by_the_object(stripe_client: StripeClient, draft: stripe.Invoice) -> None:
    shown = stripe_client.v1.invoices.retrieve(draft.id, {"expand": ["customer"]})
    assert isinstance(shown.customer, stripe.Customer)
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.invoices.retrieve(draft.id, {"expand": ["nothing"]})


# -- credit notes -------------------------------------------------------------------------------------------------


def test_credit_notes_lower_what_is_left_to_pay(stripe_client: StripeClient, draft: stripe.Invoice) -> None:
    _item(stripe_client, draft, amount=1000)
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.credit_notes.create({"invoice": draft.id, "amount": 100})
    stripe_client.v1.invoices.finalize_invoice(draft.id)
    note = stripe_client.v1.credit_notes.create({"invoice": draft.id, "amount": 400, "reason": "order_change"})
    assert (note.type, note.pre_payment_amount) == ("pre_payment", 400)
    assert stripe_client.v1.invoices.retrieve(draft.id).amount_remaining == 600
    stripe_client.v1.credit_notes.void_credit_note(note.id)
    assert stripe_client.v1.invoices.retrieve(draft.id).amount_remaining == 1000
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.credit_notes.create({"invoice": draft.id, "amount": 1001})
    stripe_client.v1.credit_notes.create({"invoice": draft.id, "amount": 1000})
    assert stripe_client.v1.invoices.retrieve(draft.id).status == "paid"


def test_a_credit_note_on_a_paid_invoice_says_where_the_money_goes(
    stripe_client: StripeClient, draft: stripe.Invoice
) -> None:
    _item(stripe_client, draft, amount=1000)
    stripe_client.v1.invoices.pay(draft.id)
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.credit_notes.create({"invoice": draft.id, "amount": 300})
    note = stripe_client.v1.credit_notes.create(
        {
            "invoice": draft.id,
            "lines": [{"type": "custom_line_item", "description": "late", "quantity": 3, "unit_amount_decimal": "100"}],
            "credit_amount": 300,
        }  # type: ignore[typeddict-item]  # the SDK wants a Decimal and would send small ones in exponent form
    )
    assert (note.amount, note.type, note.lines.data[0].unit_amount_decimal) == (300, "post_payment", Decimal(100))
    assert stripe_client.v1.customers.retrieve(str(draft.customer)).balance == -300


# -- meters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def meter(stripe_client: StripeClient) -> stripe.billing.Meter:
    return stripe_client.v1.billing.meters.create(
        {"display_name": "Tokens", "event_name": "tokens", "default_aggregation": {"formula": "sum"}}
    )


def _meter_event(client: StripeClient, customer: stripe.Customer, **more: Any) -> stripe.billing.MeterEvent:
    params: Any = {"event_name": "tokens", "payload": {"stripe_customer_id": customer.id, "value": "5"}, **more}
    return client.v1.billing.meter_events.create(params)


def test_a_second_event_with_an_identifier_is_refused_and_not_counted(
    stripe_client: StripeClient, stripe_double: StripeDouble, customer: stripe.Customer, meter: stripe.billing.Meter
) -> None:
    _meter_event(stripe_client, customer, identifier="e1")
    with pytest.raises(stripe.InvalidRequestError) as caught:
        _meter_event(stripe_client, customer, identifier="e1")
    assert caught.value.http_status == 400
    _meter_event(stripe_client, customer, identifier="e2")
    hour = stripe_double.clock.now() // 3600 * 3600
    rows = stripe_client.v1.billing.meters.event_summaries.list(
        meter.id,
        {"customer": customer.id, "start_time": hour, "end_time": hour + 3600, "value_grouping_window": "hour"},
    )
    assert [row.aggregated_value for row in rows.data] == [10.0]
    stripe_client.v1.billing.meter_event_adjustments.create(
        {"event_name": "tokens", "type": "cancel", "cancel": {"identifier": "e2"}}
    )
    rows = stripe_client.v1.billing.meters.event_summaries.list(
        meter.id, {"customer": customer.id, "start_time": hour, "end_time": hour + 3600}
    )
    assert [row.aggregated_value for row in rows.data] == [5.0]


@pytest.mark.parametrize(
    ("away_s", "code"),
    [(-35 * 86400 - 1, "timestamp_too_far_in_past"), (301, "timestamp_in_future"), (-35 * 86400, None), (300, None)],
)
def test_meter_timestamps_have_a_window(
    stripe_client: StripeClient,
    stripe_double: StripeDouble,
    customer: stripe.Customer,
    meter: stripe.billing.Meter,
    away_s: int,
    code: str | None,
) -> None:
    stripe_double.clock.freeze(1_800_000_000)
    at = 1_800_000_000 + away_s
    if code is None:
        assert _meter_event(stripe_client, customer, timestamp=at).timestamp == at
        return
    with pytest.raises(stripe.InvalidRequestError) as caught:
        _meter_event(stripe_client, customer, timestamp=at)
    assert caught.value.code == code


def test_a_meter_can_be_put_to_sleep(stripe_client: StripeClient, customer: stripe.Customer) -> None:
    params: Any = {"display_name": "T", "event_name": "tokens", "default_aggregation": {"formula": "count"}}
    meter = stripe_client.v1.billing.meters.create(params)
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.billing.meters.create(params)
    assert stripe_client.v1.billing.meters.deactivate(meter.id).status == "inactive"
    with pytest.raises(stripe.InvalidRequestError) as caught:
        _meter_event(stripe_client, customer)
    assert caught.value.code == "no_meter"
    assert stripe_client.v1.billing.meters.reactivate(meter.id).status == "active"
    with pytest.raises(stripe.InvalidRequestError):
        _meter_event(stripe_client, customer, payload={"stripe_customer_id": customer.id, "value": "many"})


# -- idempotency --------------------------------------------------------------------------------------------------


def _keyed(client: StripeClient, key: str, **params: Any) -> stripe.Customer:
    return client.v1.customers.create({"name": "Acme", **params}, {"idempotency_key": key})


def test_a_key_gives_the_same_answer_for_24_hours(stripe_client: StripeClient, stripe_double: StripeDouble) -> None:
    stripe_double.clock.freeze(1_800_000_000)
    first = _keyed(stripe_client, "k")
    stripe_double.clock.advance(seconds=24 * 3600 - 1)
    again = _keyed(stripe_client, "k")
    assert again.id == first.id
    assert again.last_response is not None
    assert again.last_response.headers["idempotent-replayed"] == "true"
    stripe_double.clock.advance(seconds=1)
    assert _keyed(stripe_client, "k").id != first.id


def test_a_key_with_other_parameters_is_an_error_of_its_own(stripe_client: StripeClient) -> None:
    _keyed(stripe_client, "k")
    with pytest.raises(stripe.IdempotencyError):
        _keyed(stripe_client, "k", name="Other")


def test_a_kept_answer_does_not_change_with_the_object(stripe_client: StripeClient) -> None:
    first = _keyed(stripe_client, "k")
    stripe_client.v1.customers.update(first.id, {"name": "Later"})
    assert _keyed(stripe_client, "k").name == "Acme"


def test_errors_after_the_endpoint_began_are_kept_and_validation_errors_are_not(
    stripe_client: StripeClient, stripe_double: StripeDouble, draft: stripe.Invoice
) -> None:
    key: Any = {"idempotency_key": "fin"}
    with pytest.raises(stripe.InvalidRequestError):
        stripe_client.v1.invoices.finalize_invoice(draft.id, {}, key)
    _item(stripe_client, draft, amount=100)
    with pytest.raises(stripe.InvalidRequestError) as caught:
        stripe_client.v1.invoices.finalize_invoice(draft.id, {}, key)
    assert caught.value.code == "invoice_no_customer_line_items"
    assert caught.value.headers["idempotent-replayed"] == "true"
    with pytest.raises(stripe.InvalidRequestError):
        _keyed(stripe_client, "k", colour="red")
    assert _keyed(stripe_client, "k").id


# -- errors, faults -----------------------------------------------------------------------------------------------


def test_a_wrong_key_is_401_and_an_unknown_parameter_is_named(stripe_double: StripeDouble) -> None:
    stranger = StripeClient("sk_test_other", base_addresses={"api": stripe_double.url})
    with pytest.raises(stripe.AuthenticationError):
        stranger.v1.customers.list()
    old: Any = StripeClient(
        stripe_double.api_key, base_addresses={"api": stripe_double.url}, stripe_version="2019-01-01"
    )
    with pytest.raises(stripe.InvalidRequestError, match="API version"):
        old.v1.customers.list()
    client = StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    with pytest.raises(stripe.InvalidRequestError) as caught:
        client.v1.customers.create({"nmae": "Acme"})  # type: ignore[typeddict-unknown-key]  # the point of the test
    assert (caught.value.code, caught.value.param) == ("parameter_unknown", "nmae")
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("kind", "error", "made"),
    [
        ("rate_limit", stripe.RateLimitError, 0),
        ("error_before", stripe.APIError, 0),
        ("error_after", stripe.APIError, 1),
        ("gateway_before", stripe.APIError, 0),
        ("gateway_after", stripe.APIError, 1),
        ("garbled_after", stripe.APIError, 1),
        ("reset_before", stripe.APIConnectionError, 0),
        ("reset_after", stripe.APIConnectionError, 1),
    ],
)
def test_faults_strike_once_and_what_took_place_is_found_by_the_key(
    stripe_client: StripeClient, stripe_double: StripeDouble, kind: Any, error: type[Exception], made: int
) -> None:
    stripe_double.faults.append(Fault(kind, "POST /v1/customers"))
    with pytest.raises(error):
        _keyed(stripe_client, "k")
    assert len(stripe_client.v1.customers.list().data) == made
    if kind in ("error_before", "error_after"):
        with pytest.raises(stripe.APIError):  # kept, as Stripe keeps it
            _keyed(stripe_client, "k")
    else:
        _keyed(stripe_client, "k")
        assert len(stripe_client.v1.customers.list().data) == 1


def test_a_key_in_use_is_a_conflict(stripe_client: StripeClient, stripe_double: StripeDouble) -> None:
    stripe_double.faults.append(Fault("hang_before", seconds=0.5))
    slow = threading.Thread(target=_keyed, args=(stripe_client, "k"))
    slow.start()
    while not stripe_double.calls:
        slow.join(0.01)
    with pytest.raises(stripe.APIError) as caught:
        _keyed(stripe_client, "k")
    slow.join()
    assert caught.value.error is not None
    assert (caught.value.http_status, caught.value.error.code) == (409, "idempotency_key_in_use")
    assert len(stripe_client.v1.customers.list().data) == 1


def test_the_nth_call_of_a_route_can_be_struck(stripe_client: StripeClient, stripe_double: StripeDouble) -> None:
    stripe_double.faults.append(Fault("rate_limit", "POST .*", nth=1, times=2))
    results = []
    for n in range(4):
        try:
            results.append(bool(_keyed(stripe_client, f"k{n}")))
        except stripe.RateLimitError:
            results.append(False)
    assert results == [True, False, False, True]


# -- webhooks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[tuple[bytes, str]]]]:
    got: list[tuple[bytes, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((body, self.headers["Stripe-Signature"]))
            self.send_response(500 if len(got) == 1 else 200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", got
        server.shutdown()
        thread.join()


def test_webhooks_are_signed_repeated_and_out_of_order(
    stripe_client: StripeClient,
    stripe_double: StripeDouble,
    draft: stripe.Invoice,
    endpoint: tuple[str, list[tuple[bytes, str]]],
) -> None:
    _item(stripe_client, draft, amount=1000)
    stripe_client.v1.invoices.pay(draft.id)
    url, got = endpoint
    statuses = stripe_double.deliver(url, repeat=2, shuffle=random.Random(7))
    assert statuses[0] == 500
    assert set(statuses[1:]) == {200}
    events = [Webhook.construct_event(body, header, stripe_double.webhook_secret) for body, header in got]
    ids = [event.id for event in events]
    assert len(ids) == 2 * len(set(ids))
    assert ids != [event["id"] for event in stripe_double.state.events] * 2
    assert {"customer.created", "invoice.created", "invoice.finalized", "invoice.paid"} <= {e.type for e in events}
    with pytest.raises(stripe.SignatureVerificationError):
        Webhook.construct_event(got[0][0], got[0][1], "whsec_other")
    stripe_double.clock.advance(seconds=-301)
    stripe_double.deliver(url)
    with pytest.raises(stripe.SignatureVerificationError):
        Webhook.construct_event(got[-1][0], got[-1][1], stripe_double.webhook_secret)


# -- as a process -------------------------------------------------------------------------------------------------


def test_it_runs_by_itself_and_says_where() -> None:
    command = [sys.executable, "-m", "tests.doubles.stripe", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        try:
            assert words[:2] == ["listening", "on"]
            client = StripeClient("sk_test_meterhouse", base_addresses={"api": words[2]})
            assert client.v1.customers.list().data == []
        finally:
            process.terminate()
        assert process.wait(10) == 0
