"""Discounts, minimums, tax: agreed, ended, looked up."""

from __future__ import annotations

import msgspec

from billing.asked import carried_femto
from billing.books import new_event
from billing.errors import Conflict
from billing.money import exact_text, format_amount, format_percent, parse_amount, parse_percent
from billing.service.shell import Idempotency, Shell, page
from billing.store import NewEvent
from billing.terms import (
    COMMITMENTS_PER_TENANT,
    DISCOUNTS_PER_TENANT,
    Commitment,
    CommitmentSet,
    Discount,
    DiscountEnded,
    DiscountGiven,
    Tax,
    TaxSet,
)


class TenantTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside prices now. `carried` is femto-units, as n or n/d: what the next invoice takes off."""

    tenant: str
    currency: str
    commitments: tuple[Commitment, ...]
    tax: Tax
    carried: str


class TermsService(Shell):
    """What a tenant agreed beside prices."""

    def give_discount(
        self,
        tenant_id: str,
        *,
        name: str,
        percent: str = "",
        amount: str = "",
        from_us: int | None = None,
        to_us: int | None = None,
        model: str = "",
        token_class: str = "",
        idempotency: Idempotency | None = None,
    ) -> Discount:
        """A discount for the invoices whose period begins in [from_us, to_us), from now on where no time is said.

        What was cut already stays as it is. Raises `Invalid` with every fault, `NotFound`, `Conflict`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Discount]:
            self._books.accounts.tenant(tenant_id)
            discount = Discount(
                id=self._new_id("discount"),
                tenant=tenant_id,
                name=name,
                percent=percent,
                amount=amount,
                from_us=time_us if from_us is None else from_us,
                to_us=to_us,
                model=model,
                token_class=token_class,
                created_us=time_us,
            )
            discount.check()
            standing = [one for one in self._books.terms.discounts_of(tenant_id) if one.to_us is None]
            if len(standing) >= DISCOUNTS_PER_TENANT:
                raise Conflict(f"a tenant has at most {DISCOUNTS_PER_TENANT} discounts without an end")
            if percent:
                discount = msgspec.structs.replace(discount, percent=format_percent(parse_percent(percent)))
            if amount:
                discount = msgspec.structs.replace(discount, amount=format_amount(parse_amount(amount)))
            return [new_event(f"tenant:{tenant_id}", DiscountGiven(discount=discount))], discount

        return self._command("give_discount", idempotency, Discount, decide)[0]

    def end_discount(self, discount_id: str, *, idempotency: Idempotency | None = None) -> Discount:
        """From now on it is for no invoice whose period begins later. Raises `NotFound`."""

        def decide(time_us: int) -> tuple[list[NewEvent], Discount]:
            discount = self._books.terms.discount(discount_id)
            end_us = max(discount.from_us, time_us)
            if discount.to_us is not None and discount.to_us <= end_us:
                return [], discount
            ended = msgspec.structs.replace(discount, to_us=end_us)
            return [new_event(f"tenant:{discount.tenant}", DiscountEnded(discount=ended))], ended

        return self._command("end_discount", idempotency, Discount, decide)[0]

    def discounts(self, tenant_id: str, limit: int = 100, after: str | None = None) -> list[Discount]:
        """Ended ones too, in the order in which they take. Raises `NotFound`."""
        with self._state:
            found = self._books.terms.discounts_of(self._books.accounts.tenant(tenant_id).id)
            return page(found, lambda discount: discount.id, limit, after)

    def set_commitment(
        self, tenant_id: str, amount: str, *, from_us: int | None = None, idempotency: Idempotency | None = None
    ) -> Commitment:
        """What each billing period comes to at least, from a time on (now where none is said); 0 ends it.

        What was cut already stays as it is. Raises `Invalid` with every fault, `NotFound`, `Conflict`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Commitment]:
            self._books.accounts.tenant(tenant_id)
            commitment = Commitment(
                id=self._new_id("commitment"),
                tenant=tenant_id,
                amount=amount,
                from_us=time_us if from_us is None else from_us,
                created_us=time_us,
            )
            commitment.check()
            if len(self._books.terms.commitments_of(tenant_id)) >= COMMITMENTS_PER_TENANT:
                raise Conflict(f"a tenant's minimum changes at most {COMMITMENTS_PER_TENANT} times")
            commitment = msgspec.structs.replace(commitment, amount=format_amount(parse_amount(amount)))
            return [new_event(f"tenant:{tenant_id}", CommitmentSet(commitment=commitment))], commitment

        return self._command("set_commitment", idempotency, Commitment, decide)[0]

    def set_tax(self, tenant_id: str, tax: Tax, *, idempotency: Idempotency | None = None) -> Tax:
        """What tax invoices have that are cut from now on. Raises `Invalid` with every fault, `NotFound`."""

        def decide(time_us: int) -> tuple[list[NewEvent], Tax]:
            self._books.accounts.tenant(tenant_id)
            tax.check()
            rates = tuple(
                msgspec.structs.replace(rate, percent=format_percent(parse_percent(rate.percent))) for rate in tax.rates
            )
            told = msgspec.structs.replace(tax, rates=rates)
            if told == self._books.terms.tax_of(tenant_id):
                return [], told
            return [new_event(f"tenant:{tenant_id}", TaxSet(tenant=tenant_id, tax=told, at_us=time_us))], told

        return self._command("set_tax", idempotency, Tax, decide)[0]

    def terms(self, tenant_id: str) -> TenantTerms:
        """Raises `NotFound`."""
        with self._state:
            tenant = self._books.accounts.tenant(tenant_id)
            return TenantTerms(
                tenant=tenant_id,
                currency=tenant.currency,
                commitments=tuple(self._books.terms.commitments_of(tenant_id)),
                tax=self._books.terms.tax_of(tenant_id),
                carried=exact_text(carried_femto(self._books.invoices.of(tenant_id))),
            )
