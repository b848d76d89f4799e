"""The money of one running request: its hold, and how many completion tokens the engine may sample under it.

Knows: that a hold covers a number of completion tokens over all parts (prompts) of a request, that it is extended
ahead of need, and what to do when the money is at its end. Does not know: prices, amounts.

At the end of what this gateway has leased a request asks for more (`gateway/lender.py`), ahead of need, so that it
seldom waits. At the end of the money a paused request waits while another one of its tenant still runs, here or on
another gateway: what that one does not use is freed, and may pay for a token here. So nothing that a request still
wanted is left unspent, and when the last running one has ended, all that wait are told that the ceiling is final.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from billing.service import Billing, Hold
from engine.client import Engine
from gateway.lender import POLL_S, Lender, Money

STARVE_S = 10.0
"""Longest wait for another request's money: a safeguard, as the other may be slow and this one keeps its blocks."""


class _Tenant:
    """The parts of one tenant that are not at the end of their money, and the word to those that are."""

    __slots__ = ("changed", "running")

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Purses:
    """All purses of a gateway, by tenant."""

    def __init__(self, billing: Billing, engine: Engine, lender: Lender) -> None:
        self.billing = billing
        self.lender = lender
        self.engine = engine
        self._tenants: dict[str, _Tenant] = {}

    def tenant(self, tenant: str) -> _Tenant:
        return self._tenants.setdefault(tenant, _Tenant())

    def forget(self, tenant: str, part_ids: Iterable[str]) -> None:
        """These parts were refused after all; what was held for them is free."""
        self.tenant(tenant).running.difference_update(part_ids)
        self.tenant(tenant).notify()


class Part:
    """One engine request: how many tokens it may want, its ceiling, and how many it has sampled."""

    __slots__ = ("ceiling", "completion", "finished", "id", "total")

    def __init__(self, id: str, total: int, ceiling: int) -> None:
        self.id = id
        self.total = total
        self.ceiling = ceiling
        self.completion = 0
        self.finished = False

    @property
    def allotted(self) -> int:
        return self.completion if self.finished else self.ceiling


class Purse:
    """One request's hold and the ceilings of its parts."""

    def __init__(
        self, purses: Purses, *, tenant: str, request_id: str, totals: Mapping[str, int], stretch: int, hold: Hold
    ) -> None:
        """`totals`: the engine request of each prompt → the completion tokens it may want, over its choices.

        `hold` is what the door got; it covers at least one token for each of them. `stretch`: how far ahead of need
        it is extended.
        """
        self._purses = purses
        self._tenant = purses.tenant(tenant)
        self._request_id = request_id
        self._stretch = stretch
        self._parts: dict[str, Part] = {}
        self._repriced = False
        spare = hold.covered_tokens - len(totals)
        for id, total in totals.items():
            extra = max(0, min(spare, min(total, stretch) - 1))
            spare -= extra
            self._parts[id] = Part(id, total, 1 + extra)
        self._tenant.running.update(self._parts)

    def ceiling(self, part_id: str) -> int:
        return self._parts[part_id].ceiling

    def progressed(self, part_id: str, prompt: int, cached: int, completion: int, *, prefilled: bool) -> None:
        """A step was done for a part. `prompt` and `cached` are the whole request's, `prefilled`: all of them known."""
        part = self._parts[part_id]
        part.completion = completion
        if not self._repriced and prefilled:
            self._repriced = True
            self._purses.billing.reprice_prompt(self._request_id, prompt, cached)
            self._tenant.notify()
        low = not part.finished and part.ceiling < part.total and part.ceiling - completion <= self._stretch // 2
        if low and not self._extend(part):
            self._purses.lender.soon(self._request_id, lambda: self._lacking(self._stretch))

    async def paused(self, part_id: str) -> None:
        """The part stands at its ceiling: raise it, or wait for what the tenant's others free, or make it final."""
        part, tenant = self._parts[part_id], self._tenant
        tenant.running.discard(part_id)
        tenant.notify()
        give_up_s = asyncio.get_running_loop().time() + STARVE_S
        while not part.finished:
            if part.ceiling > part.completion or self._extend(part):
                self._purses.engine.set_ceiling(part_id, part.ceiling, final=False)
                tenant.running.add(part_id)
                return
            changed, last = tenant.changed, not tenant.running
            money = await self._purses.lender.more(
                lambda: self._lacking(self._stretch), lambda: self._lacking(1), fresh=last
            )
            if money is Money.THERE:
                await asyncio.sleep(0)
                continue
            left_s = give_up_s - asyncio.get_running_loop().time()
            if left_s <= 0 or (last and not tenant.running and money is Money.GONE):
                self._end(part)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if money is Money.GONE else min(left_s, POLL_S)):
                    await changed.wait()

    def finished(self, part_id: str) -> None:
        """The part samples no more."""
        self._parts[part_id].finished = True
        self._tenant.running.discard(part_id)
        self._tenant.notify()

    def settled(self) -> None:
        """The request's hold is released: others may use what it left."""
        self._tenant.notify()

    def _end(self, part: Part) -> None:
        """There is no more money: the part ends where it stands."""
        for quota in self._lacking(1):
            self._purses.billing.exhausted(quota)
        self._purses.engine.set_ceiling(part.id, part.ceiling, final=True)

    def _lacking(self, tokens: int) -> dict[str, int]:
        return self._purses.billing.lacking_more(self._request_id, tokens)

    def _extend(self, part: Part) -> bool:
        """Raise the part's ceiling by a stretch, or by as much as the money covers; False when not by one token."""
        others = sum(other.allotted for other in self._parts.values()) - part.allotted
        want = min(part.total, max(part.ceiling, part.completion) + self._stretch)
        hold = self._purses.billing.extend_hold(self._request_id, others + want)
        covered = min(want, hold.covered_tokens - others)
        if covered <= part.ceiling:
            return False
        part.ceiling = covered
        self._purses.engine.set_ceiling(part.id, covered, final=False)
        return True
