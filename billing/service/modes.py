"""Which way charges are asked for: switching it, and what the meters' part of the log is."""

from __future__ import annotations

from billing.books import new_event
from billing.invoice import Invoice, owner
from billing.modes import ExportMode, ExportModeSet, Metered, Stretch
from billing.service.cutting import CLOCK_SLACK_US, CuttingService
from billing.store import NewEvent


class ModeService(CuttingService):
    """Invoices or meters."""

    def set_export_mode(self, mode: ExportMode, *, sent: tuple[Stretch, ...] = ()) -> None:
        """From here on charges are asked for in this way; the same way again changes nothing.

        `sent` is what meters had taken when no switch was written yet; it counts at the first switch only.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], None]:
            modes = self._books.modes
            before = () if modes.known else sent
            if modes.mode is mode and not before:
                return [], None
            return [new_event("export-mode", ExportModeSet(mode=mode, at_us=time_us, metered=before))], None

        self._command("set_export_mode", None, type(None), decide)

    def metered(self) -> Metered:
        """The meters' part of the ledger as it is now."""
        self.refresh()
        with self._state:
            return self._books.modes.metered(self._books.seq)

    def metered_of(self, invoice: Invoice) -> str:
        """The id of a charge that stands on the invoice and is the meters' all the same; empty: there is none.

        Only an invoice that was cut before switches were written can have one.
        """
        metered = self.metered()
        by_its_cut = {
            (after, min(upto, invoice.cut_seq)) for after, upto in metered.stretches if after < invoice.cut_seq
        }
        if by_its_cut <= set(invoice.left_out):
            return ""
        with self._state:
            invoices = self._books.invoices.of(invoice.tenant)
        first_us = min([invoice.period_start_us, *(line.period_start_us for line in invoice.lines)])
        for seq, rated in self._rated(invoice.tenant, max(0, first_us - CLOCK_SLACK_US)):
            if seq > invoice.cut_seq:
                break
            if metered.has(seq) and _id(owner(rated.ts_us, seq, invoices)) == invoice.id:
                return rated.event_id
        return ""


def _id(invoice: Invoice | None) -> str:
    return "" if invoice is None else invoice.id
