"""Credit grants: what a tenant was given, in which order it is used up, and what of it expires.

A charge uses grants by priority, then by expiry, then by age. A grant pays for requests that began before it expires;
what is left when nothing older can turn up any more expires as one event, once. What no grant covers is a debt, which
the next grant pays first.

Pure. Does not know: usage, holds, whether the tenant pays before or after.
"""

from __future__ import annotations

from bisect import insort

import msgspec

from billing.checks import AMOUNT_MAX_FEMTO, Faults
from billing.money import parse_amount

PRIORITY = 50
PRIORITY_MAX = 100
_NEVER = 1 << 63  # sorts behind every expiry


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Credits given to a tenant; the amount is exact decimal text. A lower priority is used first."""

    id: str
    tenant: str
    amount: str
    currency: str
    reason: str
    created_us: int
    priority: int = PRIORITY
    expires_us: int | None = None  # pays for no request that begins then or later
    top_up: str = ""  # the request for a top-up that this answers


class CreditGranted(msgspec.Struct, frozen=True, kw_only=True, tag="credit.granted"):
    grant: Grant


class GrantExpired(msgspec.Struct, frozen=True, kw_only=True, tag="grant.expired"):
    """What was left of a grant when nothing that it could pay for was open any more; at most once for a grant."""

    grant_id: str
    tenant: str
    amount_femto: str
    at_us: int


GrantFact = CreditGranted | GrantExpired


class GrantState(msgspec.Struct, kw_only=True):
    """One grant and what became of it: amount = used + expired + left."""

    grant: Grant
    amount: int
    left: int
    expired: int = 0
    closed: bool = False  # its expiry stands in the log

    @property
    def used(self) -> int:
        return self.amount - self.left - self.expired

    def pays_at(self, ts_us: int) -> bool:
        """Whether it pays for a request that begins at this time."""
        return self.grant.expires_us is None or ts_us < self.grant.expires_us


class Credit:
    """One tenant's grants. Σ left - debt = granted - used up - expired."""

    __slots__ = ("_live", "debt", "grants")

    def __init__(self) -> None:
        self.grants: dict[str, GrantState] = {}  # all of them, by age
        self._live: list[tuple[int, int, int, GrantState]] = []  # with something left, in the order of their use
        self.debt = 0

    def add(self, grant: Grant) -> None:
        amount = parse_amount(grant.amount)
        paid = max(0, min(self.debt, amount))  # below 0 it is a credit: what an invoice gave back
        self.debt -= paid
        state = GrantState(grant=grant, amount=amount, left=amount - paid)
        age = len(self.grants)
        self.grants[grant.id] = state
        if state.left:
            expires_us = _NEVER if grant.expires_us is None else grant.expires_us
            insort(self._live, (grant.priority, expires_us, age, state))

    def use(self, amount: int, ts_us: int) -> int:
        """Pay for a request that began at `ts_us`; what no grant covers."""
        emptied = False
        for *_, state in self._live:
            if amount == 0:
                break
            if state.pays_at(ts_us):
                paid = min(state.left, amount)
                state.left -= paid
                amount -= paid
                emptied = emptied or not state.left
        if emptied:
            self._drop_empty()
        return amount

    def expire(self, grant_id: str) -> None:
        """What is left of a grant is gone."""
        state = self.grants[grant_id]
        state.expired += state.left
        state.left, state.closed = 0, True
        self._drop_empty()

    def spendable(self, now_us: int) -> int:
        """What a request that begins now may use, less what is owed; below 0 where more was charged than given."""
        return sum(state.left for *_, state in self._live if state.pays_at(now_us)) - self.debt

    def next_expiry_us(self, now_us: int) -> int | None:
        """When a grant that pays now pays no more."""
        times = (state.grant.expires_us for *_, state in self._live)
        return min((time for time in times if time is not None and time > now_us), default=None)

    def past(self, now_us: int) -> list[GrantState]:
        """Grants that pay no more and have something left."""
        return [state for *_, state in self._live if not state.pays_at(now_us)]

    def _drop_empty(self) -> None:
        self._live = [entry for entry in self._live if entry[3].left]


def check_grant(grant: Grant, tenant_currency: str) -> None:
    """Raise `Invalid` with every fault."""
    faults = Faults()
    femto = faults.money("amount", grant.amount, parse_amount, AMOUNT_MAX_FEMTO)
    if femto == 0 and not faults.found:
        faults.add("amount", "must be more than 0")
    if grant.currency != tenant_currency:
        faults.add("currency", f"must be the tenant's, {tenant_currency}")
    faults.text("reason", grant.reason)
    if not 0 <= grant.priority <= PRIORITY_MAX:
        faults.add("priority", f"must lie between 0 and {PRIORITY_MAX}; lower is used first")
    if grant.expires_us is not None:
        faults.time("expires_at", grant.expires_us)
        if grant.expires_us <= grant.created_us:
            faults.add("expires_at", "must lie in the future")
    faults.raise_if_any()
