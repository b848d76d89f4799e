"""Invoices: exported to the payment provider, and voided, there too where an export had begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from billing.books import new_event
from billing.errors import Conflict, ExportError, StripeNotConfigured
from billing.invoice import (
    AT_PROVIDER,
    Exporter,
    ExportResult,
    Invoice,
    InvoiceExportAbandoned,
    InvoiceExported,
    InvoiceExportStarted,
    InvoiceStatus,
    InvoiceVoided,
)
from billing.service.invoicing import InvoiceService
from billing.service.shell import Idempotency
from billing.store import NewEvent


class ExportService(InvoiceService):
    """How an invoice gets to the payment provider, and how it ends."""

    def void_invoice(
        self, invoice_id: str, exporter: Exporter | None = None, *, idempotency: Idempotency | None = None
    ) -> Invoice:
        """Give its period and usage free; a void one stays as it is. Safe to repeat after any failure.

        Once its export has begun, it is voided with the payment provider first: that takes an `exporter`.
        Raises `NotFound`, `ExportError`, and `Conflict` for one that is paid.
        """
        if first := self._first_result("void_invoice", idempotency, Invoice):
            return first
        with self._with_provider(invoice_id):
            self.refresh()
            invoice = self.invoice(invoice_id)
            self._check_no_notes(invoice)
            if invoice.status is not InvoiceStatus.VOID and invoice.export_started_us is not None:
                if exporter is None:
                    raise Conflict("its export has begun, so it is to be voided with the payment provider too")
                exporter.void(invoice, invoice.stripe_ids)
            return self._finish_void(invoice, idempotency)

    def export_invoice(self, invoice_id: str, exporter: Exporter, *, idempotency: Idempotency | None = None) -> Invoice:
        """Send a final invoice to the payment provider; safe to repeat after any failure.

        An exported one stays as it is. Raises `NotFound`, `Conflict`, `ExportError`.
        """
        if first := self._first_result("export_invoice", idempotency, Invoice):
            return first
        with self._with_provider(invoice_id):
            invoice = self._start_export(invoice_id)
            if invoice.status in AT_PROVIDER:
                return invoice
            result = self._send(invoice, exporter)
            exported = self._finish_export(invoice, result, idempotency)
            if exported.status is InvoiceStatus.VOID:  # by another process, which did not find what was just made
                exporter.void(exported, result.ids)
                raise Conflict("the invoice was voided while it was exported; nothing of it stands")
            return exported

    # within

    @contextmanager
    def _with_provider(self, invoice_id: str) -> Iterator[None]:
        """One export or void of an invoice, or of a credit note, at a time. Raises `Conflict`."""
        with self._state:
            if invoice_id in self._exporting:
                raise Conflict("it is being exported or voided")
            self._exporting.add(invoice_id)
        try:
            yield
        finally:
            with self._state:
                self._exporting.discard(invoice_id)

    def _check_no_notes(self, invoice: Invoice) -> None:
        """Usage that was credited must not be invoiced again. Raises `Conflict`."""
        with self._state:
            notes = self._books.notes.standing(invoice.id)
        if notes and invoice.status is not InvoiceStatus.VOID:
            raise Conflict("it has credit notes: void those first, or issue one for the rest of it")

    def _finish_void(self, before: Invoice, idempotency: Idempotency | None) -> Invoice:
        """`before`: as it was when the provider was asked; an export that began since is one to ask about."""

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            invoice = self._books.invoices.get(before.id)
            if invoice.status is InvoiceStatus.VOID:
                return [], invoice
            if (invoice.status, invoice.export_started_us) != (before.status, before.export_started_us):
                raise Conflict("the invoice changed meanwhile; try again")
            self._check_no_notes(invoice)
            void = msgspec.structs.replace(invoice, status=InvoiceStatus.VOID, voided_us=time_us)
            return [_row(InvoiceVoided(invoice_id=before.id, at_us=time_us))], void

        return self._command("void_invoice", idempotency, Invoice, decide)[0]

    def _start_export(self, invoice_id: str) -> Invoice:
        """From here on the provider may hold the invoice."""

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            invoice = self._books.invoices.get(invoice_id)
            if invoice.status in AT_PROVIDER:
                return [], invoice
            if invoice.status is not InvoiceStatus.FINALIZED:
                raise Conflict(f"only a finalized invoice is exported; this one is {invoice.status}")
            if invoice.export_started_us is not None:
                return [], invoice
            return [_row(InvoiceExportStarted(invoice_id=invoice_id, at_us=time_us))], invoice

        return self._command("start_export", None, Invoice, decide)[0]

    def _send(self, invoice: Invoice, exporter: Exporter) -> ExportResult:
        with self._state:
            tenant = self._books.accounts.tenant(invoice.tenant)
        try:
            result = exporter.export(invoice, tenant, invoice.stripe_ids)
        except StripeNotConfigured as error:
            if invoice.export_started_us is not None:  # by an earlier attempt, which may have sent something
                raise
            abandoned = InvoiceExportAbandoned(invoice_id=invoice.id, reason=str(error))
            self._command("abandon_export", None, Invoice, lambda _: ([_row(abandoned)], invoice))
            raise
        if result.total_minor != invoice.total_minor:
            raise ExportError("the payment provider's total is not the invoice's")
        return result

    def _finish_export(self, invoice: Invoice, result: ExportResult, idempotency: Idempotency | None) -> Invoice:
        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            now = self._books.invoices.get(invoice.id)
            if now.status in AT_PROVIDER or now.status is InvoiceStatus.VOID:
                return [], now
            exported = msgspec.structs.replace(
                now,
                status=InvoiceStatus.EXPORTED,
                exported_us=time_us,
                stripe_invoice_id=result.stripe_invoice_id,
                stripe_ids=result.ids,
                provider_tax_minor=result.tax_minor,
            )
            return [_row(InvoiceExported(invoice_id=invoice.id, at_us=time_us, result=result))], exported

        return self._command("export_invoice", idempotency, Invoice, decide)[0]


def _row(
    fact: InvoiceExportStarted | InvoiceExportAbandoned | InvoiceExported | InvoiceVoided,
) -> NewEvent:
    return new_event(f"invoice:{fact.invoice_id}", fact)
