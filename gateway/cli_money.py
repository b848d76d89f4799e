"""The commands of budgets, grants and statements: `budget …`, `credit list`, `invoice statement`.

Knows: flags and columns. Does not know: what they mean, which the admin API says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gateway.client import AdminClient, CallFailed
from gateway.printing import Printer

BUDGET = ("id", "name", "scope", "subject", "period", "amount", "spent", "held", "left", "currency", "hard")
BUDGET_MORE = ("thresholds", "window_start", "window_end")
GRANT = ("id", "amount", "used", "expired", "left", "currency", "priority", "expires_at", "reason", "created_at")

Admin = Callable[[Callable[..., None]], Callable[..., None]]

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


def budget_commands(admin: Admin) -> click.Group:
    """The group; `admin` gives a command the admin API, a printer and their flags."""

    @click.group()
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
        printer.show(api.post("/tenants/{}/budgets", tenant_id, body=_given(body)), BUDGET + BUDGET_MORE)

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
        printer.show(api.patch("/budgets/{}", budget_id, body=_given(fields)), BUDGET + BUDGET_MORE)

    @budget.command("remove")
    @click.argument("budget_id", metavar="BUDGET")
    @admin
    def budget_remove(api: AdminClient, printer: Printer, budget_id: str) -> None:
        """Take a budget away: it refuses nothing any more."""
        api.delete("/budgets/{}", budget_id)
        printer.say("Removed.")

    return budget


def add_grants(credit: click.Group, admin: Admin) -> None:
    """Give the group `credit` its list."""

    @credit.command("list")
    @click.argument("tenant_id", metavar="TENANT")
    @admin
    def credit_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
        """List a tenant's grants by age, and what became of each."""
        printer.show(list(api.pages("/tenants/{}/credits", tenant_id)), GRANT)


def add_statement(invoice: click.Group, admin: Admin) -> None:
    """Give the group `invoice` its statement."""

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


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that were given a value."""
    return {name: value for name, value in fields.items() if value not in (None, ())}
