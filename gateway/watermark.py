"""The time before which all usage of this gateway is stored.

A request is, one after the other and never in none of them: open in the journal, unshipped in the spool, in the
usage store. Its time is fixed when it is opened. So the oldest that is not in the store is found by looking in
that same order, and at the clock before all of them. A request gets its time and its place in the journal in one
turn of the event loop; clock and journal are read in one turn, too, so none can stand between them.

Once true it stays true: whatever comes later begins later. So a watermark may be published and read much later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from metering.journal import Journal
from metering.spool import Spool

CONSUMER = "clickhouse"  # the spool's name for who ships to the usage store


async def stored_until_us(clock_us: Callable[[], int], journal: Journal, spool: Spool) -> int:
    """Microseconds: all usage with an earlier time is in the store. To be awaited on the gateway's event loop."""
    now_us, opened_us = clock_us(), journal.oldest_open_us()
    unshipped_us = await asyncio.to_thread(spool.oldest_unacked_us, CONSUMER)
    return _earliest(now_us, opened_us, unshipped_us)


def stored_until_idle_us(clock_us: Callable[[], int], journal: Journal, spool: Spool) -> int:
    """The same, from any thread, while nothing is let in: before serving begins and after it ended."""
    return _earliest(clock_us(), journal.oldest_open_us(), spool.oldest_unacked_us(CONSUMER))


def _earliest(now_us: int, *unstored_us: int | None) -> int:
    return min([now_us, *(time_us for time_us in unstored_us if time_us is not None)])
