"""`meterhouse credit-note issue | list | show | export | void`."""

from __future__ import annotations

from typing import Any

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

NOTE = ("id", "number", "tenant", "status", "amount", "tax", "currency", "reason", "stripe_credit_note_id")


@click.group("credit-note", cls=Noun)
def credit_note() -> None:
    """Credit notes: what is taken back of a final invoice."""


@credit_note.command("issue")
@click.argument("invoice_id", metavar="INVOICE")
@click.option("--reason", required=True, help="As the customer is told.")
@click.option("--amount", help="So much, with its tax.")
@click.option("--line", "lines", multiple=True, help="ID=AMOUNT, without tax; once for each line.")
@click.option("--all", "whole", is_flag=True, help="All that is left of the invoice.")
@click.option(
    "--way",
    type=click.Choice(["balance", "refund", "out_of_band"]),
    default="balance",
    show_default=True,
    help="Where it goes what was paid already.",
)
@admin
def issue(
    api: AdminClient,
    printer: Printer,
    invoice_id: str,
    reason: str,
    amount: str | None,
    lines: tuple[str, ...],
    whole: bool,
    way: str,
) -> None:
    """Issue a credit note for INVOICE: for --amount, --line or --all."""
    body: dict[str, Any] = {"reason": reason, "way": way, "all": whole}
    if amount is not None:
        body["amount"] = amount
    if lines:
        body["lines"] = [_line(text) for text in lines]
    printer.show(api.post("/invoices/{}/credit-notes", invoice_id, body=body), NOTE)


@credit_note.command("list")
@click.option("--tenant", help="Only this tenant's.")
@click.option("--invoice", help="Only this invoice's.")
@admin
def list_notes(api: AdminClient, printer: Printer, tenant: str | None, invoice: str | None) -> None:
    """List credit notes."""
    printer.show(list(api.pages("/credit-notes", tenant=tenant, invoice=invoice)), NOTE)


@credit_note.command("show")
@click.argument("note_id", metavar="NOTE")
@admin
def show(api: AdminClient, printer: Printer, note_id: str) -> None:
    """Show a credit note."""
    printer.show(api.get("/credit-notes/{}", note_id), (*NOTE, "lines", "way"))


def _step(step: str, help: str) -> None:
    @credit_note.command(step, help=help)
    @click.argument("note_id", metavar="NOTE")
    @admin
    def command(api: AdminClient, printer: Printer, note_id: str) -> None:
        printer.show(api.post(f"/credit-notes/{{}}/{step}", note_id), NOTE)


_step("export", "Send a credit note to Stripe; safe to repeat.")
_step("void", "Void a credit note, in Stripe too if it is there and the invoice still open.")


def _line(text: str) -> dict[str, str]:
    line, found, amount = text.rpartition("=")
    if not found:
        raise click.BadParameter(f"{text!r} is not ID=AMOUNT", param_hint="--line")
    return {"line": line, "amount": amount}
