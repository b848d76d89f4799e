"""A tenant's long answers: how many it may have under way, and that one at a time is worked on.

What reads usage or renders a long invoice has few threads, which are everybody's. Knows: seats and turns. Does not
know: what is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from gateway.errors import RateLimited

R = TypeVar("R")

SEATS = 4
SLICE_BYTES = 256 << 10


class Turns:
    """By tenant. For one event loop."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextmanager
    def seat(self, tenant_id: str) -> Iterator[None]:
        """One of the tenant's places for a long answer, until it is sent. Raises `RateLimited` where all are taken."""
        if self._taken[tenant_id] >= SEATS:
            raise RateLimited(
                f"{SEATS} long answers are on their way to this tenant: ask again when one of them has ended.",
                limit="requests",
                headers={"retry-after": "1"},
            )
        self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._taken[tenant_id] -= 1

    async def take(self, tenant_id: str, work: Callable[[], Awaitable[R]]) -> R:
        """Do some work when none of the tenant's other is done. Who leaves does not end the work, so the turn is over
        when the work is."""
        lock = self._locks[tenant_id]
        await lock.acquire()
        running = asyncio.ensure_future(work())
        running.add_done_callback(lambda _: lock.release())
        return await asyncio.shield(running)


async def begun(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same pieces, the first of them made already: what cannot be answered at all is refused before a status is
    sent. An answer that nobody takes is closed when it is let go of."""
    first = await anext(pieces, b"")
    return _behind(first, pieces)


async def _behind(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        if first:
            yield first
        async for piece in rest:
            yield piece


def slices(body: bytes) -> Iterator[bytes]:
    """A long body in pieces, so that a slow reader is known by the piece and nobody keeps it whole for him."""
    return (body[at : at + SLICE_BYTES] for at in range(0, len(body), SLICE_BYTES))
