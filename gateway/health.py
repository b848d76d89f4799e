"""Whether the server lives (`/health/live`) and can serve (`/health/ready`), and what it counts (`/metrics`).

Knows: readiness is a real one-token inference and a spool that takes writes. A probe's result stands for a few seconds
and tokens of real requests count as one, so that asking often costs nothing. Probe tokens are counted apart and billed
to nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from prometheus_client import CONTENT_TYPE_LATEST

from engine.client import Engine
from engine.types import EngineBusy, EngineError, Finish, Request, SamplingParams
from gateway import paths
from gateway.admission import Admission
from gateway.capture import PROBE_PREFIX, Capture
from gateway.telemetry import Telemetry
from metering.journal import Journal
from metering.spool import Spool, SpoolBroken

PROBE_TIMEOUT_S = 10.0


class Health:
    """The probe and its last result. One probe runs at a time; who asks meanwhile waits for it."""

    def __init__(
        self,
        *,
        engine: Engine,
        spool: Spool,
        journal: Journal,
        capture: Capture,
        admission: Admission,
        cache_s: float,
    ) -> None:
        self._engine = engine
        self._spool = spool
        self._journal = journal
        self._capture = capture
        self._admission = admission
        self._cache_s = cache_s
        self._lock = asyncio.Lock()
        self.scraping = asyncio.Lock()  # samplers add what has grown since the last scrape: one at a time
        self._probed_s = float("-inf")
        self._fault: str | None = "not probed"
        self._number = 0

    async def fault(self) -> str | None:
        """Why the server cannot serve now; None when it can."""
        if self._admission.draining:
            return "shutting down"
        if not self._engine.ready:
            return "the engine is not up"
        if not (self._spool.writable() and self._journal.writable()):
            return "usage cannot be recorded"
        async with self._lock:
            if time.monotonic() - max(self._probed_s, self._capture.last_progress_s) < self._cache_s:
                return self._fault if self._probed_s > self._capture.last_progress_s else None
            self._fault = await self._probe()
            self._probed_s = time.monotonic()
            return self._fault

    async def _probe(self) -> str | None:
        self._number += 1
        request = Request(
            id=f"{PROBE_PREFIX}{self._number}",
            prompt=[0],
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        )
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async for update in self._engine.submit(request):
                    if update.finished:
                        return None if update.finish is not Finish.ERROR else "the engine failed a probe"
            return "the engine ended a probe early"
        except EngineBusy:
            return None  # a full queue is load, not a fault
        except TimeoutError:
            self._engine.abort(request.id)
            return "the engine did not answer in time"
        except EngineError:
            return "the engine is not up"


@get(paths.LIVE, tags=["Health"])
async def live() -> dict[str, str]:
    """The process answers, and says what it is."""
    return {"status": "ok", "product": paths.PRODUCT}


NOT_READY = ResponseSpec(dict[str, str], generate_examples=False, description="It cannot serve now; `reason` says why.")


@get("/health/ready", tags=["Health"], responses={503: NOT_READY})
async def ready(health: NamedDependency[Health]) -> Response[dict[str, str]]:
    """One token was computed lately, and usage can be recorded."""
    fault = await health.fault()
    if fault is None:
        return Response({"status": "ok"}, status_code=200)
    return Response({"status": "unavailable", "reason": fault}, status_code=503, headers={"retry-after": "1"})


@get("/metrics", tags=["Health"], media_type="text/plain")
async def metrics(health: NamedDependency[Health], telemetry: NamedDependency[Telemetry]) -> Response[bytes]:
    """Prometheus' text format. On a thread: samplers count rows in local files, and no stream waits for a disk."""
    async with health.scraping:
        text = await asyncio.to_thread(telemetry.exposition)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def sample(
    telemetry: Telemetry,
    engine: Engine,
    spool: Spool,
    journal: Journal,
    capture: Capture,
    clock_us: Callable[[], int],
) -> None:
    """Set the gauges that are read at a scrape."""
    telemetry.engine_state(engine.ready, engine.restarts)
    telemetry.engine_load(engine.stats)
    telemetry["meterhouse_open_requests"].set(capture.open_count)
    telemetry["meterhouse_spool_writable"].set(1 if spool.writable() else 0)
    telemetry["meterhouse_spool_bytes"].set(spool.nbytes)
    telemetry["meterhouse_journal_writable"].set(1 if journal.writable() else 0)
    telemetry["meterhouse_journal_bytes"].set(journal.nbytes)
    with suppress(SpoolBroken):  # it is counted; what was seen last stands
        for consumer in spool.consumers:
            oldest_us = spool.oldest_unacked_us(consumer)
            age_s = 0.0 if oldest_us is None else max(0, clock_us() - oldest_us) / 1e6
            telemetry["meterhouse_spool_pending_events"].labels(consumer).set(spool.count(consumer))
            telemetry["meterhouse_spool_oldest_seconds"].labels(consumer).set(age_s)
