"""A benchmark of a server: warm-up, repeats, and what became of every request.

Knows: the order of things and who is asked. Does not know: HTTP (`client`), prompts (`workload`), what the times
mean (`statistics`).
"""

from __future__ import annotations

import asyncio
import gc
import resource
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from gateway.bench import arrivals, client, record
from gateway.bench.client import Target
from gateway.bench.record import Answer, Begin, Record, Repeat
from gateway.bench.workload import Bodies, Prompts

T = TypeVar("T")

DEFAULT_CONCURRENCY = 8
KEPT_BYTES_MAX = 256 << 20  # of answers that are not read yet; what comes after is read as it ends


class Load(msgspec.Struct, kw_only=True):
    """How much is asked. With `rate_per_s` requests come at random times whether or not others are answered."""

    requests: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    repeats: int = 3
    warmup: int = 2
    seed: int = 0
    fresh: bool = True  # each question begins with a nonce that no earlier run had


class Benchmark:
    """One server, one workload. `show` is told of each repeat as it ends, and of one answer's text."""

    def __init__(
        self,
        target: Target,
        prompts: Prompts,
        bodies: Bodies,
        load: Load,
        *,
        options: dict[str, Any] | None = None,
        save: Path | None = None,
        show: Callable[[Record, Repeat, str], None] = lambda *_: None,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._bodies = bodies
        self._load = load
        self._save = save
        self._show = show
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._record = Record(Begin(at=at, options=options or {}))
        self._run_nonce = secrets.token_hex(3) if load.fresh else ""

    def run(self) -> Record:
        """All repeats. Raises `FillError` for prompts that cannot be made and `OSError` where the record cannot go."""
        if self._save is not None:
            self._save.write_bytes(b"")
            record.append(self._save, [self._record.begin])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if self._load.warmup:
                runner.run(self._repeat(-1, self._load.warmup, None))
            for number in range(self._load.repeats):
                runner.run(self._measured(number))
        return self._record

    async def _measured(self, number: int) -> None:
        answers, repeat, text = await self._repeat(number, self._load.requests, self._load.rate_per_s)
        self._record.answers += answers
        self._record.repeats.append(repeat)
        if self._save is not None:
            record.append(self._save, [*answers, repeat])
        self._show(self._record, repeat, text)

    async def _repeat(self, number: int, count: int, rate_per_s: float | None) -> tuple[list[Answer], Repeat, str]:
        """One round of `count` requests, prepared beforehand and read afterwards; (answers, its end, one text)."""
        requests = [self._request(number, index) for index in range(count)]
        kept_bytes = 0

        async def send(index: int) -> Callable[[], tuple[Answer, str]]:
            nonlocal kept_bytes
            model, request = requests[index]
            reply = await client.ask(self._target, request)
            kept_bytes += sum(len(piece) for _, piece in reply.pieces)
            read = partial(client.read, reply, repeat=number, index=index, model=model, zero=began)
            if kept_bytes <= KEPT_BYTES_MAX:
                return read
            answer = read()
            return lambda: answer

        gc.collect()
        gc.freeze()  # so that no collection in the middle, taken for the server's silence, goes through all of these
        try:
            cpu_s, began = _cpu_s(), time.perf_counter()
            ended = await self._send(send, count, rate_per_s, number)
            repeat = Repeat(repeat=number, wall_s=time.perf_counter() - began, client_cpu_s=_cpu_s() - cpu_s)
        finally:
            gc.unfreeze()
        answers = [read() for read in ended]
        return [answer for answer, _ in answers], repeat, next((text for _, text in answers if text), "")

    async def _send(
        self, send: Callable[[int], Awaitable[T]], count: int, rate_per_s: float | None, number: int
    ) -> list[T]:
        if rate_per_s is None:
            return await arrivals.closed_loop(send, count, self._load.concurrency or DEFAULT_CONCURRENCY)
        times_s = arrivals.poisson(rate_per_s, count, self._load.seed + number)
        return await arrivals.open_loop(send, times_s, self._load.concurrency)

    def _request(self, number: int, index: int) -> tuple[str, bytes]:
        nonce = f"{self._run_nonce}{'w' if number < 0 else number}" if self._load.fresh else ""
        model, body = self._bodies.body(self._prompts.prompt(index, nonce), index)
        return model, self._target.request(self._bodies.endpoint, body)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
