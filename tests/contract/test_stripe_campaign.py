"""Long exports under every fault and every kill: 240 lines, and 300 of which the smallest are folded.

The double is spoken to in process, so that a call takes a quarter of a millisecond and not two. In the suite every
fault strikes every call of one export, every kill point is gone through in one history, and a sample of both strikes a
fresh export alone. `METERHOUSE_TEST_STRIPE_CAMPAIGN=1` strikes a fresh export at every point with every fault.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator

import pytest
import stripe

from billing.invoice import ExportResult, Invoice
from billing.stripe import MAX_ITEMS, StripeExporter, StripeUnavailable, items_of
from tests.contract.test_stripe_export import TENANT, Killed, _invoice, _no_waiting
from tests.doubles.stripe import StripeDouble
from tests.doubles.stripe.faults import KINDS, Kind
from tests.doubles.stripe.inprocess import InProcessClient

__all__ = ["_no_waiting"]  # the SDK's waits are off here too

WHOLE = bool(os.environ.get("METERHOUSE_TEST_STRIPE_CAMPAIGN"))
PLAIN = _invoice(tuple(range(1, 241)), price_nano=10**13)
FOLDED = _invoice(tuple(range(1, 301)), price_nano=10**13)
BOTH = pytest.mark.parametrize("invoice", [PLAIN, FOLDED], ids=["240 lines", "300 folded"])
AROUND = 10  # calls of an export beside one for each item


class Striking(InProcessClient):
    """Strikes the calls whose number is in `at`; with `kill` it dies there instead: before the effect or after it."""

    def __init__(self, double: StripeDouble, at: set[int], kind: Kind | None = None, kill: str = "") -> None:
        super().__init__(double, lambda call, number: kind if number in at else None)
        self._at, self._kill = at, kill

    def request(self, *args: object, **more: object) -> tuple[object, int, object]:  # type: ignore[override]
        dies = self._kill and self.calls in self._at
        if dies and self._kill == "before":
            raise Killed
        answer = super().request(*args, **more)  # type: ignore[arg-type]
        if dies:
            raise Killed
        return answer


def _exporter(double: StripeDouble, client: stripe.HTTPClient) -> StripeExporter:
    return StripeExporter(
        double.api_key, double.url, http_client=client, sleep=lambda _: None, clock_s=lambda: double.clock.now()
    )


def _double() -> StripeDouble:
    return StripeDouble()  # its server is bound and never started


@pytest.fixture
def double() -> Iterator[StripeDouble]:
    made = _double()
    yield made
    made.drop()


def _until_done(double: StripeDouble, client: stripe.HTTPClient, invoice: Invoice, hours: int = 0) -> ExportResult:
    exporter = _exporter(double, client)
    for _ in range(400):
        try:
            return exporter.export(invoice, TENANT, {})
        except StripeUnavailable:
            double.clock.advance(hours=hours)
    raise AssertionError("the export never came through")


def _assert_once(double: StripeDouble, result: ExportResult, invoice: Invoice) -> None:
    """One finalized invoice, each of our items once, the total to the cent, one customer."""
    (made,) = double.invoices()
    assert (made["id"], made["status"], made["total"]) == (result.stripe_invoice_id, "open", invoice.total_minor)
    sent = {item.id: item.amount_minor for item in items_of(invoice)}
    items = double.items(made["id"])
    assert {item["metadata"]["meterhouse_line"]: item["amount"] for item in items} == sent
    assert len(items) == len(sent)
    assert len(double.state.all("customer")) == 1


def _calls(invoice: Invoice) -> int:
    made = _double()
    client = InProcessClient(made)
    _assert_once(made, _exporter(made, client).export(invoice, TENANT, {}), invoice)
    made.drop()
    assert client.calls == len(items_of(invoice)) + AROUND
    return client.calls


def test_what_is_folded_is_in_the_statement_line_by_line() -> None:
    items = items_of(FOLDED)
    kept = {item.id for item in items}
    folded = [line for line in FOLDED.lines if line.id not in kept]
    assert len(items) == MAX_ITEMS
    assert sum(item.amount_minor for item in items if ":rest:" in item.id) == sum(line.amount_minor for line in folded)
    assert max(line.amount_minor for line in folded) <= min(i.amount_minor for i in items if ":rest:" not in i.id)
    assert sum(line.amount_minor for line in FOLDED.lines) == FOLDED.total_minor


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_one_export_is_struck(double: StripeDouble, kind: Kind, invoice: Invoice) -> None:
    """The first time that it is made; when the SDK or the next export makes it again it comes through.

    After an answer 500 and after one that cannot be read all items are listed again: there every fourth item is struck.
    """
    rare = kind in ("error_before", "error_after", "garbled_after")
    seen: set[str] = set()
    items = 0

    def struck(call: str, number: int) -> Kind | None:
        nonlocal items
        call = re.sub("(starting_after|created.gte.)=[a-z0-9_]+", r"\1", call)  # pages of a list that grows, the time
        if call in seen:
            return None
        seen.add(call)
        items += "/invoiceitems" in call and call.startswith("post")
        return None if rare and items % 4 else kind

    client = InProcessClient(double, struck)
    hours = 30 if invoice is FOLDED else 0  # until an export that ended is begun again
    _assert_once(double, _until_done(double, client, invoice, hours), invoice)
    assert items == len(items_of(invoice))


@BOTH
@pytest.mark.parametrize(("when", "hours"), [("before", 30), ("after", 0)])
def test_every_kill_point_in_one_history(double: StripeDouble, when: str, hours: int, invoice: Invoice) -> None:
    """Each process makes one thing, or was about to, and dies; the next one finds what there is."""
    killed = 0
    while True:
        client = _DiesAtMake(double, when, nth=0 if when == "after" else 1)
        try:
            result = _exporter(double, client).export(invoice, TENANT, {})
        except Killed:
            killed += 1
            double.clock.advance(hours=hours)
        else:
            break
    _assert_once(double, result, invoice)
    assert killed >= len(items_of(invoice))


class _DiesAtMake(InProcessClient):
    """Dies at the `nth` call that makes something, before it is sent or after its effect took place."""

    def __init__(self, double: StripeDouble, when: str, nth: int) -> None:
        super().__init__(double)
        self._when, self._left = when, nth

    def request(self, method: str, *args: object, **more: object) -> tuple[object, int, object]:  # type: ignore[override]
        dies = method == "post" and self._left == 0
        self._left -= method == "post"
        if dies and self._when == "before":
            raise Killed
        answer = super().request(method, *args, **more)  # type: ignore[arg-type]
        if dies:
            raise Killed
        return answer


def _points(invoice: Invoice) -> list[tuple[int, str, int]]:
    """(call, what strikes it, hours until it is begun again): a sample, or all of them."""
    calls = len(items_of(invoice)) + AROUND
    every = [
        (call, kind, hours)
        for kind in (*KINDS, "kill before", "kill after")
        for call in range(calls)
        for hours in (0, 30)
    ]
    return every if WHOLE else random.Random(invoice.total_minor).sample(every, 12)


@pytest.mark.timeout(0 if WHOLE else 60)
@BOTH
def test_a_fresh_export_struck_once(invoice: Invoice) -> None:
    assert _calls(invoice) == len(items_of(invoice)) + AROUND
    for call, what, hours in _points(invoice):
        double = _double()
        kill = what.removeprefix("kill ") if what.startswith("kill") else ""
        client = Striking(double, {call}, None if kill else what, kill)  # type: ignore[arg-type]
        try:
            result = _until_done(double, client, invoice, hours)
        except Killed:
            double.clock.advance(hours=hours)
            result = _until_done(double, InProcessClient(double), invoice)
        _assert_once(double, result, invoice)
        double.drop()


def test_makers_of_one_customer_at_once_end_with_one(double: StripeDouble) -> None:
    """Two gateways export two invoices of a tenant, renamed between; each call of the one comes between the other's."""
    other = _exporter(double, InProcessClient(double))
    renamed = _invoice(id="inv-2")

    class Meddling(InProcessClient):
        meddled = False

        def request(self, method: str, url: str, *args: object, **more: object) -> tuple[object, int, object]:  # type: ignore[override]
            if method == "post" and url.endswith("/customers") and not self.meddled:
                self.meddled = True
                other.export(renamed, TENANT.__class__(id=TENANT.id, name="New", currency="usd", created_us=1), {})
            return super().request(method, url, *args, **more)  # type: ignore[arg-type]

    _exporter(double, Meddling(double)).export(_invoice(), TENANT, {})
    (customer,) = double.state.all("customer")
    assert {invoice["customer"] for invoice in double.invoices()} == {customer["id"]}
    assert customer["name"] == "New"
