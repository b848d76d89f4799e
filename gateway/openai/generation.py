"""One admitted request, from the engine's first update to its settlement: a task that outlives its client.

Knows: how updates become frames, when to ask for money, and every way a request ends:

| ended by                        | outcome       | the client reads                                             |
|---------------------------------|---------------|--------------------------------------------------------------|
| stop, max_tokens, end of money  | `finished`    | the answer; at the end of money `length`/`insufficient_quota`|
| its client went away            | `abort`       | -                                                            |
| `request_timeout_s`             | `deadline`    | 504, or an error frame                                       |
| `queue_timeout_s`               | `expired`     | 503 with retry-after, or an error frame; nothing is billed   |
| the engine's death              | `engine_died` | 503, or an error frame                                       |
| a fault of this request         | `error`       | 500, or an error frame                                       |
| the server's stop               | `shutdown`    | 503, or an error frame                                       |

Does not know: HTTP bodies, prices. Whatever happens, `run` settles the request once and ends the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import structlog

from engine.client import Engine
from engine.types import AdapterLost, EngineError, EngineUnavailable, Finish, GrammarRejected, Request, Update
from gateway.admission import Admitted
from gateway.capture import Capture
from gateway.errors import ApiError, DeadlineExceeded, InternalError, Unavailable, api_error
from gateway.idempotency import Claim
from gateway.openai.render import Renderer
from gateway.sse import Answer
from metering.events import Outcome, UsageEvent
from metering.receipts import encode_receipt, receipt_of

log = structlog.get_logger(__name__)

RECEIPT = "x-meterhouse-receipt"
"""The header of an answer that is not streamed with the receipt for it, one line of JSON."""

_CUT_TEXT: dict[Outcome, Callable[[], ApiError]] = {
    Outcome.ABORT: lambda: InternalError("The request was aborted."),
    Outcome.DEADLINE: lambda: DeadlineExceeded("The request took longer than this server allows."),
    Outcome.EXPIRED: lambda: Unavailable(
        "The request waited in the queue for longer than this server lets it; try again.",
        code="queue_timeout",
        retry_after_s=5,
    ),
    Outcome.SHUTDOWN: lambda: Unavailable("The server is shutting down.", code="shutting_down", retry_after_s=5),
}
_GRAVEST_FIRST = (Finish.ERROR, Finish.EXPIRED, Finish.ABORT, Finish.QUOTA, Finish.LENGTH, Finish.STOP)
_UNFINISHED = (Finish.ERROR, Finish.EXPIRED, Finish.ABORT)


class RequestFailed(EngineError):
    """The engine could not go on with this request alone."""


class RequestExpired(EngineError):
    """The engine did not begin with this request in time."""


def _fault(update: Update) -> type[EngineError]:
    """What the end of a request with `Finish.ERROR` is an error of."""
    if update.rejected:
        return GrammarRejected
    return AdapterLost if update.adapter_lost else RequestFailed


class Generation:
    """See the module. `answer` grows while `run` runs."""

    def __init__(
        self,
        admitted: Admitted,
        *,
        make_renderer: Callable[[Admitted], Renderer],
        answer: Answer,
        engine: Engine,
        capture: Capture,
        claim: Claim | None,
        timeout_s: float,
        abort_timeout_s: float,
    ) -> None:
        self.answer = answer
        self._admitted = admitted
        self._make_renderer = make_renderer
        self._renderer: Renderer
        self._engine = engine
        self._capture = capture
        self._claim = claim
        self._timeout_s = timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._cut: Outcome | None = None
        self._gave_up = asyncio.Event()
        self._last_word: asyncio.TimerHandle | None = None  # how long the engine may take to stop
        self._ends: list[Finish] = []
        self._ceilings: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        return self._admitted.live.id

    def cut(self, outcome: Outcome) -> None:
        """End the request early; the first reason given stands. What was done until the engine stops is billed."""
        if self._cut is not None or self._admitted.live.settling:
            return
        self._cut = outcome
        self._abort_all()

    def client_gone(self) -> None:
        """The last reader left. With an Idempotency-Key the work goes on: the retry will ask for it."""
        if self._claim is None:
            self.cut(Outcome.ABORT)

    async def run(self) -> None:
        """Follow the engine to the end, settle, end the answer. Raises nothing."""
        deadline = asyncio.get_running_loop().call_later(self._timeout_s, self.cut, Outcome.DEADLINE)
        fault: Exception | None = None
        try:
            self._renderer = self._make_renderer(self._admitted)
            await self._follow_all()
        except Exception as error:
            fault = error
        finally:
            deadline.cancel()
            if self._last_word is not None:
                self._last_word.cancel()
            for task in self._ceilings:
                task.cancel()
        try:
            await self._end(fault)
        except Exception as error:
            log.error("request_end_failed", request_id=self.id, exc_info=error)
            self.answer.fail(api_error(error))
        finally:
            self._close_lease(fault)
            for request in self._admitted.requests:
                self._admitted.purse.finished(request.id)
            self._admitted.purse.settled()
            if self._claim is not None:
                self._claim.release()

    # -- following the engine ------------------------------------------------------------------

    async def _follow_all(self) -> None:
        """All parts to their ends; after a fault of one, the others are stopped and waited for, and it is raised."""
        loop = asyncio.get_running_loop()
        streams = [(index, request, self._submit(request)) for index, request in enumerate(self._admitted.requests)]
        tasks = [loop.create_task(self._follow(*stream)) for stream in streams]
        watch = loop.create_task(self._gave_up.wait())
        pending: set[asyncio.Task[None]] = set(tasks)
        while pending and not self._gave_up.is_set():
            done, _ = await asyncio.wait({*pending, watch}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if any(task.exception() for task in done):
                self._abort_all()
        for task in (*pending, watch):
            task.cancel()
        await asyncio.gather(*tasks, watch, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _submit(self, request: Request) -> AsyncIterator[Update] | Exception:
        try:
            return self._engine.submit(request)
        except EngineError as error:
            return error

    async def _follow(self, part: int, request: Request, stream: AsyncIterator[Update] | Exception) -> None:
        if isinstance(stream, Exception):
            raise stream
        if self._cut is not None:
            self._engine.abort(request.id)
        fault: Exception | None = None
        async for update in stream:
            try:
                self._take(part, request.id, update)
            except Exception as error:  # ours, not the engine's: stop it, but read on to its last word
                fault = fault or error
                self._abort_all()
            if update.finished:
                if fault is not None:
                    raise fault
                return
        raise EngineUnavailable("the stream ended without a last update")

    def _take(self, part: int, part_id: str, update: Update) -> None:
        """One step's work for one part: its money, its frames, its end."""
        purse, live = self._admitted.purse, self._admitted.live
        if update.finished:
            purse.finished(part_id)
            self._ends.append(update.finish or Finish.ERROR)
        purse.progressed(
            part_id,
            live.counts.prompt,
            live.counts.cached,
            update.counts.completion,
            prefilled=live.counts.prompt >= live.record.prompt_tokens,
        )
        if update.paused:
            self._ask_for_money(part_id)
        if update.finish is Finish.EXPIRED:  # nothing of it is said, so that it can still be a status
            raise RequestExpired("the request waited in the queue for too long")
        if update.rejected and not update.counts.completion:  # the same
            raise GrammarRejected(update.error or "its grammar cannot be followed")
        self.answer.say(self._renderer.update(part, update))
        if update.finish is Finish.ERROR:
            raise _fault(update)(update.error or "the engine could not go on with this request")

    def _ask_for_money(self, part_id: str) -> None:
        """Beside the stream, which must be read on: an abort has to get through while this waits."""
        task = asyncio.get_running_loop().create_task(self._paused(part_id))
        self._ceilings.add(task)
        task.add_done_callback(self._ceilings.discard)

    async def _paused(self, part_id: str) -> None:
        try:
            await self._admitted.purse.paused(part_id)
        except Exception as error:
            log.error("ceiling_failed", request_id=self.id, exc_info=error)
            self.cut(Outcome.ERROR)

    def _abort_all(self) -> None:
        for request in self._admitted.requests:
            self._engine.abort(request.id)
        if self._last_word is None:
            self._last_word = asyncio.get_running_loop().call_later(self._abort_timeout_s, self._gave_up.set)

    # -- the end -------------------------------------------------------------------------------

    async def _end(self, fault: Exception | None) -> None:
        ending: list[bytes] = []
        outcome, finish_reason = self._outcome(fault)
        if outcome is Outcome.FINISHED:
            try:
                ending = await self._ending()
                if self._claim is not None:
                    await self._claim.keep(self.answer.body() + b"".join(ending))
            except Exception as error:  # ours; the request is settled all the same
                outcome, finish_reason, fault = Outcome.ERROR, "", error
        event = await self._capture.settle(self._admitted.live, outcome, finish_reason)
        if outcome is Outcome.FINISHED:
            self.answer.end(ending if event is None else self._receipted(ending, event))
        else:
            self.answer.fail(self._error(outcome, fault))

    async def _ending(self) -> list[bytes]:
        counts, renderer = self._admitted.live.counts, self._renderer
        return await asyncio.to_thread(renderer.ending, counts) if renderer.takes_long else renderer.ending(counts)

    def _receipted(self, ending: list[bytes], event: UsageEvent) -> list[bytes]:
        """The end of the answer with the receipt for what is on disk now: in its headers, or in a stream's last chunk.

        An answer that is kept has none: should a crash keep its settlement from the disk, the event will be another.
        """
        receipt = encode_receipt(receipt_of(event))
        if not self.answer.stream:
            self.answer.headers = {**self.answer.headers, RECEIPT: receipt.decode()}
        return self._renderer.receipted(ending, receipt)

    def _outcome(self, fault: Exception | None) -> tuple[Outcome, str]:
        finish = next((finish for finish in _GRAVEST_FIRST if finish in self._ends), None)
        complete = len(self._ends) == len(self._admitted.requests) and finish not in _UNFINISHED
        if complete and fault is None and finish is not None:
            return Outcome.FINISHED, finish.value  # also where a cut came too late to change anything
        if self._cut is not None:
            return self._cut, ""
        if finish is Finish.EXPIRED:
            return Outcome.EXPIRED, ""
        if isinstance(fault, EngineUnavailable):
            return Outcome.ENGINE_DIED, ""
        return Outcome.ERROR, ""

    def _error(self, outcome: Outcome, fault: Exception | None) -> ApiError:
        if outcome in _CUT_TEXT:
            return _CUT_TEXT[outcome]()
        known = isinstance(fault, EngineError)  # its own sentence says it all, and every stream of an engine says it
        log.error("generation_failed", request_id=self.id, outcome=outcome.value, reason=str(fault), exc_info=not known)
        if fault is None:
            return InternalError("The engine could not go on with this request.")
        return api_error(fault)

    def _close_lease(self, fault: Exception | None) -> None:
        counts = self._admitted.live.counts
        done = counts.prompt + counts.completion
        if fault is not None and done == 0:
            self._admitted.lease.refund()
        else:
            self._admitted.lease.close(done)
