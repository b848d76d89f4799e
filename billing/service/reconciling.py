"""Reconciliation: gathers what each of the books has and lets `billing.reconcile` compare it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from billing.checks import Faults
from billing.errors import Invalid
from billing.invoice import Invoice, InvoiceStatus, UsageSource
from billing.reconcile import Charged, Report, Sources, compare
from billing.service.invoicing import CLOCK_SLACK_US, InvoiceService
from metering.counts import HOUR_US, CountRow, hour_of
from metering.events import UsageEvent


class ReconcileService(InvoiceService):
    """Whether all books say the same."""

    def reconcile(
        self,
        start_us: int,
        end_us: int,
        *,
        usage: UsageSource,
        spool_events: Iterable[UsageEvent] = (),
        journal_totals: Iterable[CountRow] | None = None,
        open_from_us: int | None = None,
        stripe: Callable[[Sequence[Invoice]], Mapping[str, int]] | None = None,
    ) -> Report:
        """Compare everything about requests that began in [start_us, end_us), widened to whole hours.

        `spool_events` are settled and perhaps not in `usage` yet; `journal_totals` are the journal's sums for
        the same hours; `open_from_us` is when the oldest request under way began, as the journal already has
        what no event has yet; `stripe` gives the provider's totals in minor units by our invoice id.
        """
        faults = Faults()
        faults.time("start", start_us)
        faults.time("end", end_us)
        faults.raise_if_any()
        if end_us <= start_us:
            raise Invalid([("end", "must be later than start")])
        start_us, end_us = hour_of(start_us), hour_of(end_us + HOUR_US - 1)
        spooled = [event for event in spool_events if start_us <= event.ts_us < end_us]
        self.refresh()
        with self._state:
            tenants = list(self._books.accounts.tenants)
            unrated = [one for one in self._books.ledger.unrated.values() if start_us <= one.ts_us < end_us]
            invoices = {tenant: self._books.invoices.of(tenant) for tenant in tenants}
        touched = [
            invoice
            for of_tenant in invoices.values()
            for invoice in of_tenant
            if invoice.status is InvoiceStatus.EXPORTED
            and invoice.period_start_us < end_us
            and start_us < invoice.period_end_us
        ]
        told = stripe(touched) if stripe is not None else {}
        totals = {invoice.id: told.get(invoice.id) for invoice in touched} if stripe is not None else {}
        return compare(
            Sources(
                start_us=start_us,
                end_us=end_us,
                events=itertools.chain(usage.events(None, start_us, end_us), spooled),
                charged=self._charged(tenants, start_us, end_us),
                unrated=unrated,
                invoices=invoices,
                journal=journal_totals,
                open_from_us=open_from_us,
                provider_totals=totals,
            )
        )

    def _charged(self, tenants: Iterable[str], start_us: int, end_us: int) -> list[Charged]:
        return [
            Charged(seq, rated)
            for tenant in tenants
            for seq, rated in self._rated(tenant, max(0, start_us - CLOCK_SLACK_US))
            if start_us <= rated.ts_us < end_us
        ]
