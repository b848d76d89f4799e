"""What a server keeps, opened in the one order that is safe and closed in the reverse.

Knows: the data folder has one owner; schemas come first; what a dead server left is settled before anything new is let
in; the balance is not read before every settlement is in the ledger; who serves is registered with the ledger, and a
folder with nothing left to deliver is not. Does not know: the engine, HTTP. Blocking: call it on a thread. A command
line without a server opens the same stores.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog

from billing.errors import BillingError, NoSigningKey
from billing.gateways import Gateways, GatewayTaken
from billing.service import Billing
from billing.signer import Signer
from billing.store import EventStore
from gateway.admin.times import format_time
from gateway.idempotency import Store
from gateway.restoring import MARKER
from gateway.settings import Settings, SettingsError
from gateway.watermark import CONSUMER, stored_until_idle_us
from metering.archive import Archive
from metering.clickhouse import UsageStore
from metering.disk import fsync
from metering.journal import Journal, recover_orphans
from metering.lock import FileLock, Locked
from metering.retention import Retention, Retirer
from metering.rollups import Roller
from metering.shipper import Drain, Shipper
from metering.spool import Spool, SpoolError
from migrations.cluster import Cluster
from migrations.runner import migrate_clickhouse, migrate_ledger

log = structlog.get_logger(__name__)

STALL_S = 60.0  # a ledger that takes nothing for so long holds up the start; one that is slow does not
POLL_S = 0.5
TELL_S = 5.0
STOP_S = 10.0


class StartError(Exception):
    """The server cannot start; the text is one clear sentence."""


class GivenUp(StartError):
    """`Stores.give_up` was called while they were being opened."""


class Stores:
    """Everything durable, and the two drains out of the spool. `open` does it all; `close` undoes it.

    Who has more to start calls `claim` before: a folder in use is told at once, and not after a model was loaded.
    `give_up`, from any thread, ends an `open` that is under way at its next step.
    """

    lock: FileLock
    folder: str
    events: EventStore
    billing: Billing
    gateways: Gateways
    usage: UsageStore
    spool: Spool
    journal: Journal
    answers: Store
    shipper: Shipper
    recorder: Drain
    roller: Roller
    retention: Retention

    def __init__(self, settings: Settings, clock_us: Callable[[], int]) -> None:
        self._settings = settings
        self._clock_us = clock_us
        self._stack = ExitStack()
        self._given_up = threading.Event()
        self._claimed = False
        self.recovered = 0

    def open(self, base_model: str, progress: Callable[[str], None] = lambda _: None, *, serves: bool = True) -> None:
        """Open everything. Raises `StartError` or an error of the room at fault, with all closed again.

        `serves`: requests will be let in, so this gateway is registered first.
        """
        try:
            self._open(base_model, progress)
            self._register(serves)
            self._start_drains(progress, serves)
        except BaseException:
            self._stack.close()
            raise

    def give_up(self) -> None:
        """What `open` has not begun yet it does not begin: it closes again and raises `GivenUp`."""
        self._given_up.set()

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise GivenUp("The start was broken off.")

    def _open(self, base_model: str, progress: Callable[[str], None]) -> None:
        settings, cluster = self._settings, cluster_of(self._settings)
        self.claim()
        self._go_on()
        progress("Bringing the ledger and the usage store up to date")
        migrate_ledger(settings.ledger)
        self._go_on()
        migrate_clickhouse(settings.clickhouse, cluster=cluster)
        self._go_on()
        events = self.events = EventStore(settings.ledger)
        self.gateways = Gateways(events)
        signer = Signer(settings.signing_key, self.folder, given=settings.signing_key_file is not None)
        self.billing = Billing(
            events, base_model=base_model, clock=self._clock_us, signer=signer, dunning=settings.dunning
        )
        self._stack.callback(self.billing.close)
        self._go_on()
        archive = Archive(settings.archive)
        self.usage = UsageStore(settings.clickhouse, self.folder, archive, cluster=cluster is not None)
        self.retention = Retention(self.usage, archive)
        self._stack.callback(self.usage.close)
        self.spool = Spool(
            settings.spool_dir / "spool.sqlite3",
            max_bytes=settings.spool_max_bytes,
            max_age_s=settings.spool_max_age_s,
            min_free_bytes=settings.disk_min_free_bytes,
            clock_us=self._clock_us,
        )
        self._stack.callback(self.spool.close)
        self._go_on()
        orphans = recover_orphans(settings.journal_dir, self.spool, self._clock_us(), settings.gateway_id)
        self.recovered = len(orphans)
        if orphans:
            log.warning("recovered_requests", count=len(orphans))
            progress(f"Settled {len(orphans)} requests that an earlier server left running")
        self.journal = Journal(
            settings.journal_dir,
            settings.journal_max_bytes,
            on_retired=self.spool.forget,
            max_total_bytes=settings.journal_total_max_bytes,
            max_age_s=settings.journal_max_age_s,
        )
        self._stack.callback(self.journal.close)
        self.answers = Store(
            settings.data_dir / "idempotency.sqlite3",
            max_bytes=settings.idempotency_max_bytes,
            ttl_s=settings.idempotency_ttl_s,
        )
        self._stack.callback(self.answers.close)

    def claim(self) -> None:
        """Take the data folder's lock, until `close`; again does nothing. Takes milliseconds. Raises `StartError`."""
        if self._claimed:
            return
        folder = self._settings.data_dir
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # clients' answers lie in it
            self.lock = FileLock(folder / "server.lock")
            self._claimed = True
            self._stack.callback(self._disclaim)
            if (folder / MARKER).exists():
                self._stack.close()
                raise StartError(
                    f"The restore into the data folder {folder} was broken off: run `meterhouse restore` again."
                )
            self.folder = folder_id(folder)
        except Locked:
            raise StartError(
                f"Another Meterhouse server runs on the data folder {folder}: stop it, or choose another folder with "
                "--data-dir; a command reaches that server with its --host and --port."
            ) from None
        except OSError as error:
            self._stack.close()
            raise StartError(f"The data folder {folder} cannot be used: {error.strerror}.") from None

    def _disclaim(self) -> None:
        self.lock.release()
        self._claimed = False

    def _register(self, serves: bool) -> None:
        if serves:
            try:
                self.gateways.claim(self._settings.gateway_id, self.folder, self._stored_until_us(), self._clock_us())
            except GatewayTaken as taken:
                raise StartError(
                    f"The gateway id {taken.row.id!r} belongs to another data folder on this ledger, last seen at "
                    f"{format_time(taken.row.seen_us)}: give this server another with --gateway-id, or, if that one is "
                    f"gone for good, remove it with `meterhouse gateway remove {taken.row.id}`."
                ) from None
        self._stack.callback(self._deregister, serves)

    def _deregister(self, serves: bool) -> None:
        """The drains have stopped: what is left in the folder, if anything, holds invoices back."""
        try:
            self.billing.retire()
            if self.journal.oldest_open_us() is None and self.spool.oldest_unacked_us(CONSUMER) is None:
                self.gateways.leave(self.folder)
            elif serves:
                self.publish(self._stored_until_us())
        except (BillingError, SpoolError) as error:  # the row that stands is an earlier one: it holds back too much
            log.error("gateway_not_deregistered", reason=str(error))

    def publish(self, watermark_us: int) -> None:
        """Tell the other gateways that all usage of this one that began earlier is stored."""
        self.gateways.publish(self._settings.gateway_id, self.folder, watermark_us, self._clock_us())

    def _stored_until_us(self) -> int:
        return stored_until_idle_us(self._clock_us, self.journal, self.spool)

    def _stored_everywhere_us(self) -> int:
        """All usage that began earlier is stored, of every gateway, by what each has told."""
        return min((row.watermark_us for row in self.gateways.all()), default=self._clock_us())

    def _publish_key(self) -> None:
        """Early, so that a tenant who keeps the keys today can verify by them the first invoice that comes."""
        try:
            self.billing.publish_signing_key()
        except NoSigningKey as error:  # requests need none; who makes an invoice final is told
            log.error("signing_key_not_published", reason=str(error))

    def _start_drains(self, progress: Callable[[str], None], serves: bool) -> None:
        self.recorder = Drain(self.spool, "ledger", self.billing.record)
        self.recorder.start()
        self._stack.callback(self._stop, self.recorder)
        self._catch_up(progress)
        if serves:
            self.billing.lease_as(self._settings.gateway_id, self.folder, expiry_s=self._settings.lease_expiry_s)
            self._publish_key()
        else:
            self.billing.end_leases(self.folder)
        self.shipper = Shipper(
            self.spool,
            self.usage,
            max_events=self._settings.ship_max_events,
            max_bytes=self._settings.ship_max_bytes,
            max_age_s=self._settings.ship_max_age_s,
        )
        self.shipper.start()
        self._stack.callback(self._stop, self.shipper)
        self.roller = Roller(self.usage.rollups, alive=lambda: {row.folder for row in self.gateways.all()})
        self.roller.start()
        self._stack.callback(self.roller.stop)
        retirer = Retirer(
            self.retention,
            self._settings.retention_months,
            stored_until_us=self._stored_everywhere_us,
            clock_us=self._clock_us,
        )
        retirer.start()
        self._stack.callback(retirer.stop)

    def _catch_up(self, progress: Callable[[str], None]) -> None:
        """Wait until the ledger has all that was settled, however long that takes as long as it takes some.

        Raises `StartError` when it took nothing for `STALL_S`.
        """
        taken, moved_s, told_s = self.recorder.delivered_total, time.monotonic(), float("-inf")
        while not self.recorder.flush(POLL_S):
            self._go_on()
            now_s, left = time.monotonic(), self.spool.count(self.recorder.consumer)
            if self.recorder.delivered_total > taken:
                taken, moved_s = self.recorder.delivered_total, now_s
            elif now_s - moved_s >= STALL_S:
                reason = self.recorder.last_error or "no answer"
                raise StartError(
                    f"The ledger lacks {left} settled requests, without which no balance is right, and has taken none "
                    f"of them for {STALL_S:.0f} s ({reason})."
                )
            if left and now_s - told_s >= TELL_S:
                progress(f"Charging what was settled: {left} requests are left")
                told_s = now_s

    def _stop(self, drain: Drain) -> None:
        drain.stop(0.0 if self._given_up.is_set() else STOP_S)

    def flush(self, timeout_s: float) -> bool:
        """Deliver what is settled now to the ledger and the usage store; False when it was not done in time."""
        recorded = self.recorder.flush(timeout_s)
        return self.shipper.flush(timeout_s) and recorded

    def lag(self) -> dict[str, Any]:
        """Each consumer's last error; None when it takes everything."""
        return {drain.consumer: drain.last_error for drain in (self.recorder, self.shipper)}

    def close(self) -> None:
        """Deliver what can be delivered, then close everything in reverse."""
        self._stack.close()


def cluster_of(settings: Settings) -> Cluster | None:
    """The cluster that the usage store is spread over; None where it is one server. Raises `SettingsError`."""
    name = settings.clickhouse_cluster
    if name is None:
        return None
    if settings.clickhouse.startswith("chdb"):
        raise SettingsError("clickhouse_cluster: needs the clickhouse_url of one of the cluster's servers")
    if settings.retention_months is not None:
        raise SettingsError("retention_months: months are not archived on a cluster, which clickhouse_cluster names")
    return Cluster(name, settings.clickhouse_replicated)


def folder_id(folder: Path) -> str:
    """What tells this data folder from every other one: made on first use and kept."""
    path = folder / "folder.id"
    found = path.read_text().strip() if path.exists() else ""
    if not found:
        found = uuid.uuid4().hex
        unfinished = path.with_suffix(".new")
        unfinished.write_text(f"{found}\n")
        fsync(unfinished)
        unfinished.replace(path)
        fsync(folder)
    return found
