"""What a server does every two seconds besides serving: it catches up with the ledger, and says how far it is itself.

Knows: other gateways on the same ledger make tenants, keys, prices and grants, and this one has to see them; they cut
invoices, and have to see up to when this one's usage is stored; what is leased has to be renewed, and given back when
it lies idle; what the books have to say by themselves is due at a time. Does not know: what is in the ledger. What
fails is logged once, and again when it works; requests go on with what is known, and a watermark that is not told holds
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from gateway.stores import Stores
from gateway.watermark import stored_until_us

log = structlog.get_logger(__name__)

BEAT_S = 2.0


class Heartbeat:
    """Beats on the event loop, its disk and network on a thread of its own. `stop` it before the stores close."""

    def __init__(self, stores: Stores, clock_us: Callable[[], int], beat_s: float = BEAT_S) -> None:
        self._stores = stores
        self._clock_us = clock_us
        self._beat_s = beat_s
        self._thread = ThreadPoolExecutor(1, "heartbeat")
        self._task: asyncio.Task[None] | None = None
        self._fault: str | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Returns when no beat is under way; again does nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._beat()
            except Exception as error:  # whatever it is, the next beat may do better
                self._failed(error)
            else:
                if self._fault is not None:
                    log.info("heartbeat_again")
                self._fault = None

    async def _beat(self) -> None:
        stored_us = await stored_until_us(self._clock_us, self._stores.journal, self._stores.spool)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, stored_us)

    def _exchange(self, stored_us: int) -> None:
        billing = self._stores.billing
        billing.refresh()
        billing.tend()
        self._stores.publish(stored_us)
        billing.notice()

    def _failed(self, error: Exception) -> None:
        fault = str(error) or type(error).__name__
        if fault != self._fault:
            log.error("heartbeat_failed", reason=fault)
        self._fault = fault
