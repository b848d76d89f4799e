"""Exactly one settlement per request, whatever ends it.

Knows: which requests are open, their last journalled counts, and the one place where the engine's `TokenCounts` and
`Cost` become a `UsageEvent`. Does not know: HTTP, tokens' text, prices.

A request's settlement goes through these states; a crash at any point leaves the next start what the last column says.

| state     | made true by                        | owner       | after a crash                                    |
|-----------|-------------------------------------|-------------|--------------------------------------------------|
| opened    | `journal.opened`                    | admission   | settled as `interrupted` with 0 tokens           |
| running   | `journal.step`, before frames leave | engine hook | settled as `interrupted` with the last counts    |
| settled   | `spool.settle`, fsynced             | its task    | stands in the spool, whose word is the last      |
| forgotten | `journal.settled`                   | its task    | stands in the spool, or is shipped               |
| shipped   | acknowledged by each consumer       | shippers    | sent again; store and ledger take an id once     |

The final frame leaves after `settled`. If the spool cannot write, the event stays queued in it and is tried again; the
client gets an error in place of the final frame, the balance is charged all the same.

What a part cost comes with the engine's last word on it. A cut request's too, for which its settlement waits as long as
`abort_timeout_s`; where no last word comes (the engine died, or is silent for longer) that part's cost is not known and
counts as 0. It is not journalled: a crash loses it, and an orphan is settled without.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from billing.service import Billing
from engine.types import Cost, StepOutput, TokenCounts
from gateway.telemetry import Telemetry
from metering.counts import CountsTuple
from metering.events import Outcome, UsageEvent
from metering.journal import Journal, OpenedRecord
from metering.spool import Spool, SpoolBroken

log = structlog.get_logger(__name__)

PROBE_PREFIX = "probe-"
"""Engine request ids that belong to nobody: readiness probes. Neither journalled nor billed, but counted apart."""

_RETRY_S = 0.5


class Live:
    """One open request: what was known at the door, and what is done so far (as journalled)."""

    __slots__ = (
        "costs",
        "counts",
        "first_token_s",
        "last_token_s",
        "opened_s",
        "parts",
        "queue_us",
        "record",
        "settling",
    )

    def __init__(self, record: OpenedRecord, part_ids: Iterable[str], now_s: float) -> None:
        self.record = record
        self.parts = dict.fromkeys(part_ids, TokenCounts())  # the engine's requests: one per prompt
        self.counts = TokenCounts()
        self.costs: list[Cost] = []  # of the parts that have ended
        self.opened_s = now_s
        self.first_token_s: float | None = None
        self.last_token_s = now_s
        self.queue_us = 0
        self.settling = False

    @property
    def id(self) -> str:
        return self.record.event_id

    def total_with(self, changed: dict[str, TokenCounts]) -> TokenCounts:
        """The request's counts when `changed` parts are taken at their new ones."""
        if len(self.parts) == 1:
            return next(iter(changed.values()))
        columns = zip(*(_plain(changed.get(part, counts)) for part, counts in self.parts.items()), strict=True)
        return TokenCounts(*map(sum, columns))

    @property
    def cost(self) -> Cost:
        """Of the parts that have ended, together; they waited side by side."""
        return Cost(
            compute_us=sum(cost.compute_us for cost in self.costs),
            kv_block_us=sum(cost.kv_block_us for cost in self.costs),
            queue_us=self.queue_us,
            preemptions=sum(cost.preemptions for cost in self.costs),
            recomputed=sum(cost.recomputed for cost in self.costs),
        )


def _plain(counts: TokenCounts) -> CountsTuple:
    return (
        counts.prompt,
        counts.cached,
        counts.completion,
        counts.reasoning,
        counts.recomputed,
        counts.rejected,
    )


