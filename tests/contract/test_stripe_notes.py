"""Credit notes in Stripe under every state, fault and kill: one note, over our amount, and nothing when it is void."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import stripe

from billing.errors import Conflict, StripeNotConfigured
from billing.invoice import Invoice
from billing.notes import CreditNote, Way
from billing.stripe import StripeExporter, StripeMismatch, StripeRefused, StripeUnavailable
from tests.contract.test_stripe_export import INVOICE, Killed, KillingClient, _export, _exporter, _no_waiting
from tests.contract.test_stripe_void import _client
from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.faults import KINDS

__all__ = ["_no_waiting"]  # the SDK's waits are off here too

CALLS = 4  # of a first note: look at the invoice, list, create, list
VOID_CALLS = 2  # list, void
NOTE = CreditNote(
    id="note-1",
    number="inv-1-CN1",
    invoice_id=INVOICE.id,
    tenant=INVOICE.tenant,
    currency="usd",
    amount_minor=700,
    tax_minor=0,
    reason="an outage",
    way=Way.BALANCE,
    created_us=1,
)


def _ours(double: StripeDouble, state: str = "open") -> Invoice:
    """Our invoice, exported, and what somebody made of it in Stripe."""
    made = _export(double).stripe_invoice_id
    if state == "paid":
        _client(double).invoices.pay(made)
    elif state == "uncollectible":
        _client(double).invoices.mark_uncollectible(made)
    elif state == "void":
        _client(double).invoices.void_invoice(made)
    double.calls.clear()
    return msgspec.structs.replace(INVOICE, stripe_invoice_id=made)


def _until(work: Callable[[], Any], between: Callable[[], None] = lambda: None, tries: int = 12) -> Any:
    for _ in range(tries):
        try:
            return work()
        except StripeUnavailable:
            between()
    raise AssertionError("it never came through")


def _assert_once(double: StripeDouble, id: str, invoice: Invoice, note: CreditNote = NOTE) -> None:
    (made,) = double.state.all("credit_note")
    assert (made["id"], made["amount"], made["status"]) == (id, note.amount_minor, "issued")
    assert (made["invoice"], made["metadata"]) == (invoice.stripe_invoice_id, {"meterhouse_credit_note": note.id})
    theirs = _exporter(double).look(invoice)
    assert theirs is not None
    assert (theirs.credited_minor, theirs.total_minor) == (note.amount_minor, invoice.total_minor)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("state", ["open", "paid", "uncollectible"])
def test_a_note_lowers_what_is_asked_or_sends_back_what_was_paid(
    stripe_double: StripeDouble, state: str, way: Way
) -> None:
    invoice = _ours(stripe_double, state)
    note = msgspec.structs.replace(NOTE, way=way)
    id = _exporter(stripe_double).credit(note, invoice)
    assert len(stripe_double.calls) == CALLS
    _assert_once(stripe_double, id, invoice, note)
    (made,) = stripe_double.state.all("credit_note")
    assert made["memo"] == "inv-1-CN1: an outage"
    beyond = 700 if state == "paid" else 0
    assert (made["pre_payment_amount"], made["post_payment_amount"]) == (700 - beyond, beyond)
    for hours in (0, 30):
        stripe_double.clock.advance(hours=hours)
        assert _exporter(stripe_double).credit(note, invoice) == id
    _assert_once(stripe_double, id, invoice, note)


def test_a_note_over_more_than_is_open_is_split(stripe_double: StripeDouble) -> None:
    invoice = _ours(stripe_double)
    (theirs,) = stripe_double.invoices()
    theirs["amount_remaining"] = 100
    id = _exporter(stripe_double).credit(NOTE, invoice)
    (made,) = stripe_double.state.all("credit_note")
    assert (made["id"], made["pre_payment_amount"], made["post_payment_amount"]) == (id, 100, 600)


def test_notes_over_all_of_it_pay_the_invoice_and_one_more_cent_is_refused(stripe_double: StripeDouble) -> None:
    invoice = _ours(stripe_double)
    rest = msgspec.structs.replace(NOTE, id="note-2", amount_minor=invoice.total_minor - 700)
    for note in (NOTE, rest):
        _exporter(stripe_double).credit(note, invoice)
    assert stripe_double.invoices()[0]["status"] == "paid"
    with pytest.raises(StripeRefused, match="exceeds"):
        _exporter(stripe_double).credit(msgspec.structs.replace(NOTE, id="note-3", amount_minor=1), invoice)


def test_an_invoice_that_is_void_or_not_there_takes_no_note(stripe_double: StripeDouble) -> None:
    with pytest.raises(Conflict, match="no standing invoice"):
        _exporter(stripe_double).credit(NOTE, INVOICE)
    with pytest.raises(Conflict, match="no standing invoice"):
        _exporter(stripe_double).credit(NOTE, _ours(stripe_double, "void"))
    with pytest.raises(StripeNotConfigured):
        StripeExporter(None, "http://127.0.0.1:9").credit(NOTE, INVOICE)


def test_a_note_of_another_amount_or_made_twice_by_hand_is_a_mismatch(stripe_double: StripeDouble) -> None:
    invoice = _ours(stripe_double)
    _exporter(stripe_double).credit(NOTE, invoice)
    with pytest.raises(StripeMismatch, match="over 700 minor units"):
        _exporter(stripe_double).credit(msgspec.structs.replace(NOTE, amount_minor=701), invoice)
    _client(stripe_double).credit_notes.create(
        {"invoice": str(invoice.stripe_invoice_id), "amount": 1, "metadata": {"meterhouse_credit_note": NOTE.id}}
    )
    with pytest.raises(StripeMismatch, match="more than one"):
        _exporter(stripe_double).credit(NOTE, invoice)


def test_paid_between_look_and_act_it_is_begun_again_with_the_new_split(stripe_double: StripeDouble) -> None:
    invoice = _ours(stripe_double)

    class Paying(stripe.RequestsClient):
        def request(self, method: str, url: str, headers: Any, post_data: Any = None) -> Any:
            if method == "post" and stripe_double.invoices()[0]["status"] == "open":
                _client(stripe_double).invoices.pay(str(invoice.stripe_invoice_id))
            return super().request(method, url, headers, post_data)

    with pytest.raises(StripeRefused, match="post-payment"):
        _exporter(stripe_double, Paying(timeout=5)).credit(NOTE, invoice)
    _assert_once(stripe_double, _exporter(stripe_double).credit(NOTE, invoice), invoice)


@pytest.mark.parametrize("known", [False, True])
def test_a_void_of_a_note_on_an_open_invoice_is_done_once(stripe_double: StripeDouble, known: bool) -> None:
    invoice = _ours(stripe_double)
    if known:
        _exporter(stripe_double).credit(NOTE, invoice)
    for _ in range(2):
        _exporter(stripe_double).void_credit(NOTE, invoice)
        assert {made["status"] for made in stripe_double.state.all("credit_note")} <= {"void"}
    assert sum(event["type"] == "credit_note.voided" for event in stripe_double.state.events) == known
    theirs = _exporter(stripe_double).look(invoice)
    assert theirs is not None
    assert theirs.credited_minor == 0


def test_stripe_does_not_void_a_note_on_a_paid_invoice(stripe_double: StripeDouble) -> None:
    invoice = _ours(stripe_double, "paid")
    id = _exporter(stripe_double).credit(NOTE, invoice)
    with pytest.raises(StripeRefused, match="open invoice"):
        _exporter(stripe_double).void_credit(NOTE, invoice)
    _assert_once(stripe_double, id, invoice)


# -- faults and kills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_fault_at_any_call_of_a_note(kind: Any) -> None:
    for call in range(CALLS):
        state = "paid" if call % 2 else "open"
        with StripeDouble() as double:
            invoice = _ours(double, state)
            double.faults.append(Fault(kind, nth=call, seconds=0.3))

            def later(double: StripeDouble = double) -> None:
                time.sleep(0.15 if kind.startswith("hang") else 0)
                double.clock.advance(hours=30)

            id = _until(lambda double=double, invoice=invoice: _exporter(double).credit(NOTE, invoice), later)
            time.sleep(0.3 if kind.startswith("hang") else 0)  # what hung lands
            _assert_once(double, id, invoice)


@pytest.mark.parametrize("seed", range(6))
def test_faults_of_a_note_and_its_void_at_random(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not kind.startswith("hang")]
    with StripeDouble() as double:
        invoice = _ours(double)

        def faulty() -> None:
            double.faults += [Fault(chance.choice(kinds), nth=chance.randrange(3 * CALLS)) for _ in range(8)]

        def later() -> None:
            double.clock.advance(hours=chance.choice((0, 0, 30)))

        faulty()
        id = _until(lambda: _exporter(double).credit(NOTE, invoice), later, tries=40)
        double.faults.clear()
        _assert_once(double, id, invoice)
        faulty()
        _until(lambda: _exporter(double).void_credit(NOTE, invoice), later, tries=40)
        assert [made["status"] for made in double.state.all("credit_note")] == ["void"]


@pytest.mark.parametrize("hours", [0, 30])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("act", ["credit", "void_credit"])
def test_killed_at_any_call_and_begun_again(act: str, when: str, hours: int) -> None:
    for call in range(CALLS if act == "credit" else VOID_CALLS):
        with StripeDouble() as double:
            invoice = _ours(double)
            if act == "void_credit":
                _exporter(double).credit(NOTE, invoice)
            with pytest.raises(Killed):
                getattr(_exporter(double, KillingClient(call, when)), act)(NOTE, invoice)
            double.clock.advance(hours=hours)
            done = getattr(_exporter(double), act)(NOTE, invoice)
            if act == "credit":
                _assert_once(double, done, invoice)
            else:
                assert [made["status"] for made in double.state.all("credit_note")] == ["void"]
