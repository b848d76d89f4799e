"""A ledger that was changed behind the server's back is not served from: it is told, with the event."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest

from billing.errors import LedgerCorrupt


def tamper(url: str, statement: str) -> None:
    """What who owns the file can do."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute(statement)
        db.commit()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET payload = replace(payload, '\"10.00\"', '\"99.00\"') WHERE type = 'credit.granted'",
        "DELETE FROM events WHERE type = 'credit.granted'",
    ],
)
def test_a_start_refuses_what_breaks_the_chain(house: Any, statement: str) -> None:
    house.billing.grant_credit("acme", "10.00", "usd", "before")
    granted = house.billing.balance("acme").granted_femto
    at = house.billing._books.seq
    house.use()
    assert house.restart().balance("acme").granted_femto == granted
    tamper(house.url, statement)
    with pytest.raises(LedgerCorrupt) as caught:
        house.open()
    assert caught.value.seq == at


def test_a_running_server_finds_it_in_what_another_appended(house: Any) -> None:
    other = house.open()
    other.grant_credit("acme", "10.00", "usd", "by another process")
    tamper(house.url, "UPDATE events SET payload = replace(payload, '\"10.00\"', '\"99.00\"')")
    before = house.billing.balance("acme")
    with pytest.raises(LedgerCorrupt):
        house.billing.refresh()
    assert house.billing.balance("acme") == before


def test_reconcile_finds_what_a_running_server_read_before_it_was_changed(house: Any) -> None:
    event = house.use()
    tamper(house.url, "UPDATE events SET payload = replace(payload, '\"prompt_tokens\":10', '\"prompt_tokens\":9')")
    report = house.billing.reconcile(event.ts_us, event.ts_us + 1, usage=house.shelf)
    assert not report.ok
    assert report.chain.broken_at == house.billing._books.seq
    assert report.differences[0].between == "ledger and its hash chain"


def test_reconcile_finds_what_another_appended(house: Any) -> None:
    event = house.use()
    last = house.billing._books.seq
    house.open().grant_credit("acme", "10.00", "usd", "by another process")
    tamper(house.url, "UPDATE events SET payload = replace(payload, '\"10.00\"', '\"99.00\"')")
    report = house.billing.reconcile(event.ts_us, event.ts_us + 1, usage=house.shelf)
    assert (report.ok, report.chain.to_seq, report.chain.broken_at) == (False, last, last + 1)
