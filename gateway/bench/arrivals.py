"""When requests are sent: a fixed number in flight (closed loop), or at times that do not wait for answers (open loop).

Knows: order and time. Does not know: what is sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def poisson(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Seconds after the begin at which `count` requests arrive, `rate_per_s` on average; infinite: all at 0."""
    if rate_per_s == float("inf"):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate_per_s)
    return times


async def closed_loop(send: Callable[[int], Awaitable[T]], count: int, concurrency: int) -> list[T]:
    """Send 0, 1, … count - 1, at most `concurrency` at a time, each as soon as there is room. Results in that order."""
    numbers = iter(range(count))
    results: dict[int, T] = {}

    async def worker() -> None:
        for number in numbers:
            results[number] = await send(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())
    return [results[number] for number in range(count)]


async def open_loop(
    send: Callable[[int], Awaitable[T]], times_s: Sequence[float], concurrency: int | None = None
) -> list[T]:
    """Send each at its time; with `concurrency` one that finds no room waits for it, and its clock starts only then."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(concurrency or max(1, len(times_s)))

    async def one(number: int) -> T:
        async with room:
            return await send(number)

    tasks: list[asyncio.Task[T]] = []
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number, at_s in enumerate(times_s):
            if (wait_s := began + at_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(number)))
    return [task.result() for task in tasks]
