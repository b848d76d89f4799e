"""Invoices: cut as drafts.

A draft is cut from two sources that must agree event by event: the ledger says which events stand and
what each was charged, the usage store has the events and is rated anew. Usage that only the store has is
recorded first; usage that only the ledger has is still on its way, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from billing.accounts import Tenant
from billing.asked import ask, sealed
from billing.books import Books, fact_of, new_event
from billing.checks import Faults
from billing.document import Document, content_hash_of, document
from billing.errors import Conflict, Invalid, PeriodNotClosed, UnratedUsage
from billing.invoice import Invoice, InvoiceDrafted, InvoiceStatus, UsageSource
from billing.ledger import UsageRated
from billing.lines import cut_lines, true_up
from billing.modes import Stretch, within
from billing.owners import Owners
from billing.periods import Period
from billing.prices import PriceBook
from billing.service.shell import Idempotency
from billing.service.usage import UsageService, usage_key
from billing.stays import Stay, adapter_lines
from billing.store import NewEvent
from billing.taken import Taken
from billing.terms import InvoiceTerms, PeriodRule
from billing.witnesses import Entry, Witnesses
from metering.events import UsageEvent, content_hash

CUT_ATTEMPTS = 4
DRAFT = "draft_invoice"  # the command's name in the log
CLOCK_SLACK_US = 86_400_000_000  # by how much two machines' clocks may part and a scan still sees all


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has for an invoice, at one point of its sequence."""

    seq: int
    time_us: int
    invoices: list[Invoice]  # all of the tenant's, as they stood
    tenant: Tenant  # as it was
    prices: PriceBook  # a copy: a month's charges are rated without the lock, and requests go on
    rule: PeriodRule
    stays: dict[str, list[Stay]]
    terms: InvoiceTerms
    left_out: tuple[Stretch, ...]  # charges that meters ask for


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
        if first := self._first_result(DRAFT, idempotency, Invoice):
            return first
        period = Period(start_us=start_us, end_us=end_us)
        made = self._draft(tenant_id, period, usage, watermark_us, idempotency)
        assert made is not None  # only one that is cut by the clock is not made where there is nothing to ask for
        return made

    def invoice_document(self, invoice_id: str) -> Document:
        """The invoice's canonical document. Raises `NotFound`, and `Conflict` for one that was cut without a basis."""
        with self._state:
            invoice = self._books.invoices.get(invoice_id)
            invoices = self._books.invoices.of(invoice.tenant)
            if invoice.basis is None:
                raise Conflict("the invoice was cut by a version of Meterhouse that kept nothing to verify it by")
            prices = self._books.prices.copy()
        return document(invoice, prices, invoices)  # a long one takes its time: requests do not wait for it

    # within

    def _draft(
        self,
        tenant_id: str,
        period: Period,
        usage: UsageSource,
        watermark_us: int,
        idempotency: Idempotency | None = None,
        *,
        automatic: bool = False,
    ) -> Invoice | None:
        """The draft; None for an automatic one without anything on it, which is not written."""
        self._check_period(tenant_id, period, watermark_us)
        cut, taken = self._agreed_cut(tenant_id, period, usage)
        invoice = msgspec.structs.replace(compose(self._new_id("invoice"), period, cut, taken), automatic=automatic)
        if automatic and not invoice.lines and not invoice.event_count:
            return None

        def decide(time_us: int) -> tuple[list[NewEvent], Invoice]:
            self._books.invoices.check_free(tenant_id, period.start_us, period.end_us)
            if self._books.invoices.of(tenant_id) != cut.invoices:
                raise Conflict("another invoice of this tenant changed meanwhile; try again")
            draft = msgspec.structs.replace(invoice, created_us=time_us)
            return [new_event(f"invoice:{draft.id}", InvoiceDrafted(invoice=draft))], draft

        return self._command(DRAFT, idempotency, Invoice, decide)[0]

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

    def _agreed_cut(self, tenant_id: str, period: Period, usage: UsageSource) -> tuple[Cut, Taken]:
        """A cut of the ledger, and what it takes: every charge that is free, by its stored event."""
        for _ in range(CUT_ATTEMPTS):
            cut = self._cut(tenant_id, period)
            witnesses = Witnesses(self._entries(cut, period))
            taken = Taken(cut.prices, cut.tenant.currency)
            for entry, event in witnesses.match(usage.events(tenant_id, period.start_us, period.end_us)):
                taken.add(entry, event, period.start_us)
            if unknown := self._unmatched(cut, period, witnesses.unknown()):
                self.record(unknown)
                continue
            for entry, event in witnesses.match_rest(late_events(tenant_id, cut, witnesses.unseen(), usage)):
                taken.add(entry, event, period.start_us)
            if not witnesses.unseen():
                return cut, taken
        raise PeriodNotClosed("the ledger has usage of this period that the usage store does not have yet")

    def _cut(self, tenant_id: str, period: Period) -> Cut:
        """What the ledger has now. Raises `UnratedUsage`."""
        self.refresh()
        with self._state:
            cut = cut_of(self._books, tenant_id, period, self._clock())
            unrated = [
                one.event_id
                for one in self._books.ledger.unrated.values()
                if one.tenant == tenant_id and period.start_us <= one.ts_us < period.end_us
            ]
        if unrated:
            raise UnratedUsage(f"{len(unrated)} requests of this period have no charge, first {unrated[0]}")
        return cut

    def _entries(self, cut: Cut, period: Period) -> Iterator[Entry]:
        """The tenant's charges at the cut that are of the period, or late for a standing invoice and on none."""
        owners = Owners(cut.invoices)
        for number, rated in self._rated(cut.tenant.id, self._scan_from_us(period, cut.invoices)):
            if entry := _entry(number, rated, cut, period, owners):
                yield entry

    def _unmatched(self, cut: Cut, period: Period, events: Sequence[UsageEvent]) -> list[UsageEvent]:
        """Those of them that are no second contents of what was matched: the first content of an id stands."""
        rows = self._store.find_all([usage_key(event.event_id) for event in events])
        from_us, owners = self._scan_from_us(period, cut.invoices), Owners(cut.invoices)
        found = []
        for event in events:
            row = rows.get(usage_key(event.event_id))
            fact = fact_of(row) if row is not None and row.time_us >= from_us else None
            if (
                row is None
                or not isinstance(fact, UsageRated)
                or fact.tenant != cut.tenant.id
                or fact.event_hash == content_hash(event)
                or _entry(row.seq, fact, cut, period, owners) is None
            ):
                found.append(event)
        return found

    def _scan_from_us(self, period: Period, invoices: Sequence[Invoice]) -> int:
        """No charge recorded earlier can be on a new invoice for the period.

        Late usage is recorded after the last cut, which took all there was, unless an invoice was voided since:
        what that one had is free again. When that cut was, the log says, in which no time is before another's: the
        clock of whoever cut may have been put forward, and others recorded behind the cut by theirs.
        """
        first = period.start_us
        if any(invoice.status is InvoiceStatus.VOID for invoice in invoices):
            first = min(first, *(invoice.period_start_us for invoice in invoices))
        elif invoices:
            first = min([first, *(row.time_us for row in self._store.read(invoices[-1].cut_seq, 1))])
        return max(0, first - CLOCK_SLACK_US)

    def _rated(self, tenant_id: str, recorded_from_us: int) -> Iterator[tuple[int, UsageRated]]:
        """A tenant's charges with their numbers in the ledger."""
        for row in self._store.scan(f"usage:{tenant_id}", recorded_from_us=recorded_from_us):
            fact = fact_of(row)
            if isinstance(fact, UsageRated):
                yield row.seq, fact


