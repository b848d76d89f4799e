"""Invoices by the clock: which periods are due, and whether there is anything to ask for in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from billing.daily import DAY_US
from billing.invoice import Invoice, InvoiceStatus, UsageSource
from billing.periods import Period
from billing.schedule import due_spans
from billing.service.exporting import ExportService
from billing.stays import adapter_lines
from billing.terms import PeriodRule


class Due(msgspec.Struct, frozen=True):
    """A period that has ended, that no invoice touches, and in which there is something to ask for."""

    tenant: str
    period: Period


class ScheduleService(ExportService):
    """What an invoice is to be cut for without being asked."""

    def due(self, until_us: int) -> list[Due]:
        """All that ended by `until_us`, by tenant, in order of time."""
        self.refresh()
        with self._state:
            tenants = list(self._books.accounts.tenants)
            unrated = list(self._books.ledger.unrated.values())
        waiting: dict[str, list[int]] = defaultdict(list)
        for one in unrated:
            waiting[one.tenant].append(one.ts_us)
        return [Due(id, period) for id in tenants for period in self._due_of(id, until_us, waiting[id])]

    def draft_due(self, due: Due, *, usage: UsageSource, watermark_us: int) -> Invoice | None:
        """As `draft_invoice`, marked as automatic; None, and nothing is written, where there is nothing to ask for."""
        return self._draft(due.tenant, due.period, usage, watermark_us, automatic=True)

    def automatic_invoices(self, status: InvoiceStatus) -> list[Invoice]:
        """Those that were cut by the clock and are in this state, in the order of their cuts."""
        with self._state:
            found = list(self._books.invoices.by_id.values())
        return [one for one in found if one.automatic and one.status is status]

    def _due_of(self, tenant_id: str, until_us: int, unrated_us: Sequence[int]) -> list[Period]:
        """One tenant at a time, so that requests wait for no more than one."""
        with self._state:
            tenant = self._books.accounts.tenant(tenant_id)
            spans = list(due_spans(tenant, self._books.invoices.of(tenant_id), until_us))
            late = bool(spans) and self._books.invoices.has_late(tenant_id)
            return [
                span
                for span in spans
                if (late and span is spans[-1]) or any(map(span.has, unrated_us)) or self._asks(tenant_id, span)
            ]

    def _asks(self, tenant_id: str, span: Period) -> bool:
        """Whether there can be anything to ask for, by what memory has; `_state` is held."""
        books = self._books
        if span.start_us < books.daily.kept_from_us:
            return True
        days = range(span.start_us // DAY_US, (span.end_us - 1) // DAY_US + 1)
        if any(books.daily.has(tenant_id, day) for day in days):
            return True
        tenant = books.accounts.tenant(tenant_id)
        rule = PeriodRule(anchor_day=tenant.billing_anchor_day, timezone=tenant.timezone)
        if books.terms.of(tenant_id, span, rule).commitment:
            return True
        return any(True for _ in adapter_lines(span, books.stays.of(tenant_id), tenant, books.prices, rule))
