"""The time before which all usage is stored: up to there an invoice may be cut.

A request is, one after the other and never in none of them: open in the journal, unshipped in the spool, in the
usage store. Its time is fixed when it is opened. So the oldest that is not in the store is found by looking in
that same order, and at the clock before all of them. A request gets its time and its place in the journal in one
turn of the event loop; clock and journal are read in one turn, too, so none can stand between them.
"""

from __future__ import annotations

import asyncio

from gateway.admin.state import AdminState

CONSUMER = "clickhouse"  # the spool's name for who ships to the usage store
FLUSH_S = 3.0  # how long a caller waits for what was just settled to be shipped


async def watermark_us(admin: AdminState) -> int:
    """Microseconds: all usage with an earlier time is in the store. To be awaited on the gateway's event loop."""
    now, opened = admin.clock_us(), admin.journal.oldest_open_us()
    unshipped = await asyncio.to_thread(admin.spool.oldest_unacked_us, CONSUMER)
    return min(time for time in (now, opened, unshipped) if time is not None)
