"""What was agreed beside prices: `meterhouse discount give | list | end`, `commitment set | list`, `tax set | show`."""

from __future__ import annotations

from typing import Any

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

DISCOUNT = ("id", "tenant", "name", "percent", "amount", "from", "to", "model", "token_class")
COMMITMENT = ("id", "amount", "from", "created_at")
TERMS = ("tenant", "currency", "tax.mode", "tax.rates", "carried")


@click.group(cls=Noun)
def discount() -> None:
    """What a tenant's invoices take off."""


@discount.command("give")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("name")
@click.option("--percent", help="Of what it is for, as 7.5.")
@click.option("--amount", help="Off a whole billing period, in the tenant's currency.")
@click.option("--from", "start", help="For invoices whose period begins then or later. [default: now]")
@click.option("--to", "end", help="And before this. [default: no end]")
@click.option("--model", help="Off lines of this model or adapter only.")
@click.option("--class", "token_class", help="Off lines of this class only, as completion.")
@admin
def discount_give(api: AdminClient, printer: Printer, tenant_id: str, **given: str | None) -> None:
    """Give TENANT a discount that its invoices show as NAME: a percentage or an amount."""
    names = {"start": "from", "end": "to"}
    body = {names.get(name, name): value for name, value in given.items() if value is not None}
    printer.show(api.post("/tenants/{}/discounts", tenant_id, body=body), DISCOUNT)


@discount.command("list")
@click.argument("tenant_id", metavar="TENANT")
@admin
def discount_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's discounts in the order in which they take."""
    printer.show(list(api.pages("/tenants/{}/discounts", tenant_id)), DISCOUNT)


@discount.command("end")
@click.argument("discount_id", metavar="DISCOUNT")
@admin
def discount_end(api: AdminClient, printer: Printer, discount_id: str) -> None:
    """End a discount: it is for no invoice whose period begins later."""
    printer.show(api.delete("/discounts/{}", discount_id), DISCOUNT)


@click.group(cls=Noun)
def commitment() -> None:
    """What a tenant's billing period comes to at least."""


@commitment.command("set")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("amount")
@click.option("--from", "start", help="A date, RFC 3339 or epoch seconds. [default: now]")
@admin
def commitment_set(api: AdminClient, printer: Printer, tenant_id: str, amount: str, start: str | None) -> None:
    """Set the minimum that each billing period of TENANT is invoiced up to; 0 ends it."""
    body: dict[str, Any] = {"amount": amount} if start is None else {"amount": amount, "from": start}
    printer.show(api.put("/tenants/{}/commitment", tenant_id, body=body), COMMITMENT)


@commitment.command("list")
@click.argument("tenant_id", metavar="TENANT")
@admin
def commitment_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's minimums; each is in force until the next one begins."""
    printer.show(api.get("/tenants/{}/terms", tenant_id)["commitments"], COMMITMENT)


@click.group(cls=Noun)
def tax() -> None:
    """What tax a tenant's invoices have, on top of prices."""


@tax.command("set")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("mode", type=click.Choice(["none", "fixed", "stripe"]))
@click.option("--rate", "rates", multiple=True, help="NAME=PERCENT, as VAT=19; with fixed, once for each rate.")
@admin
def tax_set(api: AdminClient, printer: Printer, tenant_id: str, mode: str, rates: tuple[str, ...]) -> None:
    """Set what tax invoices of TENANT have from the next on: none, fixed rates, or what Stripe Tax finds."""
    body = {"mode": mode, "rates": [_rate(text) for text in rates]}
    printer.show(api.put("/tenants/{}/tax", tenant_id, body=body), ("mode", "rates"))


@tax.command("show")
@click.argument("tenant_id", metavar="TENANT")
@admin
def tax_show(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """Show a tenant's tax, and what its next invoice takes off because an earlier one would have been below 0."""
    printer.show(api.get("/tenants/{}/terms", tenant_id), TERMS)


def _rate(text: str) -> dict[str, str]:
    name, found, percent = text.rpartition("=")
    if not found:
        raise click.BadParameter(f"{text!r} is not NAME=PERCENT", param_hint="--rate")
    return {"name": name, "percent": percent}
