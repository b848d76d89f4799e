"""Holds: the part of a balance that running requests may still cost.

A hold covers the prompt at its dearest and a number of completion tokens; the engine is never allowed a
token that is not covered. So the sum of what is billed never exceeds what was granted, however many
requests run at once.

Pure and in memory: a hold dies with its process, and its request is then settled from the journal.
Does not know: prices' rules, the store, the engine.
"""

from __future__ import annotations

import msgspec

from billing.checks import Faults
from billing.errors import Conflict, InsufficientCredits, NotFound
from billing.ledger import Account, Ledger
from billing.money import cost
from billing.prices import Rate


class Hold(msgspec.Struct, frozen=True):
    """What of a request is covered: the whole prompt and so many completion tokens over all choices."""

    covered_tokens: int
    complete: bool  # all that was wanted is covered


class _Open:
    """A hold that stands. `prompt_femto` + `covered` x completion price is what it keeps."""

    __slots__ = ("account", "covered", "prompt_femto", "prompt_tokens", "rate")

    def __init__(self, account: Account, rate: Rate, prompt_tokens: int, covered: int) -> None:
        self.account = account
        self.rate = rate
        self.prompt_tokens = prompt_tokens
        self.prompt_femto = cost(prompt_tokens, rate.dearest_prompt())
        self.covered = covered

    @property
    def femto(self) -> int:
        return self.prompt_femto + cost(self.covered, self.rate.completion)


class Holds:
    """Every hold that stands, by request id."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    def open(self, tenant: str, request_id: str, rate: Rate, prompt_tokens: int, want_tokens: int) -> Hold:
        """Cover the prompt and up to `want_tokens`, at least one where any is wanted.

        Raises `InsufficientCredits` (nothing is kept then), `Invalid`, or `Conflict` for an id that has a hold.
        """
        _check_counts(prompt_tokens, want_tokens)
        if request_id in self._open:
            raise Conflict("this request has a hold already")
        account = self._ledger.account(tenant)
        hold = _Open(account, rate, prompt_tokens, 0)
        needed = hold.prompt_femto + cost(min(want_tokens, 1), rate.completion)
        if needed > 0 and account.available < needed:
            raise InsufficientCredits(needed, account.available)
        hold.covered = _affordable(account.available - hold.prompt_femto, rate.completion, want_tokens)
        account.held += hold.femto
        self._open[request_id] = hold
        return Hold(hold.covered, hold.covered == want_tokens)

    def extend(self, request_id: str, want_tokens_total: int) -> Hold:
        """Cover as many of `want_tokens_total` as the balance bears; never fewer than before."""
        hold = self._find(request_id)
        more = max(want_tokens_total - hold.covered, 0)
        more = _affordable(hold.account.available, hold.rate.completion, more)
        hold.covered += more
        hold.account.held += cost(more, hold.rate.completion)
        return Hold(hold.covered, hold.covered >= want_tokens_total)

    def reprice_prompt(self, request_id: str, prompt: int, cached: int) -> None:
        """Free what the true cached count makes the prompt cheaper than its dearest; never holds more.

        Prompt tokens not computed yet stay at their dearest. An unknown request has nothing to free.
        """
        hold = self._open.get(request_id)
        if hold is None or not 0 <= cached <= prompt:
            return
        known = cost(prompt - cached, hold.rate.prompt) + cost(cached, hold.rate.cached)
        to_come = cost(max(hold.prompt_tokens - prompt, 0), hold.rate.dearest_prompt())
        femto = min(hold.prompt_femto, known + to_come)
        hold.account.held -= hold.prompt_femto - femto
        hold.prompt_femto = femto

    def release(self, request_id: str) -> int:
        """Give back all of a hold: the femto-units it kept, 0 for an unknown request."""
        hold = self._open.pop(request_id, None)
        if hold is None:
            return 0
        hold.account.held -= hold.femto
        return hold.femto

    def _find(self, request_id: str) -> _Open:
        try:
            return self._open[request_id]
        except KeyError:
            raise NotFound("hold", request_id) from None


def _affordable(femto: int, price: int, want: int) -> int:
    """How many of `want` tokens the money pays for; all of them where they cost nothing."""
    return want if price == 0 else min(want, max(femto, 0) // price)


def _check_counts(prompt_tokens: int, want_tokens: int) -> None:
    faults = Faults()
    for field, count in (("prompt_tokens", prompt_tokens), ("want_tokens", want_tokens)):
        if count < 0:
            faults.add(field, "must not be negative")
    faults.raise_if_any()
