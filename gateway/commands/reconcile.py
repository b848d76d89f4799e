"""`meterhouse reconcile`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import END, START, admin
from gateway.printing import Printer

DIFFERENCE = ("between", "tenant", "model", "start", "invoice", "left", "right")


@click.command()
@START
@END
@admin
def reconcile(api: AdminClient, printer: Printer, start: str | None, end: str | None) -> None:
    """Compare all books; exit code 1 when they part.

    Engine's journal = spool and usage store = ledger = invoice lines = Stripe. [default: the last day]
    """
    report = api.get("/reconcile", query={"start": start, "end": end})
    if printer.as_json:
        printer.json(report)
    elif report["ok"]:
        printer.say("Everything agrees.")
    else:
        printer.show(report["differences"], DIFFERENCE)
    if not report["ok"]:
        raise click.exceptions.Exit(1)
