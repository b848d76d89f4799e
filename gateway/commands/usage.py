"""`meterhouse usage show | unrated | rate`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import END, START, Defaulting, admin
from gateway.printing import Printer

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "amount", "currency")
UNRATED = ("event_id", "tenant", "model", "started_at", "reason")


@click.group(cls=Defaulting)
def usage() -> None:
    """Usage by time (`show`, the default), and what has no charge."""


@usage.command("show")
@click.option("--tenant", "tenant_id", help="Only this tenant's.")
@START
@END
@click.option("--bucket", type=click.Choice(["hour", "day", "month"]), default="day", show_default=True)
@click.option("--group-by", default="model", show_default=True, help="Comma-separated dimensions.")
@admin
def usage_show(
    api: AdminClient,
    printer: Printer,
    tenant_id: str | None,
    start: str | None,
    end: str | None,
    bucket: str,
    group_by: str,
) -> None:
    """Show tokens and exact amounts by time. [default: this month]"""
    rows = list(api.pages("/usage", tenant=tenant_id, start=start, end=end, bucket=bucket, group_by=group_by))
    dimensions = [name for name in group_by.replace(" ", "").split(",") if name not in ("", "tenant")]
    printer.show(rows, ("start", "tenant", *dimensions, *COUNTS))


@usage.command("unrated")
@click.option("--tenant", "tenant_id", help="Only this tenant's.")
@admin
def usage_unrated(api: AdminClient, printer: Printer, tenant_id: str | None) -> None:
    """List requests that have no charge, and why."""
    printer.show(list(api.pages("/usage/unrated", tenant=tenant_id)), UNRATED)


@usage.command("rate")
@admin
def usage_rate(api: AdminClient, printer: Printer) -> None:
    """Charge requests that had no price and have one now.

    The price must be effective when they began: set it with --effective-at.
    """
    total = 0
    while rated := api.post("/usage/rate")["rated"]:
        total += rated
    printer.show({"rated": total}, ("rated",))
