"""Budgets: how much a tenant, one of its keys or one of its adapters may spend in a day, a week or a month.

A window is a day, a week (from Monday) or a month of the tenant's own calendar, and is known by the date it begins on:
so a changed time zone moves a window's ends and keeps what was spent in it. A request counts in the window in which it
began, however long it runs. A hard budget refuses and stops (`billing/quotas.py`); of every budget it is told once a
window when a threshold is reached. A budget counts the charges that are recorded after it was set; a changed one keeps
its count.

A postpaid tenant's monthly cap is a hard budget of its months that nobody has to set apart.

Pure. Does not know: holds, the store, whom to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import lru_cache

import msgspec

from billing.accounts import Accounts, BillingMode, Tenant
from billing.checks import AMOUNT_MAX_FEMTO, Faults
from billing.errors import NotFound
from billing.money import parse_amount
from billing.periods import day_start_us, zone

BUDGETS_PER_TENANT = 100
THRESHOLDS_MAX = 10
PERCENT_MAX = 1000
THRESHOLDS = (80, 100)
KEPT_WINDOWS = 40  # of each budget; what turns up later than that counts in no budget that could still refuse
CAP = "cap:"  # what the id of a tenant's monthly cap begins with; no other budget's id has a colon

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_femto = lru_cache(maxsize=4096)(parse_amount)  # holds ask at every stretch


class BudgetScope(StrEnum):
    """Whose spending a budget limits."""

    TENANT = "tenant"
    KEY = "key"
    ADAPTER = "adapter"


class BudgetPeriod(StrEnum):
    """How long a budget's windows are."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """`subject` is a key's id or an adapter's name, empty for the tenant; `thresholds` are percents of the amount."""

    id: str
    tenant: str
    name: str
    scope: BudgetScope
    subject: str = ""
    period: BudgetPeriod
    amount: str  # exact decimal text
    currency: str
    hard: bool = True
    thresholds: tuple[int, ...] = THRESHOLDS
    created_us: int

    @property
    def femto(self) -> int:
        return _femto(self.amount)

    def check(self, tenant_currency: str) -> None:
        """Raise `Invalid` with every fault."""
        faults = Faults()
        faults.text("name", self.name, 64)
        faults.money("amount", self.amount, parse_amount, AMOUNT_MAX_FEMTO)
        if self.currency != tenant_currency:
            faults.add("currency", f"must be the tenant's, {tenant_currency}")
        if (self.scope is BudgetScope.TENANT) != (not self.subject):
            faults.add("subject", "must be a key's id or an adapter's name, and absent for the tenant's own budget")
        if len(self.thresholds) > THRESHOLDS_MAX or len(set(self.thresholds)) != len(self.thresholds):
            faults.add("thresholds", f"must be at most {THRESHOLDS_MAX} different percents")
        if any(not 1 <= percent <= PERCENT_MAX for percent in self.thresholds):
            faults.add("thresholds", f"must lie between 1 and {PERCENT_MAX} percent")
        faults.raise_if_any()

    def limits(self, key_id: str, adapter: str) -> bool:
        """Whether a request by this key for this adapter counts."""
        match self.scope:
            case BudgetScope.TENANT:
                return True
            case BudgetScope.KEY:
                return self.subject == key_id
            case BudgetScope.ADAPTER:
                return self.subject == adapter


class Window(msgspec.Struct, frozen=True):
    """[start_us, end_us); `label` is the date it begins on, as 2026-11-30."""

    label: str
    start_us: int
    end_us: int


class BudgetSet(msgspec.Struct, frozen=True, kw_only=True, tag="budget.set"):
    budget: Budget  # as it is afterwards


class BudgetRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="budget.removed"):
    budget_id: str
    tenant: str


class BudgetReached(msgspec.Struct, frozen=True, kw_only=True, tag="budget.reached"):
    """A threshold was reached by recorded charges: told once for a window, and again after the amount was changed."""

    budget_id: str
    tenant: str
    name: str
    window: str
    window_start_us: int
    window_end_us: int
    percent: int
    spent_femto: str
    amount: str
    currency: str
    hard: bool
    at_us: int


BudgetFact = BudgetSet | BudgetRemoved | BudgetReached


def window_at(ts_us: int, period: BudgetPeriod, timezone: str) -> Window:
    """The window that has the instant: from the first instant of its first day to that of the next window's."""
    local = (_EPOCH + timedelta(microseconds=ts_us)).astimezone(zone(timezone)).date()
    first = _first_day(local, period)
    start, end = _day_start(first, timezone), _day_start(_next(first, period), timezone)
    if ts_us >= end:  # the clock was put back over midnight: the day after has begun already
        first = _next(first, period)
        start, end = end, _day_start(_next(first, period), timezone)
    return Window(first.isoformat(), start, end)


def _first_day(day: date, period: BudgetPeriod) -> date:
    match period:
        case BudgetPeriod.DAY:
            return day
        case BudgetPeriod.WEEK:
            return day - timedelta(days=day.weekday())
        case BudgetPeriod.MONTH:
            return day.replace(day=1)


def _next(first: date, period: BudgetPeriod) -> date:
    match period:
        case BudgetPeriod.DAY:
            return first + timedelta(days=1)
        case BudgetPeriod.WEEK:
            return first + timedelta(days=7)
        case BudgetPeriod.MONTH:
            return (first + timedelta(days=31)).replace(day=1)


def _day_start(day: date, timezone: str) -> int:
    return day_start_us(day.year, day.month, day.day, timezone)


