"""`meterhouse tenant create | list | show | update | suspend | reactivate`."""

from __future__ import annotations

from typing import Any

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin, given
from gateway.printing import Printer

TENANT = ("id", "name", "currency", "stripe_customer_id", "default_adapter", "limits", "status", "created_at")
TENANT_PERIODS = ("timezone", "billing_anchor_day", "billing_mode", "monthly_cap", "dunning_steps")
STANDING = ("tenant", "status")
SUSPENSION = ("by", "invoice", "reason", "since")


def _limits(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    """`--limit requests_per_minute=60`, repeated → the API's object."""
    limits: dict[str, int] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not value.isdigit():
            raise click.BadParameter(f"{pair!r} is not NAME=WHOLE_NUMBER")
        limits[name] = int(value)
    return limits


_limit = click.option(
    "--limit", "limits", multiple=True, callback=_limits, metavar="NAME=NUMBER", help="A limit; may be repeated."
)


_timezone = click.option("--timezone", help="IANA time zone of its billing periods, as Europe/Berlin.")
_anchor_day = click.option(
    "--billing-anchor-day", type=click.IntRange(1, 31), help="Day of the month on which billing periods begin."
)
_billing_mode = click.option(
    "--billing-mode", type=click.Choice(["prepaid", "postpaid"]), help="Spends what it was granted, or pays afterwards."
)
_monthly_cap = click.option("--monthly-cap", help="The most that a postpaid tenant's month may cost, as 100.00.")
_dunning_steps = click.option(
    "--dunning-steps", help="What follows its failed payments, as notice@3,suspend@14, or none. [default: the setting]"
)


@click.group(cls=Noun)
def tenant() -> None:
    """Tenants: who is served and billed."""


@tenant.command("create")
@click.argument("name")
@click.option("--id", "tenant_id", help="Its id; without one it is made.")
@click.option("--currency", help="What it is billed in. [default: usd]")
@click.option("--stripe-customer-id", help="Stripe's id of the customer (cus_…).")
@click.option("--default-adapter", help="What a request that names no model gets.")
@_limit
@_timezone
@_anchor_day
@_billing_mode
@_monthly_cap
@_dunning_steps
@admin
def tenant_create(api: AdminClient, printer: Printer, tenant_id: str | None, **fields: Any) -> None:
    """Create the tenant NAME."""
    printer.show(api.post("/tenants", body=given(id=tenant_id, **fields)), TENANT + TENANT_PERIODS)


@tenant.command("list")
@admin
def tenant_list(api: AdminClient, printer: Printer) -> None:
    """List all tenants."""
    printer.show(list(api.pages("/tenants")), TENANT)


@tenant.command("show")
@click.argument("tenant_id", metavar="TENANT")
@admin
def tenant_show(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """Show one tenant."""
    printer.show(api.get("/tenants/{}", tenant_id), TENANT + TENANT_PERIODS)


@tenant.command("update")
@click.argument("tenant_id", metavar="TENANT")
@click.option("--name")
@click.option("--stripe-customer-id")
@click.option("--default-adapter")
@click.option("--status", type=click.Choice(["active", "suspended"]), help="`tenant suspend` gives a reason too.")
@_limit
@_timezone
@_anchor_day
@_billing_mode
@_monthly_cap
@_dunning_steps
@admin
def tenant_update(api: AdminClient, printer: Printer, tenant_id: str, **fields: Any) -> None:
    """Change what is given; limits are replaced as a whole."""
    printer.show(api.patch("/tenants/{}", tenant_id, body=given(**fields)), TENANT + TENANT_PERIODS)


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


def _show_standing(printer: Printer, found: dict[str, Any]) -> None:
    printer.show(found, STANDING)
    if found["suspensions"] and not printer.as_json:
        printer.show(found["suspensions"], SUSPENSION)
