"""What is held back after a restore, and its release."""

from __future__ import annotations

from billing.books import new_event
from billing.invoice import Invoice
from billing.restorations import ExportsReleased, LedgerRestored
from billing.service.shell import Idempotency, Shell
from billing.store import NewEvent

STREAM = "ledger"


class RestoreService(Shell):
    """Whether somebody has looked, since this ledger was restored, at what it does not know."""

    def held_after_restore(self) -> LedgerRestored | None:
        """The restore for which exports are held back; None where none are."""
        with self._state:
            return self._books.restorations.held

    def export_refusal(self, invoice: Invoice) -> str:
        """Why an invoice must not be exported yet; empty: it may be."""
        with self._state:
            return self._books.restorations.refusal(invoice)

    def meter_refusal(self) -> str:
        """Why nothing may go to meters yet; empty: it may."""
        with self._state:
            return self._books.restorations.meter_refusal()

    def release_exports(self, *, idempotency: Idempotency | None = None) -> bool:
        """Let go what was held back; False where none were."""

        def decide(_: int) -> tuple[list[NewEvent], bool]:
            held = self._books.restorations.held
            if held is None:
                return [], False
            return [new_event(STREAM, ExportsReleased(backup_id=held.backup_id))], True

        return self._command("release_exports", idempotency, bool, decide)[0]