class Capture:
    """The open requests of a gateway, from the door to their settlement. Lives on the event loop."""

    def __init__(
        self, *, spool: Spool, journal: Journal, billing: Billing, telemetry: Telemetry, clock_us: Callable[[], int]
    ) -> None:
        self._spool = spool
        self._journal = journal
        self._billing = billing
        self._telemetry = telemetry
        self._clock_us = clock_us
        self._by_part: dict[str, Live] = {}
        self._open: set[Live] = set()
        self._queued: set[asyncio.Task[None]] = set()
        self.last_progress_s = float("-inf")

    @property
    def open_count(self) -> int:
        return len(self._open)

    def open(self, record: OpenedRecord, part_ids: Iterable[str]) -> Live:
        """Journal that the request was let in. Raises `JournalError`; then it is not open."""
        self._journal.opened(record)
        live = Live(record, part_ids, time.monotonic())
        self._open.add(live)
        for part in live.parts:
            self._by_part[part] = live
        return live

    def on_step(self, output: StepOutput) -> None:
        """The engine's hook: journal what a step did, then count it. Raises when it cannot be journalled."""
        changed: dict[Live, dict[str, TokenCounts]] = {}
        for update in output.updates:
            live = self._by_part.get(update.request_id)
            if live is not None:
                changed.setdefault(live, {})[update.request_id] = update.counts
                live.queue_us = max(live.queue_us, update.queue_us)
                if update.cost is not None:
                    live.costs.append(update.cost)
            elif update.finished and update.request_id.startswith(PROBE_PREFIX):
                self._telemetry.probed(update.counts, update.cost or Cost())
        totals = [(live, parts, live.total_with(parts)) for live, parts in changed.items()]
        if totals:
            self._journal.step([(live.id, _plain(total)) for live, _, total in totals])
            self._count(totals)
        self._telemetry.engine(output.stats)

    def _count(self, totals: list[tuple[Live, dict[str, TokenCounts], TokenCounts]]) -> None:
        now_s = time.monotonic()
        sums = [0, 0, 0, 0, 0, 0]
        for live, parts, total in totals:
            before, after = _plain(live.counts), _plain(total)
            for i in range(6):
                sums[i] += after[i] - before[i]
            if total.completion > live.counts.completion:
                self._observe_tokens(live, total.completion - live.counts.completion, now_s)
            live.parts.update(parts)
            live.counts = total
        self._telemetry.counted(TokenCounts(*sums))

    def _observe_tokens(self, live: Live, tokens: int, now_s: float) -> None:
        self.last_progress_s = now_s
        if live.first_token_s is None:
            live.first_token_s = now_s
            self._telemetry["vllm:time_to_first_token_seconds"].observe(now_s - live.opened_s)
        else:
            self._telemetry["vllm:inter_token_latency_seconds"].observe((now_s - live.last_token_s) / tokens)
        live.last_token_s = now_s

    async def settle(self, live: Live, outcome: Outcome, finish_reason: str = "") -> UsageEvent | None:
        """Make the request's end durable: the spool, then the balance, then the journal's mark. The event, on disk.

        From here on its counts stand: later steps of the engine are not added. Raises `SpoolError` when the spool
        cannot write now; the event is queued and everything else is done. Must not be cancelled. A second call for a
        request does nothing, and gives None.
        """
        if live.settling:
            return None
        live.settling = True
        for part in live.parts:
            self._by_part.pop(part, None)
        event = self._event(live, outcome, finish_reason)
        started_s = time.monotonic()
        try:
            await asyncio.wrap_future(self._spool.settle(event))
        except SpoolBroken:
            self._telemetry["meterhouse_settle_failures_total"].inc()
            log.error("settlement_queued", request_id=live.id, outcome=outcome.value)
            task = asyncio.create_task(self._settle_again(event))
            self._queued.add(task)
            task.add_done_callback(self._queued.discard)
            raise
        else:
            self._journal_settled(live.id)
            return event
        finally:
            self._open.discard(live)
            self._billing.settle(event)
            self._telemetry["meterhouse_settle_seconds"].observe(time.monotonic() - started_s)
            self._measure(live, event)

    async def _settle_again(self, event: UsageEvent) -> None:
        """The spool retries by itself; wait for it, so that the journal forgets the request only then."""
        while True:
            try:
                await asyncio.wrap_future(self._spool.settle(event))
            except SpoolBroken:
                await asyncio.sleep(_RETRY_S)
            else:
                self._journal_settled(event.event_id)
                return

    def _journal_settled(self, event_id: str) -> None:
        try:
            self._journal.settled(event_id)
        except Exception as error:  # the spool has the event: at the next start its id is known there
            log.error("journal_mark_failed", request_id=event_id, error=str(error))

    def _event(self, live: Live, outcome: Outcome, finish_reason: str) -> UsageEvent:
        now_s = time.monotonic()
        ttft_s = 0.0 if live.first_token_s is None else live.first_token_s - live.opened_s
        cost = live.cost
        return live.record.event(
            _plain(live.counts),
            outcome=outcome,
            settled_us=self._clock_us(),
            finish_reason=finish_reason,
            queue_us=cost.queue_us,
            ttft_us=round(ttft_s * 1e6),
            duration_us=round((now_s - live.opened_s) * 1e6),
            compute_us=cost.compute_us,
            kv_block_us=cost.kv_block_us,
            preemptions=cost.preemptions,
        )

    def _measure(self, live: Live, event: UsageEvent) -> None:
        reason = {"quota": "length"}.get(event.finish_reason, event.finish_reason)
        if event.outcome is not Outcome.FINISHED:
            reason = "error" if event.outcome in (Outcome.ERROR, Outcome.ENGINE_DIED) else "abort"
        self._telemetry.settled(event.endpoint, event.outcome.value, reason, live.counts, live.cost)
        self._telemetry["vllm:e2e_request_latency_seconds"].observe(event.duration_us / 1e6)
        self._telemetry["vllm:request_queue_time_seconds"].observe(event.queue_us / 1e6)
        log.info(
            "request_settled",
            request_id=event.event_id,
            tenant=event.tenant,
            model=event.model,
            outcome=event.outcome.value,
            finish_reason=event.finish_reason,
            prompt=event.prompt_tokens,
            cached=event.cached_tokens,
            completion=event.completion_tokens,
            ttft_us=event.ttft_us,
            duration_us=event.duration_us,
            compute_us=event.compute_us,
        )

    async def close(self) -> None:
        """Stop waiting for what the disk refuses; the journal has it for the next start."""
        for task in list(self._queued):
            task.cancel()
        await asyncio.gather(*self._queued, return_exceptions=True)
