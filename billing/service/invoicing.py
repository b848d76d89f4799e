"""Invoices: cut, made final, exported, voided.

A draft is cut from two sources that must agree event by event: the ledger says which events stand and
what each was charged, the usage store has the events and is rated anew. Usage that only the store has is
recorded first; usage that only the ledger has is still on its way, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from billing.books import fact_of, new_event
from billing.charges import agrees
from billing.checks import Faults
from billing.errors import (
    Conflict,
    ExportError,
    Invalid,
    LedgerDisagrees,
    PeriodNotClosed,
    StripeNotConfigured,
    UnratedUsage,
)
from billing.invoice import (
    AT_PROVIDER,
    Exporter,
    ExportResult,
    Invoice,
    InvoiceDrafted,
    InvoiceExportAbandoned,
    InvoiceExported,
    InvoiceExportStarted,
    InvoiceFinalized,
    InvoiceStatus,
    InvoiceVoided,
    UsageSource,
    owner,
)
from billing.ledger import UsageRated
from billing.lines import Charge, PeriodRule, close, cut_lines, digest, true_up
from billing.periods import Period
from billing.prices import PriceBook, PriceVersion
from billing.rating import priced_quantities
from billing.service.shell import Idempotency, page
from billing.service.usage import UsageService
from billing.store import NewEvent
from metering.events import UsageEvent, content_hash

CUT_ATTEMPTS = 4
CLOCK_SLACK_US = 86_400_000_000  # by how much two machines' clocks may part and a scan still sees all


class _Entry(msgspec.Struct, frozen=True):
    """One charge that this invoice is to have, and the standing invoice it comes too late for."""

    rated: UsageRated
    late_of: Invoice | None


class _Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has for an invoice, at one point of its sequence."""

    seq: int
    time_us: int
    invoices: list[Invoice]  # all of the tenant's, as they stood
    recorded: set[str]  # ids of the period, on whichever invoice
    entries: dict[str, _Entry]


