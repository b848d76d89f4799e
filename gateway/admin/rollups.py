"""The hourly sums of the usage store: whether they say what the events say, and making them anew."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from litestar import Router, get, put
from litestar.params import JSONBody, QueryParameter

from gateway.admin.acts import begin
from gateway.admin.body import Fault
from gateway.admin.fields import TimeText, time_fault
from gateway.admin.paging import Page
from gateway.admin.ranges import DAY_US, parse_range
from gateway.admin.state import Admin
from gateway.admin.times import format_time, parse_time
from metering.counts import HOUR_US, hour_of

MAX_DAYS = 3660


class DriftView(msgspec.Struct, kw_only=True):
    """An hour whose sums are not those of its events."""

    start: str
    groups: int
    events: int
    summed: int


class RollupRange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which hours are made anew: from the one that holds `start` up to the one that holds `end`'s last instant."""

    start: TimeText
    end: TimeText

    def faults(self) -> list[Fault]:
        faults = time_fault("start", self.start) + time_fault("end", self.end)
        if not faults and not parse_time(self.start) < parse_time(self.end):
            faults.append(("end", "must be later than start"))
        return faults


class RebuiltView(msgspec.Struct, kw_only=True):
    """How many hours there were."""

    hours: int


def _hours(start_us: int, end_us: int) -> tuple[int, int]:
    return hour_of(start_us), hour_of(end_us + HOUR_US - 1)


@get("/rollups/drift")
async def get_drift(
    admin: Admin,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: a month ago.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
) -> Page[DriftView]:
    """List the hours whose sums are not those of their events; there should be none.

    Hours that are yet to be summed are not listed: whoever reads takes their events.
    """
    start_us, end_us = parse_range(
        start,
        end,
        default_start=lambda end_us: max(0, end_us - 31 * DAY_US),
        default_end_us=admin.clock_us() + 1,
        max_days=MAX_DAYS,
    )
    found = await admin.read(admin.usage.rollups.check, *_hours(start_us, end_us))
    shown = [
        DriftView(start=format_time(one.hour_us), groups=one.groups, events=one.events, summed=one.summed)
        for one in found
    ]
    return Page(data=shown)


@put("/rollups")
async def rebuild(data: JSONBody[RollupRange], admin: Admin) -> RebuiltView:
    """Forget the sums of these hours and make them anew from the events. May be repeated."""
    hours = _hours(parse_time(data.start), parse_time(data.end))
    await asyncio.to_thread(begin, admin, "rollups.rebuild", "/".join(format_time(hour_us) for hour_us in hours))
    return RebuiltView(hours=await admin.read(admin.usage.rollups.rebuild, *hours))


router = Router("/", route_handlers=[get_drift, rebuild], tags=["usage"])
