"""One price version, taken apart once for rating many requests by it.

What a request has of each class, what that costs at a position of the period, and the most that it can cost there.

A class that is part of another is priced apart only where it has a price of its own: reasoning tokens out of
completion, cache writes out of prompt; then the other is counted without it. A call of a tool, a request, compute time
cost something only where they have a price.

Pure. Does not know: which price applies, balances, the ledger.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from operator import attrgetter

from billing.prices import PriceBook, PriceVersion
from billing.tiers import Component, PriceModel, TokenClass, cost_femto, dearest_femto, dearest_once_femto, unit_femto
from metering.events import UsageEvent

NOWHERE: Mapping[str, int] = {}
"""The positions of a request before which the period has nothing."""


class Tariff:
    """Quantities are base units by the name of their class, and positions too. Nothing of it changes."""

    def __init__(self, price: PriceVersion) -> None:
        self.price = price
        self.flat = not price.components  # the three classes that every price has, each at one price
        priced = price.by_class()
        self.tiered = tuple(one.value for one, component in priced.items() if not component.linear)
        self._linear = tuple(
            (one.value, unit_femto(one, component.tiers[0].price_nano))
            for one, component in priced.items()
            if component.linear
        )
        self._steps = tuple(_Steps(component) for component in priced.values() if not component.linear)
        self._apart = tuple((one.value, _COUNTS[one]) for one in priced if one in _COUNTS)
        self._writes, self._reasons = TokenClass.CACHE_WRITE in priced, TokenClass.REASONING in priced
        self._rates = price.rate.prompt, price.rate.cached, price.rate.completion

    def counted(self, event: UsageEvent) -> dict[str, int]:
        """Base units of each class that has a price, the three that every price has always among them."""
        prompt, cached, completion = event.prompt_tokens, event.cached_tokens, event.completion_tokens
        prompt -= cached  # a cached prompt token is priced as cached and only so
        if self._writes:
            prompt -= event.cache_write_tokens
        if self._reasons:
            completion -= event.reasoning_tokens
        found = {"prompt": prompt, "cached": cached, "completion": completion}
        for name, count in self._apart:
            found[name] = count(event)
        return found

    def flat_femto(self, event: UsageEvent) -> int:
        """What the event costs by a price that is `flat`."""
        prompt, cached, completion = self._rates
        tokens = event.cached_tokens
        return (event.prompt_tokens - tokens) * prompt + tokens * cached + event.completion_tokens * completion

    def charge_femto(self, counted: Mapping[str, int], at: Mapping[str, int] = NOWHERE) -> int:
        """What quantities cost when so many units of the period come before them."""
        amount = self._linear_femto(counted)
        for step in self._steps:
            if units := counted.get(step.name, 0):
                amount += step.cost_femto(at.get(step.name, 0), units)
        return amount

    def amounts_femto(self, counted: Mapping[str, int], at: Mapping[str, int] = NOWHERE) -> tuple[int, int]:
        """What they cost at these positions, and the most that they can cost there or at later ones."""
        amount = ceiling = self._linear_femto(counted)
        for step in self._steps:
            if units := counted.get(step.name, 0):
                position = at.get(step.name, 0)
                amount += step.cost_femto(position, units)
                ceiling += units * step.dearest_femto(position) + step.once_femto
        return amount, ceiling

    def _linear_femto(self, counted: Mapping[str, int]) -> int:
        amount = 0
        for name, femto in self._linear:
            amount += counted.get(name, 0) * femto
        return amount


class Tariffs:
    """The tariffs of a price book's versions, each made when it is first asked for."""

    def __init__(self, book: PriceBook) -> None:
        self._book = book
        self._made: dict[str, Tariff] = {}

    def of(self, price_id: str) -> Tariff:
        """Raises `KeyError` for a version that the book does not have."""
        found = self._made.get(price_id)
        if found is None:
            found = self._made[price_id] = Tariff(self._book.versions[price_id])
        return found


class _Steps:
    """A component that is not linear: where its tiers end, what a unit costs in each, what is dearest from each on."""

    def __init__(self, component: Component) -> None:
        self.name = component.token_class.value
        self.once_femto = dearest_once_femto(component)
        self._component = component
        tiers = () if component.model is PriceModel.PACKAGE else component.tiers
        self._ends = [component.allowance + tier.up_to for tier in tiers if tier.up_to is not None]
        self._each = [unit_femto(component.token_class, tier.price_nano) for tier in tiers]
        self._dearest = [dearest_femto(component, end) for end in (0, *self._ends)]

    def cost_femto(self, position: int, units: int) -> int:
        """As `tiers.cost_femto`; where all units stand in one tier, they cost what one does, times their number."""
        tier = bisect_right(self._ends, position)
        if position >= self._component.allowance and self._each and tier == bisect_left(self._ends, position + units):
            return units * self._each[tier]
        return cost_femto(self._component, position, units)

    def dearest_femto(self, position: int) -> int:
        """As `tiers.dearest_femto`, which changes only where a tier is full."""
        return self._dearest[bisect_right(self._ends, position)]


def _request(event: UsageEvent) -> int:
    """Whether anything was done: what was cut while it was queued is no request that anybody pays for."""
    return int(bool(event.prompt_tokens or event.completion_tokens or event.images or event.audio_ms))


def _compute(event: UsageEvent) -> int:
    return max(0, event.compute_us)  # it is measured, so it may be wrong, but never a credit


_COUNTS: dict[TokenClass, Callable[[UsageEvent], int]] = {
    TokenClass.CACHE_WRITE: attrgetter("cache_write_tokens"),
    TokenClass.REASONING: attrgetter("reasoning_tokens"),
    TokenClass.IMAGE: attrgetter("images"),
    TokenClass.AUDIO_SECOND: attrgetter("audio_ms"),
    TokenClass.TOOL_CALL: attrgetter("tool_calls"),
    TokenClass.REQUEST: _request,
    TokenClass.COMPUTE_SECOND: _compute,
}
