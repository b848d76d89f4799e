"""Messages of the payment provider: whatever order they come in, our invoices end where the provider's are."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import msgspec
import pytest
import stripe

from billing.books import Books
from billing.invoice import Invoice, InvoiceStatus
from billing.provider import ProviderInvoice, moves
from billing.service.payments import TooEarly
from billing.store import StoredEvent, chained
from billing.stripe import StripeExporter
from billing.stripe_calls import StripeUnavailable
from billing.webhooks import StripeWebhooks, WebhookRefused
from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.inprocess import InProcessClient
from tests.doubles.stripe.webhooks import signature
from tests.unit.billing.test_service_voids import final

SECRET = "whsec_double"


class Endpoint:
    """An exported invoice, a double that tells of it, and our end of the line."""

    def __init__(self, house: Any, double: StripeDouble, *, keyed: bool = True) -> None:
        self.house, self.double = house, double
        self.exporter = self._exporter()
        self.invoice = house.billing.export_invoice(final(house).id, self.exporter)
        self.client = stripe.StripeClient(
            double.api_key, base_addresses={"api": double.url}, http_client=self.http()
        ).v1
        self.hooks = StripeWebhooks(
            house.billing, self.exporter if keyed else StripeExporter(None), ("whsec_old", SECRET)
        )

    def http(self) -> InProcessClient:
        return InProcessClient(self.double)

    def _exporter(self) -> StripeExporter:
        return StripeExporter(self.double.api_key, self.double.url, http_client=self.http(), sleep=lambda _: None)

    @property
    def there(self) -> str:
        return str(self.invoice.stripe_invoice_id)

    @property
    def here(self) -> Invoice:
        found = self.house.restart().invoice(self.invoice.id)
        assert isinstance(found, Invoice)
        self.hooks._billing = self.house.billing
        return found

    def send(self, event: dict[str, Any], *, age_s: int = 0, secret: str = SECRET) -> str:
        raw = json.dumps(event).encode()
        return self.hooks.receive(raw, signature(raw, secret, int(time.time()) - age_s))

    def events(self, *types: str) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(one)) for one in self.double.state.events if one["type"] in types or not types]


@pytest.fixture
def endpoint(house: Any, stripe_double: StripeDouble) -> Endpoint:
    return Endpoint(house, stripe_double)


def rows(endpoint: Endpoint, kind: str) -> int:
    return sum(row.type == kind for row in endpoint.house.billing._store.read(0, 10_000))


def test_paid_there_is_paid_here_once(endpoint: Endpoint) -> None:
    endpoint.client.invoices.pay(endpoint.there)
    (event,) = endpoint.events("invoice.paid")
    assert [endpoint.send(event), endpoint.send(event)] == ["moved", "duplicate"]
    paid = endpoint.here
    assert (paid.status, paid.paid_us is not None) == (InvoiceStatus.PAID, True)
    assert endpoint.send(event) == "duplicate"  # in a process that never saw it
    assert (rows(endpoint, "provider.event"), rows(endpoint, "invoice.paid")) == (1, 1)


@pytest.mark.parametrize("end", ["void_invoice", "mark_uncollectible"])
def test_given_up_there_is_given_up_here(endpoint: Endpoint, end: str) -> None:
    getattr(endpoint.client.invoices, end)(endpoint.there)
    endpoint.send(endpoint.events()[-1])
    expected = {"void_invoice": InvoiceStatus.VOID, "mark_uncollectible": InvoiceStatus.UNCOLLECTIBLE}[end]
    assert endpoint.here.status is expected
    if end == "mark_uncollectible":  # and it may still be paid
        endpoint.client.invoices.pay(endpoint.there)
        endpoint.send(endpoint.events("invoice.paid")[0])
        assert endpoint.here.status is InvoiceStatus.PAID


def test_a_failed_payment_is_counted_once_whatever_tells_of_it(endpoint: Endpoint) -> None:
    (made,) = endpoint.double.invoices()
    for attempt in (1, 2):
        made["attempt_count"] = attempt
        endpoint.double.state.touch(made, "invoice.payment_failed")
    failed = endpoint.events("invoice.payment_failed")
    assert [endpoint.send(event) for event in reversed(failed)] == ["moved", "unchanged"]
    here = endpoint.here
    assert (here.status, here.payment_failures) == (InvoiceStatus.EXPORTED, 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keyed", [True, False])
def test_any_order_any_number_of_times(house: Any, stripe_double: StripeDouble, seed: int, keyed: bool) -> None:
    endpoint = Endpoint(house, stripe_double, keyed=keyed)
    made = endpoint.double.invoices()[0]
    made["attempt_count"] = 1
    endpoint.double.state.touch(made, "invoice.payment_failed")
    endpoint.client.invoices.mark_uncollectible(endpoint.there)
    endpoint.client.invoices.pay(endpoint.there)
    queue = endpoint.events() * 2
    random.Random(seed).shuffle(queue)
    for event in queue:
        endpoint.send(event)
    assert endpoint.here.status is InvoiceStatus.PAID
    assert rows(endpoint, "provider.event") == len(queue) // 2
    assert rows(endpoint, "invoice.paid") == 1


def test_what_is_not_ours_is_noted_and_moves_nothing(endpoint: Endpoint) -> None:
    endpoint.client.invoices.pay(endpoint.there)
    (paid,) = endpoint.events("invoice.paid")
    copy = {**paid, "id": "evt_copy", "data": {"object": {**paid["data"]["object"], "id": "in_other"}}}
    unknown = {**paid, "id": "evt_new", "type": "invoice.of_the_future", "data": {"object": {"object": "thing"}}}
    foreign = {**paid, "id": "evt_foreign", "account": "acct_other"}
    live = {**paid, "id": "evt_live", "livemode": True}
    assert [endpoint.send(one) for one in (copy, unknown, foreign, live)] == [
        "unchanged",
        "unchanged",
        "of another account",
        "of the other mode",
    ]
    assert endpoint.here.status is InvoiceStatus.EXPORTED
    assert rows(endpoint, "provider.event") == 4


@pytest.mark.parametrize(("age_s", "secret"), [(301, SECRET), (-400, SECRET), (-(10**9), SECRET), (0, "whsec_wrong")])
def test_a_signature_of_another_time_or_hand_is_refused(endpoint: Endpoint, age_s: int, secret: str) -> None:
    event = endpoint.events()[-1]
    with pytest.raises(WebhookRefused):
        endpoint.send(event, age_s=age_s, secret=secret)
    assert rows(endpoint, "provider.event") == 0
    assert endpoint.send(event, age_s=290) == "unchanged"
    assert endpoint.send(endpoint.events()[-2], age_s=-290, secret="whsec_old") == "unchanged"


@pytest.mark.parametrize("header", ["", "t=1", "v1=00", "t=x,v1=00", "t=1,v1=", "t=,v1=é", ",,,", "t=1,t=2,v1=3"])
def test_a_header_of_nonsense_is_refused(endpoint: Endpoint, header: str) -> None:
    with pytest.raises(WebhookRefused):
        endpoint.hooks.receive(b"{}", header)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"id":1}', b"\xff", b'{"object":"event","id":"","type":"a"}'])
def test_a_signed_body_that_is_no_event_is_refused(endpoint: Endpoint, raw: bytes) -> None:
    with pytest.raises(WebhookRefused):
        endpoint.hooks.receive(raw, signature(raw, SECRET, int(time.time())))


def test_a_message_that_comes_before_the_export_is_recorded_comes_again(
    house: Any, stripe_double: StripeDouble
) -> None:
    """Stripe pays an invoice of nothing in the moment it is finalized; our own record of the export follows."""
    endpoint = Endpoint(house, stripe_double)
    endpoint.client.invoices.pay(endpoint.there)
    (paid,) = endpoint.events("invoice.paid")
    early = msgspec.structs.replace(
        endpoint.invoice, status=InvoiceStatus.FINALIZED, stripe_invoice_id=None, stripe_ids={}
    )
    house.billing._books.invoices.by_id[early.id] = early
    with pytest.raises(TooEarly):
        endpoint.send(paid)
    house.billing._books.invoices.by_id[early.id] = endpoint.invoice
    assert endpoint.send(paid) == "moved"


def test_stripe_being_away_means_again_later(endpoint: Endpoint) -> None:
    endpoint.client.invoices.pay(endpoint.there)
    (paid,) = endpoint.events("invoice.paid")
    endpoint.double.faults.append(Fault("reset_before", "GET /v1/invoices/.*", times=3))
    with pytest.raises(StripeUnavailable):
        endpoint.send(paid)
    assert endpoint.send(paid) == "moved"


def test_drift_that_no_message_told_of_is_made_up_by_a_look(endpoint: Endpoint) -> None:
    endpoint.client.invoices.pay(endpoint.there)
    assert [one.id for one in endpoint.house.billing.sync_invoices(endpoint.exporter.look)] == [endpoint.invoice.id]
    assert endpoint.house.billing.sync_invoices(endpoint.exporter.look) == []
    assert endpoint.here.status is InvoiceStatus.PAID


OURS = (
    InvoiceStatus.EXPORTED,
    InvoiceStatus.PAID,
    InvoiceStatus.UNCOLLECTIBLE,
    InvoiceStatus.VOID,
    InvoiceStatus.DRAFT,
)


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("theirs", ["draft", "open", "paid", "uncollectible", "void", "of_the_future"])
def test_nothing_moves_backwards(house: Any, ours: InvoiceStatus, theirs: str) -> None:
    invoice = msgspec.structs.replace(final(house), status=ours)
    found = [type(fact).__struct_config__.tag for fact in moves(invoice, _there(theirs), 1)]
    forwards = {
        (InvoiceStatus.EXPORTED, "paid"): ["invoice.paid"],
        (InvoiceStatus.EXPORTED, "uncollectible"): ["invoice.uncollectible"],
        (InvoiceStatus.EXPORTED, "void"): ["invoice.voided"],
        (InvoiceStatus.UNCOLLECTIBLE, "paid"): ["invoice.paid"],
        (InvoiceStatus.UNCOLLECTIBLE, "void"): ["invoice.voided"],
    }
    assert found == forwards.get((ours, theirs), [])


def _there(status: str) -> ProviderInvoice:
    return ProviderInvoice(id="in_1", status=status, total_minor=1)


def test_a_kill_between_message_and_effect_is_no_state(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are one transaction: when the process dies in it neither stands, and the message comes again."""
    endpoint.client.invoices.pay(endpoint.there)
    (paid,) = endpoint.events("invoice.paid")
    billing = endpoint.house.billing

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(billing, "_catch_up_as_writer", die)
    with pytest.raises(KeyboardInterrupt):
        endpoint.send(paid)
    monkeypatch.undo()
    assert endpoint.here.status is InvoiceStatus.EXPORTED
    assert endpoint.send(paid) == "moved"


