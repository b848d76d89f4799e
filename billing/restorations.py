"""What a ledger that was restored from a backup does not know, and what is held back for that.

Between the backup's instant and the restore the ledger that is lost went on: it may have drafted invoices and sent them
to Stripe, under ids that are not in this one. The same period, drafted here again, would be asked of the customer
twice. So an invoice that was drafted after a restore, for a period that began before it, does not leave the house until
somebody has looked in Stripe and said so. One that the backup has is found there by its id, and goes. The same holds
for a credit note that was issued after a restore, and for all that is on its way to meters, which forget an event's
identifier after a day.

Pure. Knows: the two facts and the rule. Does not know: how a ledger is restored, what Stripe has.
"""

from __future__ import annotations

import msgspec

from billing.invoice import Invoice
from billing.notes import CreditNote

LOOK = "look for it in Stripe, then run `meterhouse stripe release`"


class LedgerRestored(msgspec.Struct, frozen=True, kw_only=True, tag="ledger.restored"):
    """What stands before this row is a backup's ledger, whole."""

    backup_id: str
    instant_us: int  # what was done after it is not known
    seq: int  # the backup's last row
    at_us: int


class ExportsReleased(msgspec.Struct, frozen=True, kw_only=True, tag="exports.released"):
    """Somebody has looked at what was exported between the backup's instant and its restore."""

    backup_id: str


RestoreFact = LedgerRestored | ExportsReleased


class Restorations:
    """The fold: the restore after which nobody has looked yet."""

    def __init__(self) -> None:
        self.held: LedgerRestored | None = None

    def apply(self, fact: RestoreFact) -> None:
        self.held = fact if isinstance(fact, LedgerRestored) else None

    def refusal(self, invoice: Invoice) -> str:
        """Why an invoice must not be exported yet; empty: it may be."""
        held = self.held
        if held is None or invoice.cut_seq <= held.seq or invoice.period_start_us >= held.at_us:
            return ""
        return f"this ledger was restored from a backup, and the period may have been invoiced in between: {LOOK}"

    def note_refusal(self, note: CreditNote) -> str:
        """The same of a credit note."""
        if self.held is None or note.created_us < self.held.at_us:
            return ""
        return f"this ledger was restored from a backup, and the note may have been issued in between: {LOOK}"

    def meter_refusal(self) -> str:
        """Why nothing may go to meters yet; empty: it may."""
        if self.held is None:
            return ""
        return f"this ledger was restored from a backup, and its usage may have been sent in between: {LOOK}"
