"""What other prices would have come to: past usage by a candidate price book, beside what it was charged.

A candidate version counts from its `effective_at_us`, as if it had been known then, and takes the place of all that
stands for the same owner, name, endpoint and currency from there on; everything else of the book stays, unless the
candidates stand alone. Both sides are computed as an invoice's lines are: tiers, packages and allowances by the final
quantity of a billing period, minimums of the periods that have ended, adapters by the time they stood. Of a billing
period that began before the range, what it came to until then is taken off again. Discounts, commitments and tax, which
hang on an invoice and not on the price book, are left out on both sides.

Pure. Does not know: where usage and charges come from; writes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from billing.accounts import Tenant
from billing.errors import NoPrice
from billing.ledger import UsageRated
from billing.lines import Charge, cut_lines
from billing.periods import Period, period_at
from billing.positions import period_start
from billing.prices import PriceBook, PriceSet, PriceVersion
from billing.rating import quantities, unpriced
from billing.stays import Stay, adapter_lines
from billing.tariff import Tariff, Tariffs
from billing.terms import PeriodRule
from billing.tiers import TokenClass
from metering.events import UsageEvent

NO_PRICE = "no price"


class Missing(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Requests that the candidate book cannot price, and why; what they would cost is not known."""

    tenant: str
    model: str
    endpoint: str
    reason: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant, or one model of it. What shares tiers stands under the name that its price has, as on an invoice."""

    tenant: str
    model: str  # empty: all
    currency: str
    requests: int
    charged_femto: int | Fraction
    would_be_femto: int | Fraction | None  # None: some requests of the tenant have no candidate price

    @property
    def difference_femto(self) -> int | Fraction | None:
        return None if self.would_be_femto is None else self.would_be_femto - self.charged_femto


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The rows by tenant, and by model where that was asked for."""

    span: Period
    rows: list[Row]
    missing: dict[Missing, int]  # → how many requests
    uncharged: dict[str, int]  # tenant → requests of the range that have no charge: they cost nothing so far


def candidate_book(standing: PriceBook, candidates: Sequence[PriceVersion], *, alone: bool = False) -> PriceBook:
    """The book that would have been."""
    begins: dict[tuple[object, ...], int] = {}
    for version in candidates:
        key = version.slot, version.rate.currency
        begins[key] = min(begins.get(key, version.from_us), version.from_us)
    book = PriceBook()
    for version in () if alone else standing.versions.values():
        begun_us = begins.get((version.slot, version.rate.currency))
        if begun_us is None or version.from_us < begun_us:
            book.apply(PriceSet(price=version))
    for version in candidates:
        book.apply(PriceSet(price=version))
    return book


class _Key(NamedTuple):
    """What lines tell apart, and whether it began in the range or in its billing period before it."""

    tenant: str
    model: str
    adapter: str
    price_id: str
    start_us: int  # of the billing period in which the units count, 0 where nothing depends on it
    inside: bool


class Side:
    """What usage comes to by one book: sums of units, then lines."""

    def __init__(self, book: PriceBook) -> None:
        self.book = book
        self.tariffs = Tariffs(book)
        self.tiered = any(not part.linear for version in book.versions.values() for part in version.components)
        self._sums: dict[_Key, dict[str, int]] = defaultdict(dict)

    def add(self, key: _Key, counted: Mapping[str, int]) -> None:
        """Base units by class."""
        sums = self._sums[key]
        for name, units in counted.items():
            if units:
                sums[name] = sums.get(name, 0) + units

    def amounts(self, tenant: Tenant, span: Period, stays: dict[str, list[Stay]]) -> dict[str, int | Fraction]:
        """Model → femto-units of the range."""
        rule = PeriodRule(anchor_day=tenant.billing_anchor_day, timezone=tenant.timezone)
        found: dict[str, int | Fraction] = defaultdict(int)
        before = Period(start_us=0, end_us=span.start_us)
        for line in cut_lines(span, self._charges(tenant.id), book=self.book, rule=rule):
            found[line.model] += line.amount_femto
        for line in cut_lines(before, self._charges(tenant.id, before=True), book=self.book, rule=rule):
            found[line.model] -= line.amount_femto
        for line in adapter_lines(span, stays, tenant, self.book, rule):
            found[line.model] += line.amount_femto
        return found

    def _charges(self, tenant: str, *, before: bool = False) -> list[Charge]:
        """All units, or those before the range alone."""
        return [
            Charge(
                model=key.model,
                adapter=key.adapter,
                quantities={TokenClass(name): units for name, units in sums.items()},
                price=self.book.versions[key.price_id],
                late_of=None,
                period_start_us=key.start_us,
            )
            for key, sums in self._sums.items()
            if key.tenant == tenant and not (before and key.inside)
        ]


