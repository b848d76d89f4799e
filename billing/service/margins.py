"""Cost rates, and the margin over a range of time."""

from __future__ import annotations

from collections.abc import Sequence

from billing.books import new_event
from billing.invoice import UsageSource
from billing.margin import Charged, CostRate, CostRates, CostRateSet, Spent, check_cost_rate, margin
from billing.service.cutting import CLOCK_SLACK_US, CuttingService
from billing.service.shell import Idempotency, page
from billing.store import NewEvent
from metering.counts import HOUR_US, hour_of


class MarginService(CuttingService):
    """What is left of what was charged."""

    def set_cost_rate(
        self,
        *,
        currency: str,
        compute_second: str,
        kv_block_second: str,
        hour: str,
        effective_at_us: int,
        idempotency: Idempotency | None = None,
    ) -> CostRate:
        """Enter what the house pays from a time on. Raises `Invalid`."""
        amounts = {"compute_second": compute_second, "kv_block_second": kv_block_second, "hour": hour}

        def decide(time_us: int) -> tuple[list[NewEvent], CostRate]:
            check_cost_rate(currency, amounts, effective_at_us)
            rate = CostRate(
                id=self._new_id("cost"),
                currency=currency,
                effective_at_us=effective_at_us,
                recorded_us=time_us,
                **amounts,
            )
            return [new_event("costs", CostRateSet(rate=rate))], rate

        return self._command("set_cost_rate", idempotency, CostRate, decide)[0]

    def cost_rates(self, limit: int = 100, after: str | None = None) -> list[CostRate]:
        """In the order they were entered."""
        with self._state:
            return page(self._books.costs.rates, lambda rate: rate.id, limit, after)

    def margin(self, start_us: int, end_us: int, *, usage: UsageSource) -> list[Spent]:
        """Every tenant, model, adapter and hour of [start, end), widened to whole hours. Raises `NoCostRate`.

        Hours in which nobody computed are priced in the currency of the rate that was entered last.
        """
        start_us, end_us = hour_of(start_us), hour_of(end_us + HOUR_US - 1)
        self.refresh()
        with self._state:
            currencies = {tenant.id: tenant.currency for tenant in self._books.accounts.tenants.values()}
            rates = CostRates()
            rates.rates = list(self._books.costs.rates)
        idle = rates.rates[-1].currency if rates.rates else "usd"
        charges = self._charges(list(currencies), start_us, end_us)
        return margin(usage.events(None, start_us, end_us), charges, currencies, rates, start_us, end_us, idle)

    def _charges(self, tenants: Sequence[str], start_us: int, end_us: int) -> list[Charged]:
        return [
            Charged(rated.ts_us, rated.tenant, rated.model, rated.adapter, int(rated.amount_femto))
            for tenant in tenants
            for _, rated in self._rated(tenant, max(0, start_us - CLOCK_SLACK_US))
            if start_us <= rated.ts_us < end_us
        ]
