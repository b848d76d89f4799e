"""Money against `fractions.Fraction`: exact until the one rounding, and no cent made or lost in it."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from billing.money import (
    FEMTO,
    MINOR_DIGITS,
    NANO,
    MoneyError,
    allocate,
    cost,
    format_amount,
    format_minor,
    format_price,
    parse_amount,
    parse_price,
    round_half_even,
)

currencies = st.sampled_from(sorted(MINOR_DIGITS))
amounts = st.integers(-(10**30), 10**30)
prices = st.integers(0, 10**18)
tokens = st.integers(0, 10**12)


@given(amounts)
def test_an_amount_written_and_read_is_the_same(femto: int) -> None:
    text = format_amount(femto)
    assert parse_amount(text) == femto
    assert Fraction(text) * FEMTO == femto
    assert "e" not in text.lower()


@given(prices)
@example(120)  # 0.00000012, never 1.2E-7
def test_a_price_written_and_read_is_the_same(nano: int) -> None:
    text = format_price(nano)
    assert parse_price(text) == nano
    assert Fraction(text) * NANO == nano
    assert "e" not in text.lower()


def test_case_32_a_small_price_has_no_exponent() -> None:
    assert format_price(parse_price("0.00000012")) == "0.00000012"
    assert format_price(parse_price("1.2E-7")) == "0.00000012"
    assert parse_price("0.00000012") == 120


@given(st.decimals(allow_nan=False, allow_infinity=False, places=15, min_value=-(10**9), max_value=10**9))
def test_any_way_to_write_a_number_gives_its_value(number: Decimal) -> None:
    for text in (str(number), format(number, "f"), f"{number:+f}"):
        assert parse_amount(text) == Fraction(number) * FEMTO


@given(st.text(max_size=20))
def test_other_text_is_refused_and_nothing_else_happens(text: str) -> None:
    try:
        value = Fraction(parse_amount(text), FEMTO)
    except MoneyError:
        return
    assert value == Fraction(Decimal(text))


NO_AMOUNTS = ["", " ", "1,5", "0x10", "NaN", "sNaN", "inf", "-Infinity", "1e31", "1e-16", "9" * 65]
TAKEN_BY_DECIMAL = ["1_0", " 10", "10\n", "１２", "١٠"]  # the last two: digits of other scripts


@pytest.mark.parametrize("text", NO_AMOUNTS + TAKEN_BY_DECIMAL)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(MoneyError):
        parse_amount(text)


@given(tokens, prices)
def test_cost_is_tokens_times_price_per_million(count: int, nano: int) -> None:
    assert Fraction(cost(count, nano), FEMTO) == Fraction(nano, NANO) * count / 10**6


@given(amounts, currencies)
def test_rounding_goes_to_the_nearest_and_half_to_even(femto: int, currency: str) -> None:
    unit = Fraction(10 ** (15 - MINOR_DIGITS[currency]))
    minor = round_half_even(femto, currency)
    off = abs(Fraction(femto) / unit - minor)
    assert off <= Fraction(1, 2)
    if off == Fraction(1, 2):
        assert minor % 2 == 0
    assert round_half_even(-femto, currency) == -minor


@given(st.integers(-(10**15), 10**15), currencies)
def test_minor_units_pass_through(minor: int, currency: str) -> None:
    assert round_half_even(minor * 10 ** (15 - MINOR_DIGITS[currency]), currency) == minor
    assert Fraction(format_minor(minor, currency)) == Fraction(minor, 10 ** MINOR_DIGITS[currency])


@given(st.lists(st.integers(0, 10**20), max_size=300), currencies)
def test_rounded_lines_sum_to_the_rounded_sum_and_stay_near(parts: list[int], currency: str) -> None:
    unit = 10 ** (15 - MINOR_DIGITS[currency])
    rounded = allocate(parts, currency)
    assert sum(rounded) == round_half_even(sum(parts), currency)
    for part, minor in zip(parts, rounded, strict=True):
        assert math.floor(Fraction(part, unit)) <= minor <= math.ceil(Fraction(part, unit))


@given(st.lists(amounts, max_size=50), currencies)
def test_credits_among_the_lines_keep_the_sum(parts: list[int], currency: str) -> None:
    assert sum(allocate(parts, currency)) == round_half_even(sum(parts), currency)


@given(st.lists(st.integers(0, 10**20), max_size=40), currencies)
def test_larger_remainders_are_rounded_up_first(parts: list[int], currency: str) -> None:
    unit = 10 ** (15 - MINOR_DIGITS[currency])
    rounded = allocate(parts, currency)
    up = [part % unit for part, minor in zip(parts, rounded, strict=True) if minor > part // unit]
    down = [part % unit for part, minor in zip(parts, rounded, strict=True) if minor == part // unit]
    assert not up or not down or min(up) >= max(down)


def test_case_30_many_lines_that_each_round_down() -> None:
    half_a_cent = FEMTO // 200
    lines = [half_a_cent] * 81
    rounded = allocate(lines, "usd")
    assert sum(rounded) == 40  # 40.5 cents, half to even
    assert rounded == [1] * 40 + [0] * 41
    credit = allocate([*lines, -100 * FEMTO], "usd")
    assert credit[-1] == -10_000
    assert format_minor(-credit[-1], "usd") == "100.00"


def test_case_31_twice_8_165_is_16_33_whichever_way() -> None:
    each = parse_amount("8.165")
    assert round_half_even(2 * each, "usd") == 1633
    assert sum(allocate([each, each], "usd")) == 1633
    assert sum(allocate([cost(2_000_000, parse_price("8.165"))], "usd")) == 1633
