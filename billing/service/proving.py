"""Proving: which events an invoice has, in their order, and that they are those of its tree.

An event is on the invoice that took it by its number in the ledger (`invoice.takers`), and the ledger is asked for a
batch of them at a time; so an invoice of any size is told without holding it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from billing import merkle
from billing.books import fact_of
from billing.errors import Conflict, LedgerDisagrees
from billing.invoice import Basis, Invoice, UsageSource, takers
from billing.ledger import UsageRated
from billing.service.cutting import CuttingService
from billing.service.usage import usage_key
from metering.events import UsageEvent, content_hash
from metering.receipts import leaf_of

BATCH = 1000


class ProvingService(CuttingService):
    """What an invoice is made of."""

    def invoice_ranges(self, invoice: Invoice) -> list[tuple[int, int]]:
        """The ranges of time in which its events began, in order. Raises `Conflict` for one without a basis."""
        basis = _basis(invoice)
        own = (invoice.period_start_us, invoice.period_end_us)
        return sorted([own, *((late.start_us, late.end_us) for late in basis.late)])

    def on_invoice(self, invoice: Invoice, events: Sequence[UsageEvent]) -> list[UsageEvent]:
        """Those of the events that are on it."""
        basis = _basis(invoice)
        rows = self._store.find_all([usage_key(event.event_id) for event in events])
        with self._state:
            invoices = self._books.invoices.of(invoice.tenant)
        found = []
        for event in events:
            row = rows.get(usage_key(event.event_id))
            if row is None or row.payload_hash != content_hash(event):
                continue
            charged = isinstance(fact_of(row), UsageRated)
            on = any(one.id == invoice.id for one in takers(event.ts_us, row.seq, invoices))
            if (charged and on) or event.event_id in basis.priced_later:
                found.append(event)
        return found

    def invoice_events(self, invoice: Invoice, usage: UsageSource) -> Iterator[UsageEvent]:
        """All events of an invoice, by time and id."""
        for start_us, end_us in self.invoice_ranges(invoice):
            events = usage.events(invoice.tenant, start_us, end_us)
            while batch := list(islice(events, BATCH)):
                yield from self.on_invoice(invoice, batch)

    def invoice_leaves(self, invoice: Invoice, usage: UsageSource) -> list[tuple[str, bytes]]:
        """Each event's id and leaf hash, in order. Raises `LedgerDisagrees` where they are not the tree's."""
        leaves = [(event.event_id, leaf_of(event)) for event in self.invoice_events(invoice, usage)]
        if merkle.root([leaf for _, leaf in leaves]).hex() != _basis(invoice).root:
            raise LedgerDisagrees("the events that are stored now are not those that were invoiced")
        return leaves


def _basis(invoice: Invoice) -> Basis:
    if invoice.basis is None:
        raise Conflict("the invoice was cut by a version of Meterhouse that kept nothing to verify it by")
    return invoice.basis
