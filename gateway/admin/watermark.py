"""The time before which all usage is stored, on this gateway and on every other one: up to there an invoice may be cut.

Knows: this gateway's own watermark is fresh (`gateway.watermark`); the others publish theirs in the ledger's database,
and one that died has left its own there. Does not know: how either is found.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from billing.gateways import GatewayRow
from gateway.admin.state import AdminState
from gateway.watermark import CONSUMER, stored_until_us

__all__ = ["CONSUMER", "FLUSH_S", "Watermark", "watermark"]

FLUSH_S = 3.0  # how long a caller waits for what was just settled to be shipped


class Watermark(NamedTuple):
    """All usage with an earlier time is stored. `held_by`: the other gateway without which it would be later."""

    us: int
    held_by: GatewayRow | None


async def watermark(admin: AdminState) -> Watermark:
    """The least of all gateways'. To be awaited on the gateway's event loop."""
    own_us = await stored_until_us(admin.clock_us, admin.journal, admin.spool)
    rows = await asyncio.to_thread(admin.gateways.all)
    slowest = min((row for row in rows if row.folder != admin.folder), key=lambda row: row.watermark_us, default=None)
    if slowest is None or slowest.watermark_us >= own_us:
        return Watermark(own_us, None)
    return Watermark(slowest.watermark_us, slowest)
