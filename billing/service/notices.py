"""What the books say by themselves, once each: a grant expires, a balance wants a top-up, a threshold is reached, a
failed payment has its next consequence.

Decided from the folded log and the time, while the log is held by this writer alone: so of several gateways that look
at once one writes a notice, and the others find it written. A kill between a charge and its notices loses none: whoever
looks next finds them due.
"""

from __future__ import annotations

from billing.books import new_event
from billing.grants import GrantExpired
from billing.leases import LeaseTable
from billing.ledger import QuotaExhausted, TopUpRequested
from billing.service.suspending import SuspensionService
from billing.store import NewEvent

NOTICER = "notices"  # the actor of what the books say by themselves
AGAIN_US = 1_000_000  # from one look at what waits for other gateways to the next


class NoticeService(SuspensionService):
    """Notices. `notice` is called after each batch of charges and every few seconds."""

    _expiries_from_us = 0

    def notice(self) -> int:
        """Write what is due: how many events. Touches no disk when nothing is."""
        with self._writing:
            with self._state:
                self._quotas.prune()
                if not self._due(self._clock(), None):
                    self._looked()
                    return 0
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)
                holders = LeaseTable(log.connection).holders().values()
                others_us = min((one.recorded_us for one in holders if one.gateway != self._gateway), default=None)
                with self._state:
                    due, wanting = self._due(self._clock(), others_us), set(self._wanting)
                rows = log.append(due, actor=NOTICER, time_us=self._clock())
            self._fold(rows)
            with self._state:
                self._looked()
                self._wanting -= wanting
        return len(rows)

    def _looked(self) -> None:
        """Nothing is due for what has moved so far."""
        self._books.ledger.told()
        self._books.budgets.told()

    def exhausted(self, quota_id: str) -> None:
        """A request was refused or stopped for want of this quota: to be told by the next `notice`."""
        with self._state:
            quota = self._quotas.find(quota_id)
            if quota_id not in self._books.ledger.account(quota.tenant).exhausted:
                self._wanting.add(quota_id)

    def _due(self, now_us: int, others_us: int | None) -> list[NewEvent]:
        """`others_us`: up to when all other gateways' requests are recorded. `_state` is held."""
        return [
            *self._expiries(now_us, others_us),
            *self._top_ups(now_us),
            *self._thresholds(now_us),
            *self._at_their_end(now_us),
            *self._dunnings_due(now_us),
        ]

    def _expiries(self, now_us: int, others_us: int | None) -> list[NewEvent]:
        """Grants past their expiry, once no request that began before it can turn up any more."""
        past = [pair for pair in self._books.ledger.expiring.items() if self._past(*pair, now_us)]
        if not past or now_us < self._expiries_from_us:
            return []
        recorded_us = self._recorded_until_us(now_us)
        if others_us is not None and others_us < recorded_us:
            recorded_us = others_us
            self._expiries_from_us = now_us + AGAIN_US  # another gateway may take its time
        found = []
        for grant_id, tenant in past:
            if self._past(grant_id, tenant, recorded_us):
                left = self._books.ledger.account(tenant).credit.grants[grant_id].left
                fact = GrantExpired(grant_id=grant_id, tenant=tenant, amount_femto=str(left), at_us=now_us)
                found.append(new_event(f"tenant:{tenant}", fact))
        return found

    def _past(self, grant_id: str, tenant: str, time_us: int) -> bool:
        expires_us = self._books.ledger.account(tenant).credit.grants[grant_id].grant.expires_us
        return expires_us is not None and expires_us <= time_us

    def _recorded_until_us(self, now_us: int) -> int:
        """All of this process's requests that began earlier are recorded; `_state` is held."""
        pending = (one.ts_us for one in self._books.ledger.pending.values())
        oldest_us = min(pending, default=now_us)
        held_us = self._holds.oldest_us()
        return min(oldest_us, now_us if held_us is None else held_us, now_us)

    def _top_ups(self, now_us: int) -> list[NewEvent]:
        found = []
        for id, balance in self._books.ledger.due(now_us):
            tenant = self._books.accounts.tenant(id)
            assert tenant.top_up is not None
            fact = TopUpRequested(
                id=self._new_id("topup"),
                tenant=id,
                amount=tenant.top_up.amount,
                currency=tenant.currency,
                threshold=tenant.top_up.threshold,
                balance_femto=str(balance),
                at_us=now_us,
            )
            found.append(new_event(f"tenant:{id}", fact))
        return found

    def _thresholds(self, now_us: int) -> list[NewEvent]:
        return [new_event(f"tenant:{fact.tenant}", fact) for fact in self._books.budgets.due(now_us)]

    def _at_their_end(self, now_us: int) -> list[NewEvent]:
        found = []
        for quota_id in self._wanting:
            quota = self._quotas.find(quota_id)
            if quota.tenant not in self._books.accounts.tenants:
                continue  # of a budget that was taken away meanwhile
            if quota_id in self._books.ledger.account(quota.tenant).exhausted:
                continue
            fact = QuotaExhausted(
                quota=quota_id,
                tenant=quota.tenant,
                budget=quota.budget,
                left_femto=str(quota.left_at(now_us)),
                currency=self._books.accounts.tenant(quota.tenant).currency,
                at_us=now_us,
            )
            found.append(new_event(f"tenant:{quota.tenant}", fact))
        return found
