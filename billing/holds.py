"""Holds: the part of a balance that running requests may still cost.

A hold covers the prompt at its dearest and a number of completion tokens; the engine is never allowed a
token that is not covered. So the sum of what is billed never exceeds what was granted, however many
requests run at once. It counts against every quota that applies to its request (`billing/quotas.py`), so the balance
and each hard budget are kept to.

Pure and in memory: a hold dies with its process, and its request is then settled from the journal.
Does not know: prices' rules, the store, the engine.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from billing.checks import Faults
from billing.errors import Conflict, InsufficientCredits, NotFound
from billing.ledger import Account, Applying, Ledger, Spender
from billing.money import cost
from billing.prices import Rate
from billing.quotas import Quota, Quotas, least


class Hold(msgspec.Struct, frozen=True):
    """What of a request is covered: the whole prompt and so many completion tokens over all choices."""

    covered_tokens: int
    complete: bool  # all that was wanted is covered


class _Open:
    """A hold that stands. `prompt_femto` + `covered` x completion price is what it keeps of each of its quotas."""

    __slots__ = ("account", "covered", "prompt_femto", "prompt_tokens", "quotas", "rate", "ts_us", "who")

    def __init__(
        self, account: Account, who: Spender, quotas: Quotas, rate: Rate, prompt_tokens: int, ts_us: int
    ) -> None:
        self.account = account
        self.who = who
        self.quotas = quotas
        self.rate = rate
        self.ts_us = ts_us
        self.prompt_tokens = prompt_tokens
        self.prompt_femto = cost(prompt_tokens, rate.dearest_prompt()) + rate.fixed_femto
        self.covered = 0

    @property
    def femto(self) -> int:
        return self.prompt_femto + cost(self.covered, self.rate.completion)

    def keep(self, femto: int) -> None:
        """Hold so much more, or less."""
        self.account.held += femto
        for quota in self.quotas:
            quota.held += femto

    def move(self, quotas: Quotas) -> None:
        """Count against these quotas instead."""
        for quota in self.quotas:
            quota.held -= self.femto
        self.quotas = quotas
        for quota in quotas:
            quota.held += self.femto


class Holds:
    """Every hold that stands, by request id."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    def open(
        self,
        who: Spender,
        request_id: str,
        quotas: Quotas,
        rate: Rate,
        prompt_tokens: int,
        want_tokens: int,
        *,
        ts_us: int,
        now_us: int,
    ) -> Hold:
        """Cover the prompt and up to `want_tokens`, at least one where any is wanted. `ts_us`: when the request began.

        Raises `InsufficientCredits` (nothing is kept then), `Invalid`, or `Conflict` for an id that has a hold.
        """
        _check_counts(prompt_tokens, want_tokens)
        if request_id in self._open:
            raise Conflict("this request has a hold already")
        hold = _Open(self._ledger.account(who.tenant), who, quotas, rate, prompt_tokens, ts_us)
        available, short = least(quotas, now_us)
        needed = hold.prompt_femto + cost(min(want_tokens, 1), rate.completion)
        if needed > 0 and short is not None and available < needed:
            raise InsufficientCredits(needed, available, short.id, short.budget)
        hold.covered = _affordable(available - hold.prompt_femto, rate.completion, want_tokens)
        hold.keep(hold.femto)
        for quota in quotas:
            quota.used_us = now_us
        self._open[request_id] = hold
        return Hold(hold.covered, hold.covered == want_tokens)

    def extend(self, request_id: str, want_tokens_total: int, *, now_us: int) -> Hold:
        """Cover as many of `want_tokens_total` as the quotas bear; never fewer than before."""
        hold = self._find(request_id)
        more = max(want_tokens_total - hold.covered, 0)
        more = _affordable(least(hold.quotas, now_us)[0], hold.rate.completion, more)
        hold.covered += more
        hold.keep(cost(more, hold.rate.completion))
        return Hold(hold.covered, hold.covered >= want_tokens_total)

    def missing(self, request_id: str, want_tokens: int, *, now_us: int) -> dict[str, int]:
        """The quotas that do not bear so many tokens more → what they lack; nothing for an unknown request."""
        hold = self._open.get(request_id)
        if hold is None:
            return {}
        return missing(hold.quotas, cost(want_tokens, hold.rate.completion), now_us)

    def attach(self, tenants: Collection[str], applying: Applying) -> None:
        """Count what runs against the quotas that apply now: a budget was set, changed or taken away meanwhile."""
        for hold in self._open.values():
            if hold.who.tenant in tenants:
                quotas = applying(*hold.who, hold.ts_us)
                if quotas != hold.quotas:
                    hold.move(quotas)

    def oldest_us(self) -> int | None:
        """When the oldest request with a hold began."""
        return min((hold.ts_us for hold in self._open.values()), default=None)

    def reprice_prompt(self, request_id: str, prompt: int, cached: int) -> None:
        """Free what the true cached count makes the prompt cheaper than its dearest; never holds more.

        Prompt tokens not computed yet stay at their dearest. An unknown request has nothing to free.
        """
        hold = self._open.get(request_id)
        if hold is None or not 0 <= cached <= prompt:
            return
        known = cost(prompt - cached, hold.rate.prompt) + cost(cached, hold.rate.cached)
        to_come = cost(max(hold.prompt_tokens - prompt, 0), hold.rate.dearest_prompt())
        femto = min(hold.prompt_femto, known + to_come + hold.rate.fixed_femto)
        hold.keep(femto - hold.prompt_femto)
        hold.prompt_femto = femto

    def release(self, request_id: str) -> int:
        """Give back all of a hold: the femto-units it kept, 0 for an unknown request."""
        hold = self._open.pop(request_id, None)
        if hold is None:
            return 0
        hold.keep(-hold.femto)
        return hold.femto

    def _find(self, request_id: str) -> _Open:
        try:
            return self._open[request_id]
        except KeyError:
            raise NotFound("hold", request_id) from None


def missing(quotas: Quotas, femto: int, now_us: int) -> dict[str, int]:
    """Which of the quotas do not bear so much, and what each of them lacks."""
    short: dict[str, Quota] = {quota.id: quota for quota in quotas if quota.available(now_us) < femto}
    return {id: femto - quota.available(now_us) for id, quota in short.items()}


def _affordable(femto: int, price: int, want: int) -> int:
    """How many of `want` tokens the money pays for; all of them where they cost nothing."""
    return want if price == 0 else min(want, max(femto, 0) // price)


def _check_counts(prompt_tokens: int, want_tokens: int) -> None:
    faults = Faults()
    for field, count in (("prompt_tokens", prompt_tokens), ("want_tokens", want_tokens)):
        if count < 0:
            faults.add(field, "must not be negative")
    faults.raise_if_any()
