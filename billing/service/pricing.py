"""The price book's commands and the quote at the door."""

from __future__ import annotations

from collections.abc import Mapping

from billing.books import new_event
from billing.errors import Invalid
from billing.prices import PriceSet, PriceVersion, Rate, check_price
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
        idempotency: Idempotency | None = None,
    ) -> PriceVersion:
        """Add a version to the price book. Raises `Invalid` with every fault, `NotFound` for the tenant.

        It counts for requests that begin after it is recorded, whatever it was quoted as effective from:
        requests wait while it is written, so that none was quoted by the book without it and is charged by
        the book with it.
        """
        parsed = check_price(model, effective_at_us, currency, per_million)

        def decide(time_us: int) -> tuple[list[NewEvent], PriceVersion]:
            if tenant is not None and self._books.accounts.tenant(tenant).currency != currency:
                raise Invalid([("currency", "must be the tenant's")])
            id = self._new_id("price")
            price = PriceVersion(
                id=id,
                tenant=tenant,
                model=model,
                effective_at_us=effective_at_us,
                recorded_us=max(time_us, self._quoted_us + 1),
                rate=Rate(price_id=id, currency=currency, **parsed),
            )
            return [new_event("prices", PriceSet(price=price))], price

        return self._command("set_price", idempotency, PriceVersion, decide, stall=True)[0]

    def prices(self, limit: int = 100, after: str | None = None) -> list[PriceVersion]:
        """In the order they were recorded."""
        with self._state:
            return page(list(self._books.prices.versions.values()), lambda price: price.id, limit, after)

    def quote(self, tenant_id: str, model: str, base_model: str, ts_us: int) -> Rate:
        """The rate of a request that begins at `ts_us`. Raises `NoPrice`, `NotFound`."""
        with self._state:
            # A time to come (asked for by a report) must not push the next price's `recorded_us` there.
            self._quoted_us = max(self._quoted_us, min(ts_us, self._clock()))
            currency = self._books.accounts.tenant(tenant_id).currency
            return self._books.prices.resolve(tenant_id, model, base_model, currency, ts_us=ts_us, known_us=ts_us).rate
