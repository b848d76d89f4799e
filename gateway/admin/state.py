"""What the admin routes work on, handed over by the composition root."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from litestar.di import NamedDependency

from billing.alerts import Alerts
from billing.audit import Audit
from billing.automation import InvoiceAutomation
from billing.gateways import Gateways
from billing.meters import MeterExport
from billing.reconcile import Report
from billing.service import Billing
from billing.stripe import StripeExporter
from billing.webhooks import StripeWebhooks
from engine.client import Engine
from gateway.admin.kept import KeptReports
from gateway.backup.take import Backups
from metering.clickhouse import UsageStore
from metering.journal import Journal
from metering.retention import Retention
from metering.spool import Spool

P = ParamSpec("P")
R = TypeVar("R")


class AdminState:
    """The parts of a gateway that an administrator may read and change.

    `engine` is None where none runs (the command line without a server), `webhooks` without a secret. `gateways` are
    all that write to this ledger; `folder` tells which of them this is. `flush` waits at most so many seconds for
    settled usage to reach its stores, and says whether it has.
    """

    def __init__(
        self,
        *,
        admin_key: str,
        billing: Billing,
        gateways: Gateways,
        folder: str,
        usage: UsageStore,
        retention: Retention,
        spool: Spool,
        journal: Journal,
        engine: Engine | None,
        base_model: str,
        adapters_dir: Path,
        exporter: StripeExporter,
        webhooks: StripeWebhooks | None,
        meters: MeterExport,
        automation: InvoiceAutomation,
        alerts: Alerts,
        audit: Audit,
        backups: Backups,
        flush: Callable[[float], bool],
        clock_us: Callable[[], int],
    ) -> None:
        self.admin_key = admin_key
        self.billing = billing
        self.gateways = gateways
        self.folder = folder
        self.usage = usage
        self.retention = retention
        self.spool = spool
        self.journal = journal
        self.engine = engine
        self.base_model = base_model
        self.adapters_dir = adapters_dir.absolute()
        self.exporter = exporter
        self.webhooks = webhooks
        self.meters = meters
        self.automation = automation
        self.alerts = alerts
        self.audit = audit
        self.backups = backups
        self.flush = flush
        self.clock_us = clock_us
        self.reports = KeptReports()
        self.adapters_lock = threading.Lock()  # one change of a name at a time
        self.comparing = threading.Lock()  # one reconciliation at a time: it reads everything
        self.compared: Callable[[Report], None] = lambda _: None  # told of each comparison of all books
        # Reports are long queries: two at a time, and never on the threads that short calls wait for.
        self._readers = ThreadPoolExecutor(2, "admin-reader")
        self._guests = ThreadPoolExecutor(2, "tenant-reader")  # what tenants ask for is not in the operator's way
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what reads the usage store on a thread kept for that."""
        context = copy_context()  # so that the log has who asked
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, lambda: context.run(work, *args, **kwargs)
        )

    async def read_for_tenant(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for what a tenant may ask for as often as it likes."""
        return await asyncio.get_running_loop().run_in_executor(self._guests, lambda: work(*args, **kwargs))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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
        await asyncio.to_thread(self.backups.close)
        for pool in (self._readers, self._guests):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)


Admin: TypeAlias = NamedDependency[AdminState]
"""The state, as a route's handler asks for it."""
