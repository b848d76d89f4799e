"""From the spool to whoever consumes settlements: at least once, in batches, for as long as it takes.

Knows: batching, back-off, how to find the one event that spoils a batch. Does not know: what the sink does
with events; the sink makes "at least once" into "once".
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from metering.backoff import Backoff
from metering.clickhouse import UsageStore
from metering.errors import Rejected
from metering.events import UsageEvent
from metering.spool import Spool, SpoolClosed

log = logging.getLogger(__name__)


class Drain:
    """A thread that hands a consumer's events to `sink` and acknowledges them when it returned.

    A batch is what came together in `max_age_s`, at most `max_events` and about `max_bytes`.

    - An exception of `rejected` means that one of the events will never be taken: the batch is halved until
      it stands alone, then it goes to `bury` and is acknowledged. Without `bury` it stays in the spool, is
      counted in `stuck`, and is tried again with every pass; the others go on.
    - Any other exception means "not now": nothing is acknowledged, the batch is tried again after a pause
      (`Backoff`, up to `max_pause_s`, its chance from `draw`), and shrinks meanwhile in case its size is the trouble.

    Counters: `delivered_total`, `buried_total`, `failures_total`; gauges: `stuck`, `last_error`.
    """

    def __init__(
        self,
        spool: Spool,
        consumer: str,
        sink: Callable[[list[UsageEvent]], None],
        *,
        bury: Callable[[UsageEvent, str], None] | None = None,
        rejected: tuple[type[Exception], ...] = (Rejected,),
        max_events: int = 5000,
        max_bytes: int = 16 << 20,
        max_age_s: float = 0.5,
        min_pause_s: float = 0.1,
        max_pause_s: float = 10.0,
        draw: Callable[[float, float], float] = random.uniform,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_age_s`: how long an event waits at most for company. `clock_s` times `flush`."""
        self.consumer = consumer
        self.delivered_total = self.buried_total = self.failures_total = self.stuck = 0
        self.last_error: str | None = None
        self._spool, self._sink, self._bury, self._rejected = spool, sink, bury, rejected
        self._max_events, self._max_bytes, self._max_age_s = max_events, max_bytes, max_age_s
        self._backoff = Backoff(min_pause_s, max_pause_s, draw)
        self._clock_s = clock_s
        self._size = max_events
        self._wake = threading.Condition()
        self._stopping = self._hurry = False
        self._started = self._clean = 0  # the pass that began last; the last one that left nothing to deliver
        self._thread = threading.Thread(target=self._run, name=f"drain-{consumer}", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Deliver at once what is in the spool now. True when it all was (or is `stuck`), False after `timeout` s."""
        deadline = self._clock_s() + timeout
        with self._wake:
            goal = self._started + 1
            while self._clean < goal:
                left = deadline - self._clock_s()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._hurry = True
                self._wake.notify_all()
                self._wake.wait(min(left, 0.1))
        return True

    def stop(self, timeout: float = 10.0) -> bool:
        """Flush within `timeout` seconds, then end the thread and wait for it. What is left stays in the spool."""
        if not self._thread.is_alive():
            return False
        flushed = self.flush(timeout)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()  # not left behind: a thread inside chDB at exit takes the process down with it
        return flushed

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with self._wake:
                self._started += 1
                self._hurry = False
            try:
                self._pass()
            except SpoolClosed as error:
                self._failed(error)
                return
            except Exception as error:  # whatever the sink raises, the events must outlive it
                self._failed(error)
                self._pause(self._backoff.next_s())
                continue
            self._backoff.reset()
            with self._wake:
                self.last_error = None if not self.stuck else self.last_error
                self._clean = self._started
                self._wake.notify_all()
            self._pause(self._max_age_s)

    def _pass(self) -> None:
        """Deliver until the spool has nothing that was not tried."""
        while not self._stopping:
            batch, more = self._spool.batch(self.consumer, self._size, self._max_bytes)
            if not batch:
                self.stuck = 0
                return
            stuck = self._deliver(batch)
            self._size = min(self._size * 2, self._max_events)
            if not more or stuck == len(batch):
                self.stuck = stuck
                return

    def _deliver(self, batch: list[UsageEvent]) -> int:
        """Hand over a batch and acknowledge it; returns how many events of it are stuck."""
        try:
            self._sink(batch)
        except self._rejected as error:
            if len(batch) > 1:
                half = len(batch) // 2
                return self._deliver(batch[:half]) + self._deliver(batch[half:])
            if self._bury is None:
                self.last_error = str(error)
                log.error("%s: %s is not taken: %s", self.consumer, batch[0].event_id, error)
                return 1
            self._bury(batch[0], str(error))
            self.buried_total += 1
        else:
            self.delivered_total += len(batch)
        self._spool.ack(self.consumer, [event.event_id for event in batch])
        return 0

    def _failed(self, error: Exception) -> None:
        self.failures_total += 1
        self.last_error = str(error) or type(error).__name__
        self._size = max(1, self._size // 2)
        log.warning("%s: not delivered now: %s", self.consumer, self.last_error)

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not (self._hurry or self._stopping):
                self._wake.wait(seconds)


class Shipper(Drain):
    """The spool's consumer "clickhouse": events go to the usage store, what it rejects to its dead letters."""

    def __init__(
        self,
        spool: Spool,
        store: UsageStore,
        consumer: str = "clickhouse",
        *,
        max_events: int = 5000,
        max_bytes: int = 16 << 20,
        max_age_s: float = 0.5,
        max_pause_s: float = 10.0,
    ) -> None:
        super().__init__(
            spool,
            consumer,
            store.insert,
            bury=store.bury,
            max_events=max_events,
            max_bytes=max_bytes,
            max_age_s=max_age_s,
            max_pause_s=max_pause_s,
        )
