"""Statements: final invoices for people and their spreadsheets, as their tenants get them."""

from __future__ import annotations

from typing import Any

from litestar import Response, Router, get
from litestar.params import FromPath

from gateway.admin.state import Admin
from gateway.billing.rendering import RESPONSES, Format, StatementFormat, rendered


@get("/invoices/{invoice_id:str}/statement", responses=RESPONSES)
async def get_statement(
    invoice_id: FromPath[str], admin: Admin, format: Format = StatementFormat.HTML
) -> Response[Any]:
    """Show the statement of a final invoice, as a page or as a table of its lines. 409 for a draft."""
    return await admin.read(lambda: rendered(admin.billing.statement(invoice_id), format))


router = Router("/", route_handlers=[get_statement], tags=["invoices"])
