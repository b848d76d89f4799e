"""`meterhouse credit grant | list` and `meterhouse balance`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import Negative, Noun, admin, given
from gateway.printing import Printer

BALANCE = ("tenant", "currency", "billing_mode", "available", "held", "charged", "granted", "expired", "owed")
GRANT = ("id", "amount", "used", "expired", "left", "currency", "priority", "expires_at", "reason", "created_at")


@click.group(cls=Noun)
def credit() -> None:
    """Prepaid credit."""


@credit.command("grant", cls=Negative)
@click.argument("tenant_id", metavar="TENANT")
@click.argument("amount")
@click.option("--currency", default="usd", show_default=True)
@click.option("--reason", required=True, help="Why, for the ledger.")
@click.option(
    "--priority", type=click.IntRange(0, 100), help="Of several grants the lowest is used first. [default: 50]"
)
@click.option("--expires-at", help="When it ends: a date, RFC 3339 or epoch seconds. [default: never]")
@click.option("--top-up", help="The request for a top-up that it answers.")
@admin
def credit_grant(api: AdminClient, printer: Printer, tenant_id: str, **fields: str) -> None:
    """Give TENANT credit, AMOUNT as 10.00."""
    granted = api.post("/tenants/{}/credits", tenant_id, body=given(**fields))
    printer.show(granted, ("id", "tenant", "amount", "currency", "reason", "priority", "expires_at", "created_at"))


@credit.command("list")
@click.argument("tenant_id", metavar="TENANT")
@admin
def credit_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's grants by age, and what became of each."""
    printer.show(list(api.pages("/tenants/{}/credits", tenant_id)), GRANT)


@click.command()
@click.argument("tenant_id", metavar="TENANT")
@admin
def balance(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """Show what a tenant has left."""
    printer.show(api.get("/tenants/{}/balance", tenant_id), BALANCE)
