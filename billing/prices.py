"""The price book: effective-dated, append-only, exact.

Which price: tenant + name, tenant + `*`, name, base model, `*`; of these the first that has a version in
the tenant's currency which was effective when the request began, and of its versions the newest.

A price may be set for the past, but a request is priced by the book as it was known when the request
began (`recorded_us`). So the price that was quoted at the door is the one that is charged and invoiced,
and a hold cannot be outgrown by a price set while its request runs.

Pure. Does not know: usage, balances, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from billing.checks import Faults
from billing.errors import NoPrice
from billing.money import NANO, parse_price

ANY = "*"
PRICE_MAX_NANO = 10**9 * NANO  # a thousand units a token: typing errors end here, and so do 64 bits


class TokenClass(StrEnum):
    """What is priced apart."""

    PROMPT = "prompt"  # prompt tokens that were computed
    CACHED = "cached"  # prompt tokens reused from the prefix cache
    COMPLETION = "completion"


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one request, in nano-units of currency per million tokens."""

    price_id: str
    currency: str
    prompt: int
    cached: int
    completion: int

    def dearest_prompt(self) -> int:
        """The most a prompt token can cost, cached or not."""
        return max(self.prompt, self.cached)

    def of(self, token_class: TokenClass) -> int:
        return int(getattr(self, token_class.value))


class PriceVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the price book; never changed, only followed by another."""

    id: str
    tenant: str | None  # None: for all tenants
    model: str  # a model or adapter name, or "*"
    effective_at_us: int
    recorded_us: int  # requests that began earlier do not know it
    rate: Rate


class PriceSet(msgspec.Struct, frozen=True, kw_only=True, tag="price.set"):
    price: PriceVersion


def check_price(model: str, effective_at_us: int, currency: str, per_million: Mapping[str, str]) -> dict[str, int]:
    """The parsed prices by class, nano-units per million. Raises `Invalid` with every fault."""
    faults = Faults()
    if model != ANY:
        faults.model("model", model)
    faults.time("effective_at", effective_at_us)
    faults.currency("currency", currency)
    known = [token_class.value for token_class in TokenClass]
    for name in per_million:
        if name not in known:
            faults.add(f"per_million.{name}", f"is unknown; known are {', '.join(known)}")
    parsed = {}
    for name in known:
        if name not in per_million:
            faults.add(f"per_million.{name}", "is missing; write 0 for what costs nothing")
        else:
            parsed[name] = faults.money(f"per_million.{name}", per_million[name], parse_price, PRICE_MAX_NANO)
    faults.raise_if_any()
    return parsed


class PriceBook:
    """Every version ever set, found by owner and name."""

    def __init__(self) -> None:
        self.versions: dict[str, PriceVersion] = {}
        self._by_name: dict[tuple[str | None, str], tuple[PriceVersion, ...]] = {}

    def apply(self, fact: PriceSet) -> None:
        price = fact.price
        self.versions[price.id] = price
        name = price.tenant, price.model
        # The sort is stable: of two effective at one instant the one recorded later comes later and wins.
        # A new tuple each time, as a copy of the book keeps the old one.
        entries = sorted((*self._by_name.get(name, ()), price), key=lambda version: version.effective_at_us)
        self._by_name[name] = tuple(entries)

    def copy(self) -> PriceBook:
        """The book as it stands: what is set later does not show in it."""
        book = PriceBook()
        book.versions, book._by_name = dict(self.versions), dict(self._by_name)
        return book

    def resolve(
        self, tenant: str, model: str, base_model: str, currency: str, *, ts_us: int, known_us: int
    ) -> PriceVersion:
        """The version for a request that began at `ts_us`, by the book as known at `known_us`. Raises `NoPrice`."""
        for owner_and_name in _candidates(tenant, model, base_model):
            for version in reversed(self._by_name.get(owner_and_name, ())):
                if (
                    version.effective_at_us <= ts_us
                    and version.recorded_us <= known_us
                    and version.rate.currency == currency
                ):
                    return version
        raise NoPrice(f"no price in {currency} for model {model!r}")


def _candidates(tenant: str, model: str, base_model: str) -> Iterator[tuple[str | None, str]]:
    yield tenant, model
    yield tenant, ANY
    yield None, model
    yield None, base_model
    yield None, ANY
