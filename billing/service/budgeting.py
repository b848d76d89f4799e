"""Budgets: set, changed, taken away, and how far each one is."""

from __future__ import annotations

from typing import Any

import msgspec

from billing.books import new_event
from billing.budgets import (
    BUDGETS_PER_TENANT,
    THRESHOLDS,
    Budget,
    BudgetPeriod,
    BudgetRemoved,
    BudgetScope,
    BudgetSet,
    Window,
)
from billing.errors import Conflict, Invalid
from billing.money import format_amount, parse_amount
from billing.service.shell import Idempotency, Shell, page
from billing.store import NewEvent

CHANGEABLE = ("name", "amount", "hard", "thresholds")


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """A budget in its window of now; femto-units. `held` is what runs on this gateway may still cost."""

    budget: Budget
    window: Window
    spent_femto: int
    held_femto: int

    @property
    def left_femto(self) -> int:
        return self.budget.femto - self.spent_femto - self.held_femto


class BudgetService(Shell):
    """What a tenant, a key or an adapter may spend in a period."""

    def set_budget(
        self,
        tenant_id: str,
        *,
        name: str,
        scope: BudgetScope,
        period: BudgetPeriod,
        amount: str,
        currency: str,
        subject: str = "",
        hard: bool = True,
        thresholds: tuple[int, ...] = THRESHOLDS,
        idempotency: Idempotency | None = None,
    ) -> Budget:
        """A new budget, which counts what is charged from now on. Raises `Invalid`, `NotFound`, `Conflict`."""

        def decide(time_us: int) -> tuple[list[NewEvent], Budget]:
            tenant = self._books.accounts.tenant(tenant_id)
            budget = Budget(
                id=self._new_id("budget"),
                tenant=tenant_id,
                name=name,
                scope=scope,
                subject=subject,
                period=period,
                amount=amount,
                currency=currency,
                hard=hard,
                thresholds=thresholds,
                created_us=time_us,
            )
            budget.check(tenant.currency)
            self._check_subject(budget)
            if len(self._books.budgets.of(tenant_id)) >= BUDGETS_PER_TENANT:
                raise Conflict(f"a tenant has at most {BUDGETS_PER_TENANT} budgets")
            budget = msgspec.structs.replace(budget, amount=format_amount(parse_amount(amount)))
            return [new_event(f"tenant:{tenant_id}", BudgetSet(budget=budget))], budget

        return self._command("set_budget", idempotency, Budget, decide)[0]

    def change_budget(self, budget_id: str, *, idempotency: Idempotency | None = None, **changes: Any) -> Budget:
        """Change name, amount, hard or thresholds; what was spent stays counted. Raises `Invalid`, `NotFound`."""

        def decide(_: int) -> tuple[list[NewEvent], Budget]:
            before = self._books.budgets.get(budget_id)
            if unknown := [field for field in changes if field not in CHANGEABLE]:
                raise Invalid([(field, f"cannot be changed; {', '.join(CHANGEABLE)} can") for field in unknown])
            budget = msgspec.structs.replace(before, **changes)
            budget.check(self._books.accounts.tenant(budget.tenant).currency)
            budget = msgspec.structs.replace(budget, amount=format_amount(budget.femto))
            if budget == before:
                return [], budget
            return [new_event(f"tenant:{budget.tenant}", BudgetSet(budget=budget))], budget

        return self._command("change_budget", idempotency, Budget, decide)[0]

    def remove_budget(self, budget_id: str, *, idempotency: Idempotency | None = None) -> Budget:
        """From now on it refuses nothing. Raises `NotFound`."""

        def decide(_: int) -> tuple[list[NewEvent], Budget]:
            budget = self._books.budgets.get(budget_id)
            fact = BudgetRemoved(budget_id=budget_id, tenant=budget.tenant)
            return [new_event(f"tenant:{budget.tenant}", fact)], budget

        return self._command("remove_budget", idempotency, Budget, decide)[0]

    def budget(self, budget_id: str) -> BudgetState:
        """Raises `NotFound`."""
        with self._state:
            return self._budget_state(self._books.budgets.get(budget_id), self._clock())

    def budgets(self, tenant_id: str, limit: int = 100, after: str | None = None) -> list[BudgetState]:
        """A tenant's budgets in the order they were set, its monthly cap first. Raises `NotFound`."""
        with self._state:
            found = page(self._books.budgets.of(tenant_id), lambda budget: budget.id, limit, after)
            now_us = self._clock()
            return [self._budget_state(budget, now_us) for budget in found]

    def _budget_state(self, budget: Budget, now_us: int) -> BudgetState:
        """`_state` is held."""
        window = self._books.budgets.window(budget, now_us)
        quota = self._quotas.met(budget.id, window.label)
        pending, held = (0, 0) if quota is None else (quota.pending, quota.held)
        spent = self._books.budgets.spent(budget.id, window.label)
        return BudgetState(budget=budget, window=window, spent_femto=spent + pending, held_femto=held)

    def _check_subject(self, budget: Budget) -> None:
        """The key is one of the tenant's. An adapter's name may be taken later. Raises `Invalid`."""
        accounts = self._books.accounts
        if budget.scope is BudgetScope.KEY and all(key.id != budget.subject for key in accounts.keys_of(budget.tenant)):
            raise Invalid([("subject", "is not a key of this tenant")])
