"""`meterhouse gateway list | adopt | remove`."""

from __future__ import annotations

from pathlib import Path

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

GATEWAY = ("id", "alive", "this", "stored_until", "seen_at", "started_at")


@click.group(cls=Noun)
def gateway() -> None:
    """Gateways on this ledger: how far each has stored its usage."""


@gateway.command("list")
@admin
def gateway_list(api: AdminClient, printer: Printer) -> None:
    """List the gateways that hold, or may hold, usage that is not stored yet."""
    printer.show(list(api.pages("/gateways")), GATEWAY)


@gateway.command("adopt")
@click.argument("gateway_id", metavar="GATEWAY")
@click.argument("folder", type=click.Path(path_type=Path))
@admin
def gateway_adopt(api: AdminClient, printer: Printer, gateway_id: str, folder: Path) -> None:
    """Settle and deliver what GATEWAY, which is gone, left in its data FOLDER (on the server); safe to repeat."""
    body = {"path": str(folder.absolute())}
    printer.show(api.put("/gateways/{}/adoption", gateway_id, body=body), ("gateway", "settled", "delivered"))


@gateway.command("remove")
@click.argument("gateway_id", metavar="GATEWAY")
@admin
def gateway_remove(api: AdminClient, printer: Printer, gateway_id: str) -> None:
    """Give up a gateway whose data folder is lost, so that invoices no longer wait for it."""
    api.delete("/gateways/{}", gateway_id)
    printer.say("Removed.")
