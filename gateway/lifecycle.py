"""A server's life: everything opened in order, served, drained, and closed in order.

Start: the port → the model → the data folder's lock → the engine's process, while the stores open on a thread
(`stores`) → adapters → serving → demo. Stop (SIGTERM, SIGINT): not ready → running streams finish, up to `drain_s`; a
second signal hurries → the rest is cut and settled as `shutdown` → the server closes → the engine stops → settlements
are delivered → all is closed.
Each step is taken whatever became of the one before. A signal during the start breaks it off; a third one is a kill,
from which the next start recovers.

Knows: the order. Does not know what any part does. `serve(settings)` is the whole program of `meterhouse serve`;
`open_admin` is the same stores without an engine, for the command line when no server runs.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import structlog
import uvloop
from litestar import Litestar

from billing.accounts import AdapterRecord
from billing.errors import BillingError
from billing.service import Billing
from engine.client import Engine
from engine.logs import configure_logging
from engine.process import EngineProcess
from engine.tokens import Tokenizer
from engine.types import EngineConfig, EngineError, EngineUnavailable
from engine.weights import WeightsError, resolve_model
from gateway import demo
from gateway.admin import AdminState
from gateway.admin.adapters import sweep
from gateway.admission import adapter_ref
from gateway.alarms import sample_delivery
from gateway.app import Gateway, create_admin_app, create_gateway, now_us
from gateway.backup.take import Backups
from gateway.heartbeat import BEAT_S, Heartbeat
from gateway.idempotency import Idempotency
from gateway.keyfile import admin_key
from gateway.openai import edge
from gateway.server import Server, bind, make_server, raise_file_limit
from gateway.settings import Settings, SettingsError, reachable
from gateway.stores import StartError, Stores
from gateway.watch import Watch, money_parts
from metering.errors import MeteringError
from metering.journal import JournalError
from metering.spool import SpoolError
from migrations.runner import MigrationError

log = structlog.get_logger(__name__)

__all__ = ["Runtime", "StartError", "open_admin", "serve"]

LOADS_TOGETHER = 8  # adapters that the engine is asked to read at once, at the start

NO_MODEL = ""  # without an engine nothing is asked for by a model's name

_EXPECTED = (
    BillingError,
    EngineError,
    demo.DemoError,
    JournalError,
    MeteringError,
    MigrationError,
    SettingsError,
    SpoolError,
    WeightsError,
)


class Runtime:
    """Engine, stores and application of one server. `start`, then serve `gateway.app`, then `stop`."""

    gateway: Gateway
    admin: AdminState
    heartbeat: Heartbeat
    watch: Watch

    def __init__(
        self,
        settings: Settings,
        *,
        engine: Engine,
        tokenizer: edge.Tokenizer,
        base_model: str,
        progress: Callable[[str], None] = lambda _: None,
        clock_us: Callable[[], int] = now_us,
        beat_s: float = BEAT_S,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.stores = Stores(settings, clock_us)
        self._tokenizer = tokenizer
        self._base_model = base_model
        self._progress = progress
        self._clock_us = clock_us
        self._beat_s = beat_s

    async def start(self) -> None:
        """Open everything. Raises `StartError` or a room's error, or is cancelled, with all closed again."""
        self.stores.claim()
        self._progress("Starting the engine")
        opening = asyncio.create_task(asyncio.to_thread(self.stores.open, self._base_model, self._progress))
        starting = asyncio.create_task(self.engine.start())
        try:
            done, _ = await asyncio.wait({opening, starting}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            self.admin = admin_state(self.settings, self.stores, self.engine, self._base_model, self._clock_us)
            self.gateway = self._make_gateway()
            telemetry = self.gateway.telemetry
            drains = (self.stores.shipper, self.stores.recorder)
            telemetry.sample_with(lambda: sample_delivery(telemetry, self.stores.usage, drains))
            await self._load_adapters()
            self.heartbeat = Heartbeat(self.stores, self._clock_us, self._beat_s)
            self.heartbeat.start()
            self.watch = Watch(self.settings, self.stores, self.admin, telemetry, self._clock_us)
            self.watch.start()
        except BaseException:
            self.stores.give_up()  # its thread cannot be cancelled
            starting.cancel()
            await asyncio.wait({opening, starting})
            async with AsyncExitStack() as closing:
                if opening.exception() is None:
                    closing.push_async_callback(asyncio.to_thread, self.stores.close)
                closing.push_async_callback(self.engine.stop)
            raise

    def _make_gateway(self) -> Gateway:
        return create_gateway(
            self.settings,
            engine=self.engine,
            billing=self.stores.billing,
            spool=self.stores.spool,
            journal=self.stores.journal,
            tokenizer=self._tokenizer,
            idempotency=Idempotency(self.stores.answers, self._clock_us),
            admin=self.admin,
            clock_us=self._clock_us,
        )

    async def _load_adapters(self) -> None:
        """Tenants' adapters into the engine, oldest first, up to its limit; one that is not loaded answers 503."""
        records = await asyncio.to_thread(_all_adapters, self.stores.billing)
        await asyncio.to_thread(sweep, self.settings.adapters_dir, {record.id for record in records})
        loaded, left = 0, deque(records)
        while left and loaded < self.settings.max_adapters:
            together = min(len(left), LOADS_TOGETHER, self.settings.max_adapters - loaded)
            loaded += sum(await asyncio.gather(*(self._load_adapter(left.popleft()) for _ in range(together))))
        if left:
            log.error("adapters_left_out", count=len(left), loaded=loaded, max_adapters=self.settings.max_adapters)

    async def _load_adapter(self, record: AdapterRecord) -> bool:
        kept = self.settings.adapters_dir.absolute() / record.id  # restored from a backup, it lies in another folder
        try:
            await self.engine.load_adapter(adapter_ref(record, kept if kept.is_dir() else None))
        except EngineUnavailable:
            raise
        except EngineError as error:
            log.error("adapter_not_loaded", tenant=record.tenant, adapter=record.name, reason=str(error))
            return False
        return True

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; let what runs finish for so long; cut and settle the rest."""
        self.gateway.admission.draining = True
        await self.gateway.edge.drain(timeout_s)

    async def stop(self) -> None:
        """After `drain`: the engine, then the stores, with what is settled delivered. A step that fails skips none."""
        async with AsyncExitStack() as closing:  # the last pushed is called first
            closing.push_async_callback(asyncio.to_thread, self.stores.close)
            closing.push_async_callback(self.heartbeat.stop)
            closing.push_async_callback(asyncio.to_thread, self.watch.stop)
            closing.push_async_callback(self.engine.stop)
            closing.push_async_callback(self.admin.close)
            closing.push_async_callback(self.gateway.lender.close)
            closing.push_async_callback(self.gateway.capture.close)


def _all_adapters(billing: Billing) -> list[AdapterRecord]:
    """Every tenant's, in order of their loads."""
    found: list[AdapterRecord] = []
    while page := billing.adapters(after=found[-1].id if found else None):
        found += page
    return found


def admin_state(
    settings: Settings, stores: Stores, engine: Engine | None, base_model: str, clock_us: Callable[[], int]
) -> AdminState:
    """What the admin API works on."""
    return AdminState(
        admin_key=admin_key(settings),
        billing=stores.billing,
        gateways=stores.gateways,
        folder=stores.folder,
        usage=stores.usage,
        retention=stores.retention,
        spool=stores.spool,
        journal=stores.journal,
        engine=engine,
        base_model=base_model,
        adapters_dir=settings.adapters_dir,
        **money_parts(settings, stores, clock_us),
        backups=Backups(settings, stores, clock_us),
        flush=stores.flush,
        clock_us=clock_us,
    )


@contextmanager
def open_admin(settings: Settings) -> Iterator[Litestar]:
    """The admin API alone over the data folder, with no engine. Raises `StartError` when a server owns the folder."""
    stores = Stores(settings, now_us)
    with _one_sentence():
        stores.open(NO_MODEL, serves=False)
    try:
        admin = admin_state(settings, stores, None, NO_MODEL, now_us)
        try:
            yield create_admin_app(settings, admin)
        finally:
            asyncio.run(admin.close())
    finally:
        stores.close()


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn the rooms' errors into a `StartError` with their own sentence."""
    try:
        yield
    except _EXPECTED as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"The server cannot start: {error}.") from error


