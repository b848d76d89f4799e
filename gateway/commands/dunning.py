"""`meterhouse dunning list | show | waive`: invoices whose payment failed."""

from __future__ import annotations

from typing import Any

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

DUNNING = ("invoice", "tenant", "started_at", "steps_taken", "next_at", "outcome", "ended_at", "reason")
STEP = ("day", "kind", "taken_at")


@click.group(cls=Noun)
def dunning() -> None:
    """Invoices whose payment failed, and what follows from that."""


@dunning.command("list")
@click.option("--tenant", "tenant_id", help="Only this tenant's.")
@click.option("--ended", is_flag=True, help="Those that have ended too.")
@admin
def dunning_list(api: AdminClient, printer: Printer, tenant_id: str | None, ended: bool) -> None:
    """List invoices in dunning."""
    found = list(api.pages("/dunning", tenant=tenant_id, ended=str(ended).lower()))
    printer.show(found if printer.as_json else [_counted(one) for one in found], DUNNING)


@dunning.command("show")
@click.argument("invoice_id", metavar="INVOICE")
@admin
def dunning_show(api: AdminClient, printer: Printer, invoice_id: str) -> None:
    """Show an invoice's dunning, step by step."""
    _show_dunning(printer, api.get("/invoices/{}/dunning", invoice_id))


@dunning.command("waive")
@click.argument("invoice_id", metavar="INVOICE")
@click.option("--reason", required=True, help="Why, for the ledger.")
@admin
def dunning_waive(api: AdminClient, printer: Printer, invoice_id: str, reason: str) -> None:
    """End an invoice's dunning though it is owed; none begins for it again."""
    _show_dunning(printer, api.post("/invoices/{}/dunning/waive", invoice_id, body={"reason": reason}))


def _show_dunning(printer: Printer, found: dict[str, Any]) -> None:
    printer.show(found if printer.as_json else _counted(found), DUNNING)
    if not printer.as_json:
        printer.show(found["steps"], STEP)


def _counted(found: dict[str, Any]) -> dict[str, Any]:
    """With how many of its steps were taken, in a word."""
    taken = sum(step["taken_at"] is not None for step in found["steps"])
    return {**found, "steps_taken": f"{taken} of {len(found['steps'])}"}
