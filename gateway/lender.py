"""Money for requests that this gateway's leases do not cover: asked for in time, together, and not for ever.

Knows: what several requests lack of one quota is asked for in one exchange with the ledger's database, on a thread of
its own; who finds nothing asks again while other gateways may give something back, for a bounded time; what is known to
be at its end is not asked about again for a moment. Does not know: what a quota is, how slices are sized
(`billing/service/leasing.py`), what a request does meanwhile.

A gateway that is short writes so beside the log. The others look every `POLL_S` and give back what lies idle with them.
So when somebody is short, all that is neither held nor spent comes to him within about two of these times; what others
hold comes when their requests end, for which a running one waits as its purse says, and one at the door `DOOR_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, auto

import structlog

from billing.errors import LedgerUnavailable
from billing.service import Billing
from billing.service.leasing import Answer, Ask

log = structlog.get_logger(__name__)

POLL_S = 0.2
DOOR_S = 1.5
DRY_S = 0.2
"""How long it stands that nothing is to be had, if the ledger has not moved meanwhile."""

Lacking = Callable[[], Mapping[str, int]]
"""What a request lacks now, by quota; empty when it is covered."""


class Money(Enum):
    """What asking has led to."""

    THERE = auto()  # enough to go on
    AWAITED = auto()  # none now, but others have some, or the ledger is away
    GONE = auto()  # none, and nobody has any


class Lender:
    """Of one gateway. Lives on the event loop; `close` it before the stores."""

    def __init__(self, billing: Billing) -> None:
        self._billing = billing
        self._thread = ThreadPoolExecutor(1, "lender")
        self._asks: dict[str, Ask] = {}  # of the exchange that has not begun
        self._answers: asyncio.Future[dict[str, Answer]] | None = None
        self._gone: dict[str, tuple[int, float]] = {}  # quota → where the log was, and until when it stands
        self._tasks: set[asyncio.Task[None]] = set()
        self._early: set[str] = set()
        self._watching = False
        self._turn = asyncio.Lock()

    async def fund(self, wanted: Lacking, least: Lacking) -> bool:
        """Before a request is let in: whether `least` is covered, after waiting for it as long as that makes sense.

        What is wanted beyond is asked for beside it. Raises `LedgerUnavailable` where nobody can say.
        """
        if not wanted() or not self._billing.leased:
            return not least()
        if not least():
            self.soon("", wanted)
            return True
        give_up_s = self._now_s() + DOOR_S
        while True:
            money = await self._ask(wanted, least)
            if not least():
                return True
            if money is Money.GONE or self._now_s() >= give_up_s:
                return False
            if money is Money.AWAITED:
                await asyncio.sleep(POLL_S)

    async def more(self, wanted: Lacking, least: Lacking, *, fresh: bool) -> Money:
        """For a request that stands at the end of its money: one try. `fresh`: what was found a moment ago won't do."""
        if not self._billing.leased:
            return Money.GONE
        try:
            return await self._ask(wanted, least, fresh=fresh)
        except LedgerUnavailable as error:
            log.warning("lease_not_asked", reason=str(error))
            return Money.AWAITED

    def soon(self, request_id: str, wanted: Lacking) -> None:
        """Ask ahead of need, and let nobody wait for it; once at a time for a request."""
        if not self._billing.leased or (request_id and request_id in self._early):
            return
        self._early.add(request_id)
        self._spawn(self._ask_early(request_id, wanted))

    async def _ask_early(self, request_id: str, wanted: Lacking) -> None:
        try:
            await self._ask(wanted, wanted)
        except LedgerUnavailable as error:
            log.warning("lease_not_asked", reason=str(error))
        finally:
            self._early.discard(request_id)

    async def close(self) -> None:
        """End what is under way; again does nothing."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    # -- asking -----------------------------------------------------------------------------------

    async def _ask(self, wanted: Lacking, least: Lacking, *, fresh: bool = False) -> Money:
        self._watch()
        lacks, short = wanted(), least()
        if not short:
            return Money.THERE
        if not fresh and any(self._is_gone(id) for id in short):
            return Money.GONE
        answers = await self._exchanged({id: Ask(max(lacks.get(id, 0), femto), femto) for id, femto in short.items()})
        if not least():
            return Money.THERE
        found = Money.THERE
        for id in short:
            if answers[id].waits:
                found = Money.AWAITED
            elif not answers[id].got:
                self._gone[id] = self._billing.seq, self._now_s() + DRY_S
                return Money.GONE
        return found  # there is some, and another request was quicker: to be asked for again

    def _is_gone(self, quota: str) -> bool:
        seq, until_s = self._gone.get(quota, (-1, 0.0))
        stands = seq == self._billing.seq and self._now_s() < until_s
        if not stands:
            self._gone.pop(quota, None)
        return stands

    async def _exchanged(self, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        """Join the next exchange: all that is asked for while one is under way goes into one."""
        for id, ask in asks.items():
            before = self._asks.get(id)
            both = ask if before is None else Ask(before.femto + ask.femto, min(before.least, ask.least))
            self._asks[id] = both
        if self._answers is None:
            self._answers = asyncio.get_running_loop().create_future()
            self._spawn(self._exchange())
        return await asyncio.shield(self._answers)

    async def _exchange(self) -> None:
        """One exchange after the other, as long as anything is asked for."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            asks, answers, self._asks, self._answers = self._asks, self._answers, {}, None
            assert answers is not None
            try:
                found = await loop.run_in_executor(self._thread, self._billing.exchange, asks)
            except asyncio.CancelledError:
                answers.cancel()
                raise
            except Exception as error:
                answers.set_exception(error)
                answers.exception()  # whoever asked may be gone
            else:
                answers.set_result(found)

    # -- giving -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Who has leased looks whether others are short."""
        if not self._watching:
            self._watching = True
            self._spawn(self._give())

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(POLL_S)
            with suppress(LedgerUnavailable):  # the heartbeat tells
                await loop.run_in_executor(self._thread, self._billing.give_what_is_wanted)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
