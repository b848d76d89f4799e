"""Invoices: cut as drafts.

A draft is cut from two sources that must agree event by event: the ledger says which events stand and
what each was charged, the usage store has the events and is rated anew. Usage that only the store has is
recorded first; usage that only the ledger has is still on its way, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from billing.accounts import Tenant
from billing.asked import ask, sealed
from billing.books import fact_of, new_event
from billing.charges import agrees
from billing.checks import Faults
from billing.document import Document, basis_of, content_hash_of, document
from billing.errors import Conflict, Invalid, LedgerDisagrees, PeriodNotClosed, UnratedUsage
from billing.invoice import Invoice, InvoiceDrafted, InvoiceStatus, UsageSource, owner
from billing.ledger import UsageRated
from billing.lines import Charge, cut_lines, digest, true_up
from billing.periods import Period
from billing.prices import PriceBook, PriceVersion
from billing.service.shell import Idempotency
from billing.service.usage import UsageService
from billing.stays import Stay, adapter_lines
from billing.store import NewEvent
from billing.tariff import Tariffs
from billing.terms import InvoiceTerms, PeriodRule
from billing.tiers import TokenClass
from metering.events import UsageEvent, content_hash
from metering.receipts import leaf_of

CUT_ATTEMPTS = 4
CLOCK_SLACK_US = 86_400_000_000  # by how much two machines' clocks may part and a scan still sees all


class Entry(msgspec.Struct, frozen=True):
    """One charge that this invoice is to have, and the standing invoice it comes too late for."""

    rated: UsageRated
    late_of: Invoice | None


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has for an invoice, at one point of its sequence."""

    seq: int
    time_us: int
    invoices: list[Invoice]  # all of the tenant's, as they stood
    recorded: set[str]  # ids of the period, on whichever invoice
    entries: dict[str, Entry]
    tenant: Tenant  # as it was
    prices: PriceBook  # a copy: a month's charges are rated without the lock, and requests go on
    rule: PeriodRule
    stays: dict[str, list[Stay]]
    terms: InvoiceTerms


class CuttingService(UsageService):
    """What a tenant owes for a period, as a draft."""

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
        invoice = compose(self._new_id("invoice"), period, cut, events)

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            self._books.invoices.check_free(tenant_id, start_us, end_us)
            if self._books.invoices.of(tenant_id) != cut.invoices:
                raise Conflict("another invoice of this tenant changed meanwhile; try again")
            draft = msgspec.structs.replace(invoice, created_us=time_us)
            return [new_event(f"invoice:{draft.id}", InvoiceDrafted(invoice=draft))], draft

        return self._command(name, idempotency, Invoice, decide)[0]

    def invoice_document(self, invoice_id: str) -> Document:
        """The invoice's canonical document. Raises `NotFound`, and `Conflict` for one that was cut without a basis."""
        with self._state:
            invoice = self._books.invoices.get(invoice_id)
            invoices = self._books.invoices.of(invoice.tenant)
            if invoice.basis is None:
                raise Conflict("the invoice was cut by a version of Meterhouse that kept nothing to verify it by")
            return document(invoice, self._books.prices, invoices)

    # within

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

    def _agreed_cut(self, tenant_id: str, period: Period, usage: UsageSource) -> tuple[Cut, dict[str, UsageEvent]]:
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

    def _cut(self, tenant_id: str, period: Period) -> Cut:
        """What the ledger has now. Raises `UnratedUsage`."""
        self.refresh()
        with self._state:
            seq, time_us = self._books.seq, self._clock()
            tenant, prices = self._books.accounts.tenant(tenant_id), self._books.prices.copy()
            invoices = self._books.invoices.of(tenant_id)
            stays = self._books.stays.of(tenant_id)
            rule = PeriodRule(anchor_day=tenant.billing_anchor_day, timezone=tenant.timezone)
            terms = self._books.terms.of(tenant_id, period, rule)
            unrated = [
                one.event_id
                for one in self._books.ledger.unrated.values()
                if one.tenant == tenant_id and period.start_us <= one.ts_us < period.end_us
            ]
        if unrated:
            raise UnratedUsage(f"{len(unrated)} requests of this period have no charge, first {unrated[0]}")
        recorded: set[str] = set()
        entries: dict[str, Entry] = {}
        for number, rated in self._rated(tenant_id, _scan_from_us(period, invoices)):
            own = period.start_us <= rated.ts_us < period.end_us
            late_of = None if own else _standing(rated.ts_us, invoices)
            if number > seq or not (own or late_of):
                continue
            if own:
                recorded.add(rated.event_id)
            if owner(rated.ts_us, number, invoices) is None:
                entries[rated.event_id] = Entry(rated, late_of)
        return Cut(
            seq=seq,
            time_us=time_us,
            invoices=invoices,
            recorded=recorded,
            entries=entries,
            tenant=tenant,
            prices=prices,
            rule=rule,
            stays=stays,
            terms=terms,
        )

    def _rated(self, tenant_id: str, recorded_from_us: int) -> Iterator[tuple[int, UsageRated]]:
        """A tenant's charges with their numbers in the ledger."""
        for row in self._store.scan(f"usage:{tenant_id}", recorded_from_us=recorded_from_us):
            fact = fact_of(row)
            if isinstance(fact, UsageRated):
                yield row.seq, fact

    def _stored(self, tenant_id: str, period: Period, cut: Cut, usage: UsageSource) -> Iterator[UsageEvent]:
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


def compose(id: str, period: Period, cut: Cut, events: Mapping[str, UsageEvent]) -> Invoice:
    """The draft, every charge rated anew: a function of the ledger at the cut, and the stored events.

    Raises `LedgerDisagrees`.
    """
    tenant, prices, rule, terms = cut.tenant, cut.prices, cut.rule, cut.terms
    tariffs = Tariffs(prices)
    charges = [_rerated(entry, events[id], tenant.currency, prices, tariffs) for id, entry in cut.entries.items()]
    listed = cut_lines(period, charges, book=prices, earlier=cut.invoices, rule=rule)
    listed += adapter_lines(period, cut.stays, tenant, prices, rule)
    lines = sealed(id, tenant.currency, period, ask(period, listed, terms, cut.invoices), terms.tax)
    invoice = Invoice(
        id=id,
        tenant=tenant.id,
        currency=tenant.currency,
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
        basis=basis_of(charges, rule),
        terms=terms,
    )
    return msgspec.structs.replace(invoice, content_hash=content_hash_of(document(invoice, prices, cut.invoices)))


def _rerated(entry: Entry, event: UsageEvent, currency: str, prices: PriceBook, tariffs: Tariffs) -> Charge:
    rated = entry.rated
    price = _price_again(rated, event, currency, prices)
    tariff = tariffs.of(price.id)
    if not agrees(rated, event, tariff):
        raise LedgerDisagrees(f"request {event.event_id} was charged otherwise than it is rated now")
    return Charge(
        event_id=event.event_id,
        event_hash=rated.event_hash,
        ts_us=event.ts_us,
        model=event.model,
        adapter=event.adapter,
        quantities={TokenClass(name): units for name, units in tariff.counted(event).items()},
        price=price,
        late_of=entry.late_of,
        period_start_us=rated.period_start_us,
        charged_femto=int(rated.amount_femto),
        leaf=leaf_of(event),
        priced_later=rated.rated_later,
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