class Budgets:
    """Every budget that stands, what was spent in its windows, and which thresholds were told."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.by_id: dict[str, Budget] = {}
        self._of: dict[str, dict[str, Budget]] = {}
        self._spent: dict[str, dict[str, int]] = {}  # budget → window → femto-units
        self._told: dict[str, set[tuple[str, int, str]]] = {}  # budget → (window, percent, of which amount)
        self._changed: dict[tuple[str, str], int] = {}  # (budget, window) with new charges → a time in it
        self._windows: dict[tuple[BudgetPeriod, str], Window] = {}  # the last one that was asked for

    def apply(self, fact: BudgetFact) -> None:
        match fact:
            case BudgetSet(budget=budget):
                self.by_id[budget.id] = budget
                self._of.setdefault(budget.tenant, {})[budget.id] = budget
            case BudgetRemoved(budget_id=id, tenant=tenant):
                del self.by_id[id], self._of[tenant][id]
                for kept in (self._spent, self._told):
                    kept.pop(id, None)
            case BudgetReached(budget_id=id, window=window, percent=percent, amount=amount):
                self._told.setdefault(id, set()).add((window, percent, amount))

    def charge(self, tenant_id: str, key_id: str, adapter: str, ts_us: int, amount: int) -> None:
        """Count a recorded charge in every budget that it belongs to."""
        for budget in self.applying(tenant_id, key_id, adapter):
            window = self.window(budget, ts_us)
            spent = self._spent.setdefault(budget.id, {})
            spent[window.label] = spent.get(window.label, 0) + amount
            self._changed[budget.id, window.label] = ts_us
            if len(spent) > KEPT_WINDOWS:
                self._forget(budget.id, min(spent))

    def applying(self, tenant_id: str, key_id: str, adapter: str) -> Iterator[Budget]:
        """The budgets that such a request counts in, the monthly cap among them."""
        tenant = self._accounts.tenants.get(tenant_id)
        if tenant is not None and (cap := monthly_cap(tenant)) is not None:
            yield cap
        for budget in self._of.get(tenant_id, {}).values():
            if budget.limits(key_id, adapter):
                yield budget

    def window(self, budget: Budget, ts_us: int) -> Window:
        """The budget's window that has the instant."""
        timezone = self._accounts.tenant(budget.tenant).timezone
        key = budget.period, timezone
        window = self._windows.get(key)
        if window is None or not window.start_us <= ts_us < window.end_us:
            window = self._windows[key] = window_at(ts_us, budget.period, timezone)
        return window

    def find(self, budget_id: str) -> Budget | None:
        """A budget or a tenant's cap as it is now; None when it is gone."""
        if budget_id.startswith(CAP):
            tenant = self._accounts.tenants.get(budget_id.removeprefix(CAP))
            return None if tenant is None else monthly_cap(tenant)
        return self.by_id.get(budget_id)

    def get(self, budget_id: str) -> Budget:
        """Raises `NotFound`."""
        try:
            return self.by_id[budget_id]
        except KeyError:
            raise NotFound("budget", budget_id) from None

    def of(self, tenant_id: str) -> list[Budget]:
        """A tenant's budgets in the order they were set, its cap first. Raises `NotFound`."""
        cap = monthly_cap(self._accounts.tenant(tenant_id))
        return [*([] if cap is None else [cap]), *self._of.get(tenant_id, {}).values()]

    def spent(self, budget_id: str, window: str) -> int:
        """Femto-units recorded in a window."""
        return self._spent.get(budget_id, {}).get(window, 0)

    def due(self, now_us: int) -> list[BudgetReached]:
        """Thresholds that were reached and not told."""
        found: list[BudgetReached] = []
        for (budget_id, label), ts_us in self._changed.items():
            budget = self.find(budget_id)
            if budget is not None:
                found += self._reached(budget, self.window(budget, ts_us), label, now_us)
        return found

    def told(self) -> None:
        """All that was due stands in the log."""
        self._changed.clear()

    def _reached(self, budget: Budget, window: Window, label: str, now_us: int) -> Iterator[BudgetReached]:
        spent, told = self.spent(budget.id, label), self._told.get(budget.id, set())
        for percent in sorted(budget.thresholds):
            if spent * 100 >= budget.femto * percent and (label, percent, budget.amount) not in told and spent > 0:
                yield BudgetReached(
                    budget_id=budget.id,
                    tenant=budget.tenant,
                    name=budget.name,
                    window=label,
                    window_start_us=window.start_us,
                    window_end_us=window.end_us,
                    percent=percent,
                    spent_femto=str(spent),
                    amount=budget.amount,
                    currency=budget.currency,
                    hard=budget.hard,
                    at_us=now_us,
                )

    def _forget(self, budget_id: str, label: str) -> None:
        del self._spent[budget_id][label]
        self._changed.pop((budget_id, label), None)
        told = self._told.get(budget_id, set())
        told -= {one for one in told if one[0] == label}


def monthly_cap(tenant: Tenant) -> Budget | None:
    """The budget that a postpaid tenant's cap is."""
    if tenant.billing_mode is not BillingMode.POSTPAID or tenant.monthly_cap is None:
        return None
    return Budget(
        id=CAP + tenant.id,
        tenant=tenant.id,
        name="monthly cap",
        scope=BudgetScope.TENANT,
        period=BudgetPeriod.MONTH,
        amount=tenant.monthly_cap,
        currency=tenant.currency,
        created_us=tenant.created_us,
    )
