"""`meterhouse alerts show | send`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import Defaulting, admin
from gateway.printing import Printer

ALERT = ("id", "kind", "state", "created_at", "attempts", "next_attempt_at", "last_error")


@click.group(cls=Defaulting)
def alerts() -> None:
    """Alerts to the operator's webhook (`show`, the default)."""


@alerts.command("show")
@click.option("--status", type=click.Choice(["pending", "delivered", "dead", "kept"]), help="Only those.")
@admin
def alerts_show(api: AdminClient, printer: Printer, status: str | None) -> None:
    """List alerts, the newest first."""
    printer.show(list(api.pages("/alerts", status=status)), ALERT)


@alerts.command("send")
@click.argument("alert_id", metavar="ALERT")
@admin
def alerts_send(api: AdminClient, printer: Printer, alert_id: str) -> None:
    """Send an alert again, under its id."""
    printer.show(api.patch("/alerts/{}", alert_id, body={"state": "pending"}), ALERT)
