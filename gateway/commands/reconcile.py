"""`meterhouse reconcile`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import END, START, admin
from gateway.printing import Printer

MISSING = ("between", "reason")
DIFFERENCE = ("between", "tenant", "model", "start", "invoice", "left", "right")


INCOMPLETE = 3  # the exit code; click's own of a wrong command line is 2


@click.command()
@START
@END
@admin
def reconcile(api: AdminClient, printer: Printer, start: str | None, end: str | None) -> None:
    """Compare all books; exit code 1 when they part, 3 when none do but something could not be compared.

    Engine's journal = spool and usage store = ledger = invoice lines = Stripe. [default: the last day]
    """
    report = api.get("/reconcile", query={"start": start, "end": end})
    if printer.as_json:
        printer.json(report)
    elif report["ok"]:
        printer.say("Everything agrees.")
    else:
        if report["differences"]:
            printer.show(report["differences"], DIFFERENCE)
        if report["missing"]:
            printer.say("Not compared:")
            printer.show(report["missing"], MISSING)
    if report["differences"]:
        raise click.exceptions.Exit(1)
    if report["missing"]:
        raise click.exceptions.Exit(INCOMPLETE)
