"""`meterhouse adapter add | list | remove`."""

from __future__ import annotations

from pathlib import Path

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

ADAPTER = ("name", "id", "base_model", "digest", "created_at")


@click.group(cls=Noun)
def adapter() -> None:
    """LoRA adapters of a tenant."""


@adapter.command("add")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@admin
def adapter_add(api: AdminClient, printer: Printer, tenant_id: str, name: str, folder: Path) -> None:
    """Load the adapter in FOLDER (on the server) and serve it as NAME. A server must run."""
    body = {"name": name, "path": str(folder.absolute())}
    printer.show(api.post("/tenants/{}/adapters", tenant_id, body=body), ADAPTER)


@adapter.command("list")
@click.argument("tenant_id", metavar="TENANT")
@admin
def adapter_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's adapters."""
    printer.show(list(api.pages("/tenants/{}/adapters", tenant_id)), ADAPTER)


@adapter.command("remove")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("name")
@admin
def adapter_remove(api: AdminClient, printer: Printer, tenant_id: str, name: str) -> None:
    """Take an adapter away; returns when its last running request has ended."""
    api.delete("/tenants/{}/adapters/{}", tenant_id, name)
    printer.say("Removed.")
