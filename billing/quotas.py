"""Quotas: every sum that a request may spend of, and how much of each this process has committed.

A quota is a prepaid tenant's balance, or a hard budget in one of its windows. A request spends of all that apply to it,
so what it may still cost is the least of them. `committed` is what this process holds and has settled without it being
recorded yet. A process alone on its ledger may commit all that the books leave; one of several may commit its lease
(`billing/leases.py`): a part of the quota that is its own until it gives it back, and of which no other one spends.

What lowers what the books leave and takes nothing from a lease (a smaller budget, a true-up, usage that was rated
late) makes what is leased and idle void until the lease was fitted anew: several may have leased more than is left.

In memory. Knows a clock that goes on while the machine sleeps, for a lease that was not renewed in time. Does not know:
prices, the store, who the others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from billing.accounts import Accounts, BillingMode
from billing.budgets import Budget, Budgets
from billing.ledger import BALANCE, BUDGET, Ledger, UsageRated

NO_LIMIT = 1 << 200


def elapsed_s() -> float:
    """Seconds since some instant: no step of the clock moves them, and they pass while the machine is suspended."""
    return time.clock_gettime(_CLOCK)


_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the latter stands still in a suspended Linux


class Fence:
    """From this time on, by `elapsed`, the leases of this process may be others': until they are renewed."""

    __slots__ = ("_elapsed", "from_s")

    def __init__(self, elapsed: Callable[[], float]) -> None:
        self._elapsed = elapsed
        self.from_s = float("inf")

    @property
    def closed(self) -> bool:
        return self._elapsed() >= self.from_s


class Quota:
    """One sum. `left_at(now)` is what the books leave of it, to all processes together; amounts in femto-units."""

    __slots__ = (
        "_fence",
        "budget",
        "held",
        "id",
        "lease",
        "left_at",
        "pending",
        "tenant",
        "until_us",
        "used_us",
    )

    def __init__(self, id: str, tenant: str, budget: str, left_at: Callable[[int], int], fence: Fence) -> None:
        self._fence = fence
        self.id = id
        self.tenant = tenant
        self.budget = budget  # its name; empty for the balance
        self.left_at = left_at
        self.held = 0
        self.pending = 0
        self.lease: int | None = None  # None: all that the books leave
        self.until_us = NO_LIMIT  # from then on nothing more may be committed under the lease as it is
        self.used_us = 0  # when something was last held of it

    @property
    def committed(self) -> int:
        return self.held + self.pending

    @property
    def idle(self) -> int:
        """What is leased and not committed."""
        return max((self.lease or 0) - self.committed, 0)

    def available(self, now_us: int) -> int:
        """What may be committed beside what is; below 0 where more is than may be."""
        left = self.left_at(now_us)
        if self.lease is not None:
            usable = now_us < self.until_us and not self._fence.closed
            left = min(left, self.lease if usable else self.committed)
        return left - self.committed


Quotas = tuple[Quota, ...]
"""All that one request spends of; none: nothing limits it."""


def least(quotas: Iterable[Quota], now_us: int) -> tuple[int, Quota | None]:
    """What is available of all of them, and the one that says so; of several the first."""
    found: tuple[int, Quota | None] = (NO_LIMIT, None)
    for quota in quotas:
        available = quota.available(now_us)
        if available < found[0]:
            found = available, quota
    return found


