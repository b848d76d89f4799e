"""`meterhouse margin show | rate`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import END, START, Defaulting, admin, given
from gateway.printing import Printer

MARGIN = ("tenant", "model", "adapter", "hour", "requests", "charged", "cost", "margin", "currency")
COST_RATE = ("id", "currency", "compute_second", "kv_block_second", "hour", "effective_at")


@click.group(cls=Defaulting)
def margin() -> None:
    """What is left of what was charged (`show`, the default)."""


@margin.command("show")
@click.option("--group-by", default="tenant", show_default=True, help="Of tenant, model, adapter, hour, by commas.")
@START
@END
@admin
def margin_show(api: AdminClient, printer: Printer, group_by: str, start: str | None, end: str | None) -> None:
    """Show charges, costs and margins. [default: the last day]"""
    found = api.get("/margin", query={"group_by": group_by, "start": start, "end": end})
    printer.show(found["data"], MARGIN)


@margin.command("rate")
@click.option("--compute-second", required=True, help="Cost of a second of engine time, as 0.0004.")
@click.option("--kv-block-second", required=True, help="Of a KV-cache block held for a second.")
@click.option("--hour", required=True, help="Of an hour, whatever runs.")
@click.option("--currency", default="usd", show_default=True)
@click.option("--effective-at", help="From when on: a date, RFC 3339 or epoch seconds. [default: now]")
@admin
def margin_rate(api: AdminClient, printer: Printer, **fields: str | None) -> None:
    """Enter what the house pays."""
    printer.show(api.post("/margin/rates", body=given(**fields)), COST_RATE)
