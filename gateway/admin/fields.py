"""Types and rules that several request bodies share. What else a value must be is the ledger's to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from billing.money import MoneyError, minor_digits, parse_amount, parse_price
from gateway.admin.body import Fault
from gateway.admin.times import TimeError, parse_time

Text = Annotated[str, Meta(min_length=1, max_length=200)]
Currency = Annotated[str, Meta(description="ISO 4217 code in lower case", examples=["usd"])]
MoneyText = Annotated[str, Meta(max_length=64, description="exact decimal number", examples=["10.00"])]
TimeText = Annotated[str | int, Meta(description="RFC 3339, or seconds since the epoch")]


def time_fault(field: str, value: str | int) -> list[Fault]:
    return _fault(field, parse_time, value)


def price_fault(field: str, value: str) -> list[Fault]:
    return _fault(field, parse_price, value)


def amount_fault(field: str, value: str) -> list[Fault]:
    return _fault(field, parse_amount, value)


def currency_fault(value: str) -> list[Fault]:
    return _fault("currency", minor_digits, value)


def _fault(field: str, parse: Callable[[Any], object], value: Any) -> list[Fault]:
    try:
        parse(value)
    except (TimeError, MoneyError) as error:
        return [(field, str(error))]
    return []
