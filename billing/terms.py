"""What a tenant agreed beside prices: discounts, a minimum for each billing period, tax.

A *discount* is for the invoices whose period begins in [from, to). Of several each takes from what those given before
it left. A percentage is of the listed lines that it is for; an amount is for a whole billing period, of which a shorter
invoice gets its share, and is never more than there is. A *commitment* is what a tenant's billing period comes to at
least, before tax and after discounts; it is in force from its `from_us` until the next one begins, and a shorter time
counts by its microseconds. *Tax* is what stands when an invoice is cut: none, rates of the house's own, each on the
whole subtotal (prices are without tax), or whatever Stripe Tax finds.

An invoice keeps the terms that it was cut by, so nothing that is agreed later changes what was invoiced, and late usage
gets the terms of its own period.

Pure. Does not know: usage, lines, what time it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from fractions import Fraction

import msgspec

from billing.checks import AMOUNT_MAX_FEMTO, Faults
from billing.errors import NotFound
from billing.money import exact_text, parse_amount, parse_percent
from billing.periods import UTC_NAME, Period, period_at, periods
from billing.tiers import TokenClass

DISCOUNTS_PER_TENANT = 20  # that have not ended
COMMITMENTS_PER_TENANT = 1000
TAX_RATES_MAX = 5
PERCENT = 10**9  # `parse_percent` gives billionths of a percent


class PeriodRule(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant's anchor and zone, which say when a period that began ends."""

    anchor_day: int = 1
    timezone: str = UTC_NAME

    def end_of(self, start_us: int) -> int:
        return period_at(start_us, self.anchor_day, self.timezone).end_us

    def parts_of(self, span: Period) -> Iterator[tuple[Period, Period]]:
        """Each billing period that the span touches, and what of it the span has."""
        for whole in periods(span.start_us, span.end_us, self.anchor_day, self.timezone):
            start_us, end_us = max(whole.start_us, span.start_us), min(whole.end_us, span.end_us)
            yield whole, Period(start_us=start_us, end_us=end_us)


UTC_MONTHS = PeriodRule()


class Discount(msgspec.Struct, frozen=True, kw_only=True):
    """Less of a tenant's listed lines: a percentage, or an amount for each billing period (exact decimal text both)."""

    id: str
    tenant: str
    name: str  # as the invoice shows it
    percent: str = ""
    amount: str = ""
    from_us: int
    to_us: int | None = None  # for no invoice whose period begins then or later
    model: str = ""  # of lines of this model (or adapter) only
    token_class: str = ""  # of lines of this class only
    created_us: int

    def check(self) -> None:
        """Raise `Invalid` with every fault."""
        faults = Faults()
        faults.text("name", self.name)
        if bool(self.percent) == bool(self.amount):
            faults.add("percent", "or amount must be given, one of the two")
        if self.percent and not faults.money("percent", self.percent, parse_percent, 100 * PERCENT):
            _above_zero(faults, "percent")
        if self.amount and not faults.money("amount", self.amount, parse_amount, AMOUNT_MAX_FEMTO):
            _above_zero(faults, "amount")
        faults.time("from", self.from_us)
        if self.to_us is not None:
            faults.time("to", self.to_us)
            if self.to_us <= self.from_us:
                faults.add("to", "must be later than from")
        if self.model:
            faults.model("model", self.model)
        if self.token_class and self.token_class not in list(TokenClass):
            faults.add("token_class", f"is unknown; known are {', '.join(TokenClass)}")
        faults.raise_if_any()

    def is_for(self, model: str, token_class: str) -> bool:
        """Whether it takes from lines of this model and class."""
        return self.model in ("", model) and self.token_class in ("", token_class)

    def stands_at(self, start_us: int) -> bool:
        """Whether it is for an invoice whose period begins then."""
        return self.from_us <= start_us and (self.to_us is None or start_us < self.to_us)


class Commitment(msgspec.Struct, frozen=True, kw_only=True):
    """What a billing period comes to at least (exact decimal text), from a time on; 0 ends it."""

    id: str
    tenant: str
    amount: str
    from_us: int
    created_us: int

    def check(self) -> None:
        """Raise `Invalid` with every fault."""
        faults = Faults()
        faults.money("amount", self.amount, parse_amount, AMOUNT_MAX_FEMTO)
        faults.time("from", self.from_us)
        faults.raise_if_any()


class CommitmentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in which one commitment was in force, within one billing period of so many microseconds."""

    amount: str
    start_us: int
    end_us: int
    period_us: int

    @property
    def target_femto(self) -> Fraction:
        """What is due for it at least, exactly."""
        return Fraction(parse_amount(self.amount) * (self.end_us - self.start_us), self.period_us)


class TaxMode(StrEnum):
    """Who says what tax there is."""

    NONE = "none"
    FIXED = "fixed"
    STRIPE = "stripe"


class TaxRate(msgspec.Struct, frozen=True, kw_only=True):
    """One tax on the subtotal; `percent` is exact decimal text."""

    name: str
    percent: str


class Tax(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's tax. Several rates are each on the same subtotal, never on each other."""

    mode: TaxMode = TaxMode.NONE
    rates: tuple[TaxRate, ...] = ()

    def check(self) -> None:
        """Raise `Invalid` with every fault."""
        faults = Faults()
        if self.mode is TaxMode.FIXED and not 1 <= len(self.rates) <= TAX_RATES_MAX:
            faults.add("rates", f"must be 1 to {TAX_RATES_MAX} where the mode is fixed")
        if self.mode is not TaxMode.FIXED and self.rates:
            faults.add("rates", "are for the mode fixed")
        for number, rate in enumerate(self.rates):
            faults.text(f"rates[{number}].name", rate.name)
            faults.money(f"rates[{number}].percent", rate.percent, parse_percent, 100 * PERCENT)
        if len({rate.name for rate in self.rates}) != len(self.rates):
            faults.add("rates", "must each have a name of its own")
        faults.raise_if_any()


class InvoiceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of one invoice's own period, kept on it.

    `share`: of how many billing periods amounts off are, as n or n/d; 1 where there is no discount.
    """

    discounts: tuple[Discount, ...] = ()  # in the order in which they take
    share: str = "1"
    commitment: tuple[CommitmentPart, ...] = ()
    tax: Tax = Tax()


class DiscountGiven(msgspec.Struct, frozen=True, kw_only=True, tag="discount.given"):
    discount: Discount


class DiscountEnded(msgspec.Struct, frozen=True, kw_only=True, tag="discount.ended"):
    discount: Discount  # as it is afterwards


class CommitmentSet(msgspec.Struct, frozen=True, kw_only=True, tag="commitment.set"):
    commitment: Commitment


class TaxSet(msgspec.Struct, frozen=True, kw_only=True, tag="tax.set"):
    tenant: str
    tax: Tax
    at_us: int


TermsFact = DiscountGiven | DiscountEnded | CommitmentSet | TaxSet


class Terms:
    """What every tenant agreed."""

    def __init__(self) -> None:
        self.discounts: dict[str, Discount] = {}  # all of them, in the order in which they were given
        self._discounts_of: dict[str, list[str]] = defaultdict(list)
        self._commitments: dict[str, tuple[Commitment, ...]] = {}
        self._tax: dict[str, Tax] = {}

    def apply(self, fact: TermsFact) -> None:
        match fact:
            case DiscountGiven(discount=discount):
                self.discounts[discount.id] = discount
                self._discounts_of[discount.tenant].append(discount.id)
            case DiscountEnded(discount=discount):
                self.discounts[discount.id] = discount
            case CommitmentSet(commitment=commitment):
                # The sort is stable: of two from one instant the one that was set later comes later and counts.
                known = (*self._commitments.get(commitment.tenant, ()), commitment)
                self._commitments[commitment.tenant] = tuple(sorted(known, key=lambda one: one.from_us))
            case TaxSet(tenant=tenant, tax=tax):
                self._tax[tenant] = tax

    def discount(self, discount_id: str) -> Discount:
        try:
            return self.discounts[discount_id]
        except KeyError:
            raise NotFound("discount", discount_id) from None

    def discounts_of(self, tenant: str) -> list[Discount]:
        """All of them, ended ones too, in the order in which they were given."""
        return [self.discounts[id] for id in self._discounts_of.get(tenant, ())]

    def commitments_of(self, tenant: str) -> list[Commitment]:
        """All of them, by the time from which they are in force."""
        return list(self._commitments.get(tenant, ()))

    def tax_of(self, tenant: str) -> Tax:
        return self._tax.get(tenant, Tax())

    def of(self, tenant: str, span: Period, rule: PeriodRule) -> InvoiceTerms:
        """The terms of an invoice for the span."""
        share, parts = Fraction(0), []
        commitments = self._commitments.get(tenant, ())
        for whole, part in rule.parts_of(span):
            period_us = whole.end_us - whole.start_us
            share += Fraction(part.end_us - part.start_us, period_us)
            parts += list(_in_force(commitments, part, period_us))
        discounts = tuple(one for one in self.discounts_of(tenant) if one.stands_at(span.start_us))
        return InvoiceTerms(
            discounts=discounts,
            share=exact_text(share) if discounts else "1",
            commitment=tuple(parts),
            tax=self.tax_of(tenant),
        )


def _in_force(commitments: tuple[Commitment, ...], part: Period, period_us: int) -> Iterator[CommitmentPart]:
    for number, one in enumerate(commitments):
        until_us = commitments[number + 1].from_us if number + 1 < len(commitments) else part.end_us
        start_us, end_us = max(one.from_us, part.start_us), min(until_us, part.end_us)
        if start_us < end_us and parse_amount(one.amount):
            yield CommitmentPart(amount=one.amount, start_us=start_us, end_us=end_us, period_us=period_us)


def _above_zero(faults: Faults, field: str) -> None:
    if not any(name == field for name, _ in faults.found):
        faults.add(field, "must be more than 0")
