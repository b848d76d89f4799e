"""The routes of this folder that need a tenant's key, over one state."""

from __future__ import annotations

from typing import Any

from litestar import Request, Router
from litestar.di import Provide

from gateway.admin.query import check_query
from gateway.admin.state import AdminState
from gateway.billing.desk import Desk
from gateway.billing.events import usage_events
from gateway.billing.invoices import invoice_document, invoice_proof


async def check_request(request: Request[Any, Any, Any]) -> None:
    """A `before_request` hook: a parameter that is unknown or doubled is refused."""
    check_query(request)


def billing_router(state: AdminState) -> Router:
    """Each finds out itself whose key it was asked with."""
    desk = Desk(state)
    return Router(
        "/",
        route_handlers=[usage_events, invoice_document, invoice_proof],
        dependencies={"desk": Provide(lambda: desk, sync_to_thread=False)},
        signature_types=[Desk],
        before_request=check_request,
        tags=["Billing"],
    )