class InvoiceService(UsageService):
    """What a tenant owes."""

    def draft_invoice(
        self,
        tenant_id: str,
        start_us: int,
        end_us: int,
        *,
        usage: UsageSource,
        watermark_us: int,
        idempotency: Idempotency | None = None,
    ) -> Invoice:
        """Cut a draft for [start_us, end_us). `watermark_us`: all usage that began before it is stored.

        Raises `Invalid`, `NotFound`, `PeriodNotClosed`, `PeriodOverlaps`, `UnratedUsage`, `LedgerDisagrees`.
        """
        name = "draft_invoice"
        if first := self._first_result(name, idempotency, Invoice):
            return first
        period = Period(start_us=start_us, end_us=end_us)
        self._check_period(tenant_id, period, watermark_us)
        cut, events = self._agreed_cut(tenant_id, period, usage)
        invoice = self._compose(tenant_id, period, cut, events)

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            self._books.invoices.check_free(tenant_id, start_us, end_us)
            if self._books.invoices.of(tenant_id) != cut.invoices:
                raise Conflict("another invoice of this tenant changed meanwhile; try again")
            draft = msgspec.structs.replace(invoice, created_us=time_us)
            return [new_event(f"invoice:{draft.id}", InvoiceDrafted(invoice=draft))], draft

        return self._command(name, idempotency, Invoice, decide)[0]

    def finalize_invoice(self, invoice_id: str, *, idempotency: Idempotency | None = None) -> Invoice:
        """Make a draft final; a final one stays as it is. Raises `NotFound`, `Conflict`."""

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            invoice = self._books.invoices.get(invoice_id)
            if invoice.status is InvoiceStatus.FINALIZED:
                return [], invoice
            if invoice.status is not InvoiceStatus.DRAFT:
                raise Conflict(f"the invoice is {invoice.status}")
            final = msgspec.structs.replace(invoice, status=InvoiceStatus.FINALIZED, finalized_us=time_us)
            return [_row(InvoiceFinalized(invoice_id=invoice_id, at_us=time_us))], final

        return self._command("finalize_invoice", idempotency, Invoice, decide)[0]

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

    def invoice(self, invoice_id: str) -> Invoice:
        """Raises `NotFound`."""
        with self._state:
            return self._books.invoices.get(invoice_id)

    def invoices(self, tenant_id: str | None = None, limit: int = 100, after: str | None = None) -> list[Invoice]:
        """In the order of their cuts, void ones too. Raises `NotFound` for an unknown tenant."""
        with self._state:
            if tenant_id is None:
                found = list(self._books.invoices.by_id.values())
            else:
                found = self._books.invoices.of(self._books.accounts.tenant(tenant_id).id)
            return page(found, lambda invoice: invoice.id, limit, after)

    # cutting

    def _check_period(self, tenant_id: str, period: Period, watermark_us: int) -> None:
        faults = Faults()
        faults.time("period_start", period.start_us)
        faults.time("period_end", period.end_us)
        faults.raise_if_any()
        if period.end_us <= period.start_us:
            raise Invalid([("period_end", "must be later than period_start")])
        self.refresh()
        with self._state:
            self._books.accounts.tenant(tenant_id)
            self._books.invoices.check_free(tenant_id, period.start_us, period.end_us)
        if period.end_us > min(watermark_us, self._clock()):
            raise PeriodNotClosed("usage of this period may still be on its way")

    def _agreed_cut(self, tenant_id: str, period: Period, usage: UsageSource) -> tuple[_Cut, dict[str, UsageEvent]]:
        """A cut of the ledger, and the stored event of each of its charges."""
        for _ in range(CUT_ATTEMPTS):
            cut = self._cut(tenant_id, period)
            events: dict[str, UsageEvent] = {}
            unknown: list[UsageEvent] = []
            for event in self._stored(tenant_id, period, cut, usage):
                entry = cut.entries.get(event.event_id)
                if entry is not None and content_hash(event) == entry.rated.event_hash:
                    events[event.event_id] = event
                elif entry is None and period.start_us <= event.ts_us < period.end_us:
                    unknown += [event] if event.event_id not in cut.recorded else []
            if unknown:
                self.record(unknown)
            elif len(events) == len(cut.entries):
                return cut, events
        raise PeriodNotClosed("the ledger has usage of this period that the usage store does not have yet")

    def _cut(self, tenant_id: str, period: Period) -> _Cut:
        """What the ledger has now. Raises `UnratedUsage`."""
        self.refresh()
        with self._state:
            seq, time_us = self._books.seq, self._clock()
            invoices = self._books.invoices.of(tenant_id)
            unrated = [
                one.event_id
                for one in self._books.ledger.unrated.values()
                if one.tenant == tenant_id and period.start_us <= one.ts_us < period.end_us
            ]
        if unrated:
            raise UnratedUsage(f"{len(unrated)} requests of this period have no charge, first {unrated[0]}")
        recorded: set[str] = set()
        entries: dict[str, _Entry] = {}
        for number, rated in self._rated(tenant_id, _scan_from_us(period, invoices)):
            own = period.start_us <= rated.ts_us < period.end_us
            late_of = None if own else _standing(rated.ts_us, invoices)
            if number > seq or not (own or late_of):
                continue
            if own:
                recorded.add(rated.event_id)
            if owner(rated.ts_us, number, invoices) is None:
                entries[rated.event_id] = _Entry(rated, late_of)
        return _Cut(seq=seq, time_us=time_us, invoices=invoices, recorded=recorded, entries=entries)

    def _rated(self, tenant_id: str, recorded_from_us: int) -> Iterator[tuple[int, UsageRated]]:
        """A tenant's charges with their numbers in the ledger."""
        for row in self._store.scan(f"usage:{tenant_id}", recorded_from_us=recorded_from_us):
            fact = fact_of(row)
            if isinstance(fact, UsageRated):
                yield row.seq, fact

    def _stored(self, tenant_id: str, period: Period, cut: _Cut, usage: UsageSource) -> Iterator[UsageEvent]:
        """The store's events of the period, and those of earlier periods that turned up late."""
        yield from usage.events(tenant_id, period.start_us, period.end_us)
        late = [entry for entry in cut.entries.values() if entry.late_of]
        for invoice in cut.invoices:
            settled = [entry.rated.settled_us for entry in late if entry.late_of == invoice]
            if settled:
                yield from usage.events(
                    tenant_id,
                    invoice.period_start_us,
                    invoice.period_end_us,
                    settled_from_us=min(settled),
                    settled_to_us=max(settled) + 1,
                )

    def _compose(self, tenant_id: str, period: Period, cut: _Cut, events: dict[str, UsageEvent]) -> Invoice:
        """The draft, every charge rated anew. Raises `LedgerDisagrees`."""
        with self._state:
            tenant = self._books.accounts.tenant(tenant_id)
            prices = self._books.prices.copy()  # a month's charges are rated without the lock: requests go on
        currency = tenant.currency
        charges = [_rerated(entry, events[id], currency, prices) for id, entry in cut.entries.items()]
        id = self._new_id("invoice")
        rule = PeriodRule(anchor_day=tenant.billing_anchor_day, timezone=tenant.timezone)
        asked = cut_lines(period, charges, book=prices, earlier=cut.invoices, rule=rule)
        lines = close(id, currency, asked)
        return Invoice(
            id=id,
            tenant=tenant_id,
            currency=currency,
            status=InvoiceStatus.DRAFT,
            period_start_us=period.start_us,
            period_end_us=period.end_us,
            cut_us=cut.time_us,
            cut_seq=cut.seq,
            lines=lines,
            total_minor=sum(line.amount_minor for line in lines),
            event_count=len(charges),
            events_digest=digest(charges),
            created_us=cut.time_us,
            true_up=true_up(lines, charges),
        )

    # exporting and voiding

    @contextmanager
    def _with_provider(self, invoice_id: str) -> Iterator[None]:
        """One export or void of an invoice at a time. Raises `Conflict`."""
        with self._state:
            if invoice_id in self._exporting:
                raise Conflict("the invoice is being exported or voided")
            self._exporting.add(invoice_id)
        try:
            yield
        finally:
            with self._state:
                self._exporting.discard(invoice_id)

    def _finish_void(self, before: Invoice, idempotency: Idempotency | None) -> Invoice:
        """`before`: as it was when the provider was asked; an export that began since is one to ask about."""

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            invoice = self._books.invoices.get(before.id)
            if invoice.status is InvoiceStatus.VOID:
                return [], invoice
            if (invoice.status, invoice.export_started_us) != (before.status, before.export_started_us):
                raise Conflict("the invoice changed meanwhile; try again")
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
            )
            return [_row(InvoiceExported(invoice_id=invoice.id, at_us=time_us, result=result))], exported

        return self._command("export_invoice", idempotency, Invoice, decide)[0]


