"""Which way a charge is asked for: on an invoice of ours, or by Stripe's meters. Each charge one way, for ever.

A switch is a fact of the log, and what decides is the number of the charge: one recorded behind a switch to meters and
before the next switch back is the meters', all others are invoices'. So no clock, no crash and no second gateway can
have a charge asked for twice or by nobody, and an invoice says itself which stretches of the log it left out.

Pure. Does not know: Stripe, how far the meters are.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

Stretch = tuple[int, int]
"""(after, up to): numbers of the log behind the first, up to the second with it."""


class ExportMode(StrEnum):
    """How charges are asked for from now on."""

    INVOICE = "invoice"
    METER = "meter"


class ExportModeSet(msgspec.Struct, frozen=True, kw_only=True, tag="export_mode.set"):
    """Charges behind this event are asked for in this way, until the next one.

    `metered` is what meters had taken before switches were events: such charges are theirs as well.
    """

    mode: ExportMode
    at_us: int
    metered: tuple[Stretch, ...] = ()


def within(seq: int, stretches: Iterable[Stretch]) -> bool:
    """Whether one of the stretches has the number."""
    return any(after < seq <= upto for after, upto in stretches)


class Metered(msgspec.Struct, frozen=True, kw_only=True):
    """The meters' part of the log up to `seq`, in order."""

    seq: int
    mode: ExportMode
    known: bool  # whether any switch was written
    stretches: tuple[Stretch, ...]

    def has(self, seq: int) -> bool:
        """Whether a charge of this number, at most `seq`, is the meters'."""
        return within(seq, self.stretches)

    def next_after(self, seq: int) -> Stretch | None:
        """What of the first stretch that has any number behind `seq` lies behind it."""
        return next(((max(seq, after), upto) for after, upto in self.stretches if upto > seq), None)


class Modes:
    """Every switch."""

    def __init__(self) -> None:
        self.mode = ExportMode.INVOICE
        self.known = False
        self._closed: list[Stretch] = []
        self._open_after: int | None = None

    def apply(self, fact: ExportModeSet, seq: int) -> None:
        self.known = True
        self._closed += fact.metered
        if fact.mode is ExportMode.METER and self._open_after is None:
            self._open_after = seq
        elif fact.mode is ExportMode.INVOICE and self._open_after is not None:
            self._closed.append((self._open_after, seq))
            self._open_after = None
        self.mode = fact.mode

    def metered(self, seq: int) -> Metered:
        """As it is when the log ends at `seq`."""
        stretches = list(self._closed)
        if self._open_after is not None and self._open_after < seq:
            stretches.append((self._open_after, seq))
        return Metered(seq=seq, mode=self.mode, known=self.known, stretches=tuple(stretches))