class Simulator:
    """Takes charges and events in any order, each once; `result` compares."""

    def __init__(self, span: Period, tenants: Mapping[str, Tenant], standing: PriceBook, candidate: PriceBook) -> None:
        self._span, self._tenants = span, tenants
        self._charged, self._would_be = Side(standing), Side(candidate)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._missing: Counter[Missing] = Counter()
        self._tiered = self._charged.tiered or self._would_be.tiered

    def from_us(self, tenant: Tenant) -> int:
        """From when on a tenant's usage counts: where tiers may be, from the start of the range's billing period."""
        if not self._tiered:
            return self._span.start_us
        return period_at(self._span.start_us, tenant.billing_anchor_day, tenant.timezone).start_us

    def charge(self, rated: UsageRated) -> None:
        """A charge of the ledger."""
        tenant, inside = self._tenants[rated.tenant], self._span.has(rated.ts_us)
        if inside or (rated.positions and self.from_us(tenant) <= rated.ts_us < self._span.start_us):
            counted = rated.quantities or {one.value: units for one, units in quantities(rated).items()}
            key = _Key(rated.tenant, rated.model, rated.adapter, rated.price_id, rated.period_start_us, inside)
            self._charged.add(key, counted)

    def event(self, event: UsageEvent) -> None:
        """A stored event."""
        inside, tenant = self._span.has(event.ts_us), self._tenants.get(event.tenant)
        if tenant is not None and not inside and not self.from_us(tenant) <= event.ts_us < self._span.start_us:
            return
        tariff = self._tariff(event, tenant) if tenant is not None and not event.faults() else None
        if inside:
            self._requests[event.tenant, event.model] += 1
        if tariff is None or tenant is None:
            if inside:
                self._missing[self._why(event, tenant)] += 1
            return
        if inside or tariff.tiered:
            start_us = period_start(tariff, event.ts_us, tenant.billing_anchor_day, tenant.timezone)
            key = _Key(event.tenant, event.model, event.adapter, tariff.price.id, start_us, inside)
            self._would_be.add(key, tariff.counted(event))

    def result(
        self, stays: Mapping[str, dict[str, list[Stay]]], uncharged: dict[str, int], *, by_model: bool
    ) -> Simulation:
        """`stays`: of each tenant's adapters. Tenants without usage and without amounts have no row."""
        rows: list[Row] = []
        for id in sorted(self._tenants):
            rows += self._rows(self._tenants[id], stays.get(id, {}), by_model)
        return Simulation(span=self._span, rows=rows, missing=dict(sorted(self._missing.items())), uncharged=uncharged)

    def _rows(self, tenant: Tenant, stays: dict[str, list[Stay]], by_model: bool) -> Iterable[Row]:
        charged = self._charged.amounts(tenant, self._span, stays)
        would_be = self._would_be.amounts(tenant, self._span, stays)
        requests = {model: count for (owner, model), count in self._requests.items() if owner == tenant.id}
        unknown = {one.model for one in self._missing if one.tenant == tenant.id}
        for model in sorted({*charged, *would_be, *requests}) if by_model else [""]:
            names = [model] if by_model else sorted({*charged, *would_be, *requests})
            row = Row(
                tenant=tenant.id,
                model=model,
                currency=tenant.currency,
                requests=sum(requests.get(name, 0) for name in names),
                charged_femto=sum(charged.get(name, 0) for name in names),
                would_be_femto=None if unknown & set(names) else sum(would_be.get(name, 0) for name in names),
            )
            if row.requests or row.charged_femto or row.would_be_femto:
                yield row

    def _tariff(self, event: UsageEvent, tenant: Tenant) -> Tariff | None:
        try:
            price = self._would_be.book.resolve(
                event.tenant,
                event.model,
                event.base_model,
                tenant.currency,
                ts_us=event.ts_us,
                known_us=event.ts_us,
                endpoint=event.endpoint,
            )
        except NoPrice:
            return None
        return None if unpriced(event, price) else self._would_be.tariffs.of(price.id)

    def _why(self, event: UsageEvent, tenant: Tenant | None) -> Missing:
        if tenant is None:
            reason = "unknown tenant"
        elif faults := event.faults():
            reason = faults[0]
        elif event.images or event.audio_ms:
            reason = f"{NO_PRICE}, or none for what is no token"
        else:
            reason = f"{NO_PRICE} in {tenant.currency}"
        return Missing(tenant=event.tenant, model=event.model, endpoint=event.endpoint, reason=reason)
