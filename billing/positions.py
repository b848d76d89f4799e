"""How much of each tier of a period is used up: the units that the ledger has charged, by tenant, price and class.

A tier, an allowance and a package count the units of one tenant, one billing period, one class and one *slot* of the
price book (`prices.Slot`): a new version goes on where the one before it stood. A charge keeps the position at which
it was made and the start of its period, so that it can be checked for ever by itself, whatever comes later.

Only what is not linear is counted. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from billing.periods import period_at
from billing.prices import Slot
from billing.tariff import Tariff

Key = tuple[str, Slot, str, int]  # tenant, slot, class, start of the period


class Positions:
    """Sums of recorded charges. `ahead()` is a view that what is decided together is added to before it is recorded."""

    def __init__(self, under: Positions | None = None) -> None:
        self._under = under
        self._sums: dict[Key, int] = {}

    def of(self, tenant: str, tariff: Tariff, period_start_us: int) -> dict[str, int]:
        """The position of each class that the price does not price linearly."""
        slot = tariff.price.slot
        return {name: self._at((tenant, slot, name, period_start_us)) for name in tariff.tiered}

    def add(self, tenant: str, tariff: Tariff, period_start_us: int, counted: Mapping[str, int]) -> None:
        """Units that were charged."""
        slot = tariff.price.slot
        for name in tariff.tiered:
            if units := counted.get(name, 0):
                key = tenant, slot, name, period_start_us
                self._sums[key] = self._at(key) + units

    def ahead(self) -> Positions:
        """These and what is added to the view, which changes nothing here."""
        return Positions(self)

    def _at(self, key: Key) -> int:
        found = self._sums.get(key)
        if found is None:
            return 0 if self._under is None else self._under._at(key)
        return found


def period_start(tariff: Tariff, ts_us: int, anchor_day: int, timezone: str) -> int:
    """The start of the period that an event counts in; 0 where nothing of its price depends on it."""
    return period_at(ts_us, anchor_day, timezone).start_us if tariff.tiered else 0
