"""Reconciliation: gathers what each of the books has and lets `billing.reconcile` compare it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from billing.checks import Faults
from billing.document import content_hash_of, document
from billing.errors import ExportError, Invalid, LedgerCorrupt
from billing.invoice import AT_PROVIDER, Invoice, InvoiceStatus, UsageSource
from billing.notes import NoteStatus
from billing.provider import ProviderInvoice
from billing.reconcile import INVOICE_AND_PROVIDER, Chain, Charged, Missing, Report, Sources, compare
from billing.service.admins import AdminService
from billing.service.cutting import CLOCK_SLACK_US
from billing.service.margins import MarginService
from billing.service.payments import PaymentService
from metering.counts import HOUR_US, CountRow, Drift, hour_of
from metering.events import UsageEvent

MAX_ASKED = 3000  # invoices of other periods that the provider is asked for in one comparison: two calls each
ProviderHolds = Callable[[Sequence[Invoice]], Mapping[str, ProviderInvoice]]
"""What the payment provider has now, by our invoice id; nothing for what it does not have."""


class ComparedUsage(UsageSource, Protocol):
    """A usage store that also tells of the contents it does not count."""

    def conflicts(self, start_us: int, end_us: int) -> list[str]:
        """Ids of events in [start_us, end_us) that are stored with more than one content."""
        ...


class ReconcileService(PaymentService, MarginService, AdminService):
    """Whether all books say the same."""

    def reconcile(
        self,
        start_us: int,
        end_us: int,
        *,
        usage: ComparedUsage,
        spool_events: Iterable[UsageEvent] = (),
        journal_totals: Iterable[CountRow] | None = None,
        gateway: str = "",
        open_from_us: int | None = None,
        drifts: Sequence[Drift] = (),
        stripe: ProviderHolds | None = None,
        stripe_from_us: int | None = None,
    ) -> Report:
        """Compare everything about requests that began in [start_us, end_us), widened to whole hours.

        `spool_events` are settled and perhaps not in `usage` yet; `journal_totals` are the sums of the journal of
        `gateway` for the same hours; `open_from_us` is when the oldest request under way began, as the journal already
        has what no event has yet; `drifts` are the usage store's hourly sums that are not those of their events;
        `stripe` tells what the provider holds of invoices whose period touches the range, or ends behind
        `stripe_from_us`; that it cannot be asked keeps nothing else from being compared. The hash chain is checked over
        all rows of the ledger that can be about the range, up to the last that was folded in.
        """
        start_us, end_us = _whole_hours(start_us, end_us)
        spooled = [event for event in spool_events if start_us <= event.ts_us < end_us]
        chain = self._checked_chain(start_us)
        with self._state:
            tenants = list(self._books.accounts.tenants)
            unrated = [one for one in self._books.ledger.unrated.values() if start_us <= one.ts_us < end_us]
            invoices = {tenant: self._books.invoices.of(tenant) for tenant in tenants}
            notes = [note for note in self._books.notes.by_id.values() if note.status is not NoteStatus.VOID]
        provider, missing = _held_there(stripe, *_at_provider(invoices, start_us, end_us, stripe_from_us))
        credited: dict[str, int] = defaultdict(int)
        for note in notes:
            credited[note.invoice_id] += note.amount_minor
        return compare(
            Sources(
                start_us=start_us,
                end_us=end_us,
                chain=chain,
                events=itertools.chain(usage.events(None, start_us, end_us), spooled),
                charged=self._charged(tenants, start_us, end_us),
                unrated=unrated,
                invoices=invoices,
                conflicts=usage.conflicts(start_us, end_us),
                journal=journal_totals,
                gateway=gateway,
                open_from_us=open_from_us,
                drifts=drifts,
                documents=self._documents(invoices, start_us, end_us),
                unsound=self._unsound(invoices, start_us, end_us),
                credited=credited,
                provider=provider,
                missing=missing,
            )
        )

    def _checked_chain(self, start_us: int) -> Chain:
        """The books as new as can be, and what the ledger's rows since a time are worth."""
        broken: LedgerCorrupt | None = None
        try:
            self.refresh()
        except LedgerCorrupt as error:
            broken = error
        with self._state:
            head = self._books.seq, self._books.hash
        before = min(self._store.last_before(max(0, start_us - CLOCK_SLACK_US)), head[0])
        try:
            self._store.verify_chain(before, upto=head)
        except LedgerCorrupt as error:
            broken = error  # it comes first
        return Chain(
            from_seq=before + 1,
            to_seq=head[0],
            broken_at=None if broken is None else broken.seq,
            reason="" if broken is None else broken.reason,
        )

    def _documents(self, invoices: Mapping[str, Sequence[Invoice]], start_us: int, end_us: int) -> dict[str, str]:
        """The hash of each document of an invoice whose period touches the range, made anew."""
        with self._state:
            prices = self._books.prices.copy()
        return {
            invoice.id: content_hash_of(document(invoice, prices, of_tenant))
            for of_tenant in invoices.values()
            for invoice in of_tenant
            if invoice.basis and invoice.period_start_us < end_us and start_us < invoice.period_end_us
        }

    def _unsound(self, invoices: Mapping[str, Sequence[Invoice]], start_us: int, end_us: int) -> dict[str, str]:
        """Why the signature of an invoice whose period touches the range does not hold, where it does not."""
        found: dict[str, str] = {}
        for of_tenant in invoices.values():
            for invoice in of_tenant:
                if invoice.signed and invoice.period_start_us < end_us and start_us < invoice.period_end_us:
                    with self._state:
                        fault = self._books.signing_keys.fault(invoice.signed)
                    if invoice.signed.head.content_hash != invoice.content_hash:
                        fault = "another content was signed"
                    if fault:
                        found[invoice.id] = fault
        return found

    def _charged(self, tenants: Iterable[str], start_us: int, end_us: int) -> list[Charged]:
        return [
            Charged(seq, rated)
            for tenant in tenants
            for seq, rated in self._rated(tenant, max(0, start_us - CLOCK_SLACK_US))
            if start_us <= rated.ts_us < end_us
        ]


