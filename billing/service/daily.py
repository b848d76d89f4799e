"""What was charged, by day."""

from __future__ import annotations

from billing.daily import KEPT_DAYS, DayCharge
from billing.errors import Invalid
from billing.service.shell import Shell


class DailyService(Shell):
    """The ledger's recorded charges as sums of days."""

    def charges_of_day(self, day_us: int, tenant_id: str | None = None) -> list[DayCharge]:
        """All charges of requests that began on the UTC day that begins at `day_us`, of one tenant or of all.

        What is settled and not recorded yet, or has no price, is not among them. Raises `Invalid` for a day whose sums
        are no longer kept.
        """
        with self._state:
            if day_us < self._books.daily.kept_from_us:
                raise Invalid([("start_time", f"costs are kept for {KEPT_DAYS} days: older ones are on the invoices")])
            return self._books.daily.of_day(day_us, tenant_id)
