"""What becomes of an exported invoice at the payment provider: its messages, and its state whenever it is asked.

A message is one row of the log under the provider's id, and what follows from it the rows behind it, in one
transaction: a message that comes again changes nothing, one that a kill cut off is told again by the provider.
"""

from __future__ import annotations

from collections.abc import Callable

from billing.accounts import TenantStatus
from billing.books import new_event
from billing.errors import BillingError
from billing.invoice import AT_PROVIDER, Invoice, InvoiceStatus
from billing.provider import ENDS, ProviderEvent, ProviderEventSeen, ProviderInvoice, moves
from billing.service.exporting import ExportService

PROVIDER = "stripe"  # the actor of what it told
DUPLICATE = "duplicate"


Look = Callable[[Invoice], ProviderInvoice | None]
"""What the provider has now for one of our invoices; None: nothing. Raises `ExportError`."""


class TooEarly(BillingError):
    """The message is about an invoice whose export is not recorded here yet: it has to come again."""


class PaymentService(ExportService):
    """Invoices follow the provider's state, forwards only."""

    def follow(self, event: ProviderEvent, look: Look | None) -> str:
        """Take one message: "moved", "unchanged", "duplicate", or why it is ignored.

        With `look` the provider's state now decides, without it the state in the message. Raises `TooEarly` and
        `ExportError`, after which the message has to come again.
        """
        key = f"stripe:{event.id}"
        if self._store.find(key) is not None:
            return DUPLICATE
        theirs = self._state_of(event, look)
        with self._writing:
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)
                if log.find([key]):
                    return DUPLICATE
                invoice = self._books.invoices.by_id.get(event.invoice_id)
                facts = moves(invoice, theirs, self._clock()) if invoice and theirs else []
                outcome = event.ignored or ("moved" if facts else "unchanged")
                seen = ProviderEventSeen(
                    id=event.id,
                    kind=event.type,
                    created_s=event.created_s,
                    object_id=event.object_id,
                    invoice_id=event.invoice_id,
                    outcome=outcome,
                )
                rows = log.append(
                    [new_event("stripe", seen, key=key)]
                    + [new_event(f"invoice:{event.invoice_id}", fact) for fact in facts],
                    actor=PROVIDER,
                    time_us=self._clock(),
                )
            self._fold(rows)
            self._decided()
        return outcome

    def suspended_tenants(self) -> list[str]:
        """Ids of those that an operator suspended."""
        with self._state:
            tenants = list(self._books.accounts.tenants.values())
        return [tenant.id for tenant in tenants if tenant.status is TenantStatus.SUSPENDED]

    def find_invoice(self, invoice_id: str) -> Invoice | None:
        """As `invoice`, and as new as the ledger; None where there is none."""
        with self._state:
            known = self._books.invoices.by_id.get(invoice_id)
        if known is None or known.stripe_invoice_id is None:
            self.refresh()
        with self._state:
            return self._books.invoices.by_id.get(invoice_id)

    def sync_invoice(self, invoice_id: str, look: Look) -> Invoice:
        """Let ours catch up with what the provider has now. Raises `NotFound`, `ExportError`."""
        before = self.invoice(invoice_id)
        theirs = look(before) if before.status in AT_PROVIDER else None
        if theirs is None or not moves(before, theirs, 0):
            return before
        with self._writing:
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)
                facts = moves(self._books.invoices.get(invoice_id), theirs, self._clock())
                events = [new_event(f"invoice:{invoice_id}", fact) for fact in facts]
                rows = log.append(events, actor=PROVIDER, time_us=self._clock())
            self._fold(rows)
            self._decided()
        return self.invoice(invoice_id)

    def sync_invoices(self, look: Look) -> list[Invoice]:
        """The same for every invoice that may still move: those that did. Raises `ExportError`."""
        with self._state:
            waiting = [one for one in self._books.invoices.by_id.values() if one.status in AT_PROVIDER]
        open_ones = [one for one in waiting if one.status is not InvoiceStatus.PAID]
        after = [(one, self.sync_invoice(one.id, look)) for one in open_ones]
        return [now for before, now in after if now != before]

    def _state_of(self, event: ProviderEvent, look: Look | None) -> ProviderInvoice | None:
        """The state that counts. Raises `TooEarly`."""
        with self._state:
            invoice = self._books.invoices.by_id.get(event.invoice_id)
        if invoice is None or event.ignored:
            return None
        if invoice.status not in AT_PROVIDER:
            self.refresh()
            invoice = self.invoice(event.invoice_id)
        if invoice.status is InvoiceStatus.VOID:
            return None
        theirs = event.snapshot
        if look is not None and invoice.status in AT_PROVIDER:
            theirs = look(invoice)
        if theirs is not None and invoice.status not in AT_PROVIDER and (theirs.status in ENDS or theirs.attempts):
            raise TooEarly("the export of this invoice is not recorded here yet: send the message again")
        return theirs
