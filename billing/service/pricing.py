"""The price book's commands and the quote at the door."""

from __future__ import annotations

import time
from collections.abc import Mapping

from billing.books import new_event
from billing.errors import Invalid, LedgerUnavailable
from billing.offers import ClassOffer, check_price
from billing.positions import period_start
from billing.prices import PriceSet, PriceVersion, Rate, version_of
from billing.service.shell import Idempotency, Shell, page
from billing.store import NewEvent


class PriceService(Shell):
    """What things cost."""

    def set_price(
        self,
        *,
        model: str,
        effective_at_us: int,
        currency: str,
        per_million: Mapping[str, str],
        tenant: str | None = None,
        endpoint: str = "",
        classes: Mapping[str, ClassOffer] | None = None,
        idempotency: Idempotency | None = None,
    ) -> PriceVersion:
        """Add a version to the price book. Raises `Invalid` with every fault, `NotFound` for the tenant.

        `per_million` has the flat prices of prompt, cached and completion tokens; what is priced otherwise, or what
        else has a price, stands in `classes`. `endpoint`: for requests of this one alone.

        It counts for requests that begin at its `recorded_us` or later, whatever it is said to be effective from.
        That instant lies a moment ahead of the write, so that requests go on meanwhile, and is waited for here.
        """
        components = check_price(model, effective_at_us, currency, per_million, classes, endpoint)

        def decide(time_us: int) -> tuple[list[NewEvent], PriceVersion]:
            if tenant is not None and self._books.accounts.tenant(tenant).currency != currency:
                raise Invalid([("currency", "must be the tenant's")])
            id = self._new_id("price")
            with self._state:
                # From here on no later request is quoted anything, until the books have the price or it is given up.
                self._undecided_us = max(time_us, self._quoted_us + 1) + self._price_lead_us
                recorded_us = self._undecided_us
            price = version_of(
                id,
                components,
                currency=currency,
                model=model,
                effective_at_us=effective_at_us,
                recorded_us=recorded_us,
                tenant=tenant,
                endpoint=endpoint,
            )
            return [new_event("prices", PriceSet(price=price))], price

        price, fresh = self._command("set_price", idempotency, PriceVersion, decide)
        if fresh:
            left_us = price.recorded_us - self._clock()
            time.sleep(min(max(left_us, 0), self._price_lead_us) / 1_000_000)
        return price

    def prices(self, limit: int = 100, after: str | None = None) -> list[PriceVersion]:
        """In the order they were recorded."""
        with self._state:
            return page(list(self._books.prices.versions.values()), lambda price: price.id, limit, after)

    def quote(self, tenant_id: str, model: str, base_model: str, ts_us: int, endpoint: str = "") -> Rate:
        """The rate of a request that begins at `ts_us`: where tiers decide, the dearest that it can still come to.

        Raises `NoPrice`, `NotFound`, and `LedgerUnavailable` while nobody knows the prices of that instant, since
        one that counts from before it is still being written.
        """
        with self._state:
            if self._undecided_us is not None and ts_us >= self._undecided_us:
                raise LedgerUnavailable("a price is being written; try again")
            # A time to come (asked for by a report) must not push the next price's `recorded_us` there.
            self._quoted_us = max(self._quoted_us, min(ts_us, self._clock()))
            tenant = self._books.accounts.tenant(tenant_id)
            price = self._books.prices.resolve(
                tenant_id, model, base_model, tenant.currency, ts_us=ts_us, known_us=ts_us, endpoint=endpoint
            )
            if price.rate.exact:
                return price.rate
            tariff = self._books.tariffs.of(price.id)
            start_us = period_start(tariff, ts_us, tenant.billing_anchor_day, tenant.timezone)
            return price.bound(self._books.positions.of(tenant_id, tariff, start_us))
