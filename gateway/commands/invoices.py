"""`meterhouse invoice create | list | show | due | finalize | export | void | statement`.

Knows: flags and columns. Does not know: how an invoice is cut, which the admin API says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gateway.client import AdminClient, CallFailed
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

INVOICE = ("id", "tenant", "status", "period_start", "period_end", "requests", "total", "due", "currency")
MORE = ("tax", "provider_tax", "credited", "exact_total", "finalized_at", "paid_at", "stripe_invoice_id")
LINE = ("kind", "model", "name", "token_class", "quantity", "unit_price", "exact", "amount")


@click.group(cls=Noun)
def invoice() -> None:
    """Invoices: draft, finalize, export, void."""


@invoice.command("create")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("period_start")
@click.argument("period_end")
@admin
def invoice_create(api: AdminClient, printer: Printer, tenant_id: str, period_start: str, period_end: str) -> None:
    """Draft an invoice for usage from PERIOD_START up to PERIOD_END (excluded).

    Both are dates, which begin in UTC, or times such as 2026-11-30T17:00:00Z. It may be any range that is over and that
    no other invoice has a part of: a billing period, or for a trial the hours up to a minute ago.
    """
    body = {"tenant": tenant_id, "period_start": period_start, "period_end": period_end}
    show_invoice(printer, api.post("/invoices", body=body))


@invoice.command("list")
@click.option("--tenant", "tenant_id", help="Only this tenant's.")
@admin
def invoice_list(api: AdminClient, printer: Printer, tenant_id: str | None) -> None:
    """List invoices."""
    printer.show(list(api.pages("/invoices", tenant=tenant_id)), INVOICE)


@invoice.command("show")
@click.argument("invoice_id", metavar="INVOICE")
@admin
def invoice_show(api: AdminClient, printer: Printer, invoice_id: str) -> None:
    """Show an invoice with its lines."""
    show_invoice(printer, api.get("/invoices/{}", invoice_id))


@invoice.command("due")
@click.option("--run", "mode", type=click.Choice(["draft", "finalize", "export"]), help="Carry them so far.")
@admin
def invoice_due(api: AdminClient, printer: Printer, mode: str | None) -> None:
    """List the periods that are over and have no invoice, or with --run make their invoices."""
    if mode is None:
        printer.show(api.get("/invoices/due")["data"], ("tenant", "period_start", "period_end"))
        return
    done = api.patch("/invoices/due", body={"mode": mode})
    printer.show(done, ("drafted", "finalized", "exported"))
    if done["failures"]:
        if not printer.as_json:
            printer.show(done["failures"], ("step", "tenant", "period_start", "invoice", "reason"))
        raise click.exceptions.Exit(1)


def _step(step: str, help: str) -> None:
    @invoice.command(step, help=help)
    @click.argument("invoice_id", metavar="INVOICE")
    @admin
    def command(api: AdminClient, printer: Printer, invoice_id: str) -> None:
        show_invoice(printer, api.post(f"/invoices/{{}}/{step}", invoice_id))


_step("finalize", "Make a draft final.")
_step("export", "Send a final invoice to Stripe; safe to repeat.")
_step("void", "Void an invoice, in Stripe too if it is there; safe to repeat.")


@invoice.command("statement")
@click.argument("invoice_id", metavar="INVOICE")
@click.option("--format", "format", type=click.Choice(["html", "csv"]), default="html", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write it to this file. [default: print it]")
@admin
def statement(api: AdminClient, printer: Printer, invoice_id: str, format: str, output: Path | None) -> None:
    """Print a final invoice for people (html) or their spreadsheets (csv); the same bytes for ever."""
    text = api.text("/invoices/{}/statement", invoice_id, query={"format": format})
    if output is not None:
        try:
            output.write_bytes(text.encode())
        except OSError as error:
            raise CallFailed(f"{output} cannot be written: {error.strerror}") from None
        printer.say(f"Written to {output}.")
    if printer.as_json:
        printer.json({"invoice": invoice_id, "format": format, "statement": text})
    elif output is None:
        click.echo(text.encode(), nl=False)


def show_invoice(printer: Printer, found: dict[str, Any]) -> None:
    """An invoice, and for people its lines."""
    printer.show(found, (*INVOICE, *MORE))
    if not printer.as_json:
        printer.show(found["lines"], LINE)
