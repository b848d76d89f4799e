"""The only arithmetic on money. Integers and fractions, never a float.

A price is a whole number of nano-units of currency per million tokens; tokens x price is then a whole
number of femto-units (1e-15 of a unit: 1 USD = 10**15 femto). What is not whole is a `Fraction` until
the one rounding, half-even to the currency's minor unit, when an invoice line closes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

NANO = 10**9
FEMTO = 10**15

_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_EXACT = re.compile(r"-?\d{1,1000}(/[1-9]\d{0,999})?", re.ASCII)

MINOR_DIGITS = {  # ISO 4217, the currencies Stripe bills in whole, hundredth and thousandth units
    "usd": 2,
    "eur": 2,
    "gbp": 2,
    "chf": 2,
    "cad": 2,
    "aud": 2,
    "nzd": 2,
    "sek": 2,
    "nok": 2,
    "dkk": 2,
    "pln": 2,
    "czk": 2,
    "inr": 2,
    "brl": 2,
    "mxn": 2,
    "sgd": 2,
    "hkd": 2,
    "zar": 2,
    "ils": 2,
    "aed": 2,
    "jpy": 0,
    "krw": 0,
    "clp": 0,
    "vnd": 0,
    "kwd": 3,
    "bhd": 3,
    "jod": 3,
    "omr": 3,
    "tnd": 3,
}


class MoneyError(ValueError):
    """A text that is not an exact amount, or an unknown currency."""


def minor_digits(currency: str) -> int:
    """Digits after the point in the currency's minor unit. Raises `MoneyError` on an unknown currency."""
    try:
        return MINOR_DIGITS[currency]
    except KeyError:
        raise MoneyError(f"unknown currency {currency!r}") from None


def _scaled(text: str, scale: int, digits: int) -> int:
    if not isinstance(text, str):
        raise MoneyError("money is written as a decimal string")
    if len(text) > 64:
        raise MoneyError("a decimal number has at most 64 characters")
    if not _DECIMAL.fullmatch(text):  # `Decimal` takes more: spaces, 1_0, the digits of other scripts
        raise MoneyError(f"{text!r} is not a decimal number")
    value = Decimal(text)
    if abs(value.adjusted()) > 30:
        raise MoneyError(f"{text!r} is not a decimal number in range")
    with localcontext(prec=120):
        scaled = value * scale
        if scaled != scaled.to_integral_value():
            raise MoneyError(f"{text!r} has more than {digits} digits after the point")
        return int(scaled)


def parse_price(text: str) -> int:
    """Price per million tokens as text → nano-units per million tokens. At most 9 decimals, not negative."""
    nano = _scaled(text, NANO, 9)
    if nano < 0:
        raise MoneyError("a price is not negative")
    return nano


def parse_amount(text: str) -> int:
    """Amount as text → femto-units. At most 15 decimals."""
    return _scaled(text, FEMTO, 15)


def parse_percent(text: str) -> int:
    """Percentage as text → billionths of a percent. At most 9 decimals, not negative."""
    found = _scaled(text, NANO, 9)
    if found < 0:
        raise MoneyError("a percentage is not negative")
    return found


def format_percent(billionths: int) -> str:
    """Billionths of a percent → exact decimal text."""
    return _decimal_text(billionths, 9, 0)


def percent_of(femto: int | Fraction, percent: str) -> Fraction:
    """So many percent of an amount, exactly."""
    return Fraction(femto) * parse_percent(percent) / (100 * NANO)


def minor_femto(minor: int, currency: str) -> int:
    """Minor units → femto-units."""
    unit: int = 10 ** (15 - minor_digits(currency))
    return minor * unit


def _decimal_text(value: int, digits: int, keep: int) -> str:
    sign, whole = ("-" if value < 0 else ""), str(abs(value)).rjust(digits + 1, "0")
    point = len(whole) - digits
    fraction = whole[point:].rstrip("0").ljust(keep, "0")
    return f"{sign}{whole[:point]}{'.' + fraction if fraction else ''}"


def format_price(nano: int) -> str:
    """Nano-units per million tokens → exact decimal text, never in exponent form."""
    return _decimal_text(nano, 9, 2)


def format_amount(femto: int) -> str:
    """Femto-units → exact decimal text, at least two decimals."""
    return _decimal_text(femto, 15, 2)


def format_minor(minor: int, currency: str) -> str:
    """Minor units (cents) → decimal text in the currency's own number of digits."""
    digits = minor_digits(currency)
    return _decimal_text(minor, digits, digits)


def exact_text(femto: int | Fraction) -> str:
    """Femto-units, whole or not, as `n` or `n/d` in lowest terms: what a JSON number cannot hold."""
    return str(Fraction(femto))


def parse_exact(text: str) -> int | Fraction:
    """Inverse of `exact_text`; whole ones as int. Raises `MoneyError`."""
    if not _EXACT.fullmatch(text):
        raise MoneyError(f"{text[:64]!r} is not an exact amount")
    value = Fraction(text)
    return value.numerator if value.denominator == 1 else value


def format_exact(femto: int | Fraction) -> str:
    """Femto-units → decimal text of the unit where that ends within 15 digits, else the fraction `n/d` of the unit."""
    value = Fraction(femto)
    return format_amount(value.numerator) if value.denominator == 1 else str(value / FEMTO)


def cost(tokens: int, price_nano: int) -> int:
    """Tokens × price → femto-units, exact."""
    return tokens * price_nano


def round_half_even(femto: int | Fraction, currency: str) -> int:
    """Femto-units → minor units, half to even: the one rounding."""
    unit: int = 10 ** (15 - minor_digits(currency))
    return round(Fraction(femto) / unit)


def allocate(parts_femto: Sequence[int | Fraction], currency: str) -> list[int]:
    """Round every part to minor units so that they sum to the rounded exact total (largest remainder).

    Ties go to the earlier part, so the result depends on nothing but the input.
    """
    unit = 10 ** (15 - minor_digits(currency))
    exact = [Fraction(part) / unit for part in parts_femto]
    floors = [math.floor(part) for part in exact]
    short = round_half_even(sum(parts_femto, Fraction(0)), currency) - sum(floors)
    by_remainder = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    for i in by_remainder[:short]:
        floors[i] += 1
    return floors
