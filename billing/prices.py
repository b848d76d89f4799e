"""The price book: effective-dated, append-only, exact.

Which price: tenant + name, tenant + `*`, name, base model, `*`; of these the first that has a version in
the tenant's currency which was effective when the request began, and of its versions the newest. At each of
these steps a version for the request's endpoint goes before one for every endpoint.

A price may be set for the past, but a request is priced by the book as it was known when the request
began (`recorded_us`). So the price that was quoted at the door is the one that is charged and invoiced,
and a hold cannot be outgrown by a price set while its request runs.

Pure. Does not know: usage, balances, what time it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from billing.errors import NoPrice
from billing.offers import simple
from billing.tiers import (
    FEMTO_PER_NANO,
    Component,
    Tier,
    TokenClass,
    dearest_femto,
    dearest_once_femto,
)

ANY = "*"
TIMELINES_MAX = 10_000  # kept at once

__all__ = [
    "ANY",
    "PriceBook",
    "PriceSet",
    "PriceVersion",
    "Rate",
    "Slot",
    "Timeline",
    "TokenClass",
    "rate_of",
    "version_of",
]


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What a request can cost at most, in nano-units of currency per million tokens; exactly that where `exact`.

    Not exact: the version's components say what it costs, and these are bounds of them: whatever kinds of tokens they
    turn out to be, wherever in the period's tiers they come to stand.
    """

    price_id: str
    currency: str
    prompt: int
    cached: int
    completion: int
    fixed_nano: int = 0  # nano-units on top, whatever the tokens
    exact: bool = True

    @property
    def fixed_femto(self) -> int:
        """What a request can cost at most beside its tokens."""
        return self.fixed_nano * FEMTO_PER_NANO

    def dearest_prompt(self) -> int:
        """The most a prompt token can cost, cached or not."""
        return max(self.prompt, self.cached)

    def of(self, token_class: TokenClass) -> int:
        """Of prompt, cached or completion."""
        return int(getattr(self, token_class.value))


Slot = tuple[str, str, str]
"""Tenant (empty: all), model and endpoint (empty: all): versions that follow each other share the period's tiers."""


class PriceVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the price book; never changed, only followed by another."""

    id: str
    tenant: str | None  # None: for all tenants
    model: str  # a model or adapter name, or "*"
    effective_at_us: int
    recorded_us: int  # requests that began earlier do not know it
    rate: Rate
    endpoint: str = ""  # empty: for every endpoint
    components: tuple[Component, ...] = ()  # of every class that has a price; empty: the rate's three, flat

    @property
    def slot(self) -> Slot:
        return self.tenant or "", self.model, self.endpoint

    @property
    def from_us(self) -> int:
        """From when on it can price requests."""
        return max(self.effective_at_us, self.recorded_us)

    def by_class(self) -> dict[TokenClass, Component]:
        """The component of each class that has a price."""
        if self.components:
            return {component.token_class: component for component in self.components}
        return {
            token_class: Component(token_class=token_class, tiers=(Tier(price_nano=self.rate.of(token_class)),))
            for token_class in (TokenClass.PROMPT, TokenClass.CACHED, TokenClass.COMPLETION)
        }

    def bound(self, positions: Mapping[str, int]) -> Rate:
        """The rate of a request that begins when the period has these quantities already: tiers below are past."""
        if self.rate.exact:
            return self.rate
        return rate_of(self.id, self.rate.currency, self.by_class(), positions)


def rate_of(
    price_id: str,
    currency: str,
    components: Mapping[TokenClass, Component],
    positions: Mapping[str, int] | None = None,
) -> Rate:
    """Bounds of what a request can cost. Compute time, images and audio are not known ahead and not in them.

    A call of a tool takes at least one token to write, so its price is in a completion token's.
    """

    def dearest(*classes: TokenClass) -> int:
        found = (components[one] for one in classes if one in components)
        return max((dearest_femto(one, (positions or {}).get(one.token_class, 0)) for one in found), default=0)

    fixed_femto = dearest(TokenClass.REQUEST) + sum(
        dearest_once_femto(component)
        for token_class, component in components.items()
        if token_class not in (TokenClass.COMPUTE_SECOND, TokenClass.IMAGE, TokenClass.AUDIO_SECOND)
    )
    return Rate(
        price_id=price_id,
        currency=currency,
        prompt=dearest(TokenClass.PROMPT, TokenClass.CACHE_WRITE),
        cached=dearest(TokenClass.CACHED),
        completion=dearest(TokenClass.COMPLETION, TokenClass.REASONING) + dearest(TokenClass.TOOL_CALL),
        fixed_nano=-(-fixed_femto // FEMTO_PER_NANO),
        exact=False,
    )


def version_of(
    id: str,
    components: tuple[Component, ...],
    *,
    currency: str,
    model: str,
    effective_at_us: int,
    recorded_us: int,
    tenant: str | None = None,
    endpoint: str = "",
) -> PriceVersion:
    """A version of checked components (`offers.check_price`)."""
    rate = rate_of(id, currency, {component.token_class: component for component in components})
    return PriceVersion(
        id=id,
        tenant=tenant,
        model=model,
        effective_at_us=effective_at_us,
        recorded_us=recorded_us,
        rate=msgspec.structs.replace(rate, exact=True) if simple(components) else rate,
        endpoint=endpoint,
        components=() if simple(components) else components,
    )


class Timeline:
    """Of one tenant, name, base model, currency and endpoint: which version prices a request that begins at a time.

    That changes only where a version begins to count, so it is looked up once for each such instant.
    """

    def __init__(self, starts_us: Sequence[int], versions: Sequence[PriceVersion | None]) -> None:
        """`versions[i]` counts from `starts_us[i]` to the next, exclusive."""
        self._starts_us = starts_us
        self._versions = versions

    def at(self, ts_us: int) -> PriceVersion | None:
        return self._versions[found - 1] if (found := bisect_right(self._starts_us, ts_us)) else None


class PriceSet(msgspec.Struct, frozen=True, kw_only=True, tag="price.set"):
    price: PriceVersion


class PriceBook:
    """Every version ever set, found by owner, name and endpoint."""

    def __init__(self) -> None:
        self.versions: dict[str, PriceVersion] = {}
        self._by_name: dict[tuple[str | None, str, str], tuple[PriceVersion, ...]] = {}
        self._order: dict[str, int] = {}
        self._by_endpoint = False  # whether any version is for one endpoint alone
        self._timelines: dict[tuple[str, str, str, str, str], Timeline] = {}

    def apply(self, fact: PriceSet) -> None:
        price = fact.price
        self._timelines.clear()
        self._order[price.id] = len(self.versions)
        self.versions[price.id] = price
        self._by_endpoint |= bool(price.endpoint)
        name = price.tenant, price.model, price.endpoint
        # The sort is stable: of two effective at one instant the one recorded later comes later and wins.
        # A new tuple each time, as a copy of the book keeps the old one.
        entries = sorted((*self._by_name.get(name, ()), price), key=lambda version: version.effective_at_us)
        self._by_name[name] = tuple(entries)

    def copy(self) -> PriceBook:
        """The book as it stands: what is set later does not show in it."""
        book = PriceBook()
        book.versions, book._by_name, book._order = dict(self.versions), dict(self._by_name), dict(self._order)
        book._by_endpoint = self._by_endpoint
        return book

    def resolve(
        self,
        tenant: str,
        model: str,
        base_model: str,
        currency: str,
        *,
        ts_us: int,
        known_us: int,
        endpoint: str = "",
    ) -> PriceVersion:
        """The version for a request that began at `ts_us`, by the book as known at `known_us`. Raises `NoPrice`."""
        if known_us == ts_us:
            found = self.timeline(tenant, model, base_model, currency, endpoint).at(ts_us)
        else:
            found = self._search(tenant, model, base_model, currency, endpoint, ts_us, known_us)
        if found is None:
            raise NoPrice(f"no price in {currency} for model {model!r}")
        return found

    def timeline(self, tenant: str, model: str, base_model: str, currency: str, endpoint: str) -> Timeline:
        """Which version prices these requests at which time, by the book as it was known at that time."""
        key = tenant, model, base_model, currency, endpoint
        if (found := self._timelines.get(key)) is None:
            if len(self._timelines) >= TIMELINES_MAX:
                self._timelines.clear()
            found = self._timelines[key] = self._timeline(*key)
        return found

    def _timeline(self, tenant: str, model: str, base_model: str, currency: str, endpoint: str) -> Timeline:
        starts_us = sorted(
            {
                version.from_us
                for owner, name in _candidates(tenant, model, base_model)
                for at in (endpoint, "")
                for version in self._by_name.get((owner, name, at), ())
            }
        )
        return Timeline(
            starts_us,
            [self._search(tenant, model, base_model, currency, endpoint, at_us, at_us) for at_us in starts_us],
        )

    def _search(
        self, tenant: str, model: str, base_model: str, currency: str, endpoint: str, ts_us: int, known_us: int
    ) -> PriceVersion | None:
        for owner, name in _candidates(tenant, model, base_model):
            for at in (endpoint, "") if endpoint and self._by_endpoint else ("",):
                for version in reversed(self._by_name.get((owner, name, at), ())):
                    if (
                        version.effective_at_us <= ts_us
                        and version.recorded_us <= known_us
                        and version.rate.currency == currency
                    ):
                        return version
        return None

    def rank(self, price_id: str) -> tuple[int, int]:
        """The order in which the versions of a slot take the period's tiers: by time, then as they were entered."""
        return self.versions[price_id].from_us, self._order[price_id]


def _candidates(tenant: str, model: str, base_model: str) -> Iterator[tuple[str | None, str]]:
    yield tenant, model
    yield tenant, ANY
    yield None, model
    yield None, base_model
    yield None, ANY
