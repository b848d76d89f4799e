"""Which invoice has an event, for many events of one tenant.

`invoice.owner` hangs on nothing but which periods have the event's time, which cuts its number is behind and which
stretches that were left out have it: so it is asked once for each stretch of time and of numbers in which none changes.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from billing.invoice import Invoice, owner


class Owners:
    """Of one list of invoices, all of a tenant's in the order of their cuts, as they stand now."""

    def __init__(self, invoices: Sequence[Invoice]) -> None:
        self._invoices = invoices
        self._ends_us = sorted({us for one in invoices for us in (one.period_start_us, one.period_end_us)})
        left_out = {seq for one in invoices for stretch in one.left_out for seq in stretch}
        self._cuts = sorted({one.cut_seq for one in invoices} | left_out)
        self._found: dict[tuple[int, int], Invoice | None] = {}

    def of(self, ts_us: int, seq: int) -> Invoice | None:
        """As `invoice.owner`."""
        stretch = bisect_right(self._ends_us, ts_us), bisect_left(self._cuts, seq)
        if stretch not in self._found:
            self._found[stretch] = owner(ts_us, seq, self._invoices)
        return self._found[stretch]
