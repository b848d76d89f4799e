"""What is at Stripe or on its way: `meterhouse stripe sync | release`, `meterhouse meters show | send | leave`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import Defaulting, Noun, admin
from gateway.commands.invoices import INVOICE
from gateway.printing import Printer

METERS = ("begun_at", "from_event", "done_event", "put_aside")
METER_EVENT = ("identifier", "tenant", "kind", "quantity", "began_at", "state", "reason")
HOLD = ("held", "backup", "instant", "restored_at")


@click.group(cls=Defaulting)
def meters() -> None:
    """Usage on its way to Stripe's meters (`show`, the default)."""


@meters.command("show")
@admin
def meters_show(api: AdminClient, printer: Printer) -> None:
    """Show how far the export is, and what was put aside."""
    found = {**api.get("/meters"), "events": list(api.pages("/meters/events"))}
    printer.show(found, METERS)
    if not printer.as_json:
        printer.show(found["events"], METER_EVENT)


def _meters_decision(name: str, send: bool, help: str) -> None:
    @meters.command(name, help=help)
    @click.argument("identifier")
    @admin
    def command(api: AdminClient, printer: Printer, identifier: str) -> None:
        printer.show(api.patch("/meters/events/{}", identifier, body={"send": send}), METER_EVENT)


_meters_decision("send", True, "Send a meter event that was put aside (again).")
_meters_decision("leave", False, "Decide that a meter event that was put aside is not to be sent.")


@click.group(cls=Noun)
def stripe() -> None:
    """What stands at Stripe."""


@stripe.command("sync")
@admin
def stripe_sync(api: AdminClient, printer: Printer) -> None:
    """Let every exported invoice catch up with what Stripe has now."""
    printer.show(api.patch("/stripe/invoices", body={})["data"], INVOICE)


@stripe.command("release")
@admin
def release(api: AdminClient, printer: Printer) -> None:
    """After a restore: let invoices, credit notes and metered usage go, once they were looked for in Stripe."""
    before = api.get("/stripe/hold")
    api.delete("/stripe/hold")
    printer.show({**before, "held": False}, HOLD)
