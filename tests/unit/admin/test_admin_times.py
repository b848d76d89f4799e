"""Times in and out: RFC 3339 and epoch seconds, exact to the microsecond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.times import TimeError, format_time, month_start, parse_time


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-11-18T11:06:40Z", 1_795_000_000_000_000),
        ("2026-11-18T12:06:40+01:00", 1_795_000_000_000_000),
        ("2026-11-18t11:06:40z", 1_795_000_000_000_000),
        ("2026-11-18 11:06:40.000001Z", 1_795_000_000_000_001),
        ("2026-11-18T11:06:40.5Z", 1_795_000_000_500_000),
        ("2026-11-18T11:06:40.123456000Z", 1_795_000_000_123_456),
        ("2026-11-18", 1_794_960_000_000_000),
        ("1795000000", 1_795_000_000_000_000),
        ("1795000000.25", 1_795_000_000_250_000),
        (1_795_000_000, 1_795_000_000_000_000),
        ("9999-12-31T23:59:59.999999Z", 253_402_300_799_999_999),
    ],
)
def test_a_time_is_read_exactly(text: str | int, us: int) -> None:
    assert parse_time(text) == us


@pytest.mark.parametrize(
    "text",
    [
        *("", "now", "2026-11-18T11:06:40", "2026-13-01T00:00:00Z", "2026-02-29T00:00:00Z", "2026-11-18T25:00:00Z"),
        *("2026-11-18T11:06:40.1234567Z", "1969-12-31T23:59:59Z", "10000-01-01T00:00:00Z", "1e9", "-1", "٢٠٢٦-11-18"),
        *("253402300800", 253_402_300_800, -1, "2026-11-18T11:06:40 01:00", "1795000000.1234567"),
    ],
)
def test_what_is_no_time_is_refused(text: str | int) -> None:
    with pytest.raises(TimeError):
        parse_time(text)


@given(st.integers(0, 253_402_300_799_999_999))
def test_what_is_written_is_read_back(us: int) -> None:
    assert parse_time(format_time(us)) == us


@given(st.integers(0, 253_402_300_799_999_999))
def test_a_month_starts_at_its_first_midnight(us: int) -> None:
    start = month_start(us)
    assert 0 <= us - start < 31 * 86_400_000_000
    assert format_time(start)[7:] == "-01T00:00:00Z"
    assert format_time(start)[:7] == format_time(us)[:7]
