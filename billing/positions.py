"""How much of each tier of a period is used up: the units that the ledger has charged, by tenant, price and class.

A tier, an allowance and a package count the units of one tenant, one billing period, one class and one *slot* of the
price book (`prices.Slot`): a new version goes on where the one before it stood. A charge keeps the position at which
it was made and the start of its period, so that it can be checked for ever by itself, whatever comes later.

Only what is not linear is counted. Pure.
"""

from __future__ import annotations

from billing.periods import period_at
from billing.prices import PriceVersion, Slot, TokenClass
from billing.rating import tiered

Key = tuple[str, Slot, str, int]  # tenant, slot, class, start of the period


class Positions:
    """Sums of recorded charges. `ahead()` is a view that what is decided together is added to before it is recorded."""

    def __init__(self, under: Positions | None = None) -> None:
        self._under = under
        self._sums: dict[Key, int] = {}

    def of(self, tenant: str, price: PriceVersion, period_start_us: int) -> dict[TokenClass, int]:
        """The position of each class that the version does not price linearly."""
        return {
            component.token_class: self._at((tenant, price.slot, component.token_class.value, period_start_us))
            for component in tiered(price)
        }

    def add(self, tenant: str, price: PriceVersion, period_start_us: int, counted: dict[TokenClass, int]) -> None:
        """Units that were charged."""
        for component in tiered(price):
            if units := counted.get(component.token_class, 0):
                key = tenant, price.slot, component.token_class.value, period_start_us
                self._sums[key] = self._at(key) + units

    def ahead(self) -> Positions:
        """These and what is added to the view, which changes nothing here."""
        return Positions(self)

    def _at(self, key: Key) -> int:
        if key in self._sums or self._under is None:
            return self._sums.get(key, 0)
        return self._under._at(key)


def period_start(price: PriceVersion, ts_us: int, anchor_day: int, timezone: str) -> int:
    """The start of the period that an event counts in; 0 where nothing of its price depends on it."""
    return period_at(ts_us, anchor_day, timezone).start_us if tiered(price) else 0
