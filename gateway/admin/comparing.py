"""The comparison of all books of a gateway over a range of time, however many requests it has.

Knows: in which order the books are read, and how much is held at once: a range with more is compared in slices, down to
an hour. Does not know: what is compared (`billing.reconcile`), who asks. What cannot be compared is told in the report
as missing and keeps nothing else from being compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from billing.errors import ExportError
from billing.invoice import Invoice
from billing.provider import ProviderInvoice
from billing.reconcile import Missing, Report, join
from billing.stripe import StripeExporter
from gateway.admin.state import AdminState
from gateway.admin.times import format_time
from gateway.admin.watermark import CONSUMER, FLUSH_S
from metering.counts import HOUR_US, hour_of

MAX_EVENTS = 500_000  # all of a slice are held side by side, about 2 KB each
ATTEMPTS = 4  # a request that ends between two of the reads looks like a difference, once
PAUSE_S = 0.25


class _TooMany(Exception):
    """There are more requests in a slice than are held at once."""


class ComparisonStopped(Exception):
    """It was not carried to its end: the server stops."""


class _Asked:
    """What the payment provider has, asked for once, whichever slices an invoice touches."""

    def __init__(self, exporter: StripeExporter, stopping: Callable[[], bool]) -> None:
        self._exporter = exporter
        self._stopping = stopping
        self._found: dict[str, ProviderInvoice | None] = {}
        self._fault: ExportError | None = None

    def __call__(self, invoices: Sequence[Invoice]) -> dict[str, ProviderInvoice]:
        """Raises `ExportError`, the same at each slice: what is away is not waited for again and again; and
        `ComparisonStopped`: there may be thousands to ask for."""
        if self._fault is not None:
            raise self._fault
        for invoice in invoices:
            if invoice.id in self._found:
                continue
            self.look()
            try:
                self._found[invoice.id] = self._exporter.held([invoice]).get(invoice.id)
            except ExportError as error:
                self._fault = error
                raise
        return {invoice.id: one for invoice in invoices if (one := self._found[invoice.id]) is not None}

    def look(self) -> None:
        """Raises `ComparisonStopped`."""
        if self._stopping():
            raise ComparisonStopped

    def forget(self, report: Report) -> None:
        """Ask anew for those that part."""
        for difference in report.differences:
            self._found.pop(difference.invoice_id, None)


def compare_books(
    admin: AdminState,
    start_us: int,
    end_us: int,
    *,
    stripe_from_us: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Report:
    """All books over a range, each slice compared until they agree or have parted `ATTEMPTS` times; one comparison at a
    time. Also what Stripe has of all invoices whose period ends behind `stripe_from_us`.

    Blocking, for seconds: call it on a thread. Raises `ComparisonStopped` soon after `stopping`.
    """
    start_us, end_us = hour_of(start_us), hour_of(end_us + HOUR_US - 1)
    asked = _Asked(admin.exporter, stopping)
    missing: list[Missing] = []
    with admin.comparing:
        slices = _slices(admin, start_us, end_us, asked, stripe_from_us, missing)
    report = join(start_us, end_us, slices, missing)
    admin.compared(report)
    return report


def _slices(
    admin: AdminState,
    start_us: int,
    end_us: int,
    asked: _Asked,
    stripe_from_us: int | None,
    missing: list[Missing],
) -> list[Report]:
    """The range as one report, or halved until there is not too much in any; `missing` grows by the hours that have."""
    asked.look()
    try:
        return [_settled(admin, start_us, end_us, asked, stripe_from_us)]
    except _TooMany:
        if end_us - start_us <= HOUR_US:
            reason = f"the hour of {format_time(start_us)} has more than the {MAX_EVENTS} requests compared at once"
            missing.append(Missing(between="all books", reason=reason))
            return []
    middle_us = start_us + hour_of((end_us - start_us) // 2)
    return [
        *_slices(admin, start_us, middle_us, asked, stripe_from_us, missing),
        *_slices(admin, middle_us, end_us, asked, None, missing),
    ]


def _settled(admin: AdminState, start_us: int, end_us: int, asked: _Asked, stripe_from_us: int | None) -> Report:
    """Raises `_TooMany`."""
    report = _compare(admin, start_us, end_us, asked, stripe_from_us)
    for _ in range(ATTEMPTS - 1):
        if not report.differences:
            break
        time.sleep(PAUSE_S)
        asked.forget(report)
        report = _compare(admin, start_us, end_us, asked, stripe_from_us)
    return report


def _compare(admin: AdminState, start_us: int, end_us: int, asked: _Asked, stripe_from_us: int | None) -> Report:
    """Read the books in the order in which tokens pass through them, and compare. Raises `_TooMany`."""
    admin.flush(FLUSH_S)
    if sum(row.requests for row in admin.usage.counts(start_us, end_us)) > MAX_EVENTS:
        raise _TooMany
    before = admin.journal.oldest_open_us()
    totals = admin.journal.totals(start_us, end_us)
    after = admin.journal.oldest_open_us()
    spooled = admin.spool.pending_between(CONSUMER, start_us, end_us, MAX_EVENTS + 1)
    if len(spooled) > MAX_EVENTS:
        raise _TooMany
    return admin.billing.reconcile(
        start_us,
        end_us,
        usage=admin.usage,
        spool_events=spooled,
        journal_totals=totals,
        gateway=next((row.id for row in admin.gateways.all() if row.folder == admin.folder), ""),
        open_from_us=min((time for time in (before, after) if time is not None), default=None),
        drifts=admin.usage.rollups.check(start_us, end_us),
        stripe=asked if admin.exporter.configured else None,
        stripe_from_us=stripe_from_us,
    )
