"""`/v1/billing`: what a tenant may see of its own money, suspended or not.

Knows: routes, whose key it is. Does not know: how anything is charged (`billing`). Each tenant sees its own and nothing
of others: what is another's is answered as what does not exist. Any key of a tenant sees all of the tenant's.
"""

from __future__ import annotations

from litestar import Router
from litestar.di import Provide

from billing.service import Billing
from gateway.billing.balance import get_balance
from gateway.billing.own_invoices import get_invoice, list_invoices
from gateway.billing.router import check_request
from gateway.billing.statements import get_statement
from gateway.billing.views import Views


def own_router(billing: Billing) -> Router:
    """All routes over `billing`."""
    views = Views(billing)
    return Router(
        "/v1/billing",
        route_handlers=[get_balance, list_invoices, get_invoice, get_statement],
        dependencies={"views": Provide(lambda: views, sync_to_thread=False)},
        signature_types=[Views],
        before_request=check_request,
        tags=["Billing"],
    )
