"""The engine as the gateway sees it: submit, follow, raise the ceiling, abort.

`Engine` is the interface; `engine.process.EngineProcess` (the supervised child process) and
`engine.fake.FakeEngine` (deterministic, for the other rooms' tests) implement it, and one test-suite
runs against both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.types import AdapterInfo, AdapterRef, EngineError, EngineStats, ModelInfo, Request, StepOutput, Update

StepHook = Callable[[StepOutput], None]
"""Called once per step on the event loop, before any of its updates reaches a stream."""


class Engine(Protocol):
    """Obligations of every implementation.

    - `submit` is synchronous and either returns a stream or raises an `EngineError` with nothing computed.
    - A stream yields every `Update` of its request in order; exactly one, the last, has `finished`.
    - A stream that is not read never blocks another one.
    - `abort` and `set_ceiling` on an unknown or finished request do nothing. After `abort` the stream
      still yields its last update, with the counts of the step that was running when it was told.
    - A request that has not begun within `queue_timeout_ms`, or the engine's own limit if that is less, ends with
      `Finish.EXPIRED` and counts of 0, whatever else goes on. The last update of every request tells its `cost`.
    - When the engine dies, every open stream raises `EngineUnavailable`; the engine comes back by itself.
    - `on_step` sees a step's counts before any stream does. If it raises, no update of that step is delivered:
      streams raise `EngineUnavailable`.
    """

    on_step: StepHook | None

    async def start(self) -> None:
        """Return when the engine can serve; raise `EngineUnavailable` with the reason when it cannot."""
        ...

    async def stop(self) -> None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def restarts(self) -> int:
        """How often the engine process was started again after it died."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Update]: ...

    def abort(self, request_id: str) -> None: ...

    def set_ceiling(self, request_id: str, tokens: int, *, final: bool) -> None:
        """Allow `tokens` completion tokens in all (never fewer than before); `final`: no more will follow."""
        ...

    async def load_adapter(self, adapter: AdapterRef) -> AdapterInfo:
        """Load and validate; raise `AdapterRejected`. Loaded adapters survive a restart of the engine."""
        ...

    async def unload_adapter(self, adapter_id: str) -> None:
        """Return when the last request that uses it has ended; new ones get `AdapterUnknown` at once."""
        ...


class UpdateStream:
    """The updates of one request, in order, for one reader; both engines hand it out.

    What was pushed before a failure is still delivered before the failure is raised: its counts were
    shown to `on_step`. Belongs to one event loop; nothing here is thread-safe.
    """

    __slots__ = ("_error", "_finished", "_pushed", "_waiter")

    def __init__(self) -> None:
        self._pushed: deque[Update] = deque()
        self._error: EngineError | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, update: Update) -> None:
        self._pushed.append(update)
        self._finished = update.finished
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error; nothing may be pushed after it."""
        self._error = error
        self._finished = True
        self._wake()

    def __aiter__(self) -> UpdateStream:
        return self

    async def __anext__(self) -> Update:
        while not self._pushed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pushed.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