class QuotaBook:
    """The quotas that this process has met, by id."""

    def __init__(
        self, accounts: Accounts, ledger: Ledger, budgets: Budgets, elapsed: Callable[[], float] = elapsed_s
    ) -> None:
        self._accounts = accounts
        self._ledger = ledger
        self._budgets = budgets
        self._by_id: dict[str, Quota] = {}
        self.fence = Fence(elapsed)
        self.leased = False  # whether a new one begins with a lease of nothing

    def applying(self, tenant_id: str, key_id: str, adapter: str, ts_us: int) -> Quotas:
        """What a request by this key for this adapter spends of when it begins at `ts_us`."""
        tenant = self._accounts.tenants.get(tenant_id)
        if tenant is None:
            return ()
        found = [] if tenant.billing_mode is BillingMode.POSTPAID else [self._balance(tenant_id)]
        for budget in self._budgets.applying(tenant_id, key_id, adapter):
            if budget.hard:
                found.append(self._budget(budget, self._budgets.window(budget, ts_us).label))
        return tuple(found)

    def get(self, quota_id: str) -> Quota | None:
        return self._by_id.get(quota_id)

    def met(self, budget_id: str, window: str) -> Quota | None:
        """A budget's quota, if a request has spent of it here."""
        return self._by_id.get(f"{BUDGET}{budget_id}:{window}")

    def all(self) -> list[Quota]:
        return list(self._by_id.values())

    def find(self, quota_id: str) -> Quota:
        """The quota of an id, met here or not."""
        if quota_id.startswith(BALANCE):
            return self._balance(quota_id.removeprefix(BALANCE))
        budget_id, label = quota_id.removeprefix(BUDGET).rsplit(":", 1)
        budget = self._budgets.find(budget_id)
        tenant, name = ("", "") if budget is None else (budget.tenant, budget.name)
        return self._by_id.get(quota_id) or self._made(quota_id, tenant, name, lambda _: self._left(budget_id, label))

    def recorded(self, fact: UsageRated) -> None:
        """A charge of this gateway's stands in the log: so much of its leases is used up."""
        amount = int(fact.amount_femto)
        for quota in self.applying(fact.tenant, fact.key_id, fact.adapter, fact.ts_us):
            if quota.lease is not None:
                quota.lease = max(quota.lease - amount, 0)

    def unfit(self, tenants: Collection[str]) -> None:
        """The books leave these tenants another sum: what is leased and idle is void until it was fitted anew."""
        for quota in self._by_id.values():
            if quota.lease is not None and quota.tenant in tenants:
                quota.until_us = 0

    def prune(self) -> None:
        """Let go of what nothing is committed under and nothing leased: windows that are over, tenants that left."""
        for quota_id in list(self._by_id):
            self.forget(quota_id)

    def lease_all(self) -> None:
        """From now on only what is leased may be committed; what is committed already is."""
        self.leased = True
        for quota in self._by_id.values():
            quota.lease = quota.committed

    def until_us(self, quota: Quota, now_us: int) -> int:
        """How long the books leave at least what they do now: until the next grant expires."""
        if not quota.id.startswith(BALANCE):
            return NO_LIMIT
        return self._ledger.account(quota.tenant).credit.next_expiry_us(now_us) or NO_LIMIT

    def forget(self, quota_id: str) -> None:
        """Nothing is committed under it and nothing leased."""
        quota = self._by_id.get(quota_id)
        if quota is not None and not quota.committed and not quota.lease:
            del self._by_id[quota_id]

    def _balance(self, tenant_id: str) -> Quota:
        id = f"{BALANCE}{tenant_id}"
        return self._by_id.get(id) or self._made(id, tenant_id, "", self._ledger.account(tenant_id).credit.spendable)

    def _budget(self, budget: Budget, label: str) -> Quota:
        id = f"{BUDGET}{budget.id}:{label}"
        return self._by_id.get(id) or self._made(id, budget.tenant, budget.name, lambda _: self._left(budget.id, label))

    def _left(self, budget_id: str, label: str) -> int:
        budget = self._budgets.find(budget_id)
        if budget is None or not budget.hard:  # it was taken away: it stops nobody any more
            return NO_LIMIT
        return budget.femto - self._budgets.spent(budget_id, label)

    def _made(self, id: str, tenant: str, budget: str, left_at: Callable[[int], int]) -> Quota:
        quota = self._by_id[id] = Quota(id, tenant, budget, left_at, self.fence)
        quota.lease = 0 if self.leased else None
        return quota
