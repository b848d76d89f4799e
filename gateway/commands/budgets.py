"""`meterhouse budget set | list | change | remove`."""

from __future__ import annotations

from typing import Any

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin, given
from gateway.printing import Printer

BUDGET = ("id", "name", "scope", "subject", "period", "amount", "spent", "held", "left", "currency", "hard")
BUDGET_MORE = ("thresholds", "window_start", "window_end")

_hard = click.option(
    "--hard/--soft", "hard", default=None, help="Refuse and stop at the amount, or only tell. [default: --hard]"
)
_threshold = click.option(
    "--threshold",
    "thresholds",
    type=click.IntRange(1, 1000),
    multiple=True,
    help="A percent of the amount of which is told; may be repeated. [default: 80, 100]",
)


@click.group(cls=Noun)
def budget() -> None:
    """What a tenant, one of its keys or adapters may spend in a day, a week or a month."""


@budget.command("set")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("name")
@click.argument("amount")
@click.option("--per", "period", type=click.Choice(["day", "week", "month"]), required=True, help="Its windows.")
@click.option("--key", "key_id", help="Only what this key spends.")
@click.option("--adapter", help="Only what this adapter costs.")
@click.option("--currency", default="usd", show_default=True)
@_hard
@_threshold
@admin
def budget_set(
    api: AdminClient, printer: Printer, tenant_id: str, key_id: str | None, adapter: str | None, **fields: Any
) -> None:
    """Set the budget NAME of TENANT: AMOUNT, as 10.00, for each window. It counts from now on."""
    if key_id is not None and adapter is not None:
        raise click.UsageError("--key and --adapter are for two budgets")
    scope = "key" if key_id is not None else "adapter" if adapter is not None else "tenant"
    body = {**fields, "scope": scope, "subject": key_id or adapter}
    printer.show(api.post("/tenants/{}/budgets", tenant_id, body=given(**body)), BUDGET + BUDGET_MORE)


@budget.command("list")
@click.argument("tenant_id", metavar="TENANT")
@admin
def budget_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's budgets, in their windows of now; a monthly cap comes first."""
    printer.show(list(api.pages("/tenants/{}/budgets", tenant_id)), BUDGET)


@budget.command("change")
@click.argument("budget_id", metavar="BUDGET")
@click.option("--name")
@click.option("--amount", help="As 10.00; what was spent stays counted.")
@_hard
@_threshold
@admin
def budget_change(api: AdminClient, printer: Printer, budget_id: str, **fields: Any) -> None:
    """Change what is given; thresholds are replaced as a whole."""
    printer.show(api.patch("/budgets/{}", budget_id, body=given(**fields)), BUDGET + BUDGET_MORE)


@budget.command("remove")
@click.argument("budget_id", metavar="BUDGET")
@admin
def budget_remove(api: AdminClient, printer: Printer, budget_id: str) -> None:
    """Take a budget away: it refuses nothing any more."""
    api.delete("/budgets/{}", budget_id)
    printer.say("Removed.")