def _whole_hours(start_us: int, end_us: int) -> tuple[int, int]:
    """Raises `Invalid`."""
    faults = Faults()
    faults.time("start", start_us)
    faults.time("end", end_us)
    faults.raise_if_any()
    if end_us <= start_us:
        raise Invalid([("end", "must be later than start")])
    return hour_of(start_us), hour_of(end_us + HOUR_US - 1)


def _at_provider(
    invoices: Mapping[str, Sequence[Invoice]], start_us: int, end_us: int, from_us: int | None
) -> tuple[list[Invoice], int]:
    """Exported invoices whose period touches the range, and up to `MAX_ASKED` more that end behind `from_us`, unpaid
    and later ones first; how many of those are left out.

    One that was exported and is void here is among them: it must be void there.
    """
    exported = [
        invoice
        for of_tenant in invoices.values()
        for invoice in of_tenant
        if invoice.status in AT_PROVIDER or (invoice.status is InvoiceStatus.VOID and invoice.stripe_invoice_id)
    ]
    touched = [one for one in exported if one.period_start_us < end_us and start_us < one.period_end_us]
    if from_us is None:
        return touched, 0
    ids = {invoice.id for invoice in touched}
    more = [one for one in exported if one.period_end_us > from_us and one.id not in ids]
    more.sort(key=lambda one: (one.status is not InvoiceStatus.EXPORTED, -one.period_end_us, one.id))
    return touched + more[:MAX_ASKED], max(0, len(more) - MAX_ASKED)


def _held_there(
    told: ProviderHolds | None, invoices: Sequence[Invoice], left_out: int
) -> tuple[dict[str, ProviderInvoice | None], list[Missing]]:
    """What the provider has for each; nothing if it is not asked, and that this is missing where it cannot be."""
    if told is None:
        return {}, []
    try:
        held = told(invoices)
    except ExportError as error:
        return {}, [Missing(between=INVOICE_AND_PROVIDER, reason=str(error), passing=True)]
    reason = f"{left_out} invoices of other periods were not asked for: at most {MAX_ASKED} are"
    missing = [Missing(between=INVOICE_AND_PROVIDER, reason=reason)] if left_out else []
    return {invoice.id: held.get(invoice.id) for invoice in invoices}, missing
