"""Whose bills they are: a tenant sees its own, suspended or not, and nothing of another's."""

from __future__ import annotations

from typing import Any

from litestar import Request

from billing.accounts import Tenant
from billing.errors import NotFound
from billing.invoice import Invoice
from billing.service import Billing
from gateway.auth import Principal, key_holder
from gateway.billing.turns import Turns


class Views:
    """The books as tenants may read them."""

    def __init__(self, billing: Billing) -> None:
        self.billing = billing
        self.turns = Turns()

    def principal(self, request: Request[Any, Any, Any]) -> Principal:
        """Who asks; a suspended tenant too, as it must see why and what is due. Raises `Unauthorized`."""
        return key_holder(request, self.billing)

    def tenant(self, request: Request[Any, Any, Any]) -> Tenant:
        """Whose key it is. Raises `Unauthorized`."""
        return self.principal(request).tenant

    def invoice(self, tenant: Tenant, invoice_id: str) -> Invoice:
        """A tenant's own invoice, once it was made final. Raises `NotFound`, in the same words for all others."""
        invoice = self.billing.invoice(invoice_id)
        if invoice.tenant != tenant.id or invoice.finalized_us is None:
            raise NotFound("invoice", invoice_id)
        return invoice