def test_the_fields_of_a_message(endpoint: Endpoint) -> None:
    event = endpoint.events()[-1]
    endpoint.send(event)
    (row,) = endpoint.house.billing._store.scan("stripe")
    assert (row.key, row.actor) == (f"stripe:{event['id']}", "stripe")
    assert json.loads(row.payload) == {
        "type": "provider.event",
        "id": event["id"],
        "kind": event["type"],
        "created_s": event["created"],
        "object_id": endpoint.there,
        "invoice_id": endpoint.invoice.id,
        "outcome": "unchanged",
    }


def test_an_invoice_of_an_older_ledger_is_one_that_nobody_paid() -> None:
    """Its row as it was written before there were payments: to the byte, and what it folds to."""
    written = (
        '{"type":"invoice.drafted","invoice":{"id":"inv-1","tenant":"acme","currency":"usd","status":"exported",'
        '"period_start_us":0,"period_end_us":1,"cut_us":1,"cut_seq":1,"lines":[],"total_minor":7,"event_count":0,'
        '"events_digest":"","created_us":1,"finalized_us":2,"export_started_us":3,"exported_us":4,"voided_us":null,'
        '"voided_seq":null,"stripe_invoice_id":"in_1","stripe_ids":{}}}'
    )
    tenant = '{"type":"tenant.created","tenant":{"id":"acme","name":"Acme","currency":"usd","created_us":1}}'
    books = Books()
    for seq, (stream, kind, text) in enumerate(
        [("tenant:acme", "tenant.created", tenant), ("invoice:inv-1", "invoice.drafted", written)], start=1
    ):
        row = StoredEvent(seq, stream, 1, kind, text, "system", 1, None, None, None, "")
        books.apply(msgspec.structs.replace(row, hash=chained(books.hash, row)))
    invoice = books.invoices.get("inv-1")
    assert (invoice.status, invoice.paid_us, invoice.payment_failures) == (InvoiceStatus.EXPORTED, None, 0)
    assert [type(fact).__struct_config__.tag for fact in moves(invoice, _there("paid"), 9)] == ["invoice.paid"]
