"""The export to Stripe under every fault and every kill: one finalized invoice, the right total, no line twice."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import stripe

from billing.accounts import Tenant
from billing.errors import Conflict, ExportError, StripeNotConfigured
from billing.invoice import ExportResult, Invoice, InvoiceStatus
from billing.line import InvoiceLine, LineKind
from billing.money import MINOR_DIGITS, allocate
from billing.prices import TokenClass
from billing.stripe import (
    MAX_ITEMS,
    StripeExporter,
    StripeMismatch,
    StripeRefused,
    StripeUnavailable,
    items_of,
)
from billing.terms import InvoiceTerms, Tax, TaxMode
from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.clock import Clock
from tests.doubles.stripe.faults import KINDS

ROOT = Path(__file__).resolve().parents[2]
TENANT = Tenant(id='acme\'s "own"', name="Acme", currency="usd", created_us=1)
MONTH_US = (1_793_491_200_000_000, 1_796_083_200_000_000)
CALLS = 13  # of a first export of three lines: 4 look-ups, 2 makes, 1 name, 1 list, 3 items, 1 check, 1 finalize
CLASSES = list(TokenClass)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits half a second before each of its retries."""
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.0)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0.0)


def _invoice(
    quantities: tuple[int, ...] = (2_000_000, 17, 333_333), price_nano: int = 8_165 * 10**6, **more: Any
) -> Invoice:
    """Lines of the given tokens at one price, rounded as billing rounds them."""
    currency = more.get("currency", "usd")
    minors = allocate([quantity * price_nano for quantity in quantities], currency)
    lines = tuple(
        InvoiceLine(
            id=f"inv-1:{n}",
            model="smollm",
            adapter="",
            token_class=CLASSES[n % 3],
            price_id="p1",
            period_start_us=MONTH_US[0],
            period_end_us=MONTH_US[1],
            quantity=quantity,
            unit_price_nano=price_nano,
            amount_minor=minor,
        )
        for n, (quantity, minor) in enumerate(zip(quantities, minors, strict=True))
    )
    fields: dict[str, Any] = {
        "id": "inv-1",
        "tenant": TENANT.id,
        "currency": "usd",
        "status": InvoiceStatus.FINALIZED,
        "period_start_us": MONTH_US[0],
        "period_end_us": MONTH_US[1],
        "cut_us": MONTH_US[1],
        "cut_seq": 1,
        "lines": lines,
        "total_minor": sum(minors),
        "event_count": 3,
        "events_digest": "0" * 64,
        "created_us": MONTH_US[1],
    }
    return Invoice(**{**fields, **more})


INVOICE = _invoice()


def _exporter(double: StripeDouble, client: stripe.HTTPClient | None = None) -> StripeExporter:
    http = client or stripe.RequestsClient(timeout=0.2)
    return StripeExporter(double.api_key, double.url, http_client=http, sleep=lambda _: None)


def _export(double: StripeDouble, invoice: Invoice = INVOICE, tenant: Tenant = TENANT, **ids: str) -> ExportResult:
    return _exporter(double).export(invoice, tenant, ids)


def _until_done(
    double: StripeDouble, between: Callable[[], None] = lambda: None, tries: int = 12, invoice: Invoice = INVOICE
) -> ExportResult:
    """Begin again after every error that allows it, as an operator's retry does."""
    for _ in range(tries):
        try:
            return _export(double, invoice)
        except StripeUnavailable:
            between()
    raise AssertionError("the export never came through")


def _assert_exactly_once(double: StripeDouble, result: ExportResult, invoice: Invoice = INVOICE) -> None:
    (made,) = double.invoices()
    assert (made["id"], made["status"], made["total"]) == (result.stripe_invoice_id, "open", invoice.total_minor)
    items = double.items(made["id"])
    assert {item["metadata"]["meterhouse_line"]: item["amount"] for item in items} == {
        line.id: line.amount_minor for line in invoice.lines
    }
    assert len(items) == len(invoice.lines)
    assert len(double.state.all("customer")) == 1
    assert result.total_minor == invoice.total_minor
    assert result.ids == {invoice.id: made["id"]} | {item["metadata"]["meterhouse_line"]: item["id"] for item in items}