def _rerated(entry: _Entry, event: UsageEvent, currency: str, prices: PriceBook) -> Charge:
    rated = entry.rated
    price = _price_again(rated, event, currency, prices)
    if not agrees(rated, event, price):
        raise LedgerDisagrees(f"request {event.event_id} was charged otherwise than it is rated now")
    return Charge(
        event_id=event.event_id,
        event_hash=rated.event_hash,
        ts_us=event.ts_us,
        model=event.model,
        adapter=event.adapter,
        quantities=priced_quantities(event, price),
        price=price,
        late_of=entry.late_of,
        period_start_us=rated.period_start_us,
        charged_femto=int(rated.amount_femto),
    )


def _price_again(rated: UsageRated, event: UsageEvent, currency: str, prices: PriceBook) -> PriceVersion:
    if rated.rated_later:  # by its time alone there was no price: the operator set one for it afterwards
        return prices.versions[rated.price_id]
    return prices.resolve(
        event.tenant,
        event.model,
        event.base_model,
        currency,
        ts_us=event.ts_us,
        known_us=event.ts_us,
        endpoint=event.endpoint,
    )


def _row(
    fact: InvoiceFinalized | InvoiceExportStarted | InvoiceExportAbandoned | InvoiceExported | InvoiceVoided,
) -> NewEvent:
    return new_event(f"invoice:{fact.invoice_id}", fact)


def _standing(ts_us: int, invoices: Iterable[Invoice]) -> Invoice | None:
    """The invoice whose period has the instant and that is not void."""
    return next((one for one in invoices if one.status is not InvoiceStatus.VOID and one.has(ts_us)), None)


def _scan_from_us(period: Period, invoices: Sequence[Invoice]) -> int:
    """No charge recorded earlier can be on a new invoice for the period.

    Late usage is recorded after the last cut, which took all there was, unless an invoice was voided since:
    what that one had is free again.
    """
    first = period.start_us
    if any(invoice.status is InvoiceStatus.VOID for invoice in invoices):
        first = min(first, *(invoice.period_start_us for invoice in invoices))
    elif invoices:
        first = min(first, invoices[-1].cut_us)
    return max(0, first - CLOCK_SLACK_US)
