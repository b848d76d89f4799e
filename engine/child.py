"""The engine's own process: takes messages between steps, sends one message a step.

Knows: the socket to the parent and the loop around `EngineCore`. Does not know: who supervises it
(`process`), HTTP, tenants. Lives no longer than its parent: the kernel kills it when the parent dies, and an
end of file on the socket ends it too. Until then it heeds no polite signal: those that are sent to all of a
server's processes (Ctrl-C, systemd's stop) are for the parent, which lets running streams finish first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

from engine.blocks import IntegrityError
from engine.core import EngineCore
from engine.logs import configure_logging
from engine.modelcache import WeightsError
from engine.types import AdapterRejected, EngineConfig, EngineError
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
    ToParent,
    Unframer,
    Unload,
    Unloaded,
    Waiting,
    frame,
)

log = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0
"""So long nothing was to be done before the engine looks whether it contradicts itself."""

CHECK_PAUSE_S = 5.0
"""It does not look again before so long."""

BEAT_S = 10.0
"""So often it says that it is there while requests are open and nothing can be computed for them."""

_PR_SET_PDEATHSIG = 1


class Pipe:
    """The child's end of the socket; blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._poll = select.poll()  # select() takes no descriptor above 1023, and a busy gateway hands down such a one
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._unframer = Unframer.at_child()

    def send(self, message: ToParent) -> None:
        self._sock.sendall(frame(message))

    def receive(self) -> list[ToChild]:
        """The messages that are there. Raises `EOFError` when the parent is gone."""
        messages: list[ToChild] = []
        while self._sock.fileno() in self._ready(0):
            data = self._sock.recv(1 << 18)
            if not data:
                raise EOFError
            messages += self._unframer.feed(data)
        return messages

    def wait(self, timeout_s: float | None) -> bool:
        """Whether there is something to receive, or the end, or a wake, within that time (None: however long)."""
        ready = self._ready(timeout_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        return bool(ready)

    def wake(self) -> None:
        """End a `wait`, or the next one; any thread may."""
        with contextlib.suppress(BlockingIOError):  # there are wakes enough in the pipe
            os.write(self._wake, b"!")

    def _ready(self, timeout_s: float | None) -> set[int]:
        return {fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000)}


def serve(pipe: Pipe, core: EngineCore) -> None:
    """Step while there is work, sleep while there is none. Returns by `EOFError` when the parent is gone."""
    core.adapters.wake_with(pipe.wake)
    core.grammars.wake_with(pipe.wake)
    core.grammars.prepare()
    pipe.send(Ready(core.info))
    checked_s = 0.0
    while True:
        for message in pipe.receive():
            _obey(pipe, core, message)
        output = core.step()
        if output is not None:
            pipe.send(Stepped(output))
        for adapter_id, result in core.adapters.take_loaded():
            if isinstance(result, AdapterRejected):
                pipe.send(Loaded(adapter_id, None, str(result)))
            else:
                pipe.send(Loaded(adapter_id, result))
        for adapter_id in core.take_unloaded():
            pipe.send(Unloaded(adapter_id))
        if output is None:
            checked_s = _rest(pipe, core, checked_s)


def _rest(pipe: Pipe, core: EngineCore, checked_s: float) -> float:
    """Sleep until there is something to do. Idle for a while, look for contradictions, a slice at a time, so that
    whoever comes waits for one slice at most. Returns when that was last done, as `checked_s` says of the last time."""
    due_s = core.due_in_s()
    quiet_s = max(IDLE_CHECK_S, checked_s + CHECK_PAUSE_S - time.monotonic())
    if pipe.wait(quiet_s if due_s is None else min(quiet_s, due_s)) or (due_s is not None and due_s <= quiet_s):
        return checked_s
    for _ in core.checked_slices():
        if pipe.wait(0):
            return checked_s
    if core.has_open:
        pipe.send(Waiting())
        due_s = core.due_in_s()
        pipe.wait(BEAT_S if due_s is None else min(BEAT_S, due_s))
    else:
        pipe.wait(None)
    return time.monotonic()


def _obey(pipe: Pipe, core: EngineCore, message: ToChild) -> None:
    match message:
        case Submit(arrived_us, request):
            try:
                core.add(request, arrived_us=arrived_us)
            except EngineError as error:
                core.refuse(request.id, str(error))
        case Abort(request_id):
            core.abort(request_id)
        case SetCeiling(request_id, tokens, final):
            core.set_ceiling(request_id, tokens, final=final)
        case Load(adapter, restored):
            if restored:
                core.adapters.restore(adapter)
            else:
                core.adapters.begin_load(adapter)
        case Unload(adapter_id):
            core.unload_adapter(adapter_id)
        case Configure():
            raise RuntimeError("configured twice")


def _build(config: EngineConfig, builder: str) -> EngineCore:
    """Call `module:function` with the config."""
    module, _, name = builder.partition(":")
    build: Callable[[EngineConfig], EngineCore] = getattr(importlib.import_module(module), name)
    return build(config)


def _why(error: Exception) -> str:
    """One sentence for the operator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "there is not enough memory to load the model"
    text = str(error).strip()
    return text if text else f"the engine failed with {type(error).__name__}"


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was told
        sys.exit(1)


def _first(pipe: Pipe) -> Configure:
    messages: list[ToChild] = []
    while not messages:
        pipe.wait(None)
        messages = pipe.receive()
    if len(messages) != 1 or not isinstance(messages[0], Configure):
        raise RuntimeError("not configured")
    return messages[0]


def main(fd: int, parent_pid: int, builder: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent(parent_pid)
    with socket.socket(fileno=fd) as sock, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe = Pipe(sock)
        first = _first(pipe)
        configure_logging(first.log_level, first.log_format)
        try:
            core = _build(first.config, builder)
        except Exception as error:
            if not isinstance(error, EngineError | WeightsError | MemoryError):
                log.exception("the engine cannot start")
            pipe.send(Failed(_why(error)))
            return 1
        gc.collect()
        gc.freeze()  # what the model brought along is there to stay: no collection need look at it again
        try:
            serve(pipe, core)
        except IntegrityError:
            log.critical("the engine contradicts itself, and ends to be started again", exc_info=True)
            return 1
    return 0
