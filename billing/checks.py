"""Checks of what people type. Every fault of an input is collected before anything is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

from billing.errors import Invalid
from billing.money import FEMTO, MoneyError, minor_digits
from billing.periods import ANCHOR_MAX

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODEL = re.compile(r"[A-Za-z0-9._:/-]{1,64}")
STRIPE_ID = re.compile(r"[A-Za-z0-9_]{1,255}")
TEXT_LIMIT = 200
REQUESTS, TOKENS, CONCURRENT, WEIGHT = "requests_per_minute", "tokens_per_minute", "concurrent", "weight"
LIMITS = (REQUESTS, TOKENS, CONCURRENT, WEIGHT)
LIMIT_MAX = 10**12
AMOUNT_MAX_FEMTO = 10**12 * FEMTO  # of a grant, a budget, a cap: typing errors end here
LATEST_US = 253_402_300_800_000_000  # the year 10000


class Faults:
    """What is wrong with one input, as (field, reason)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, field: str, reason: str) -> None:
        self.found.append((field, reason))

    def raise_if_any(self) -> None:
        if self.found:
            raise Invalid(self.found)

    def id(self, field: str, value: object) -> None:
        self._matches(field, value, ID, "must be 1 to 64 letters, digits, _ or -")

    def model(self, field: str, value: object) -> None:
        self._matches(field, value, MODEL, "must be 1 to 64 letters, digits or any of . _ : / -")

    def stripe_id(self, field: str, value: object) -> None:
        self._matches(field, value, STRIPE_ID, "must be 1 to 255 letters, digits or _")

    def text(self, field: str, value: object, limit: int = TEXT_LIMIT) -> None:
        if not (isinstance(value, str) and 1 <= len(value) <= limit and value.isprintable() and value.strip()):
            self.add(field, f"must be 1 to {limit} printable characters")

    def currency(self, field: str, value: object) -> None:
        try:
            minor_digits(value if isinstance(value, str) else "")
        except MoneyError:
            self.add(field, "must be a known currency in small letters, as usd")

    def time(self, field: str, value: object) -> None:
        if not (_is_int(value) and 0 <= value < LATEST_US):  # type: ignore[operator]  # _is_int has said so
            self.add(field, "must be a time between 1970 and 9999")

    def anchor_day(self, field: str, value: object) -> None:
        if not (_is_int(value) and 1 <= value <= ANCHOR_MAX):  # type: ignore[operator]  # _is_int has said so
            self.add(field, f"must be a day from 1 to {ANCHOR_MAX}")

    def limits(self, field: str, value: object) -> None:
        if not isinstance(value, dict):
            self.add(field, "must be an object")
            return
        for name, limit in value.items():
            if name not in LIMITS:
                self.add(f"{field}.{name}", f"is unknown; known are {', '.join(LIMITS)}")
            elif not (_is_int(limit) and 1 <= limit <= LIMIT_MAX):
                self.add(f"{field}.{name}", "must be a positive whole number")

    def money(self, field: str, value: object, parse: Callable[[str], int], most: int) -> int:
        """The parsed value; 0 with a fault added when it is none, negative or above `most`."""
        try:
            parsed = parse(value)  # type: ignore[arg-type]  # the parsers refuse what is not text themselves
        except MoneyError as error:
            self.add(field, str(error))
            return 0
        if not 0 <= parsed <= most:
            self.add(field, "is out of range")
            return 0
        return parsed

    def _matches(self, field: str, value: object, pattern: re.Pattern[str], reason: str) -> None:
        if not (isinstance(value, str) and pattern.fullmatch(value)):
            self.add(field, reason)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
