"""Credit notes: issued, sent to the payment provider, voided, looked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from billing.books import new_event
from billing.errors import Conflict
from billing.invoice import AT_PROVIDER, Invoice
from billing.notes import (
    NOTES_PER_INVOICE,
    CreditNote,
    CreditNoteExported,
    CreditNoteExportStarted,
    CreditNoteIssued,
    CreditNoteVoided,
    NoteStatus,
    Way,
    check_creditable,
    check_reason,
    take,
)
from billing.service.exporting import ExportService
from billing.service.shell import Idempotency, page
from billing.store import NewEvent


class NoteExporter(Protocol):
    """Obligations: safe to call again after a kill at any point, with no second note."""

    def credit(self, note: CreditNote, invoice: Invoice) -> str:
        """The provider's id of the note, which it has when this returns. Raises `ExportError`, `Conflict`."""
        ...

    def void_credit(self, note: CreditNote, invoice: Invoice) -> None:
        """When it returns, the provider holds nothing for this note that counts. Raises `ExportError`."""
        ...


class CreditNoteService(ExportService):
    """What is taken back of invoices."""

    def issue_credit_note(
        self,
        invoice_id: str,
        *,
        reason: str,
        amount: str | None = None,
        lines: Mapping[str, str] | None = None,
        way: Way = Way.BALANCE,
        idempotency: Idempotency | None = None,
    ) -> CreditNote:
        """A note for an amount (with tax), for amounts of lines (without), or for all that is left; booked at once.

        Raises `Invalid` with every fault, `NotFound`, `Conflict`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], CreditNote]:
            invoice = self._books.invoices.get(invoice_id)
            check_reason(reason)
            check_creditable(invoice)
            all_notes = self._books.notes.of(invoice_id)
            if len(all_notes) >= NOTES_PER_INVOICE:
                raise Conflict(f"an invoice has at most {NOTES_PER_INVOICE} credit notes")
            taken = take(invoice, self._books.notes.standing(invoice_id), amount, lines)
            note = CreditNote(
                id=self._new_id("note"),
                number=f"{invoice_id}-CN{len(all_notes) + 1}",
                invoice_id=invoice_id,
                tenant=invoice.tenant,
                currency=invoice.currency,
                amount_minor=taken.amount_minor,
                tax_minor=taken.tax_minor,
                lines=taken.lines,
                reason=reason,
                way=way,
                created_us=time_us,
            )
            return [new_event(f"invoice:{invoice_id}", CreditNoteIssued(note=note))], note

        return self._command("issue_credit_note", idempotency, CreditNote, decide)[0]

    def export_credit_note(
        self, note_id: str, exporter: NoteExporter, *, idempotency: Idempotency | None = None
    ) -> CreditNote:
        """Send a note to the payment provider, which has its invoice; safe to repeat after any failure.

        An exported one stays as it is. Raises `NotFound`, `Conflict`, `ExportError`.
        """
        if first := self._first_result("export_credit_note", idempotency, CreditNote):
            return first
        with self._with_provider(note_id):
            note, invoice = self._start_note(note_id)
            if note.status is NoteStatus.EXPORTED:
                return note
            theirs = exporter.credit(note, invoice)
            exported = self._finish_note(note, theirs, idempotency)
            if exported.status is NoteStatus.VOID:  # by another process, which did not find what was just made
                exporter.void_credit(exported, invoice)
                raise Conflict("the credit note was voided while it was exported; nothing of it stands")
            return exported

    def void_credit_note(
        self, note_id: str, exporter: NoteExporter | None = None, *, idempotency: Idempotency | None = None
    ) -> CreditNote:
        """Take a note back, with the payment provider first if its export has begun: that takes an `exporter`.

        A void one stays as it is. Raises `NotFound`, `Conflict`, and `ExportError` where the provider refuses.
        """
        if first := self._first_result("void_credit_note", idempotency, CreditNote):
            return first
        with self._with_provider(note_id):
            self.refresh()
            before = self.credit_note(note_id)
            if before.status is not NoteStatus.VOID and before.export_started_us is not None:
                if exporter is None:
                    raise Conflict("its export has begun, so it is to be voided with the payment provider too")
                exporter.void_credit(before, self.invoice(before.invoice_id))

            def decide(time_us: int) -> tuple[list[NewEvent], CreditNote]:
                note = self._books.notes.get(note_id)
                if note.status is NoteStatus.VOID:
                    return [], note
                if (note.status, note.export_started_us) != (before.status, before.export_started_us):
                    raise Conflict("the credit note changed meanwhile; try again")
                void = msgspec.structs.replace(note, status=NoteStatus.VOID, voided_us=time_us)
                fact = CreditNoteVoided(note_id=note_id, at_us=time_us)
                return [new_event(f"invoice:{note.invoice_id}", fact)], void

            return self._command("void_credit_note", idempotency, CreditNote, decide)[0]

    def credit_note(self, note_id: str) -> CreditNote:
        """Raises `NotFound`."""
        with self._state:
            return self._books.notes.get(note_id)

    def credit_notes(
        self,
        *,
        tenant_id: str | None = None,
        invoice_id: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[CreditNote]:
        """In the order in which they were issued, void ones too. Raises `NotFound`."""
        with self._state:
            if tenant_id is not None:
                self._books.accounts.tenant(tenant_id)
            if invoice_id is not None:
                found = self._books.notes.of(self._books.invoices.get(invoice_id).id)
            else:
                found = list(self._books.notes.by_id.values())
            mine = [note for note in found if tenant_id in (None, note.tenant)]
            return page(mine, lambda note: note.id, limit, after)

    def pending_credit_notes(self) -> list[CreditNote]:
        """Those that the payment provider is to have and may not have yet: it has their invoice."""
        with self._state:
            issued = [note for note in self._books.notes.by_id.values() if note.status is NoteStatus.ISSUED]
            return [note for note in issued if self._books.invoices.get(note.invoice_id).status in AT_PROVIDER]

    def _start_note(self, note_id: str) -> tuple[CreditNote, Invoice]:
        """From here on the provider may hold the note."""

        def decide(time_us: int) -> tuple[list[NewEvent], CreditNote]:
            note = self._books.notes.get(note_id)
            invoice = self._books.invoices.get(note.invoice_id)
            if note.status is NoteStatus.EXPORTED:
                return [], note
            if note.status is NoteStatus.VOID:
                raise Conflict("the credit note is void")
            if invoice.status not in AT_PROVIDER:
                raise Conflict(f"its invoice goes to the payment provider first; this one is {invoice.status}")
            if note.export_started_us is not None:
                return [], note
            if refusal := self._books.restorations.note_refusal(note):
                raise Conflict(refusal)
            fact = CreditNoteExportStarted(note_id=note_id, at_us=time_us)
            return [new_event(f"invoice:{note.invoice_id}", fact)], note

        note = self._command("start_credit_note", None, CreditNote, decide)[0]
        return note, self.invoice(note.invoice_id)

    def _finish_note(self, note: CreditNote, theirs: str, idempotency: Idempotency | None) -> CreditNote:
        def decide(time_us: int) -> tuple[list[NewEvent], CreditNote]:
            now = self._books.notes.get(note.id)
            if now.status is not NoteStatus.ISSUED:
                return [], now
            exported = msgspec.structs.replace(
                now, status=NoteStatus.EXPORTED, exported_us=time_us, stripe_credit_note_id=theirs
            )
            fact = CreditNoteExported(note_id=note.id, at_us=time_us, stripe_credit_note_id=theirs)
            return [new_event(f"invoice:{note.invoice_id}", fact)], exported

        return self._command("export_credit_note", idempotency, CreditNote, decide)[0]
