"""What was charged by day: every recorded charge, summed by tenant, key and model over the UTC day the request began.

Knows: charges as the log has them; a sum of exact femto-units. Does not know: prices, invoices, what is settled and not
recorded yet. Pure: folded from the log like everything else, so that it is the ledger's word and not a second rating.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from billing.ledger import UsageRated

DAY_US = 86_400_000_000
KEPT_DAYS = 400  # behind the newest day that has a charge


class DayCharge(msgspec.Struct, frozen=True, kw_only=True):
    """The charges of one day, tenant, key and model. Keys of charges that were recorded without one are empty."""

    day_us: int  # the day's first microsecond
    tenant: str
    key_id: str
    model: str
    requests: int
    tokens: int  # prompt and completion
    amount_femto: int


class _Key(NamedTuple):
    tenant: str
    key_id: str
    model: str


class DailyCharges:
    """The sums of the last `KEPT_DAYS` days; what is older is on the invoices and in the log."""

    def __init__(self) -> None:
        self._days: dict[int, dict[_Key, list[int]]] = {}
        self._tenants: dict[int, set[str]] = {}
        self._newest = self._kept_from = 0

    def apply(self, rated: UsageRated) -> None:
        day = rated.ts_us // DAY_US
        if day > self._newest:
            self._newest = day
            self._forget([known for known in self._days if known <= day - KEPT_DAYS])
        if day <= self._newest - KEPT_DAYS:
            self._kept_from = self._newest - KEPT_DAYS + 1
            return
        self._tenants.setdefault(day, set()).add(rated.tenant)
        key = _Key(rated.tenant, rated.key_id, rated.model)
        sums = self._days.setdefault(day, {}).setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += rated.prompt_tokens + rated.completion_tokens
        sums[2] += int(rated.amount_femto)

    @property
    def kept_from_us(self) -> int:
        """The first day of which nothing was forgotten."""
        return self._kept_from * DAY_US

    def has(self, tenant: str, day: int) -> bool:
        """Whether the tenant has a charge on this day, a number of days since the epoch."""
        return tenant in self._tenants.get(day, ())

    def of_day(self, day_us: int, tenant: str | None) -> list[DayCharge]:
        """All sums of the day that begins at `day_us`, of one tenant or of all."""
        return [
            DayCharge(
                day_us=day_us,
                tenant=key.tenant,
                key_id=key.key_id,
                model=key.model,
                requests=sums[0],
                tokens=sums[1],
                amount_femto=sums[2],
            )
            for key, sums in self._days.get(day_us // DAY_US, {}).items()
            if tenant in (None, key.tenant)
        ]

    def _forget(self, days: list[int]) -> None:
        for day in days:
            del self._days[day], self._tenants[day]
            self._kept_from = max(self._kept_from, self._newest - KEPT_DAYS + 1)
