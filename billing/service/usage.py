"""From settled usage to charges, each exactly once.

    settled in the spool ──► settle(): memory is charged, the hold is given back
          └────(spool's consumer)──► record(): `usage.rated` in the log, once per event id

Either may come first. A kill anywhere loses nothing: what the spool has and the log has not is given to
`record` again, what the log has is found by the event's id and skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import structlog

from billing.books import fact_of, new_event
from billing.charges import Priced, move, rate
from billing.errors import LedgerUnavailable, NoPrice
from billing.leases import LeaseTable
from billing.ledger import Spender, Unrated, UsageRated, UsageUnrated
from billing.positions import Positions
from billing.prices import PriceVersion
from billing.rating import unpriced
from billing.service.notices import NoticeService
from billing.service.shell import Idempotency, page
from billing.store import Log, NewEvent
from metering.events import UsageEvent, content_hash

RECORD_BATCH = 1000
RATE_BATCH = 10_000
RECORDER = "ledger"  # the actor of recorded usage
NO_PRICE = "no price"

Used = dict[str, dict[str, int]]
"""Gateway → quota → femto-units."""

_log = structlog.get_logger(__name__)


def usage_key(event_id: str) -> str:
    """The key under which the log has an event, rated or not."""
    return f"usage:{event_id}"


class UsageService(NoticeService):
    """Charges. Alarms: `usage_conflict`, `usage_unrated`, `hold_exceeded`."""

    def settle(self, event: UsageEvent) -> None:
        """Charge the balance in memory and give the hold back; once, however often it is called.

        To be called when the spool has the event. Without a price nothing is charged: `record` says so.
        An event that has no hold here may be an old one, so the store is asked; when it cannot answer,
        the charge waits for `record`.
        """
        digest = content_hash(event)
        with self._state:
            known = self._books.ledger.known_hash(event.event_id)
            if known is None and event.event_id in self._holds:
                self._charge(event, digest)
                return
        if known is None:
            try:
                row = self._store.find(usage_key(event.event_id))
            except LedgerUnavailable:
                return
            known = row.payload_hash if row else None
        with self._state:
            known = self._books.ledger.known_hash(event.event_id) or known
            if known is None:
                self._charge(event, digest)
                return
            self._holds.release(event.event_id)
            if known != digest:
                self._alarm("usage_conflict", event.event_id)

    def record(self, events: Sequence[UsageEvent]) -> None:
        """Append `usage.rated`, or `usage.unrated`, exactly once per event id: the spool's ledger consumer.

        When it returns, all of them stand on disk. The first content of an id stands; another is an alarm.
        """
        for first in range(0, len(events), RECORD_BATCH):
            self._record(events[first : first + RECORD_BATCH])

    def unrated(self, tenant_id: str | None = None, limit: int = 100, after: str | None = None) -> list[Unrated]:
        """Usage without a charge, in the order it was recorded; `after` is an event's id. Raises `NotFound`."""
        with self._state:
            if tenant_id is not None:
                self._books.accounts.tenant(tenant_id)
            waiting = [one for one in self._books.ledger.unrated.values() if tenant_id in (None, one.tenant)]
        return page(waiting, lambda one: one.event_id, limit, after)

    def unrated_count(self) -> int:
        """How many requests have no charge."""
        with self._state:
            return len(self._books.ledger.unrated)

    def rate_unrated(self, *, idempotency: Idempotency | None = None) -> int:
        """Charge usage that had no price when it was settled and has one in today's book: how many.

        At most `RATE_BATCH` in one call: again, until it is 0.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], int]:
            waiting = self._priced_now(time_us, RATE_BATCH)
            rows = self._store.find_all([usage_key(unrated.event_id) for unrated in waiting])
            rated: list[NewEvent] = []
            positions = self._books.positions.ahead()
            for row in rows.values():
                fact = fact_of(row)
                if isinstance(fact, UsageUnrated):
                    later = self._rate(fact.event, fact.event_hash, positions, known_us=time_us)
                    if isinstance(later, Priced):
                        self._move(positions, later.rated)
                        rated.append(new_event(f"usage:{later.rated.tenant}", later.rated))
            return rated, len(rated)

        return self._command("rate_unrated", idempotency, int, decide)[0]

    def _priced_now(self, known_us: int, limit: int) -> list[Unrated]:
        """The first that wait for nothing but to be rated: the book has their price."""
        with self._state:
            waiting = (one for one in self._books.ledger.unrated.values() if one.reason == NO_PRICE)
            return list(itertools.islice((one for one in waiting if self._has_price(one, known_us)), limit))

    def _has_price(self, unrated: Unrated, known_us: int) -> bool:
        """Whether the book has a price for all that it must be charged for; `_state` is held."""
        price = self._price(unrated, known_us)
        return price is not None and unpriced(unrated, price) is None

    def _record(self, events: Sequence[UsageEvent]) -> None:
        with self._writing:
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)
                used: Used = {}
                new = self._unrecorded(log, events, used)
                rows = log.append(new, actor=RECORDER, time_us=self._clock())
                LeaseTable(log.connection).use_up(used)
            self._fold(rows)
        for row in rows:
            if row.type == "usage.unrated":
                self._alarm("usage_unrated", str(row.key))
        self.notice()

    def _unrecorded(self, log: Log, events: Sequence[UsageEvent], used: Used) -> list[NewEvent]:
        """The events that the log does not have, as rows; what they use up of leases is added to `used`."""
        standing = {
            row_key: row.payload_hash
            for row_key, row in log.find([usage_key(event.event_id) for event in events]).items()
        }
        new: list[NewEvent] = []
        positions = self._books.positions.ahead()
        for event in events:
            key, digest = usage_key(event.event_id), content_hash(event)
            if key in standing:
                if standing[key] != digest:
                    self._alarm("usage_conflict", event.event_id)
                continue
            standing[key] = digest
            found = self._rate(event, digest, positions)
            if isinstance(found, UsageUnrated):
                new.append(new_event("unrated", found, key=key, payload_hash=digest))
                continue
            self._move(positions, found.rated)
            self._use(used, found.rated)
            new.append(new_event(f"usage:{found.rated.tenant}", found.rated, key=key, payload_hash=digest))
        return new

    def _use(self, used: Used, rated: UsageRated) -> None:
        """Count a charge in the leases of the gateway that ran its request."""
        amounts = used.setdefault(rated.gateway, {})
        with self._state:
            quotas = self._quotas.applying(rated.tenant, rated.key_id, rated.adapter, rated.ts_us)
        for quota in quotas:
            amounts[quota.id] = amounts.get(quota.id, 0) + int(rated.amount_femto)

    def _charge(self, event: UsageEvent, digest: str) -> None:
        """Memory only; `_state` is held."""
        held = self._holds.release(event.event_id) if event.event_id in self._holds else None
        found = self._rate(event, digest, self._books.positions)
        if isinstance(found, UsageUnrated):
            return
        # Where tiers decide, the charge depends on what is recorded first: until then it is the most it can be.
        fact, amount = found
        quotas = self._quotas.applying(fact.tenant, fact.key_id, fact.adapter, fact.ts_us)
        who = Spender(fact.tenant, fact.key_id, fact.adapter)
        self._books.ledger.settle(event.event_id, digest, who, amount, quotas, event.ts_us)
        if held is not None and amount > held:
            self._alarm("hold_exceeded", event.event_id)

    def _rate(
        self, event: UsageEvent, digest: str, positions: Positions, *, known_us: int | None = None
    ) -> Priced | UsageUnrated:
        """The event's charge, or why it has none. `known_us`: rate it later, by the book of that time."""
        with self._state:
            tenant = self._books.accounts.tenants.get(event.tenant)
            faults = event.faults() if tenant else ["unknown tenant"]
            if tenant is None or faults:
                return UsageUnrated(event=event, event_hash=digest, reason=faults[0])
            price = self._price(event, event.ts_us if known_us is None else known_us)
            if price is None or unpriced(event, price):
                return UsageUnrated(event=event, event_hash=digest, reason=NO_PRICE)
            return rate(event, digest, tenant, self._books.tariffs.of(price.id), positions, later=known_us is not None)

    def _move(self, positions: Positions, rated: UsageRated) -> None:
        if rated.positions:
            move(positions, rated, self._books.tariffs.of(rated.price_id))

    def _price(self, usage: UsageEvent | Unrated, known_us: int) -> PriceVersion | None:
        """The price of a known tenant's request by what the book knew at a time; `_state` is held."""
        currency = self._books.accounts.tenant(usage.tenant).currency
        try:
            return self._books.prices.resolve(
                usage.tenant,
                usage.model,
                usage.base_model,
                currency,
                ts_us=usage.ts_us,
                known_us=known_us,
                endpoint=usage.endpoint,
            )
        except NoPrice:
            return None

    def _alarm(self, name: str, event_id: str) -> None:
        with self._state:
            self._alarms[name] += 1
        _log.error(name, event_id=event_id)
