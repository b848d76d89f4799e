"""Billing periods: months between anchors, in the customer's own time zone, as exact instants.

A period begins at the first instant at which the zone's wall clock shows the anchor's day or a later one: where its
midnight was skipped (or its whole day, as in Samoa in December 2011) that is the instant of the jump, where midnight
came twice it is the first. Anchors 29 to 31 fall on the last day of a shorter month. So periods tile time: the end of
one is the start of the next, and every instant lies in exactly one.

Zones are those of the `tzdata` package and no others: two machines with the same lock file cut the same periods,
whatever their own files say. An instant that was cut stands as a number in the ledger, so a newer package moves
no period that was invoiced.

Pure. Does not know: tenants, invoices, what time it is.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib import resources
from zoneinfo import ZoneInfo

import msgspec

ANCHOR_MAX = 31
UTC_NAME = "UTC"

_EPOCH = datetime(1970, 1, 1)  # naive on purpose: wall clocks and UTC are both read as plain numbers here
_SECOND = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_YEAR, _LAST_YEAR = 1970, 9998
_S = 1_000_000


class UnknownZone(ValueError):
    """A name that is no IANA time zone."""


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """[start_us, end_us)."""

    start_us: int
    end_us: int

    def has(self, ts_us: int) -> bool:
        return self.start_us <= ts_us < self.end_us


@cache
def zone_names() -> frozenset[str]:
    """Every zone that there is, links too."""
    return frozenset((resources.files("tzdata") / "zones").read_text().split())


@lru_cache(maxsize=1024)
def zone(name: str) -> ZoneInfo:
    """The zone's rules from the tzdata package. Raises `UnknownZone`."""
    if name not in zone_names():  # the name becomes a path: nothing but a known one may
        raise UnknownZone(f"{name!r} is not an IANA time zone, such as Europe/Berlin")
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def period_at(ts_us: int, anchor_day: int = 1, timezone: str = UTC_NAME) -> Period:
    """The period that has the instant. Times from 1970 to 9998."""
    last = _last.get((anchor_day, timezone))
    if last is None or not last.start_us <= ts_us < last.end_us:
        last = _last[anchor_day, timezone] = _period_at(ts_us, anchor_day, timezone)
    return last


_last: dict[tuple[int, str], Period] = {}  # of each anchor and zone, the period that was asked for last


def _period_at(ts_us: int, anchor_day: int, timezone: str) -> Period:
    year, month = _month_of(ts_us, timezone)
    start_us = anchor_us(year, month, anchor_day, timezone)
    if ts_us < start_us:
        return Period(start_us=anchor_us(*_moved(year, month, -1), anchor_day, timezone), end_us=start_us)
    end_us = anchor_us(*_moved(year, month, 1), anchor_day, timezone)
    if ts_us >= end_us:  # the clock was put back over midnight: it shows the old month, and the new one has begun
        return Period(start_us=end_us, end_us=anchor_us(*_moved(year, month, 2), anchor_day, timezone))
    return Period(start_us=start_us, end_us=end_us)


def periods(from_us: int, to_us: int, anchor_day: int = 1, timezone: str = UTC_NAME) -> Iterator[Period]:
    """The periods that cover [from_us, to_us), each whole, in order."""
    while from_us < to_us:
        period = period_at(from_us, anchor_day, timezone)
        yield period
        from_us = period.end_us


@lru_cache(maxsize=65_536)
def anchor_us(year: int, month: int, anchor_day: int, timezone: str) -> int:
    """The instant at which the period of this month begins."""
    day = min(anchor_day, calendar.monthrange(year, month)[1])
    return day_start_us(year, month, day, timezone)


def day_start_us(year: int, month: int, day: int, timezone: str) -> int:
    """The first instant at which the zone's clock shows this day or a later one."""
    midnight_s = (datetime(year, month, day) - _EPOCH) // _SECOND
    if timezone == UTC_NAME:
        return midnight_s * _S
    rules = zone(timezone)
    first = datetime(year, month, day, tzinfo=rules)
    before_s = midnight_s - _offset_s(first)
    after_s = midnight_s - _offset_s(first.replace(fold=1))
    if before_s <= after_s:  # midnight is there; where it comes twice the first is meant
        return before_s * _S
    return _jump_s(rules, midnight_s, after_s, before_s) * _S


def whole_days(start_us: int, end_us: int, timezone: str) -> int:
    """How many days of the zone's calendar begin in [start_us, end_us)."""
    first, last = (_local(us, timezone).toordinal() for us in (start_us - 1, end_us - 1))
    return last - first


def _jump_s(rules: ZoneInfo, midnight_s: int, low_s: int, high_s: int) -> int:
    """The second in (low_s, high_s] at which the clock jumps to midnight_s or past it: a search, as nobody tells."""
    while high_s - low_s > 1:
        middle_s = (low_s + high_s) // 2
        if middle_s + _offset_s(datetime.fromtimestamp(middle_s, rules)) >= midnight_s:
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _offset_s(time: datetime) -> int:
    offset = time.utcoffset()
    return 0 if offset is None else offset // _SECOND


def _local(ts_us: int, timezone: str) -> datetime:
    return (_EPOCH.replace(tzinfo=UTC) + timedelta(microseconds=ts_us)).astimezone(zone(timezone))


def _month_of(ts_us: int, timezone: str) -> tuple[int, int]:
    local = _local(ts_us, timezone)
    if not _FIRST_YEAR <= local.year <= _LAST_YEAR:
        raise ValueError("a period lies between 1970 and 9998")
    return local.year, local.month


def _moved(year: int, month: int, months: int) -> tuple[int, int]:
    index = year * 12 + month - 1 + months
    return index // 12, index % 12 + 1