def cut_of(books: Books, tenant_id: str, period: Period, time_us: int) -> Cut:
    """What the books have for an invoice; later facts do not change it."""
    tenant = books.accounts.tenant(tenant_id)
    rule = PeriodRule(anchor_day=tenant.billing_anchor_day, timezone=tenant.timezone)
    return Cut(
        seq=books.seq,
        time_us=time_us,
        invoices=books.invoices.of(tenant_id),
        tenant=tenant,
        prices=books.prices.copy(),
        rule=rule,
        stays=books.stays.of(tenant_id),
        terms=books.terms.of(tenant_id, period, rule),
        left_out=books.modes.metered(books.seq).stretches,
    )


def late_events(tenant_id: str, cut: Cut, entries: Sequence[Entry], usage: UsageSource) -> Iterator[UsageEvent]:
    """Events of earlier periods, of those that turned up late and some beside them."""
    for invoice in cut.invoices:
        settled = [entry.rated.settled_us for entry in entries if entry.late_of == invoice]
        if settled:
            yield from usage.events(
                tenant_id,
                invoice.period_start_us,
                invoice.period_end_us,
                settled_from_us=min(settled),
                settled_to_us=max(settled) + 1,
            )


def compose(id: str, period: Period, cut: Cut, taken: Taken) -> Invoice:
    """The draft: a function of the ledger at the cut, and what it takes."""
    tenant, prices, rule, terms = cut.tenant, cut.prices, cut.rule, cut.terms
    charges = taken.charges()
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
        event_count=taken.count,
        events_digest=taken.digest(),
        created_us=cut.time_us,
        true_up=true_up(lines, charges),
        left_out=cut.left_out,
        basis=taken.basis(rule),
        terms=terms,
    )
    return msgspec.structs.replace(invoice, content_hash=content_hash_of(document(invoice, prices, cut.invoices)))


def _entry(number: int, rated: UsageRated, cut: Cut, period: Period, owners: Owners) -> Entry | None:
    """The charge as it concerns an invoice for the period."""
    own = period.start_us <= rated.ts_us < period.end_us
    late_of = None if own else _standing(rated.ts_us, cut.invoices)
    if number > cut.seq or not (own or late_of):
        return None
    free = not within(number, cut.left_out) and owners.of(rated.ts_us, number) is None
    return Entry(rated, late_of, free) if own or free else None


def _standing(ts_us: int, invoices: Iterable[Invoice]) -> Invoice | None:
    """The invoice whose period has the instant and that is not void."""
    return next((one for one in invoices if one.status is not InvoiceStatus.VOID and one.has(ts_us)), None)
