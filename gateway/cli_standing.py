"""The commands of suspension and dunning: `tenant suspend | reactivate`, `dunning list | show | waive`.

Knows: flags and columns. Does not know: what holds whom, which the admin API says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gateway.client import AdminClient
from gateway.printing import Printer

STANDING = ("tenant", "status")
SUSPENSION = ("by", "invoice", "reason", "since")
DUNNING = ("invoice", "tenant", "started_at", "steps_taken", "next_at", "outcome", "ended_at", "reason")
STEP = ("day", "kind", "taken_at")

Admin = Callable[[Callable[..., None]], Callable[..., None]]


def add_suspension(tenant: click.Group, admin: Admin) -> None:
    """Give the group `tenant` its two commands."""

    @tenant.command("suspend")
    @click.argument("tenant_id", metavar="TENANT")
    @click.option("--reason", required=True, help="Why; the tenant can read it.")
    @admin
    def suspend(api: AdminClient, printer: Printer, tenant_id: str, reason: str) -> None:
        """Suspend TENANT: its requests get 403, what runs goes on to its end, its bills stay open to it."""
        _show_standing(printer, api.post("/tenants/{}/suspend", tenant_id, body={"reason": reason}))

    @tenant.command("reactivate")
    @click.argument("tenant_id", metavar="TENANT")
    @click.option("--reason", required=True, help="Why, for the ledger.")
    @click.option("--waive-dunning", is_flag=True, help="End its dunnings, and what they hold suspended, too.")
    @admin
    def reactivate(api: AdminClient, printer: Printer, tenant_id: str, reason: str, waive_dunning: bool) -> None:
        """Lift the suspension of TENANT; what an invoice in dunning holds stays until it is paid, void or waived."""
        body = {"reason": reason, "waive_dunning": waive_dunning}
        _show_standing(printer, api.post("/tenants/{}/reactivate", tenant_id, body=body))


def dunning_commands(admin: Admin) -> click.Group:
    """The group; `admin` gives a command the admin API, a printer and their flags."""

    @click.group()
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

    return dunning


def _show_standing(printer: Printer, found: dict[str, Any]) -> None:
    printer.show(found, STANDING)
    if found["suspensions"] and not printer.as_json:
        printer.show(found["suspensions"], SUSPENSION)


def _show_dunning(printer: Printer, found: dict[str, Any]) -> None:
    printer.show(found if printer.as_json else _counted(found), DUNNING)
    if not printer.as_json:
        printer.show(found["steps"], STEP)


def _counted(found: dict[str, Any]) -> dict[str, Any]:
    """With how many of its steps were taken, in a word."""
    taken = sum(step["taken_at"] is not None for step in found["steps"])
    return {**found, "steps_taken": f"{taken} of {len(found['steps'])}"}
