"""Replay: a final invoice is rebuilt from the log and the usage store to the same bytes, or it is told where not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from billing.errors import LedgerCorrupt, NotFound
from billing.invoice import Invoice
from tests.unit.billing.test_tampering import tamper
from tests.unit.billing.test_verify import history


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_every_invoice_is_rebuilt_to_the_same_bytes_whatever_came_after(house: Any, seed: int) -> None:
    ids = list(history(house, seed))
    house.billing.update_tenant("acme", billing_anchor_day=9, timezone="Europe/Berlin")
    house.billing.void_invoice(ids[1])
    house.set_price("base", completion="77")
    billing = house.restart()
    replays = billing.replay_invoices(0, house.clock.now_us, house.shelf)
    assert [one.invoice.id for one in replays] == ids
    assert [one.difference for one in replays] == [""] * 3
    assert all(one.equal and one.content_hash == one.rebuilt_hash for one in replays)
    assert billing.replay_invoice(ids[2], house.shelf).equal
    first = billing.invoice(ids[0])
    assert len(billing.replay_invoices(first.period_start_us, first.period_start_us + 1, house.shelf)) == 1


def test_it_names_what_cannot_be_rebuilt(house: Any) -> None:
    *_, last = history(house, 0)
    invoice = house.billing.invoice(last)
    events = list(house.billing.invoice_events(invoice, house.shelf))
    house.shelf.kept = [event for event in house.shelf.kept if event.event_id != events[3].event_id]
    replay = house.billing.replay_invoice(last, house.shelf)
    assert (replay.equal, replay.rebuilt_hash) == (False, "")
    assert events[3].event_id in replay.difference
    forged = [event for event in house.shelf.kept if event is not events[5]]
    house.shelf.kept = [*forged, events[3], msgspec.structs.replace(events[5], completion_tokens=1)]
    assert events[5].event_id in house.billing.replay_invoice(last, house.shelf).difference
    with pytest.raises(NotFound):
        house.billing.replay_invoice("nothing", house.shelf)


def test_it_names_the_first_difference(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(history(house, 0))
    monkeypatch.setattr("billing.taken.Taken.digest", lambda self: "another")
    replay = house.billing.replay_invoice(first, house.shelf)
    assert replay.difference.startswith("events.digest: ")
    assert replay.difference.endswith('"another" now')
    assert replay.content_hash != replay.rebuilt_hash


def test_a_log_that_was_changed_is_not_rebuilt_from(house: Any) -> None:
    first = next(history(house, 0))
    tamper(house.url, 'UPDATE events SET payload = replace(payload, \'"currency":"usd"\', \'"currency":"eur"\')')
    with pytest.raises(LedgerCorrupt):
        house.billing.replay_invoice(first, house.shelf)


def test_an_invoice_of_an_older_ledger_is_rebuilt_as_far_as_it_goes(house: Any) -> None:
    first = next(history(house, 0))
    old = msgspec.structs.replace(house.billing.invoice(first), basis=None, content_hash="", signed=None)
    house.billing._books.invoices.by_id[first] = old
    assert house.billing.replay_invoice(first, house.shelf).equal
    wrong: Invoice = msgspec.structs.replace(old, total_minor=old.total_minor + 1)
    house.billing._books.invoices.by_id[first] = wrong
    assert house.billing.replay_invoice(first, house.shelf).difference.startswith("total_minor: ")
