"""What the routes of this folder work on, and who may see what of it: a tenant its own, and nothing of another's."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from litestar import Request

from billing.accounts import Tenant
from billing.errors import NotFound
from billing.invoice import Invoice
from billing.service import Billing
from gateway.admin.state import AdminState
from gateway.auth import authenticate
from metering.clickhouse import UsageStore

P = ParamSpec("P")
R = TypeVar("R")


class Desk:
    """One gateway's state as its tenants may ask about it."""

    def __init__(self, state: AdminState) -> None:
        self._state = state
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def billing(self) -> Billing:
        return self._state.billing

    @property
    def usage(self) -> UsageStore:
        return self._state.usage

    def now_us(self) -> int:
        return self._state.clock_us()

    def tenant(self, request: Request[Any, Any, Any]) -> Tenant:
        """Whose key it is. Raises `Unauthorized`."""
        return authenticate(request, self.billing).tenant

    def invoice(self, tenant: Tenant, invoice_id: str) -> Invoice:
        """A tenant's own invoice, once it was made final. Raises `NotFound`, in the same words for all others."""
        invoice = self.billing.invoice(invoice_id)
        if invoice.tenant != tenant.id or invoice.finalized_us is None:
            raise NotFound("invoice", invoice_id)
        return invoice

    async def read(self, tenant: Tenant, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what reads the usage store, one at a time for a tenant: the threads that read are few and everybody's."""
        async with self._turns[tenant.id]:
            return await self._state.read(work, *args, **kwargs)
