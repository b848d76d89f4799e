"""Times at the admin API's border: RFC 3339 text or epoch seconds in, RFC 3339 in UTC out.

Inside the program a time is a whole number of microseconds since the epoch. No float is used on the way.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_RFC3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2})(?:[Tt ](\d{2}:\d{2}(?::\d{2})?)(?:\.(\d{1,9}))?([Zz]|[+-]\d{2}:\d{2}))?", re.ASCII
)
_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d{1,6}))?", re.ASCII)
_LAST_US = 253_402_300_800_000_000  # the first microsecond of the year 10000

WHAT_A_TIME_IS = "must be a date, a time in RFC 3339 such as 2026-11-01T00:00:00Z, or seconds since the epoch"


class TimeError(ValueError):
    """A text that is no time; the message completes the sentence "field …"."""


def parse_time(value: str | int) -> int:
    """RFC 3339 with an offset, a date alone (its midnight in UTC), or epoch seconds → microseconds.

    Raises `TimeError`. What is finer than a microsecond is refused unless it is zero.
    """
    if isinstance(value, int):
        return _in_range(value * 1_000_000)
    text = value.strip()
    if seconds := _SECONDS.fullmatch(text):
        return _in_range(int(seconds[1]) * 1_000_000 + int((seconds[2] or "").ljust(6, "0")))
    parts = _RFC3339.fullmatch(text)
    if parts is None:
        hint = "; a + in a query is written %2B" if re.search(r"\d \d\d:\d\d$", text) else ""
        raise TimeError(WHAT_A_TIME_IS + hint)
    day, clock, fraction, zone = parts.groups(default="")
    if fraction[6:].strip("0"):
        raise TimeError("must not be finer than a microsecond")
    try:
        whole = datetime.fromisoformat(f"{day}T{clock or '00:00'}{zone.upper() or 'Z'}")
    except ValueError:
        raise TimeError(WHAT_A_TIME_IS) from None
    return _in_range((whole - _EPOCH) // _MICROSECOND + int(fraction[:6].ljust(6, "0")))


def _in_range(us: int) -> int:
    if not 0 <= us < _LAST_US:
        raise TimeError("must lie between 1970 and 9999")
    return us


def format_time(us: int) -> str:
    """Microseconds → RFC 3339 in UTC; the fraction is left out when it is zero."""
    text = (_EPOCH + timedelta(microseconds=us)).replace(tzinfo=None).isoformat()
    return f"{text}Z"


def month_start(us: int) -> int:
    """The first microsecond of the UTC month that holds `us`."""
    time = _EPOCH + timedelta(microseconds=us)
    first = time.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first - _EPOCH) // _MICROSECOND
