"""The engine as the gateway holds it: a supervised child process behind the `Engine` interface.

Knows: starting, watching and restarting the child, the open streams, the adapters to be loaded again. Does
not know: torch, which is imported in the child alone, nor anything the child does (`child`, `core`).

One message comes per engine step. Its counts are shown to `on_step`, then its updates are given to their
streams. When the child dies or hangs, every open stream fails at once, and a new child is started, after a
pause that doubles with each failure. It is told which adapters there are, and reads them as they are wanted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from engine.client import StepHook, UpdateStream
from engine.scheduler import queue_full, running_limit
from engine.sequence import check_request
from engine.types import (
    AdapterInfo,
    AdapterRef,
    AdapterRejected,
    AdapterUnknown,
    EngineBusy,
    EngineConfig,
    EngineError,
    EngineStats,
    EngineUnavailable,
    ModelInfo,
    Request,
    StepOutput,
)
from engine.wire import (
    Abort,
    Configure,
    Failed,
    Load,
    Loaded,
    Ready,
    SetCeiling,
    Stepped,
    Submit,
    ToChild,
    Unframer,
    Unload,
    Unloaded,
    frame,
)

log = logging.getLogger(__name__)

CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100000"}
"""Defaults of the child's environment. Its threads share the cores with the gateway: a barrier that spins for ever
waits out the scheduler's tick for a thread whose core is taken (milliseconds, hundreds of times a step); one that
sleeps at once makes a step by torch two thirds longer. So they spin for a while, then sleep."""

SECRET_VARIABLES = ("METERHOUSE_", "STRIPE_", "PGPASS")
"""How variables begin that the child must not have: it reads files that strangers made, and has no use for keys and
for URLs with passwords. Its settings come in a message."""

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 5.0
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 30.0
STEADY_S = 60.0  # a child that lived so long is not part of a row of failures


class _Link(asyncio.Protocol):
    """One child: its process and the parent's end of its socket."""

    def __init__(self, on_message: Callable[[_Link, Any], None], on_lost: Callable[[_Link], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._unframer = Unframer.at_parent()
        self._transport: asyncio.WriteTransport | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.lost = asyncio.Event()
        self.up: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self.heard_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # a socket's is one

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        for message in self._unframer.feed(data):
            self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._on_lost(self)

    def send(self, message: ToChild) -> None:
        """Raises what `msgspec` cannot encode, with nothing sent."""
        data = frame(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    async def close(self, timeout_s: float) -> int:
        """Let the child go: it ends at the end of file, or is killed after `timeout_s`. Returns its exit status."""
        if self._transport is not None:
            self._transport.close()
        assert self.process is not None  # set before the link is handed out
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 can swallow a cancellation
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            return await self.process.wait()


@dataclass(slots=True)
class _Open:
    """A request that the child has."""

    request: Request
    stream: UpdateStream
    ceiling: int
    ceiling_final: bool
    completion: int = 0
    started: bool = False
    paused: bool = False  # it waits for an answer to its ceiling: no word of it is no sign of a hang

    def note(self, *, paused: bool) -> None:
        self.paused = paused and not self.ceiling_final and self.ceiling <= self.completion


class EngineProcess:
    """The `Engine` over a child process; see `engine.client` for the obligations.

    `hang_timeout_s`: a child that has work and says nothing for so long is killed. `builder` names the
    function that makes the child's `EngineCore` from the config. `log_level` and `log_format` are the child's, as
    `engine.logs` takes them. Use from one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        hang_timeout_s: float = 120.0,
        builder: str = "engine.core:build",
        log_level: str = "info",
        log_format: str = "auto",
    ) -> None:
        self.on_step: StepHook | None = None
        self._config = config
        self._hang_timeout_s = hang_timeout_s
        self._builder = builder
        self._log_level, self._log_format = log_level, log_format
        self._link: _Link | None = None
        self._ready = False
        self._restarts = 0
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._open: dict[str, _Open] = {}
        self._adapters: dict[str, AdapterRef] = {}  # loaded, with their digests; loaded again after a restart
        self._loads: dict[str, tuple[AdapterRef, list[asyncio.Future[AdapterInfo]]]] = {}  # who waits for the answer
        self._unloads: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        link = await self._launch()
        self._ready = not link.lost.is_set()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._supervise()), loop.create_task(self._watch())]

    async def stop(self) -> None:
        self._ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail_open("the engine is shutting down")
        if self._link is not None:
            await self._link.close(STOP_TIMEOUT_S)
            self._link = None

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def info(self) -> ModelInfo:
        """Raises `EngineUnavailable` before the first start."""
        if self._info is None:
            raise EngineUnavailable("the engine is not started")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def pid(self) -> int | None:
        """Of the child that is up."""
        return self._link.process.pid if self._link is not None and self._link.process is not None else None

    def submit(self, request: Request) -> UpdateStream:
        link = self._up()
        check_request(request, self.info)
        if request.id in self._open:
            raise EngineError("a request of this id is open already")
        if request.adapter and (request.adapter.id not in self._adapters or request.adapter.id in self._unloads):
            raise AdapterUnknown("the adapter is not loaded")
        if self._is_full(request.tenant):
            raise EngineBusy("the engine's queue is full")
        link.send(Submit(time.monotonic_ns() // 1000, request))
        entry = _Open(request, UpdateStream(), request.token_ceiling or 0, request.ceiling_final)
        self._open[request.id] = entry
        return entry.stream

    def abort(self, request_id: str) -> None:
        if request_id in self._open and self._link is not None:
            self._link.send(Abort(request_id))

    def set_ceiling(self, request_id: str, tokens: int, *, final: bool) -> None:
        entry = self._open.get(request_id)
        if entry is None or self._link is None:
            return
        entry.ceiling = max(entry.ceiling, tokens)
        entry.ceiling_final = entry.ceiling_final or final
        entry.note(paused=entry.paused)
        self._link.send(SetCeiling(request_id, tokens, final))

    async def load_adapter(self, adapter: AdapterRef) -> AdapterInfo:
        return await self._load(self._up(), adapter)

    async def unload_adapter(self, adapter_id: str) -> None:
        if adapter_id in self._loads:  # whoever asked for it may have gone away; the child has not answered yet
            with suppress(EngineError):
                await self._load(self._up(), self._loads[adapter_id][0])
        if adapter_id not in self._adapters:
            return
        if not self._ready or self._link is None:
            self._adapters.pop(adapter_id)  # it is just not loaded again
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unloads.setdefault(adapter_id, []).append(done)
        self._link.send(Unload(adapter_id))
        await done

    # The child's messages

    def _heard(self, link: _Link, message: Any) -> None:
        match message:
            case Stepped(output):
                self._stepped(output)
            case Loaded(adapter_id, info, reason):
                self._loaded(adapter_id, info, reason)
            case Unloaded(adapter_id):
                self._unloaded(adapter_id)
            case Ready(info) if not link.up.done():
                link.up.set_result(info)
            case Failed(reason) if not link.up.done():
                link.up.set_exception(EngineUnavailable(reason))

    def _stepped(self, output: StepOutput) -> None:
        """Show the counts, then deliver. What belongs to no open stream was ended here already: nobody sees it."""
        self._stats = output.stats
        if any(update.request_id not in self._open for update in output.updates):
            known = [update for update in output.updates if update.request_id in self._open]
            output = StepOutput(output.step, known, output.stats)
        if not self._told(output):
            self._drop(output)
            return
        for update in output.updates:
            entry = self._open[update.request_id]
            entry.started = True
            entry.completion = update.counts.completion
            entry.note(paused=update.paused)
            if update.finished:
                del self._open[update.request_id]
            entry.stream.push(update)

    def _told(self, output: StepOutput) -> bool:
        if self.on_step is None:
            return True
        try:
            self.on_step(output)
        except Exception:
            log.exception("a step's counts could not be recorded: its streams fail")
            return False
        return True

    def _drop(self, output: StepOutput) -> None:
        """Nothing of a step that was not recorded may be delivered: its requests end here and in the child."""
        for update in output.updates:
            if not update.finished:
                self.abort(update.request_id)
            self._open.pop(update.request_id).stream.fail(EngineUnavailable("the step could not be recorded"))

    def _loaded(self, adapter_id: str, info: AdapterInfo | None, reason: str) -> None:
        if adapter_id not in self._loads:
            return  # the answer to a second call for the same load
        adapter, waiters = self._loads.pop(adapter_id)
        if info is not None and self._ready:  # kept even if nobody waits any more: the child has it
            self._adapters[adapter_id] = msgspec.structs.replace(adapter, digest=info.digest)
        for waiter in waiters:
            if not waiter.done() and info is not None:
                waiter.set_result(info)
            elif not waiter.done():
                waiter.set_exception(AdapterRejected(reason))

    def _unloaded(self, adapter_id: str) -> None:
        self._adapters.pop(adapter_id, None)
        for waiter in self._unloads.pop(adapter_id, []):
            if not waiter.done():
                waiter.set_result(None)

    # The child's life

    async def _launch(self) -> _Link:
        """Start a child and load what it must have. Raises `EngineUnavailable` with the reason."""
        try:
            link = self._link = await self._spawn()
        except OSError as error:
            raise EngineUnavailable(f"the engine process cannot be started: {error.strerror}") from error
        try:
            link.send(Configure(self._config, self._log_level, self._log_format))
            async with asyncio.timeout(START_TIMEOUT_S):
                self._info = await link.up
            for adapter in self._adapters.values():  # in order, so before any request that uses them
                link.send(Load(adapter, restored=True))
        except TimeoutError:
            await link.close(0)
            raise EngineUnavailable(f"the engine did not start within {START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await link.close(0)
            raise
        return link

    async def _spawn(self) -> _Link:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the working directory is the operator's: no module is taken from it
                *("-m", "engine.process", str(theirs.fileno()), str(os.getpid()), self._builder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # a library that prints must not write into the gateway's output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # signals to the gateway's group are for the gateway to act on
                env=_child_environment(os.environ),
            )
            _, link = await loop.create_unix_connection(lambda: _Link(self._heard, self._lost), sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link.process = process
        return link

    async def _load(self, link: _Link, adapter: AdapterRef) -> AdapterInfo:
        answer: asyncio.Future[AdapterInfo] = asyncio.get_running_loop().create_future()
        self._loads.setdefault(adapter.id, (adapter, []))[1].append(answer)
        link.send(Load(adapter))
        return await answer

    def _lost(self, link: _Link) -> None:
        """The child is gone: whatever waits for it fails at once."""
        if not link.up.done():
            link.up.set_exception(EngineUnavailable("the engine process ended while it was starting"))
        if link is not self._link:
            return
        self._ready = False
        self._stats = EngineStats()
        self._fail_open("the engine process died")

    def _fail_open(self, reason: str) -> None:
        entries, self._open = self._open, {}
        for entry in entries.values():
            entry.stream.fail(EngineUnavailable(reason))
        loads, self._loads = self._loads, {}
        for waiter in [waiter for _, waiters in loads.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(EngineUnavailable(reason))
        for adapter_id in list(self._unloads):  # its last request has ended, and it is not loaded again
            self._unloaded(adapter_id)

    async def _supervise(self) -> None:
        pause_s = PAUSE_FIRST_S
        while self._link is not None:
            link, began_s = self._link, time.monotonic()
            await link.lost.wait()
            status = await link.close(1.0)
            log.error("the engine process died (%s)", f"signal {-status}" if status < 0 else f"status {status}")
            if time.monotonic() - began_s >= STEADY_S:
                pause_s = PAUSE_FIRST_S
            pause_s = await self._revive(pause_s)

    async def _revive(self, pause_s: float) -> float:
        """Start a child, however often it takes; returns the pause before the next start."""
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            try:
                link = await self._launch()
            except EngineUnavailable as error:
                log.error("the engine process did not come back: %s", error)
                continue
            self._restarts += 1
            self._ready = not link.lost.is_set()
            return pause_s

    async def _watch(self) -> None:
        """Kill a child that has work and says nothing; the rest is the same as for any death."""
        quiet_since_s = time.monotonic()
        while True:
            await asyncio.sleep(self._hang_timeout_s / 4)
            now_s = time.monotonic()
            if not self._ready or all(entry.paused for entry in self._open.values()):
                quiet_since_s = now_s
            elif self._link is not None and now_s - max(quiet_since_s, self._link.heard_s) > self._hang_timeout_s:
                log.error("the engine process said nothing for %.0f s and is killed", self._hang_timeout_s)
                self._link.kill()
                quiet_since_s = now_s

    def _up(self) -> _Link:
        if not self._ready or self._link is None:
            raise EngineUnavailable("the engine is not ready")
        return self._link

    def _is_full(self, tenant: str) -> bool:
        """Whether the queue is at its limit, by what this end knows: a request without an update waits."""
        config = self._config
        running = sum(entry.request.n for entry in self._open.values() if entry.started)
        waiting = [entry.request.tenant for entry in self._open.values() if not entry.started]
        free = max(0, running_limit(config.max_num_seqs, config.max_num_batched_tokens) - running)
        return queue_full(config.max_waiting, free, len(waiting), waiting.count(tenant))


def _child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if not name.startswith(SECRET_VARIABLES)}
    return {**CHILD_ENVIRONMENT, **kept}


if __name__ == "__main__":
    from engine.child import main  # imports torch, which this module must not where it is imported

    status = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stderr.flush()
    os._exit(status)  # nothing is left to be closed, and libraries that are taken down take their time over it