# -- what is sent ---------------------------------------------------------------------------------------------------


def test_an_export_is_a_finalized_invoice_with_our_lines(stripe_double: StripeDouble) -> None:
    result = _export(stripe_double)
    _assert_exactly_once(stripe_double, result)
    assert len(stripe_double.calls) == CALLS
    (made,) = stripe_double.invoices()
    assert made["metadata"] == {"meterhouse_invoice": "inv-1", "meterhouse_tenant": TENANT.id}
    assert (made["auto_advance"], made["currency"]) == (False, "usd")
    item = stripe_double.items(made["id"])[0]
    assert item["description"] == "smollm: 2,000,000 prompt tokens at 8.165 USD per million"
    assert item["period"] == {"start": MONTH_US[0] // 10**6, "end": MONTH_US[1] // 10**6 - 1}
    assert item["amount"] == 1633  # 2 x 8.165


def test_a_tiny_unit_price_is_written_out(stripe_double: StripeDouble) -> None:
    invoice = _invoice((10**12,), price_nano=120)
    _export(stripe_double, invoice)
    (made,) = stripe_double.invoices()
    assert "at 0.00000012 USD per million" in stripe_double.items(made["id"])[0]["description"]
    assert made["total"] == 12


@pytest.mark.parametrize("quantities", [(), (1,), (3, 3)])
def test_an_invoice_of_nothing_is_exported_too(stripe_double: StripeDouble, quantities: tuple[int, ...]) -> None:
    invoice = _invoice(quantities, price_nano=10)
    result = _export(stripe_double, invoice)
    assert (result.total_minor, result.status) == (0, "paid")
    assert _export(stripe_double, invoice) == result
    assert len(stripe_double.invoices()) == 1


@pytest.mark.parametrize("currency", ["jpy", "kwd", "eur"])
def test_amounts_are_in_the_currencys_own_minor_unit(stripe_double: StripeDouble, currency: str) -> None:
    invoice = _invoice((2_000_000,), price_nano=10**12 + 10**10, currency=currency)
    assert _export(stripe_double, invoice).total_minor == 2020 * 10 ** MINOR_DIGITS[currency]


@pytest.mark.parametrize("count", [MAX_ITEMS, MAX_ITEMS + 1, 1000])
def test_more_lines_than_stripe_takes_are_folded_smallest_first(stripe_double: StripeDouble, count: int) -> None:
    invoice = _invoice(tuple(range(1, count + 1)), price_nano=10**13)
    result = _export(stripe_double, invoice)
    items = stripe_double.items(result.stripe_invoice_id)
    sent = items_of(invoice)
    assert result.total_minor == invoice.total_minor == sum(item["amount"] for item in items)
    assert [(item["metadata"]["meterhouse_line"], item["amount"]) for item in items] == [i[:2] for i in sent]
    assert len(items) == min(count, MAX_ITEMS)
    if count > MAX_ITEMS:
        kept = {item.id for item in sent}
        largest = sorted(invoice.lines, key=lambda line: -line.amount_minor)[: MAX_ITEMS - 3]
        assert {line.id for line in largest} <= kept
        folded = items[-1]["description"].split()
        assert folded[1:3] == ["smaller", "lines:"]


def test_a_known_customer_is_used_and_an_unknown_one_is_made_once(stripe_double: StripeDouble) -> None:
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    own = client.v1.customers.create({"name": "made by hand"})
    _export(stripe_double, tenant=msgspec.structs.replace(TENANT, stripe_customer_id=own.id))
    assert stripe_double.invoices()[0]["customer"] == own.id
    _export(stripe_double, _invoice(id="inv-2"))
    stripe_double.clock.advance(hours=100)
    _export(stripe_double, _invoice(id="inv-3"))
    assert len({invoice["customer"] for invoice in stripe_double.invoices()}) == 2


def test_lines_below_nothing_go_as_they_are_and_fold_by_kind(stripe_double: StripeDouble) -> None:
    usage = _invoice(tuple(range(1, MAX_ITEMS + 1)), price_nano=10**14)
    off = msgspec.structs.replace(
        usage.lines[0], id="inv-1:off", kind=LineKind.DISCOUNT, token_class=None, name="Ten", rate="10", amount_minor=-5
    )
    invoice = msgspec.structs.replace(usage, lines=(*usage.lines, off), total_minor=usage.total_minor - 5)
    result = _export(stripe_double, invoice)
    items = {item["metadata"]["meterhouse_line"]: item for item in stripe_double.items(result.stripe_invoice_id)}
    assert len(items) <= MAX_ITEMS
    assert sum(item["amount"] for item in items.values()) == invoice.total_minor == result.total_minor
    assert items["inv-1:rest:discount:"]["amount"] == -5
    assert items["inv-1:rest:discount:"]["description"] == "1 smaller lines: discounts"


# -- tax ------------------------------------------------------------------------------------------------------------


def _taxed_there() -> Invoice:
    return _invoice(terms=InvoiceTerms(tax=Tax(mode=TaxMode.STRIPE)))


def test_stripe_tax_is_added_there_and_our_total_is_the_one_without_it(stripe_double: StripeDouble) -> None:
    stripe_double.state.tax_percent = 20
    invoice = _taxed_there()
    result = _export(stripe_double, invoice)
    (made,) = stripe_double.invoices()
    tax = round(invoice.total_minor / 5)
    assert (result.total_minor, result.tax_minor, made["total"]) == (
        invoice.total_minor,
        tax,
        invoice.total_minor + tax,
    )
    assert made["automatic_tax"]["enabled"]
    assert _export(stripe_double, invoice) == result
    theirs = _exporter(stripe_double).look(
        msgspec.structs.replace(invoice, stripe_invoice_id=result.stripe_invoice_id, provider_tax_minor=tax)
    )
    assert theirs is not None
    assert (theirs.total_minor, theirs.tax_minor) == (invoice.total_minor, tax)


def test_without_a_place_stripe_tax_refuses_and_the_export_can_be_begun_again(stripe_double: StripeDouble) -> None:
    with pytest.raises(StripeRefused, match="location"):
        _export(stripe_double, _taxed_there())
    stripe_double.state.tax_percent = 7
    stripe_double.clock.advance(hours=30)
    assert _export(stripe_double, _taxed_there()).tax_minor > 0
    assert len(stripe_double.invoices()) == 1


@pytest.mark.parametrize("kind", ["error_after", "reset_after"])
def test_a_fault_at_any_call_of_a_taxed_export(kind: Any) -> None:
    for call in range(CALLS):
        with StripeDouble() as double:
            double.state.tax_percent = 20
            double.faults.append(Fault(kind, nth=call))
            result = _until_done(double, lambda clock=double.clock: clock.advance(hours=30), invoice=_taxed_there())
            (made,) = double.invoices()
            assert (made["status"], made["total"] - result.tax_minor) == ("open", INVOICE.total_minor)


def test_tax_that_stripe_was_not_asked_for_is_a_mismatch(stripe_double: StripeDouble) -> None:
    stripe_double.state.tax_percent = 20
    with pytest.raises(Killed):
        _exporter(stripe_double, KillingClient(CALLS - 1, "before")).export(_taxed_there(), TENANT, {})
    with pytest.raises(StripeMismatch, match="tax set in Stripe"):
        _export(stripe_double)


# -- again, later, at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [0, 30])
@pytest.mark.parametrize("known", [False, True])
def test_an_exported_invoice_is_found_and_not_made_again(stripe_double: StripeDouble, hours: int, known: bool) -> None:
    first = _export(stripe_double)
    stripe_double.clock.advance(hours=hours)
    assert _export(stripe_double, **({"inv-1": first.stripe_invoice_id} if known else {})) == first
    _assert_exactly_once(stripe_double, first)


def test_two_exports_at_once_make_one_invoice(stripe_double: StripeDouble) -> None:
    results: list[ExportResult] = []
    threads = [threading.Thread(target=lambda: results.append(_until_done(stripe_double))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len({result.stripe_invoice_id for result in results}) == 1
    _assert_exactly_once(stripe_double, results[0])


def test_a_deleted_draft_is_made_anew_although_its_key_is_remembered(stripe_double: StripeDouble) -> None:
    stripe_double.faults.append(Fault("reset_before", "POST /v1/invoices/.*/finalize", times=3))
    with pytest.raises(StripeUnavailable):
        _export(stripe_double)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.invoices.delete(stripe_double.invoices()[0]["id"])
    _assert_exactly_once(stripe_double, _export(stripe_double))


def test_a_deleted_customer_is_made_anew_although_its_key_is_remembered(stripe_double: StripeDouble) -> None:
    stripe_double.faults.append(Fault("reset_before", "POST /v1/invoices", times=3))
    with pytest.raises(StripeUnavailable):
        _export(stripe_double)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.customers.delete(stripe_double.state.all("customer")[0]["id"])
    _assert_exactly_once(stripe_double, _export(stripe_double))


def test_a_tenant_renamed_between_two_attempts_keeps_its_customer(stripe_double: StripeDouble) -> None:
    stripe_double.faults.append(Fault("reset_before", "POST /v1/invoices", times=3))
    with pytest.raises(StripeUnavailable):
        _export(stripe_double)
    _assert_exactly_once(stripe_double, _export(stripe_double, tenant=msgspec.structs.replace(TENANT, name="New")))


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [0, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_any_fault_at_any_call(kind: Any, hours: int) -> None:
    for call in range(CALLS):
        with StripeDouble() as double:
            double.faults.append(Fault(kind, nth=call, seconds=0.3))

            def later(clock: Clock = double.clock) -> None:
                time.sleep(0.15 if kind.startswith("hang") else 0)  # no request hangs for 30 hours: let it land first
                clock.advance(hours=hours)

            result = _until_done(double, later)
            _assert_exactly_once(double, result)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("hang")])
def test_a_fault_that_outlasts_every_retry_of_one_export(kind: Any) -> None:
    for call in range(CALLS):
        with StripeDouble() as double:
            double.faults.append(Fault(kind, nth=call, times=8))
            _assert_exactly_once(double, _until_done(double))


@pytest.mark.parametrize("seed", range(12))
def test_faults_at_random(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not kind.startswith("hang")]
    with StripeDouble() as double:
        double.faults += [Fault(chance.choice(kinds), nth=chance.randrange(3 * CALLS)) for _ in range(20)]
        result = _until_done(double, lambda: double.clock.advance(hours=chance.choice((0, 0, 30))), tries=40)
        _assert_exactly_once(double, result)


def test_a_rate_limit_without_end_gives_up_and_says_so(stripe_double: StripeDouble) -> None:
    stripe_double.faults.append(Fault("rate_limit", times=1000))
    waits: list[float] = []
    exporter = StripeExporter(stripe_double.api_key, stripe_double.url, sleep=waits.append)
    with pytest.raises(StripeUnavailable, match="rate limit"):
        exporter.export(INVOICE, TENANT, {})
    assert len(waits) == 5
    assert all(0 < wait <= 16 for wait in waits)


# -- kills ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no handler catches: as far as the code under test knows, the process is gone."""


class KillingClient(stripe.RequestsClient):
    """Dies at one call: before it is sent, or after it was answered and before anyone saw the answer."""

    def __init__(self, call: int, when: str) -> None:
        super().__init__(timeout=5)
        self._left, self._when = call, when

    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None, post_data: Any = None
    ) -> tuple[bytes, int, Mapping[str, str]]:
        self._left -= 1
        if self._left == -1 and self._when == "before":
            raise Killed
        answer = super().request(method, url, headers, post_data)
        if self._left == -1:
            raise Killed
        return answer


@pytest.mark.parametrize("hours", [0, 30])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_call_and_begun_again(when: str, hours: int) -> None:
    for call in range(CALLS):
        with StripeDouble() as double:
            with pytest.raises(Killed):
                _exporter(double, KillingClient(call, when)).export(INVOICE, TENANT, {})
            double.clock.advance(hours=hours)
            _assert_exactly_once(double, _export(double))


@pytest.mark.parametrize("hours", [0, 30])
def test_killed_at_every_call_in_a_row(hours: int) -> None:
    """Each run gets one call further than what it finds costs, and dies; the last comes through."""
    with StripeDouble() as double:
        for call in range(2 * CALLS):
            try:
                result = _exporter(double, KillingClient(call, "after")).export(INVOICE, TENANT, {})
            except Killed:
                double.clock.advance(hours=hours)
        _assert_exactly_once(double, result)


_CHILD = """
import os, signal, sys
from tests.contract.test_stripe_export import INVOICE, TENANT, Killed, KillingClient
from billing.stripe import StripeExporter
client = KillingClient(int(sys.argv[2]), sys.argv[3])
try:
    StripeExporter("sk_test_meterhouse", sys.argv[1], http_client=client).export(INVOICE, TENANT, {})
except Killed:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("call", "when"), [(4, "after"), (8, "before"), (11, "after")])
def test_a_process_that_is_really_killed(stripe_double: StripeDouble, call: int, when: str) -> None:
    command = [sys.executable, "-c", _CHILD, stripe_double.url, str(call), when]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -9
    _assert_exactly_once(stripe_double, _export(stripe_double))


# -- what must stop it ------------------------------------------------------------------------------------------------


def _stopped_before_finalize(double: StripeDouble) -> dict[str, Any]:
    """A draft with all items, as a crash leaves it."""
    with pytest.raises(Killed):
        _exporter(double, KillingClient(CALLS - 1, "before")).export(INVOICE, TENANT, {})
    return double.invoices()[0]


@pytest.mark.parametrize("meddle", ["foreign item", "other amount", "line twice"])
def test_a_draft_that_is_not_ours_to_the_cent_is_left_alone(stripe_double: StripeDouble, meddle: str) -> None:
    draft = _stopped_before_finalize(stripe_double)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    item = stripe_double.items(draft["id"])[0]
    extra: Any = {"customer": draft["customer"], "invoice": draft["id"], "amount": 0}
    if meddle == "foreign item":
        client.v1.invoice_items.create(extra)
    elif meddle == "line twice":
        client.v1.invoice_items.create({**extra, "metadata": item["metadata"]})
    else:
        client.v1.invoice_items.update(item["id"], {"amount": item["amount"] + 1})
    with pytest.raises(StripeMismatch, match="not finalized"):
        _export(stripe_double)
    assert stripe_double.invoices()[0]["status"] == "draft"


def test_a_total_changed_by_stripe_itself_is_not_finalized(
    stripe_double: StripeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = _stopped_before_finalize(stripe_double)
    stripe_double.invoices()[0]["total"] -= 100  # a discount of the customer, say
    with pytest.raises(StripeMismatch, match="discount"):
        _export(stripe_double)
    assert stripe_double.invoices(id=draft["id"])[0]["status"] == "draft"


def test_an_invoice_voided_in_stripe_is_not_made_again(stripe_double: StripeDouble) -> None:
    result = _export(stripe_double)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.invoices.void_invoice(result.stripe_invoice_id)
    for ids in ({}, {"inv-1": result.stripe_invoice_id}):
        with pytest.raises(Conflict, match="voided"):
            _export(stripe_double, **ids)
    assert len(stripe_double.invoices()) == 1


def test_a_draft_for_another_customer_is_not_used(stripe_double: StripeDouble) -> None:
    _stopped_before_finalize(stripe_double)
    stripe_double.clock.advance(seconds=60)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    other = client.v1.customers.create({"name": "Other"})
    with pytest.raises(StripeMismatch, match="customer"):
        _export(stripe_double, tenant=msgspec.structs.replace(TENANT, stripe_customer_id=other.id))
    assert len(stripe_double.invoices()) == 1


def test_without_a_key_nothing_is_sent() -> None:
    with pytest.raises(StripeNotConfigured, match="STRIPE_API_KEY"):
        StripeExporter(None, "http://127.0.0.1:9").export(INVOICE, TENANT, {})


def test_what_stripe_refuses_is_told_in_its_words(stripe_double: StripeDouble) -> None:
    with pytest.raises(StripeRefused, match="key"):
        StripeExporter("sk_test_wrong", stripe_double.url).export(INVOICE, TENANT, {})
    lost = msgspec.structs.replace(TENANT, stripe_customer_id="cus_nobody")
    with pytest.raises(StripeRefused, match="cus_nobody"):
        _export(stripe_double, tenant=lost)
    _export(stripe_double)
    with pytest.raises(StripeRefused, match="another currency"):
        _export(stripe_double, _invoice(id="inv-2", currency="eur"))


def test_a_refusal_that_was_put_right_is_not_remembered_against_us(stripe_double: StripeDouble) -> None:
    first = _export(stripe_double)
    euros = _invoice(id="inv-2", currency="eur")
    with pytest.raises(StripeRefused):
        _export(stripe_double, euros)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.invoices.pay(first.stripe_invoice_id)
    assert _export(stripe_double, euros).status == "open"


def test_nothing_listening_is_told_as_such() -> None:
    with pytest.raises(StripeUnavailable, match="begun again"):
        StripeExporter("sk_test_meterhouse", "http://127.0.0.1:9", timeout_s=1).export(INVOICE, TENANT, {})


def test_an_invoice_that_contradicts_itself_is_not_sent(stripe_double: StripeDouble) -> None:
    with pytest.raises(ExportError, match="sum to"):
        _export(stripe_double, _invoice(total_minor=1))
    assert stripe_double.calls == []


# -- reading back -----------------------------------------------------------------------------------------------------


def test_what_stripe_holds_is_read_back_and_what_is_gone_is_left_out(stripe_double: StripeDouble) -> None:
    results = {name: _export(stripe_double, _invoice(id=name)) for name in ("inv-1", "inv-2")}
    exported = [_invoice(id=name, stripe_invoice_id=result.stripe_invoice_id) for name, result in results.items()]
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    client.v1.invoices.void_invoice(results["inv-2"].stripe_invoice_id)
    gone = _invoice(id="inv-3", stripe_invoice_id="in_gone")
    never = _invoice(id="inv-4")
    held = _exporter(stripe_double).held([*exported, gone, never])
    assert {id: (one.status, one.total_minor, one.faults) for id, one in held.items()} == {
        "inv-1": ("open", INVOICE.total_minor, ()),
        "inv-2": ("void", INVOICE.total_minor, ()),
    }
    stripe_double.state.objects["invoiceitem"].popitem()
    stripe_double.items(results["inv-2"].stripe_invoice_id)[0]["amount"] += 1
    (faults,) = [one.faults for one in _exporter(stripe_double).held(exported[1:]).values()]
    assert [fault.split(" ", 2)[2].split()[0] for fault in faults] == ["not", "at"]
