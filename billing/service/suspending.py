"""Suspension, and the dunning that leads to it: the commands, and what is due.

A step of a dunning and the suspension that it brings, its end and what that lifts, are rows of one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from billing.books import new_event
from billing.checks import Faults
from billing.dunning import Dunning, DunningEnded, DunningFact, DunningStepped, Outcome, ended
from billing.errors import Conflict
from billing.service.shell import Idempotency, Shell, page
from billing.steps import Policy, StepKind, parse_steps
from billing.store import NewEvent
from billing.suspensions import OPERATOR, Standing, Suspension, SuspensionLifted, SuspensionPlaced


class SuspensionService(Shell):
    """Who is held suspended, by what."""

    def standing(self, tenant_id: str) -> Standing:
        """What holds the tenant suspended, if anything does. Raises `NotFound`."""
        with self._state:
            return self._standing(tenant_id)

    def suspended_count(self) -> int:
        """How many tenants are suspended."""
        with self._state:
            return len(self._books.accounts.suspensions)

    def dunning_count(self) -> int:
        """How many invoices are in dunning."""
        with self._state:
            return len(self._books.dunnings.open)

    def suspend_tenant(self, tenant_id: str, reason: str, *, idempotency: Idempotency | None = None) -> Standing:
        """An operator's own suspension, for a reason that the tenant may read; one that stands keeps its own.

        Raises `Invalid`, `NotFound`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Standing]:
            _check_reason(reason)
            before = self._standing(tenant_id)
            if _held_by(before, OPERATOR):
                return [], before
            fact = SuspensionPlaced(tenant=tenant_id, reason=reason, at_us=time_us)
            mine = Suspension(invoice_id=OPERATOR, reason=reason, since_us=time_us)
            after = Standing(tenant=tenant_id, suspensions=(*before.suspensions, mine))
            return [new_event(f"tenant:{tenant_id}", fact)], after

        return self._command("suspend_tenant", idempotency, Standing, decide)[0]

    def reactivate_tenant(
        self, tenant_id: str, reason: str, *, waive_dunning: bool = False, idempotency: Idempotency | None = None
    ) -> Standing:
        """Lift an operator's suspension; with `waive_dunning` end all of the tenant's dunnings, and what they hold.

        An active tenant stays as it is. Raises `Invalid`, `NotFound`, and `Conflict` where only dunning holds it and is
        not waived.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Standing]:
            _check_reason(reason)
            before = self._standing(tenant_id)
            mine = [one for one in self._books.dunnings.open.values() if one.tenant == tenant_id]
            waived = [ended(one, Outcome.WAIVED, time_us, reason) for one in mine if waive_dunning]
            own = _held_by(before, OPERATOR)
            if before.suspended and not own and not waived:
                invoices = ", ".join(one.invoice_id for one in before.suspensions)
                raise Conflict(f"held by dunning, not by an operator: until {invoices} is paid, void or waived")
            events = self._follow_up(waived)
            after = _without(before, [fact.invoice_id for fact in waived] + [OPERATOR] * own)
            if own:
                fact = SuspensionLifted(tenant=tenant_id, reason=reason, at_us=time_us, active=not after.suspended)
                events.append(new_event(f"tenant:{tenant_id}", fact))
            return events, after

        return self._command("reactivate_tenant", idempotency, Standing, decide)[0]

    def waive_dunning(self, invoice_id: str, reason: str, *, idempotency: Idempotency | None = None) -> Dunning:
        """End an invoice's dunning though it is owed; none begins for it again. What has ended stays as it is.

        Raises `Invalid`, `NotFound`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Dunning]:
            _check_reason(reason)
            dunning = self._books.dunnings.get(invoice_id)
            if dunning.outcome:
                return [], dunning
            fact = ended(dunning, Outcome.WAIVED, time_us, reason)
            return self._follow_up([fact]), dunning.ended_by(fact)

        return self._command("waive_dunning", idempotency, Dunning, decide)[0]

    def dunning(self, invoice_id: str) -> Dunning:
        """Raises `NotFound` for an invoice that never was in dunning."""
        with self._state:
            return self._books.dunnings.get(invoice_id)

    def dunnings(
        self, tenant_id: str | None = None, *, ended: bool = False, limit: int = 100, after: str | None = None
    ) -> list[Dunning]:
        """Those under way, and with `ended` all, in the order of their beginnings. Raises `NotFound` for a tenant."""
        with self._state:
            if tenant_id is not None:
                self._books.accounts.tenant(tenant_id)
            book = self._books.dunnings
            found = [one for one in book.by_invoice.values() if tenant_id in (None, one.tenant)]
            shown = [one for one in found if ended or not one.outcome]
            return page(shown, lambda one: one.invoice_id, limit, after)

    # -- what is due ------------------------------------------------------------------------------

    def _dunnings_due(self, now_us: int) -> list[NewEvent]:
        """`_state` is held."""
        return self._follow_up(self._books.dunnings.due(now_us, self._books.invoices.get, self._policy))

    def _policy(self, tenant_id: str) -> Policy:
        own = self._books.accounts.tenant(tenant_id).dunning_steps
        if own is None:
            return self._dunning
        return Policy(steps=parse_steps(own), ends_uncollectible=self._dunning.ends_uncollectible)

    def _follow_up(self, facts: Sequence[DunningFact]) -> list[NewEvent]:
        """The facts, each with what it places or lifts behind it."""
        events: list[NewEvent] = []
        standings: dict[str, Standing] = {}
        for fact in facts:
            events.append(new_event(f"invoice:{fact.invoice_id}", fact))
            before = standings.get(fact.tenant) or self._standing(fact.tenant)
            if isinstance(fact, DunningStepped) and fact.kind is StepKind.SUSPEND:
                reason = f"Invoice {fact.invoice_id} is not paid."
                placed = SuspensionPlaced(
                    tenant=fact.tenant, reason=reason, at_us=fact.at_us, invoice_id=fact.invoice_id
                )
                events.append(new_event(f"tenant:{fact.tenant}", placed))
            elif isinstance(fact, DunningEnded) and _held_by(before, fact.invoice_id):
                after = standings[fact.tenant] = _without(before, [fact.invoice_id])
                lifted = SuspensionLifted(
                    tenant=fact.tenant,
                    reason=fact.reason or f"Invoice {fact.invoice_id} is {fact.outcome}.",
                    at_us=fact.at_us,
                    active=not after.suspended,
                    invoice_id=fact.invoice_id,
                )
                events.append(new_event(f"tenant:{fact.tenant}", lifted))
        return events

    def _standing(self, tenant_id: str) -> Standing:
        """`_state` or the log is held. Raises `NotFound`."""
        return self._books.accounts.suspensions.standing(self._books.accounts.tenant(tenant_id).id)


def _check_reason(reason: str) -> None:
    faults = Faults()
    faults.text("reason", reason)
    faults.raise_if_any()


def _held_by(standing: Standing, ground: str) -> bool:
    return any(one.invoice_id == ground for one in standing.suspensions)


def _without(standing: Standing, grounds: Sequence[str]) -> Standing:
    left = tuple(one for one in standing.suspensions if one.invoice_id not in grounds)
    return Standing(tenant=standing.tenant, suspensions=left)
