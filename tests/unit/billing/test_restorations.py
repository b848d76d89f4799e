"""What is held back after a restore, and until when."""

from __future__ import annotations

import msgspec
import pytest

from billing.books import fact_of, new_event
from billing.invoice import Invoice, InvoiceStatus
from billing.notes import CreditNote, Way
from billing.restorations import ExportsReleased, LedgerRestored, Restorations
from billing.store import StoredEvent

RESTORED = LedgerRestored(backup_id="backup-1", instant_us=1000, seq=50, at_us=2000)


def invoice(cut_seq: int, period_start_us: int) -> Invoice:
    return Invoice(
        id="invoice-1",
        tenant="acme",
        currency="usd",
        status=InvoiceStatus.FINALIZED,
        period_start_us=period_start_us,
        period_end_us=period_start_us + 10,
        cut_us=3000,
        cut_seq=cut_seq,
        lines=(),
        total_minor=0,
        event_count=0,
        events_digest="",
        created_us=3000,
    )


@pytest.mark.parametrize(
    ("cut_seq", "period_start_us", "held"),
    [
        (50, 500, False),  # the backup has it: Stripe knows it by the same id
        (51, 500, True),  # the ledger that is lost may have invoiced the period
        (51, 1999, True),
        (51, 2000, False),  # nobody can have
    ],
)
def test_what_may_have_been_invoiced_in_between_is_held_back(cut_seq: int, period_start_us: int, held: bool) -> None:
    restorations = Restorations()
    assert restorations.refusal(invoice(cut_seq, period_start_us)) == ""
    restorations.apply(RESTORED)
    assert bool(restorations.refusal(invoice(cut_seq, period_start_us))) == held
    restorations.apply(ExportsReleased(backup_id="backup-1"))
    assert restorations.refusal(invoice(cut_seq, period_start_us)) == ""


@pytest.mark.parametrize(("created_us", "held"), [(1999, False), (2000, True)])
def test_a_credit_note_issued_after_a_restore_is_held_back(created_us: int, held: bool) -> None:
    note = CreditNote(
        id="note-1",
        number="invoice-1-CN1",
        invoice_id="invoice-1",
        tenant="acme",
        currency="usd",
        amount_minor=5,
        tax_minor=0,
        reason="r",
        way=Way.BALANCE,
        created_us=created_us,
    )
    restorations = Restorations()
    assert restorations.note_refusal(note) == ""
    restorations.apply(RESTORED)
    assert bool(restorations.note_refusal(note)) == held
    restorations.apply(ExportsReleased(backup_id="backup-1"))
    assert restorations.note_refusal(note) == ""


@pytest.mark.parametrize("fact", [RESTORED, ExportsReleased(backup_id="backup-1")])
def test_the_facts_come_back_from_the_log(fact: LedgerRestored | ExportsReleased) -> None:
    new = new_event("ledger", fact)
    row = StoredEvent(1, new.stream, 1, new.type, new.payload, "restore", 1, None, None, None, "")
    assert (new.type, fact_of(row)) == (msgspec.json.decode(new.payload)["type"], fact)
