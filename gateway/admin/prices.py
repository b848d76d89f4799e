"""The price book: what a million tokens of a model cost from a time on."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, post
from litestar.params import JSONBody
from msgspec import UNSET, Meta, UnsetType

from billing.errors import Invalid
from billing.money import format_price
from billing.offers import ClassOffer, check_price, offer_of
from billing.prices import PriceVersion
from billing.tiers import REQUIRED, TokenClass
from gateway.admin.body import Fault
from gateway.admin.fields import Currency, MoneyText, Text, TimeText, time_fault
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time, parse_time


class PerMillion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Flat prices of a million tokens, by class; one that stands in `classes` is left out here.

    A cached prompt token costs `cached` and not also `prompt`.
    """

    prompt: MoneyText | UnsetType = UNSET
    cached: MoneyText | UnsetType = UNSET
    completion: MoneyText | UnsetType = UNSET


Classes = Annotated[
    dict[str, ClassOffer],
    Meta(
        description=f"prices by class: {', '.join(TokenClass)}; of tokens per million, of all else for one; tiers, "
        "packages and allowances count tokens, images, seconds, calls, requests of a billing period"
    ),
]


class PriceCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A price from `effective_at` on; for one tenant or, without `tenant`, for all."""

    model: Annotated[Text, Meta(description="name of a model or adapter, or *")]
    currency: Currency
    per_million: PerMillion
    classes: Classes = {}
    endpoint: Annotated[Text | None, Meta(description="for its requests alone, as chat.completions; null: all")] = None
    effective_at: Annotated[TimeText | None, Meta(description="null: now")] = None
    tenant: Text | None = None

    def faults(self) -> list[Fault]:
        """The time's fault, which only this side knows, and with it all of the ledger's own."""
        faults = [] if self.effective_at is None else time_fault("effective_at", self.effective_at)
        try:
            check_price(self.model, 0, self.currency, given(self.per_million), self.classes, self.endpoint or "")
        except Invalid as error:
            faults += error.faults
        return faults


class PriceView(msgspec.Struct, kw_only=True):
    """One entry of the price book. It prices requests that began after both of its times."""

    id: str
    model: str
    tenant: Annotated[str | None, Meta(description="null: for every tenant")]
    endpoint: Annotated[str | None, Meta(description="null: for every endpoint")]
    currency: str
    per_million: PerMillion
    classes: Classes
    effective_at: str
    recorded_at: str


def show_price(price: PriceVersion) -> PriceView:
    priced = price.by_class()
    flat = {kind: one for kind, one in priced.items() if kind in REQUIRED and one.linear}
    return PriceView(
        id=price.id,
        model=price.model,
        tenant=price.tenant,
        endpoint=price.endpoint or None,
        currency=price.rate.currency,
        per_million=PerMillion(**{kind.value: format_price(one.tiers[0].price_nano) for kind, one in flat.items()}),
        classes={kind.value: offer_of(one) for kind, one in priced.items() if kind not in flat},
        effective_at=format_time(price.effective_at_us),
        recorded_at=format_time(price.recorded_us),
    )


def given(per_million: PerMillion) -> dict[str, str]:
    """The prices that were told."""
    return {name: text for name, text in msgspec.structs.asdict(per_million).items() if text is not UNSET}


@post("/prices", sync_to_thread=True)
def set_price(data: JSONBody[PriceCreate], admin: Admin, idempotency: Once) -> PriceView:
    """Enter a price; earlier ones stay for the requests they were in force for."""
    price = admin.billing.set_price(
        model=data.model,
        effective_at_us=admin.clock_us() if data.effective_at is None else parse_time(data.effective_at),
        currency=data.currency,
        per_million=given(data.per_million),
        classes=data.classes,
        endpoint=data.endpoint or "",
        tenant=data.tenant,
        idempotency=idempotency,
    )
    return show_price(price)


@get("/prices", sync_to_thread=True)
def list_prices(admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[PriceView]:
    """List the price book in order of entry."""
    found = admin.billing.prices(limit=limit + 1, after=after)
    return page(found, limit, show_price, lambda price: price.id)


router = Router("/", route_handlers=[set_price, list_prices], tags=["prices"])
