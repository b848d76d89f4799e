"""What a tenant agreed beside prices: discounts, a minimum for each billing period, tax."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, delete, get, post, put
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.money import format_exact, parse_exact
from billing.service.terms import TenantTerms
from billing.terms import TAX_RATES_MAX, Commitment, Discount, Tax, TaxMode, TaxRate
from billing.tiers import TokenClass
from gateway.admin.body import Fault
from gateway.admin.fields import MoneyText, Text, TimeText, time_fault
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time, parse_time

PercentText = Annotated[str, Meta(max_length=64, description="exact decimal number from 0 to 100", examples=["7.5"])]
ClassText = Annotated[Text, Meta(description=", ".join(TokenClass))]


class DiscountCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """For the invoices whose period begins at `from` or later, and before `to`. One of percent and amount.

    An amount is for a whole billing period, in the tenant's currency. Of several discounts each takes from what those
    before it left.
    """

    name: Text
    percent: PercentText | None = None
    amount: MoneyText | None = None
    start: Annotated[TimeText | None, Meta(description="absent: now")] = msgspec.field(name="from", default=None)
    end: Annotated[TimeText | None, Meta(description="absent: until it is ended")] = msgspec.field(
        name="to", default=None
    )
    model: Annotated[Text | None, Meta(description="of lines of this model or adapter only")] = None
    token_class: ClassText | None = None

    def faults(self) -> list[Fault]:
        given = [(name, value) for name, value in (("from", self.start), ("to", self.end)) if value is not None]
        return [fault for name, value in given for fault in time_fault(name, value)]


class DiscountView(msgspec.Struct, kw_only=True):
    id: str
    tenant: str
    name: str
    percent: str | None
    amount: str | None
    start: str = msgspec.field(name="from")
    end: str | None = msgspec.field(name="to")
    model: str | None
    token_class: str | None
    created_at: str


class CommitmentBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What each billing period comes to at least, before tax, in the tenant's currency; 0 ends it."""

    amount: MoneyText
    start: Annotated[TimeText | None, Meta(description="absent: now")] = msgspec.field(name="from", default=None)

    def faults(self) -> list[Fault]:
        return [] if self.start is None else time_fault("from", self.start)


class CommitmentView(msgspec.Struct, kw_only=True):
    """In force from `from` until the next one's."""

    id: str
    amount: str
    start: str = msgspec.field(name="from")
    created_at: str


class TaxRateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Text
    percent: PercentText


class TaxBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tax comes on top of prices. fixed: each rate on the subtotal; stripe: what Stripe Tax finds, added there."""

    mode: TaxMode
    rates: Annotated[list[TaxRateBody], Meta(max_length=TAX_RATES_MAX)] = []


class TermsView(msgspec.Struct, kw_only=True):
    """`carried`: what the next invoice takes off, because an earlier one would have been below 0."""

    tenant: str
    currency: str
    commitments: list[CommitmentView]
    tax: TaxBody
    carried: str


def show_discount(discount: Discount) -> DiscountView:
    return DiscountView(
        id=discount.id,
        tenant=discount.tenant,
        name=discount.name,
        percent=discount.percent or None,
        amount=discount.amount or None,
        start=format_time(discount.from_us),
        end=None if discount.to_us is None else format_time(discount.to_us),
        model=discount.model or None,
        token_class=discount.token_class or None,
        created_at=format_time(discount.created_us),
    )


def show_commitment(commitment: Commitment) -> CommitmentView:
    return CommitmentView(
        id=commitment.id,
        amount=commitment.amount,
        start=format_time(commitment.from_us),
        created_at=format_time(commitment.created_us),
    )


def show_tax(tax: Tax) -> TaxBody:
    return TaxBody(mode=tax.mode, rates=[TaxRateBody(name=rate.name, percent=rate.percent) for rate in tax.rates])


def show_terms(terms: TenantTerms) -> TermsView:
    return TermsView(
        tenant=terms.tenant,
        currency=terms.currency,
        commitments=[show_commitment(one) for one in terms.commitments],
        tax=show_tax(terms.tax),
        carried=format_exact(parse_exact(terms.carried)),
    )


@post("/tenants/{tenant_id:str}/discounts", sync_to_thread=True)
def give_discount(
    tenant_id: FromPath[str], data: JSONBody[DiscountCreate], admin: Admin, idempotency: Once
) -> DiscountView:
    """Give a tenant a discount."""
    discount = admin.billing.give_discount(
        tenant_id,
        name=data.name,
        percent=data.percent or "",
        amount=data.amount or "",
        from_us=None if data.start is None else parse_time(data.start),
        to_us=None if data.end is None else parse_time(data.end),
        model=data.model or "",
        token_class=data.token_class or "",
        idempotency=idempotency,
    )
    return show_discount(discount)


@get("/tenants/{tenant_id:str}/discounts", sync_to_thread=True)
def list_discounts(
    tenant_id: FromPath[str], admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> Page[DiscountView]:
    """List a tenant's discounts, ended ones too, in the order in which they take."""
    found = admin.billing.discounts(tenant_id, limit=limit + 1, after=after)
    return page(found, limit, show_discount, lambda discount: discount.id)


@delete("/discounts/{discount_id:str}", status_code=200, sync_to_thread=True)
def end_discount(discount_id: FromPath[str], admin: Admin, idempotency: Once) -> DiscountView:
    """End a discount: it is for no invoice whose period begins later. Invoices that have it keep it."""
    return show_discount(admin.billing.end_discount(discount_id, idempotency=idempotency))


@put("/tenants/{tenant_id:str}/commitment", sync_to_thread=True)
def set_commitment(
    tenant_id: FromPath[str], data: JSONBody[CommitmentBody], admin: Admin, idempotency: Once
) -> CommitmentView:
    """Set what a tenant's billing period comes to at least."""
    start_us = None if data.start is None else parse_time(data.start)
    return show_commitment(
        admin.billing.set_commitment(tenant_id, data.amount, from_us=start_us, idempotency=idempotency)
    )


@put("/tenants/{tenant_id:str}/tax", sync_to_thread=True)
def set_tax(tenant_id: FromPath[str], data: JSONBody[TaxBody], admin: Admin, idempotency: Once) -> TaxBody:
    """Set what tax a tenant's invoices have, from the next that is cut."""
    rates = tuple(TaxRate(name=rate.name, percent=rate.percent) for rate in data.rates)
    return show_tax(admin.billing.set_tax(tenant_id, Tax(mode=data.mode, rates=rates), idempotency=idempotency))


@get("/tenants/{tenant_id:str}/terms", sync_to_thread=True)
def get_terms(tenant_id: FromPath[str], admin: Admin) -> TermsView:
    """Show a tenant's minimums, its tax, and what its next invoice takes off."""
    return show_terms(admin.billing.terms(tenant_id))


router = Router(
    "/",
    route_handlers=[give_discount, list_discounts, end_discount, set_commitment, set_tax, get_terms],
    tags=["terms"],
)
