"""Invoices: made final, looked up."""

from __future__ import annotations

import msgspec

from billing.books import new_event
from billing.errors import Conflict
from billing.invoice import Invoice, InvoiceFinalized, InvoiceStatus
from billing.notes import CreditNote
from billing.service.proving import ProvingService
from billing.service.replaying import ReplayService
from billing.service.shell import Idempotency, page
from billing.service.signing import SigningService
from billing.statement import Statement, statement_of
from billing.store import NewEvent


class InvoiceService(ProvingService, ReplayService, SigningService):
    """What a tenant owes."""

    def finalize_invoice(self, invoice_id: str, *, idempotency: Idempotency | None = None) -> Invoice:
        """Make a draft final, and sign it; a final one stays as it is. Raises `NotFound`, `Conflict`, `NoSigningKey`.

        A draft of a version that kept nothing to verify it by is not signed.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            invoice = self._books.invoices.get(invoice_id)
            if invoice.status is InvoiceStatus.FINALIZED:
                return [], invoice
            if invoice.status is not InvoiceStatus.DRAFT:
                raise Conflict(f"the invoice is {invoice.status}")
            final = msgspec.structs.replace(invoice, status=InvoiceStatus.FINALIZED, finalized_us=time_us)
            rows = [new_event(f"invoice:{invoice_id}", InvoiceFinalized(invoice_id=invoice_id, at_us=time_us))]
            if invoice.basis is None:
                return rows, final
            signing, signed = self._signed(invoice, time_us)
            return [*rows, *signing], msgspec.structs.replace(final, signed=signed)

        return self._command("finalize_invoice", idempotency, Invoice, decide)[0]

    def invoice(self, invoice_id: str) -> Invoice:
        """Raises `NotFound`."""
        with self._state:
            return self._books.invoices.get(invoice_id)

    def statement(self, invoice_id: str) -> Statement:
        """Of a final invoice, with its tenant as it was at the cut. Raises `NotFound`, `Conflict` for a draft."""
        with self._state:
            invoice = self._books.invoices.get(invoice_id)
            tenant = self._books.billed[invoice_id]
        return statement_of(invoice, tenant)

    def due_minor(self, tenant_id: str) -> int:
        """What the tenant's final invoices ask for and was not paid yet, in minor units. Raises `NotFound`."""
        with self._state:
            mine = self._books.invoices.of(self._books.accounts.tenant(tenant_id).id)
            return sum(one.due_minor(self._credited_minor(one.id)) for one in mine)

    def notes_of(self, invoice_id: str) -> list[CreditNote]:
        """An invoice's credit notes that are not void, the oldest first."""
        with self._state:
            return self._books.notes.standing(invoice_id)

    def _credited_minor(self, invoice_id: str) -> int:
        return sum(note.amount_minor for note in self._books.notes.standing(invoice_id))

    def invoices(
        self, tenant_id: str | None = None, limit: int = 100, after: str | None = None, *, final: bool = False
    ) -> list[Invoice]:
        """In the order of their cuts, void ones too; with `final` those that were made final at some time.

        Raises `NotFound` for an unknown tenant.
        """
        with self._state:
            if tenant_id is None:
                found = list(self._books.invoices.by_id.values())
            else:
                found = self._books.invoices.of(self._books.accounts.tenant(tenant_id).id)
            if final:
                found = [invoice for invoice in found if invoice.finalized_us is not None]
            return page(found, lambda invoice: invoice.id, limit, after)
