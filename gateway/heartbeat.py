"""What a server does every two seconds besides serving: it catches up with the ledger.

Knows: other gateways on the same ledger make tenants, keys, prices and grants, and this one has to see them. Does not
know: what is in the ledger. What fails is logged once, and again when it works; requests go on with what is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

log = structlog.get_logger(__name__)

BEAT_S = 2.0


class Heartbeat:
    """Calls `refresh` over and over, on a thread of its own. `start` on the event loop, `stop` before stores close."""

    def __init__(self, refresh: Callable[[], None], beat_s: float = BEAT_S) -> None:
        self._refresh = refresh
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
                await asyncio.get_running_loop().run_in_executor(self._thread, self._refresh)
            except Exception as error:  # whatever it is, the next beat may do better
                self._failed(error)
            else:
                if self._fault is not None:
                    log.info("heartbeat_again")
                self._fault = None

    def _failed(self, error: Exception) -> None:
        fault = str(error) or type(error).__name__
        if fault != self._fault:
            log.error("heartbeat_failed", reason=fault)
        self._fault = fault
