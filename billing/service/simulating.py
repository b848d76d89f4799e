"""Past usage by other prices: what would have been charged. Reads, and writes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from billing.accounts import Tenant
from billing.errors import Invalid
from billing.invoice import UsageSource
from billing.offers import ClassOffer, check_price
from billing.periods import Period
from billing.prices import PriceBook, PriceVersion, version_of
from billing.service.cutting import CLOCK_SLACK_US, CuttingService
from billing.simulation import Simulation, Simulator, candidate_book
from billing.tiers import Component

CANDIDATES_MAX = 1000
TURN = 1000  # after so many charges or events, others get their turn: this shares a process with streams


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A price as it might have been: one that stands (`price_id`), or all of a version's own fields."""

    effective_at_us: int
    price_id: str = ""
    tenant: str | None = None
    model: str = ""
    endpoint: str = ""
    currency: str = ""
    per_million: Mapping[str, str] = {}
    classes: Mapping[str, ClassOffer] = {}


class SimulatingService(CuttingService):
    """What other prices would have come to."""

    def simulate_prices(
        self,
        candidates: Sequence[Candidate],
        start_us: int,
        end_us: int,
        *,
        usage: UsageSource,
        tenant_id: str | None = None,
        alone: bool = False,
        by_model: bool = False,
        turn_s: float = 0.0,
    ) -> Simulation:
        """Requests that began in [start_us, end_us) by the candidates, see `billing/simulation.py`.

        `alone`: by nothing else. After every `TURN` rows it waits for `turn_s`. Raises `Invalid` with every fault of
        the candidates, `NotFound` for the tenant.
        """
        self.refresh()
        with self._state:
            standing = self._books.prices.copy()
            tenants = dict(self._books.accounts.tenants)
            if tenant_id is not None:
                tenants = {tenant_id: self._books.accounts.tenant(tenant_id)}
            versions = _versions(candidates, standing, self._books.accounts.tenants)
            stays = {id: self._books.stays.of(id) for id in tenants}
            uncharged: dict[str, int] = {}
            for one in self._books.ledger.unrated.values():
                if start_us <= one.ts_us < end_us and tenant_id in (None, one.tenant):
                    uncharged[one.tenant] = uncharged.get(one.tenant, 0) + 1
        span = Period(start_us=start_us, end_us=end_us)
        simulator = Simulator(span, tenants, standing, candidate_book(standing, versions, alone=alone))
        from_us = min((simulator.from_us(tenant) for tenant in tenants.values()), default=start_us)
        for id in tenants:
            for number, (_, rated) in enumerate(self._rated(id, max(0, from_us - CLOCK_SLACK_US)), 1):
                simulator.charge(rated)
                _take_turn(number, turn_s)
        for number, event in enumerate(usage.events(tenant_id, from_us, end_us), 1):
            simulator.event(event)
            _take_turn(number, turn_s)
        return simulator.result(stays, uncharged, by_model=by_model)


def _take_turn(number: int, turn_s: float) -> None:
    if turn_s and number % TURN == 0:
        time.sleep(turn_s)


def _versions(
    candidates: Sequence[Candidate], standing: PriceBook, tenants: Mapping[str, Tenant]
) -> list[PriceVersion]:
    """The candidates as versions that were known from when they are effective. Raises `Invalid` with every fault."""
    if not 1 <= len(candidates) <= CANDIDATES_MAX:
        raise Invalid([("prices", f"must be 1 to {CANDIDATES_MAX}")])
    faults: list[tuple[str, str]] = []
    found: list[PriceVersion] = []
    seen: dict[tuple[object, ...], int] = {}
    for number, candidate in enumerate(candidates):
        field = f"prices[{number}]"
        try:
            version = _version(f"candidate-{number + 1}", candidate, standing, tenants)
        except Invalid as error:
            faults += [(f"{field}.{name}", reason) for name, reason in error.faults]
            continue
        key = version.slot, version.rate.currency, version.effective_at_us
        if key in seen:
            faults.append((field, f"is for the same requests from the same time as prices[{seen[key]}]"))
        seen.setdefault(key, number)
        found.append(version)
    if faults:
        raise Invalid(faults)
    return found


def _version(id: str, candidate: Candidate, standing: PriceBook, tenants: Mapping[str, Tenant]) -> PriceVersion:
    at_us = candidate.effective_at_us
    if candidate.price_id:
        version = standing.versions.get(candidate.price_id)
        if version is None:
            raise Invalid([("price", "is no version of the price book")])
        rate = msgspec.structs.replace(version.rate, price_id=id)
        return msgspec.structs.replace(version, id=id, rate=rate, effective_at_us=at_us, recorded_us=at_us)
    faults: list[tuple[str, str]] = []
    components: tuple[Component, ...] = ()
    try:
        components = check_price(
            candidate.model, at_us, candidate.currency, candidate.per_million, candidate.classes, candidate.endpoint
        )
    except Invalid as error:
        faults += error.faults
    if candidate.tenant is not None and candidate.tenant not in tenants:
        faults.append(("tenant", "is unknown"))
    elif candidate.tenant is not None and tenants[candidate.tenant].currency != candidate.currency:
        faults.append(("currency", "must be the tenant's"))
    if faults:
        raise Invalid(faults)
    return version_of(
        id,
        components,
        currency=candidate.currency,
        model=candidate.model,
        effective_at_us=at_us,
        recorded_us=at_us,
        tenant=candidate.tenant,
        endpoint=candidate.endpoint,
    )
