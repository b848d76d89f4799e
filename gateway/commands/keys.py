"""`meterhouse key create | list | revoke`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

KEY = ("id", "tenant", "name", "prefix", "created_at", "revoked_at")


@click.group(cls=Noun)
def key() -> None:
    """API keys of a tenant."""


@key.command("create")
@click.argument("tenant_id", metavar="TENANT")
@click.option("--name", default="default", show_default=True, help="For people to know it by.")
@admin
def key_create(api: AdminClient, printer: Printer, tenant_id: str, name: str) -> None:
    """Create a key and print it, this once."""
    printer.show(api.post("/tenants/{}/keys", tenant_id, body={"name": name}), ("id", "name", "key"))
    printer.say("Keep the key now: it is not shown again.")


@key.command("list")
@click.argument("tenant_id", metavar="TENANT")
@admin
def key_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's keys."""
    printer.show(list(api.pages("/tenants/{}/keys", tenant_id)), KEY)


@key.command("revoke")
@click.argument("key_id", metavar="KEY_ID")
@admin
def key_revoke(api: AdminClient, printer: Printer, key_id: str) -> None:
    """Revoke a key: it opens nothing from now on."""
    api.delete("/keys/{}", key_id)
    printer.say("Revoked.")
