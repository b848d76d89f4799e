"""What other prices would have come to: past usage by a candidate price book. Changes nothing."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Annotated, Any

import msgspec
from litestar import Router, post
from litestar.params import JSONBody
from msgspec import Meta

from billing.errors import Conflict
from billing.money import format_exact
from billing.service.simulating import CANDIDATES_MAX, Candidate
from billing.simulation import Row, Simulation
from gateway.admin.body import Fault, refuse
from gateway.admin.fields import Currency, Text, TimeText, time_fault
from gateway.admin.prices import Classes, PerMillion, given
from gateway.admin.ranges import DAY_US
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time, parse_time
from gateway.admin.watermark import FLUSH_S

MAX_DAYS = 366
MAX_EVENTS = 1_000_000  # half a minute or so
TURN_S = 0.005

_simulating = threading.Lock()


class CandidatePrice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A version of the book as it might have been: `price` names one that stands, else all of it is told."""

    price: Annotated[Text | None, Meta(description="id of a version, taken as it stands")] = None
    model: Annotated[Text | None, Meta(description="name of a model or adapter, or *")] = None
    currency: Currency | None = None
    per_million: PerMillion | None = None
    classes: Classes | None = None
    endpoint: Annotated[Text | None, Meta(description="for its requests alone; null: all")] = None
    tenant: Annotated[Text | None, Meta(description="null: for all")] = None
    effective_at: Annotated[TimeText | None, Meta(description="null: the start of the range")] = None

    def faults(self) -> list[Fault]:
        """The time's, and what stands beside `price`, or is missing without it."""
        found = [] if self.effective_at is None else time_fault("effective_at", self.effective_at)
        told = ("model", "currency", "per_million", "classes", "endpoint", "tenant")
        if self.price is not None:
            found += [(name, "is the standing version's") for name in told if getattr(self, name) is not None]
        else:
            found += [(name, "is required without price") for name in told[:2] if getattr(self, name) is None]
        return found


class SimulationAsk(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which usage, and by which prices; from its time on a candidate takes the place of all that stands for the same
    tenant, model, endpoint and currency."""

    start: TimeText
    end: Annotated[TimeText, Meta(description="excluded")]
    prices: Annotated[list[CandidatePrice], Meta(min_length=1, max_length=CANDIDATES_MAX)]
    tenant: Annotated[Text | None, Meta(description="null: all")] = None
    alone: Annotated[bool, Meta(description="no price but the candidates")] = False
    by_model: Annotated[bool, Meta(description="a row for each model beside its tenant")] = False

    def faults(self) -> list[Fault]:
        """Of the times, and of every candidate."""
        found = [*time_fault("start", self.start), *time_fault("end", self.end)]
        if not found and not 0 < parse_time(self.end) - parse_time(self.start) <= MAX_DAYS * DAY_US:
            found.append(("end", f"must be later than start, by at most {MAX_DAYS} days"))
        for number, candidate in enumerate(self.prices):
            found += [(f"prices[{number}].{field}", reason) for field, reason in candidate.faults()]
        return found


class SimulatedRow(msgspec.Struct, kw_only=True):
    """Exact amounts, before any rounding. `would_be` is null, never less, where a request has no candidate price."""

    tenant: str
    model: Annotated[str | None, Meta(description="what shares tiers stands under its price's name; null: all")]
    currency: str
    requests: int
    charged: str
    would_be: str | None
    difference: str | None
    percent: Annotated[str | None, Meta(description="of what was charged, to two digits; null: nothing was")]


class MissingPrice(msgspec.Struct, kw_only=True):
    """Requests that the candidate book cannot price."""

    tenant: str
    model: str
    endpoint: str
    reason: str
    requests: int


class SimulationView(msgspec.Struct, kw_only=True):
    """What was charged and what it would be, tiers and minimums included; discounts, commitments and tax left out."""

    start: str
    end: str
    data: list[SimulatedRow]
    missing: list[MissingPrice]
    uncharged: Annotated[dict[str, int], Meta(description="tenant: requests that have no charge, so cost nothing yet")]


def show(found: Simulation) -> SimulationView:
    return SimulationView(
        start=format_time(found.span.start_us),
        end=format_time(found.span.end_us),
        data=[_show_row(row) for row in found.rows],
        missing=[
            MissingPrice(**msgspec.structs.asdict(missing), requests=count) for missing, count in found.missing.items()
        ],
        uncharged=found.uncharged,
    )


def _show_row(row: Row) -> SimulatedRow:
    difference = row.difference_femto
    return SimulatedRow(
        tenant=row.tenant,
        model=row.model or None,
        currency=row.currency,
        requests=row.requests,
        charged=format_exact(row.charged_femto),
        would_be=None if row.would_be_femto is None else format_exact(row.would_be_femto),
        difference=None if difference is None else format_exact(difference),
        percent=None if difference is None or not row.charged_femto else _percent(difference, row.charged_femto),
    )


def _percent(part: int | Fraction, whole: int | Fraction) -> str:
    hundredths = round(Fraction(part) * 10_000 / whole)
    sign, digits = "-" if hundredths < 0 else "+", f"{abs(hundredths):03d}"
    return f"{sign}{digits[:-2]}.{digits[-2:]}"


def _candidate(price: CandidatePrice, start_us: int) -> Candidate:
    at_us = start_us if price.effective_at is None else parse_time(price.effective_at)
    if price.price is not None:
        return Candidate(effective_at_us=at_us, price_id=price.price)
    return Candidate(
        effective_at_us=at_us,
        tenant=price.tenant,
        model=price.model or "",
        endpoint=price.endpoint or "",
        currency=price.currency or "",
        per_million=given(price.per_million or PerMillion()),
        classes=price.classes or {},
    )


def _simulate(admin: AdminState, ask: SimulationAsk) -> Simulation:
    """One at a time. Raises `BadRequest` for a range with too much in it, `Conflict` while another runs."""
    start_us, end_us = parse_time(ask.start), parse_time(ask.end)
    if not _simulating.acquire(blocking=False):
        raise Conflict("another simulation is under way: try again when it is done")
    try:
        admin.flush(FLUSH_S)
        events = sum(row.requests for row in admin.usage.usage(tenant=ask.tenant, start_us=start_us, end_us=end_us))
        if events > MAX_EVENTS:
            refuse([("start", f"there are {events} requests in this range, and at most {MAX_EVENTS} are rated again")])
        candidates = [_candidate(price, start_us) for price in ask.prices]
        wanted: dict[str, Any] = {"tenant_id": ask.tenant, "alone": ask.alone, "by_model": ask.by_model}
        return admin.billing.simulate_prices(candidates, start_us, end_us, usage=admin.usage, turn_s=TURN_S, **wanted)
    finally:
        _simulating.release()


@post("/prices/simulation", status_code=200)
async def simulate(data: JSONBody[SimulationAsk], admin: Admin) -> SimulationView:
    """Rate past usage again by other prices, beside what it was charged; nothing is changed."""
    return show(await admin.read(_simulate, admin, data))


router = Router("/", route_handlers=[simulate], tags=["prices"])
