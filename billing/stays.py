"""How long each adapter stood, and what that costs: a price for a month, by the exact part of it.

An adapter stands from when its name was added until it was removed; another load under the same name goes on where the
one before it was. A line is for one adapter, one price and one billing period: price x microseconds that it stood /
microseconds of the period. So the lines of invoices whose periods tile a billing period sum to what one for all of it
would have. The price is found as a request's for that adapter would be, at each instant: a version that begins in the
period is for what comes after it. Where the price that is found has no adapter-month, or there is none, an adapter
costs nothing.

Pure. Does not know: usage, what time it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

import msgspec

from billing.accounts import AdapterAdded, AdapterRemoved, Tenant
from billing.errors import NoPrice
from billing.line import InvoiceLine, LineKind
from billing.money import exact_text
from billing.periods import Period
from billing.prices import PriceBook, PriceVersion
from billing.terms import PeriodRule
from billing.tiers import TokenClass, unit_femto

MONTH = TokenClass.ADAPTER_MONTH


class Stay(msgspec.Struct, frozen=True):
    """One stretch of time in which a name was an adapter's; `to_us` None: it still is."""

    from_us: int
    to_us: int | None
    base_model: str


class Stays:
    """Every adapter that there ever was, by tenant and name."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, list[Stay]]] = defaultdict(dict)

    def apply(self, fact: AdapterAdded | AdapterRemoved, time_us: int) -> None:
        """`time_us`: when the fact was written."""
        adapter = fact.adapter
        stays = self._of[adapter.tenant].setdefault(adapter.name, [])
        last = stays[-1] if stays else None
        if last is not None and last.to_us is None:
            stays[-1] = Stay(last.from_us, max(last.from_us, time_us), last.base_model)
        if isinstance(fact, AdapterAdded):
            from_us = time_us if not stays else max(time_us, stays[-1].to_us or 0)  # a clock that was put back
            stays.append(Stay(from_us, None, adapter.base_model))

    def of(self, tenant: str) -> dict[str, list[Stay]]:
        """A copy."""
        return {name: list(stays) for name, stays in self._of.get(tenant, {}).items()}


def adapter_lines(
    span: Period, stays: dict[str, list[Stay]], tenant: Tenant, book: PriceBook, rule: PeriodRule
) -> Iterator[InvoiceLine]:
    """What the adapters of a tenant cost in the span, in the order of period, name and price."""
    if not stays or not any(MONTH in version.by_class() for version in book.versions.values()):
        return
    changes = sorted({version.from_us for version in book.versions.values()})
    for whole, part in rule.parts_of(span):
        for name in sorted(stays):
            stood: dict[str, int] = defaultdict(int)
            for stay in stays[name]:
                for price, us in _priced(tenant, name, stay, part, book, changes):
                    stood[price.id] += us
            for id in sorted(stood, key=book.rank):
                yield _line(name, book.versions[id], stood[id], whole, part)


def _priced(
    tenant: Tenant, name: str, stay: Stay, part: Period, book: PriceBook, changes: list[int]
) -> Iterator[tuple[PriceVersion, int]]:
    """The prices of one stay within one period, and for how long each."""
    start_us = max(stay.from_us, part.start_us)
    end_us = part.end_us if stay.to_us is None else min(stay.to_us, part.end_us)
    if start_us >= end_us:
        return
    inner = changes[bisect_right(changes, start_us) : bisect_left(changes, end_us)]
    for at_us, until_us in zip([start_us, *inner], [*inner, end_us], strict=True):
        try:
            price = book.resolve(tenant.id, name, stay.base_model, tenant.currency, ts_us=at_us, known_us=at_us)
        except NoPrice:
            continue
        if MONTH in price.by_class():
            yield price, until_us - at_us


def _line(name: str, price: PriceVersion, stood_us: int, whole: Period, part: Period) -> InvoiceLine:
    nano = price.by_class()[MONTH].tiers[0].price_nano
    period_us = whole.end_us - whole.start_us
    return InvoiceLine(
        id="",
        kind=LineKind.ADAPTER,
        model=name,
        adapter=name,
        token_class=MONTH,
        price_id=price.id,
        period_start_us=part.start_us,
        period_end_us=part.end_us,
        quantity=stood_us,
        unit_price_nano=nano,
        amount_minor=0,
        total=period_us,
        exact=exact_text(Fraction(stood_us * unit_femto(MONTH, nano), period_us)),
    )
