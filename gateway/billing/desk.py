"""What the routes of this folder work on that read usage, beside the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from billing.accounts import Tenant
from gateway.admin.state import AdminState
from gateway.billing.trees import Trees
from gateway.billing.views import Views
from metering.clickhouse import UsageStore

P = ParamSpec("P")
R = TypeVar("R")


class Desk(Views):
    """One gateway's state as its tenants may ask about it."""

    def __init__(self, state: AdminState) -> None:
        super().__init__(state.billing)
        self.trees = Trees()
        self._state = state

    @property
    def usage(self) -> UsageStore:
        return self._state.usage

    def now_us(self) -> int:
        return self._state.clock_us()

    async def read(self, tenant: Tenant, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what reads the usage store, one at a time for a tenant."""
        return await self.turns.take(tenant.id, lambda: self._state.read_for_tenant(work, *args, **kwargs))
