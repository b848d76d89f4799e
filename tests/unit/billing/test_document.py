"""The document of an invoice: complete, the same for ever, and compared with what was said at the cut."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

import msgspec
import pytest

from billing import merkle
from billing.document import canonical, document
from billing.errors import Conflict
from billing.invoice import Invoice
from billing.offers import ClassOffer, TierOffer
from billing.periods import period_at
from billing.service import Balance, cutting
from billing.tiers import PriceModel
from metering.receipts import leaf_of

FOREVER = 2**62
VOLUME = ClassOffer(model=PriceModel.VOLUME, tiers=(TierOffer(price="10", up_to=100), TierOffer(price="5")))


def offer(house: Any, **classes: ClassOffer) -> str:
    flat = {name: "0" for name in ("prompt", "cached", "completion") if name not in classes}
    price = house.billing.set_price(
        model="*", effective_at_us=0, currency="usd", per_million=flat, tenant="acme", classes=classes
    )
    return str(price.id)


def draft(house: Any) -> Invoice:
    period = period_at(house.clock.now_us)
    house.clock.now_us = period.end_us
    made = house.billing.draft_invoice("acme", period.start_us, period.end_us, usage=house.shelf, watermark_us=FOREVER)
    assert isinstance(made, Invoice)
    return made


def floats(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [found for one in value.values() for found in floats(one)]
    if isinstance(value, list):
        return [found for one in value for found in floats(one)]
    return [value] if isinstance(value, float) else []


def test_it_says_what_the_invoice_is_cut_from(house: Any) -> None:
    events = [house.use(), house.use(prompt=0, completion=0), house.use(prompt=7)]
    house.set_price("base", prompt="9")
    invoice = draft(house)
    made = house.billing.invoice_document(invoice.id)
    leaves = [leaf_of(event) for event in events]
    assert made["events"] == {
        "count": 3,
        "root": merkle.root(leaves).hex(),
        "digest": invoice.events_digest,
    }
    (price,) = made["prices"]  # the only one that priced anything
    assert [one["tiers"] for one in price["components"]] == [
        [{"price_nano": 10**9, "up_to": None}],
        [{"price_nano": 10**8, "up_to": None}],
        [{"price_nano": 2 * 10**9, "up_to": None}],
    ]
    assert (made["period"]["anchor_day"], made["period"]["timezone"]) == (1, "UTC")
    assert sum(line["amount_minor"] for line in made["lines"]) == made["total_minor"] == invoice.total_minor
    assert floats(made) == []
    assert hashlib.sha256(canonical(made)).hexdigest() == invoice.content_hash
    assert canonical(json.loads(canonical(made))) == canonical(made)


def test_nothing_that_happens_afterwards_changes_it(house: Any) -> None:
    offer(house, completion=VOLUME)
    house.use(prompt=0, completion=90)
    late = house.event(prompt=0, completion=20)
    first = draft(house)
    before = house.billing.invoice_document(first.id)
    house.billing.finalize_invoice(first.id)
    house.shelf.kept.append(late)
    house.billing.record([late])
    offer(house, completion=VOLUME)
    house.use(prompt=0, completion=1)
    second = draft(house)
    said = house.billing.invoice_document(second.id)
    assert [(line["invoice_id"], line["id"], line["exact"]) for line in said["booked"]] == [
        (first.id, first.lines[0].id, str(900 * 10**9))
    ]
    assert said["late"] == [{"invoice_id": first.id, "start_us": first.period_start_us, "end_us": first.period_end_us}]
    assert [one["start_us"] for one in said["counted"]] == [first.period_start_us, second.period_start_us]
    house.billing.update_tenant("acme", billing_anchor_day=9, timezone="Europe/Berlin")
    house.billing.finalize_invoice(second.id)
    house.billing.void_invoice(second.id)
    house.billing.void_invoice(first.id)
    billing = house.restart()
    assert billing.invoice_document(first.id) == before
    assert billing.invoice_document(second.id) == said
    assert billing.reconcile(first.period_start_us, house.clock.now_us, usage=house.shelf).differences == []


def test_a_price_that_came_after_the_usage_is_named_with_it(house: Any) -> None:
    event = house.use(images=1)
    price = offer(house, image=ClassOffer(price="0.25"))
    house.billing.rate_unrated()
    assert house.billing.invoice_document(draft(house).id)["priced_later"] == {event.event_id: price}


def test_reconcile_finds_an_invoice_that_says_something_else_now(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house.use()
    invoice = draft(house)
    monkeypatch.setattr("billing.document.VERSION", 2)
    (found,) = house.billing.reconcile(invoice.period_start_us, invoice.period_end_us, usage=house.shelf).differences
    assert (found.between, found.invoice_id) == ("invoice and its document", invoice.id)
    assert invoice.content_hash in found.left


def test_an_invoice_of_an_older_ledger_has_none_and_opens(house: Any) -> None:
    house.use()
    row = msgspec.json.decode(msgspec.json.encode(draft(house)))
    del row["basis"], row["content_hash"]
    old = msgspec.json.decode(msgspec.json.encode(row), type=Invoice)
    assert (old.basis, old.content_hash) == (None, "")
    house.billing._books.invoices.by_id[old.id] = old
    with pytest.raises(Conflict):
        house.billing.invoice_document(old.id)
    assert house.billing.reconcile(old.period_start_us, old.period_end_us, usage=house.shelf).ok
    assert house.billing.finalize_invoice(old.id).finalized_us


def test_requests_do_not_wait_for_a_long_document(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house.use()
    invoice = draft(house)
    made = house.billing.invoice_document(invoice.id)
    free: list[Balance] = []

    def slow(*given: Any) -> Any:
        asked = threading.Thread(target=lambda: free.append(house.billing.balance("acme")), daemon=True)
        asked.start()
        asked.join(2)
        return document(*given)

    monkeypatch.setattr(cutting, "document", slow)
    assert house.billing.invoice_document(invoice.id) == made
    assert free