# --- the program ---------------------------------------------------------------------------------


def serve(settings: Settings) -> None:
    """Run a server until SIGTERM or SIGINT. Raises `StartError` with one clear sentence when it cannot start."""
    configure_logging(settings.log_level, settings.log_format)
    raise_file_limit()
    with _one_sentence(), bind(settings.host, settings.port) as bound:
        model = resolve_model(settings.model, settings.cache_dir, progress=_stages())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, bound, model))


async def _serve(settings: Settings, bound: socket.socket, model: Path) -> None:
    stopping, hurry = _watch_signals()
    engine = EngineProcess(engine_config(settings, model), log_level=settings.log_level, log_format=settings.log_format)
    runtime = Runtime(settings, engine=engine, tokenizer=Tokenizer(model), base_model=model.name, progress=_say)
    if not await _unless(stopping, runtime.start()):
        _say("Stopped before it served")
        return
    server = make_server(runtime.gateway.app, write_timeout_s=settings.write_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    gc.collect()
    gc.freeze()
    async with AsyncExitStack() as closing:  # the last pushed is called first
        closing.push_async_callback(runtime.stop)
        closing.push_async_callback(_close, server, serving)
        closing.push_async_callback(_drain, runtime, hurry)
        await _unless(stopping, _live(runtime, server, serving, bound))
    _say("Stopped")


async def _unless(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Whether `work` came to its end; False when it was cancelled, and cleaned up, because `stopping` was set first."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not working.done():
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        return False
    working.result()
    return True


async def _live(runtime: Runtime, server: Server, serving: asyncio.Task[None], bound: socket.socket) -> None:
    """Until the server ends by itself, which it does not."""
    await _until_started(server, serving)
    host, port = bound.getsockname()[:2]
    await _announce(runtime, f"http://{reachable(host)}:{port}")
    await asyncio.wait({serving})


async def _drain(runtime: Runtime, hurry: asyncio.Event) -> None:
    _say(f"Stopping: running streams may finish within {runtime.settings.drain_s:g} s; Ctrl-C again ends them now")
    drain = asyncio.create_task(runtime.drain(runtime.settings.drain_s))
    await asyncio.wait({drain, asyncio.create_task(hurry.wait())}, return_when=asyncio.FIRST_COMPLETED)
    await runtime.drain(0.0)
    await drain


async def _close(server: Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await serving


def engine_config(settings: Settings, model: Path) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        model=str(model),
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        native=settings.native,
        cache_dir=str(settings.cache_dir),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        max_waiting=settings.max_waiting,
        kv_cache_bytes=settings.kv_cache_bytes,
        memory_utilization=settings.memory_utilization,
        queue_timeout_s=settings.queue_timeout_s,
        max_adapters=settings.max_adapters,
        adapter_slots=settings.adapter_slots,
        adapter_cache_bytes=settings.adapter_cache_bytes,
        max_lora_rank=settings.max_lora_rank,
        threads=settings.threads,
    )


def _watch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """(the first signal came, the second came). A third one ends the process at once."""
    stopping, hurry = asyncio.Event(), asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if not stopping.is_set():
            stopping.set()
            return
        hurry.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    return stopping, hurry


async def _until_started(server: Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise StartError("The HTTP server could not start; the log says why.")
        await asyncio.sleep(0.01)


async def _announce(runtime: Runtime, url: str) -> None:
    info, bits = runtime.engine.info, runtime.settings.quantization
    weights = info.dtype if bits == "none" else f"{info.dtype} with weights in {bits}"
    _say(f"Serving on {url}  (model {info.name}, {weights} on {info.device})")
    if runtime.settings.admin_key is None:
        _say(f"The admin key is in {runtime.settings.admin_key_file}")
    if runtime.settings.demo:
        for line in await demo.prepare(runtime.gateway.app, admin_key(runtime.settings), url, runtime.engine.info.name):
            _say(line)


def _stages() -> Callable[..., None]:
    """Progress of a long stage: its name once, and then every tenth of it."""
    shown: list[tuple[str, int]] = []

    def progress(stage: str, done: int = 0, total: int = 0) -> None:
        tenth = done * 10 // total if total else 0
        if (stage, tenth) not in shown:
            shown.append((stage, tenth))
            _say(f"{stage}: {tenth * 10} %" if total else stage)

    return progress


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # the server's own words to who started it
