"""Billing periods tile time, in every zone and for every anchor, without gap or overlap."""

from __future__ import annotations

import calendar
import itertools
import random
from datetime import UTC, datetime, timedelta
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.periods import Period, UnknownZone, day_start_us, period_at, periods, whole_days, zone, zone_names

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_YEAR, YEARS = 2009, 10  # Samoa and Tokelau lose a day, North Korea and Venezuela move by half an hour
MONTHS = [divmod(FIRST_YEAR * 12 + month, 12) for month in range(YEARS * 12 + 1)]


def different_zones() -> list[str]:
    """One name for each set of rules: the others are links to it."""
    folder = resources.files("tzdata").joinpath("zoneinfo")
    rules = {folder.joinpath(*name.split("/")).read_bytes(): name for name in sorted(zone_names())}
    return sorted(rules.values())


def wall(us: int, name: str) -> datetime:
    """What the zone's clock shows: the direction that `day_start_us` does not take."""
    return (EPOCH + timedelta(microseconds=us)).astimezone(zone(name)).replace(tzinfo=None)


def instant(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> int:
    return (datetime(year, month, day, hour, minute, tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def test_periods_tile_ten_years_in_every_zone_for_every_anchor() -> None:
    """Each start is where the clock first shows the day, and each start of an anchor comes after the one before."""
    zones = different_zones()
    assert len(zones) > 300
    random_ = random.Random(4)
    for name in zones:
        starts = {
            (year, month + 1, day): day_start_us(year, month + 1, day, name)
            for year, month in MONTHS
            for day in range(1, calendar.monthrange(year, month + 1)[1] + 1)
        }
        in_order = list(starts.items())
        assert all(one[1] <= next_[1] for one, next_ in itertools.pairwise(in_order)), name
        _check_instants(name, in_order)
        for anchor in range(1, 32):
            firsts = [
                starts[year, month + 1, min(anchor, calendar.monthrange(year, month + 1)[1])] for year, month in MONTHS
            ]
            gaps = [end - start for start, end in itertools.pairwise(firsts)]
            assert min(gaps) > 26 * 86_400_000_000, (name, anchor)
            at = random_.randrange(len(firsts) - 1)
            expected = Period(start_us=firsts[at], end_us=firsts[at + 1])
            inside = random_.randrange(expected.start_us, expected.end_us)
            for ts_us in (expected.start_us, inside, expected.end_us - 1):
                assert period_at(ts_us, anchor, name) == expected, (name, anchor, ts_us)


def _check_instants(name: str, in_order: list[tuple[tuple[int, int, int], int]]) -> None:
    """Where the length of a day is not 24 hours, and on a sample: the clock shows the day at its start, not before."""
    for number, (day, start_us) in enumerate(in_order):
        length = start_us - in_order[number - 1][1] if number else 0
        if length == 86_400_000_000 and number % 97:
            continue
        midnight = datetime(*day)
        assert wall(start_us, name) >= midnight, (name, day)
        assert wall(start_us - 1, name) < midnight, (name, day)


@given(
    st.sampled_from(sorted(zone_names())),
    st.integers(1, 31),
    st.integers(instant(1971, 1, 1), instant(2200, 1, 1)),
    st.integers(1, 400),
)
@settings(deadline=None)
def test_what_covers_a_stretch_has_every_instant_of_it_once(name: str, anchor: int, from_us: int, days: int) -> None:
    to_us = from_us + days * 86_400_000_000
    found = list(periods(from_us, to_us, anchor, name))
    assert found[0].has(from_us)
    assert found[-1].has(to_us - 1)
    assert all(one.end_us == next_.start_us for one, next_ in itertools.pairwise(found))
    assert sum(one.has((from_us + to_us) // 2) for one in found) == 1
    assert sum(whole_days(one.start_us, one.end_us, name) for one in found) == whole_days(
        found[0].start_us, found[-1].end_us, name
    )


@pytest.mark.parametrize(
    ("name", "anchor", "inside", "start", "end"),
    [
        ("UTC", 1, (2026, 2, 10), (2026, 2, 1), (2026, 3, 1)),
        ("UTC", 31, (2026, 2, 10), (2026, 1, 31), (2026, 2, 28)),
        ("UTC", 31, (2026, 2, 28), (2026, 2, 28), (2026, 3, 31)),
        ("UTC", 29, (2028, 2, 29), (2028, 2, 29), (2028, 3, 29)),
        ("UTC", 29, (2027, 2, 28), (2027, 2, 28), (2027, 3, 29)),
        ("Pacific/Tongatapu", 1, (2026, 1, 31, 11), (2026, 1, 31, 11), (2026, 2, 28, 11)),  # UTC+13
        ("Europe/Berlin", 29, (2026, 3, 29, 5), (2026, 3, 28, 23), (2026, 4, 28, 22)),  # 23 hours long
        ("Europe/Berlin", 25, (2026, 10, 25), (2026, 10, 24, 22), (2026, 11, 24, 23)),  # 25 hours long
        ("America/Sao_Paulo", 4, (2018, 11, 10), (2018, 11, 4, 3), (2018, 12, 4, 2)),  # no midnight: 1 o'clock
        ("America/Havana", 4, (2018, 11, 5), (2018, 11, 4, 4), (2018, 12, 4, 5)),  # midnight comes twice: the first
        ("America/St_Johns", 1, (2009, 11, 1, 3), (2009, 11, 1, 2, 30), (2009, 12, 1, 3, 30)),  # it shows October again
        ("Pacific/Apia", 30, (2012, 1, 1), (2011, 12, 30, 10), (2012, 1, 29, 10)),  # there was no 30 December
        ("Pacific/Apia", 31, (2012, 1, 1), (2011, 12, 30, 10), (2012, 1, 30, 10)),
    ],
)
def test_a_period(
    name: str, anchor: int, inside: tuple[int, ...], start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    found = period_at(instant(*inside), anchor, name)
    assert found == Period(start_us=instant(*start), end_us=instant(*end))


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../../etc/passwd", "europe/berlin", "Europe", "zone.tab"])
def test_a_name_that_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(UnknownZone):
        zone(name)
