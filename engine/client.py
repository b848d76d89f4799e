"""The engine as the gateway sees it: submit, follow, raise the ceiling, abort.

`Engine` is the interface; `engine.process.EngineProcess` (the supervised child process) and
`engine.fake.FakeEngine` (deterministic, for the other rooms' tests) implement it, and one test-suite
runs against both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.types import AdapterInfo, AdapterRef, EngineStats, ModelInfo, Request, StepOutput, Update

StepHook = Callable[[StepOutput], None]
"""Called once per step on the event loop, before any of its updates reaches a stream."""


class Engine(Protocol):
    """Obligations of every implementation.

    - `submit` is synchronous and either returns a stream or raises an `EngineError` with nothing computed.
    - A stream yields every `Update` of its request in order; exactly one, the last, has `finished`.
    - A stream that is not read never blocks another one.
    - `abort` and `set_ceiling` on an unknown or finished request do nothing. After `abort` the stream
      still yields its last update, with the counts of the step that was running when it was told.
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
