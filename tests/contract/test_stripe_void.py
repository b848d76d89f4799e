"""The void of an export under every state, fault and kill: nothing is left that anybody could be asked to pay."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import stripe

from billing.errors import Conflict, StripeNotConfigured
from billing.stripe import StripeExporter, StripeUnavailable
from tests.contract.test_stripe_export import (
    CALLS,
    INVOICE,
    TENANT,
    Killed,
    KillingClient,
    _export,
    _exporter,
    _invoice,
    _no_waiting,
)
from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.clock import Clock
from tests.doubles.stripe.faults import KINDS

__all__ = ["_no_waiting"]  # the SDK's waits are off here too

VOID_CALLS = 6  # of an open invoice whose id is not known: search, list, look, look, void, look


def _client(double: StripeDouble) -> stripe.V1Services:
    return stripe.StripeClient(double.api_key, base_addresses={"api": double.url}).v1


def _made(double: StripeDouble, state: str) -> str:
    """Our invoice as an export and a person at Stripe's dashboard left it; its id there."""
    if state == "draft":
        with pytest.raises(Killed):
            _exporter(double, KillingClient(CALLS - 1, "before")).export(INVOICE, TENANT, {})
        return str(double.invoices()[0]["id"])
    made = _export(double).stripe_invoice_id
    if state == "uncollectible":
        _client(double).invoices.mark_uncollectible(made)
    elif state == "void":
        _client(double).invoices.void_invoice(made)
    elif state == "paid":
        _client(double).invoices.pay(made)
    return made


def _until_void(double: StripeDouble, between: Callable[[], None] = lambda: None, tries: int = 12) -> None:
    for _ in range(tries):
        try:
            return _exporter(double).void(INVOICE, {})
        except StripeUnavailable:
            between()
    raise AssertionError("the void never came through")


def _told(double: StripeDouble, kind: str) -> int:
    """How often Stripe did something to an invoice, by its events."""
    return sum(event["type"] == f"invoice.{kind}" for event in double.state.events)


def _assert_ended_once(double: StripeDouble, state: str) -> None:
    assert {invoice["status"] for invoice in double.invoices()} <= {"void"}
    assert (_told(double, "deleted"), _told(double, "voided")) == ((1, 0) if state == "draft" else (0, 1))


@pytest.mark.parametrize("hours", [0, 30])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("state", ["draft", "open", "uncollectible", "void"])
def test_whatever_stands_in_stripe_is_ended_once(
    stripe_double: StripeDouble, state: str, known: bool, hours: int
) -> None:
    made = _made(stripe_double, state)
    stripe_double.clock.advance(hours=hours)
    ids = {INVOICE.id: made} if known else {}
    for _ in range(2):
        _exporter(stripe_double).void(INVOICE, ids)
        _assert_ended_once(stripe_double, state)


def test_what_never_reached_stripe_is_void_at_once(stripe_double: StripeDouble) -> None:
    other = _export(stripe_double, _invoice(id="inv-2"))
    _exporter(stripe_double).void(INVOICE, {})
    _exporter(stripe_double).void(INVOICE, {INVOICE.id: "in_gone"})
    assert {call.method for call in stripe_double.calls[CALLS:]} == {"GET"}
    assert [(one["id"], one["status"]) for one in stripe_double.invoices()] == [(other.stripe_invoice_id, "open")]


@pytest.mark.parametrize("known", [False, True])
def test_a_paid_invoice_is_left_alone_and_the_way_out_named(stripe_double: StripeDouble, known: bool) -> None:
    made = _made(stripe_double, "paid")
    with pytest.raises(Conflict, match="credit note"):
        _exporter(stripe_double).void(INVOICE, {INVOICE.id: made} if known else {})
    assert stripe_double.invoices()[0]["status"] == "paid"


def test_an_invoice_of_nothing_that_stripe_paid_by_itself_is_no_hindrance(stripe_double: StripeDouble) -> None:
    empty = _invoice((), price_nano=10)
    assert _export(stripe_double, empty).status == "paid"
    _exporter(stripe_double).void(empty, {})


def test_the_export_of_an_invoice_that_is_void_in_stripe_says_what_to_do(stripe_double: StripeDouble) -> None:
    made = _made(stripe_double, "void")
    for ids in ({}, {INVOICE.id: made}):
        with pytest.raises(Conflict, match="void it here too"):
            _exporter(stripe_double).export(INVOICE, TENANT, ids)
    assert len(stripe_double.invoices()) == 1


def test_two_voids_at_once_and_one_by_hand_are_one(stripe_double: StripeDouble) -> None:
    """Between our look and our act somebody voids it at the dashboard: what Stripe then refuses is no failure."""
    made = _made(stripe_double, "open")

    class Meddling(stripe.RequestsClient):
        def request(self, method: str, url: str, headers: Any, post_data: Any = None) -> Any:
            if method == "post" and url.endswith("/void"):
                _client(stripe_double).invoices.void_invoice(made)
            return super().request(method, url, headers, post_data)

    _exporter(stripe_double, Meddling(timeout=5)).void(INVOICE, {})
    _assert_ended_once(stripe_double, "open")


def test_an_invoice_paid_between_look_and_act_is_told(stripe_double: StripeDouble) -> None:
    made = _made(stripe_double, "open")

    class Paying(stripe.RequestsClient):
        def request(self, method: str, url: str, headers: Any, post_data: Any = None) -> Any:
            if method == "post" and url.endswith("/void"):
                _client(stripe_double).invoices.pay(made)
            return super().request(method, url, headers, post_data)

    with pytest.raises(Conflict, match="credit note"):
        _exporter(stripe_double, Paying(timeout=5)).void(INVOICE, {})
    assert stripe_double.invoices()[0]["status"] == "paid"


def test_without_a_key_nothing_is_asked() -> None:
    with pytest.raises(StripeNotConfigured, match="STRIPE_API_KEY"):
        StripeExporter(None, "http://127.0.0.1:9").void(INVOICE, {})


# -- faults and kills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["draft", "open"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_fault_at_any_call_of_a_void(kind: Any, state: str) -> None:
    for call in range(VOID_CALLS):
        with StripeDouble() as double:
            _made(double, state)
            double.faults.append(Fault(kind, nth=call, seconds=0.3))

            def later(clock: Clock = double.clock) -> None:
                time.sleep(0.15 if kind.startswith("hang") else 0)
                clock.advance(hours=30)

            _until_void(double, later)
            time.sleep(0.3 if kind.startswith("hang") else 0)  # what hung lands
            _assert_ended_once(double, state)


@pytest.mark.parametrize("seed", range(8))
def test_faults_of_a_void_at_random(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not kind.startswith("hang")]
    state = chance.choice(("draft", "open", "uncollectible"))
    with StripeDouble() as double:
        _made(double, state)
        double.faults += [Fault(chance.choice(kinds), nth=chance.randrange(3 * VOID_CALLS)) for _ in range(12)]
        _until_void(double, lambda: double.clock.advance(hours=chance.choice((0, 0, 30))), tries=40)
        _assert_ended_once(double, state)


@pytest.mark.parametrize("hours", [0, 30])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("state", ["draft", "open"])
def test_a_void_killed_at_any_call_and_begun_again(state: str, when: str, hours: int) -> None:
    for call in range(VOID_CALLS):
        with StripeDouble() as double:
            _made(double, state)
            with pytest.raises(Killed):
                _exporter(double, KillingClient(call, when)).void(INVOICE, {})
            double.clock.advance(hours=hours)
            _exporter(double).void(INVOICE, {})
            _assert_ended_once(double, state)
