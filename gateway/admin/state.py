"""What the admin routes work on, handed over by the composition root."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from billing.service import Billing
from billing.stripe import StripeExporter
from engine.client import Engine
from metering.clickhouse import UsageStore
from metering.journal import Journal
from metering.spool import Spool

P = ParamSpec("P")
R = TypeVar("R")


def _readers() -> ThreadPoolExecutor:
    # chDB wants few reader threads and keeps a client for each, so its readers are these two and no others.
    return ThreadPoolExecutor(2, "admin-reader")


@dataclass(frozen=True, kw_only=True)
class AdminState:
    """The parts of a gateway that an administrator may read and change.

    `engine` is None where none runs (the command line without a server). `exporter` raises `StripeNotConfigured`
    when there is no key, which `stripe_configured` says. `flush` waits at most so many seconds for settled usage to
    reach its stores, and says whether it has.
    """

    admin_key: str
    billing: Billing
    usage: UsageStore
    spool: Spool
    journal: Journal
    engine: Engine | None
    base_model: str
    adapters_dir: Path
    exporter: StripeExporter
    stripe_configured: bool
    flush: Callable[[float], bool]
    clock_us: Callable[[], int]
    readers: ThreadPoolExecutor = field(default_factory=_readers)
    adapters_lock: threading.Lock = field(default_factory=threading.Lock)  # one change of a name at a time
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def read(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what reads the usage store, off the event loop, on a thread kept for that."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, lambda: work(*args, **kwargs))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run what outlives its request."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End what outlives its request and wait for running reads: a thread in a query at exit brings chDB down."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.readers.shutdown, wait=True, cancel_futures=True)
