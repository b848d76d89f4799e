"""Types that several request bodies share, and the rule of times. What else a value must be is the ledger's to say."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gateway.admin.body import Fault
from gateway.admin.times import TimeError, parse_time

Text = Annotated[str, Meta(min_length=1, max_length=200)]
Currency = Annotated[str, Meta(description="ISO 4217 code in lower case", examples=["usd"])]
MoneyText = Annotated[str, Meta(max_length=64, description="exact decimal number", examples=["10.00"])]
TimeText = Annotated[str | int, Meta(description="RFC 3339, or seconds since the epoch")]


def time_fault(field: str, value: str | int) -> list[Fault]:
    try:
        parse_time(value)
    except TimeError as error:
        return [(field, str(error))]
    return []
