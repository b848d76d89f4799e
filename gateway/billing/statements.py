"""`GET /v1/billing/invoices/{id}/statement`: an invoice for people and their spreadsheets."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.billing.rendering import RESPONSES, Format, StatementFormat, rendered
from gateway.billing.views import Views


@get("/invoices/{invoice_id:str}/statement", responses=RESPONSES)
async def get_statement(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    invoice_id: FromPath[str],
    format: Format = StatementFormat.HTML,
) -> Response[Any]:
    """Show the statement of one of the tenant's final invoices, as a page or as a table of its lines."""
    tenant = views.tenant(request)
    invoice = views.invoice(tenant, invoice_id)
    with views.turns.seat(tenant.id):
        return await views.turns.take(
            tenant.id, lambda: asyncio.to_thread(lambda: rendered(views.billing.statement(invoice.id), format))
        )
