"""The command line: start a server, and everything the admin API does.

Knows: commands, flags and which columns to show. Does not know how anything is done: each command but `serve` and
`migrate` is a call of the admin API, a running server's or, when none runs, the same app's opened here on the data
folder (`gateway.client`). A failure is one sentence on standard error and exit code 1; wrong use of a command
is exit code 2.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gateway import settings as settings_module
from gateway.bench.commands import bench
from gateway.cli_backup import backup_command, release_command, restore
from gateway.cli_credit_note import credit_note_group
from gateway.cli_invoice import commands as invoice_commands
from gateway.cli_invoices import INVOICE, invoice_group
from gateway.cli_money import add_grants, add_statement, budget_commands
from gateway.cli_price import price_commands
from gateway.cli_standing import add_suspension, dunning_commands
from gateway.cli_store import commands as store_commands
from gateway.cli_terms import terms_commands
from gateway.client import AdminClient, CallFailed, connect
from gateway.flags import settings_flags
from gateway.printing import Printer
from gateway.settings import Settings, SettingsError

TENANT = ("id", "name", "currency", "stripe_customer_id", "default_adapter", "limits", "status", "created_at")
TENANT_PERIODS = ("timezone", "billing_anchor_day", "billing_mode", "monthly_cap", "dunning_steps")
KEY = ("id", "tenant", "name", "prefix", "created_at", "revoked_at")
ADAPTER = ("name", "id", "base_model", "digest", "created_at")
BALANCE = ("tenant", "currency", "available", "held", "charged", "granted")
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "amount", "currency")
UNRATED = ("event_id", "tenant", "model", "started_at", "reason")
GATEWAY = ("id", "alive", "this", "stored_until", "seen_at", "started_at")
ADMIN_KEY = ("id", "name", "role", "prefix", "created_at", "revoked_at")
AUDIT = ("event", "at", "actor", "actor_name", "type", "detail")
ALERT = ("id", "kind", "state", "created_at", "attempts", "next_attempt_at", "last_error")
METERS = ("begun_at", "from_event", "done_event", "put_aside")
METER_EVENT = ("identifier", "tenant", "kind", "quantity", "began_at", "state", "reason")
MARGIN = ("tenant", "model", "adapter", "hour", "requests", "charged", "cost", "margin", "currency")
COST_RATE = ("id", "currency", "compute_second", "kv_block_second", "hour", "effective_at")
DIFFERENCE = ("between", "tenant", "model", "start", "invoice", "left", "right")


class Group(click.Group):
    """Turns the failures a command may have into one sentence."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (CallFailed, SettingsError) as error:
            raise click.ClickException(str(error)) from None
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("METERHOUSE_LOG_LEVEL") == "debug":
                raise
            raise click.ClickException(
                f"unexpected {type(error).__name__}: {error} (METERHOUSE_LOG_LEVEL=debug shows where)"
            ) from None


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meterhouse", prog_name="meterhouse")
def main() -> None:
    """Serve models to tenants and turn every token into an exact invoice line."""


# --- flags ---------------------------------------------------------------------------------------


def _admin(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the admin API and a printer as first arguments, and the flags that say whose API."""

    @settings_flags("host", "port", "data_dir", "admin_key")
    @click.option("--json", "as_json", is_flag=True, help="Print the API's answer as JSON.")
    @functools.wraps(function)
    def command(
        config: Path | None,
        host: str | None,
        port: str | None,
        data_dir: str | None,
        admin_key: str | None,
        as_json: bool,
        **arguments: Any,
    ) -> None:
        flags = {"host": host, "port": port, "data_dir": data_dir, "admin_key": admin_key}
        with connect(settings_module.load(flags, config=config), _open_here) as api:
            function(api, Printer(as_json), **arguments)

    return command


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that were given a value."""
    return {name: value for name, value in fields.items() if value not in (None, {}, ())}


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


# --- the server ----------------------------------------------------------------------------------


@contextmanager
def _open_here(settings: Settings) -> Iterator[Any]:
    """The admin app on the data folder, without an engine. The whole program hangs on it, so it is imported late."""
    from engine.logs import configure_logging
    from gateway import lifecycle

    # Standard output is the answer's, standard error has one sentence; who debugs gets the log there too.
    configure_logging("debug" if settings.log_level == "debug" else "critical", settings.log_format)
    try:
        with lifecycle.open_admin(settings) as app:
            yield app
    except lifecycle.StartError as error:
        raise CallFailed(str(error)) from None


@main.command()
@settings_flags()
def serve(config: Path | None, **flags: str | None) -> None:
    """Start a server, until SIGINT or SIGTERM."""
    from gateway import lifecycle

    try:
        lifecycle.serve(settings_module.load(flags, config=config))
    except lifecycle.StartError as error:
        raise CallFailed(str(error)) from None


@main.command()
@settings_flags("data_dir", "clickhouse_url", "clickhouse_cluster", "clickhouse_replicated", "ledger_url")
def migrate(config: Path | None, **flags: str | None) -> None:
    """Bring the data to this version's schema.

    `serve` and every other command do it by themselves; the data folder may not be in use.
    """
    with _open_here(settings_module.load(flags, config=config)):
        pass  # opening is what migrates
    click.echo("The usage store and the ledger are up to date.")


# --- tenants and their keys ----------------------------------------------------------------------


@main.group()
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
@_admin
def tenant_create(api: AdminClient, printer: Printer, tenant_id: str | None, **fields: Any) -> None:
    """Create the tenant NAME."""
    printer.show(api.post("/tenants", body=_given(id=tenant_id, **fields)), TENANT + TENANT_PERIODS)


@tenant.command("list")
@_admin
def tenant_list(api: AdminClient, printer: Printer) -> None:
    """List all tenants."""
    printer.show(list(api.pages("/tenants")), TENANT)


@tenant.command("show")
@click.argument("tenant_id", metavar="TENANT")
@_admin
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
@_admin
def tenant_update(api: AdminClient, printer: Printer, tenant_id: str, **fields: Any) -> None:
    """Change what is given; limits are replaced as a whole."""
    printer.show(api.patch("/tenants/{}", tenant_id, body=_given(**fields)), TENANT + TENANT_PERIODS)


add_suspension(tenant, _admin)
main.add_command(dunning_commands(_admin))


@main.group()
def key() -> None:
    """API keys of a tenant."""


@key.command("create")
@click.argument("tenant_id", metavar="TENANT")
@click.option("--name", default="default", show_default=True, help="For people to know it by.")
@_admin
def key_create(api: AdminClient, printer: Printer, tenant_id: str, name: str) -> None:
    """Create a key and print it, this once."""
    printer.show(api.post("/tenants/{}/keys", tenant_id, body={"name": name}), ("id", "name", "key"))
    printer.say("Keep the key now: it is not shown again.")


@key.command("list")
@click.argument("tenant_id", metavar="TENANT")
@_admin
def key_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's keys."""
    printer.show(list(api.pages("/tenants/{}/keys", tenant_id)), KEY)


@key.command("revoke")
@click.argument("key_id", metavar="KEY_ID")
@_admin
def key_revoke(api: AdminClient, printer: Printer, key_id: str) -> None:
    """Revoke a key: it opens nothing from now on."""
    api.delete("/keys/{}", key_id)
    printer.say("Revoked.")


# --- what is sold --------------------------------------------------------------------------------


@main.group()
def adapter() -> None:
    """LoRA adapters of a tenant."""


@adapter.command("add")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@_admin
def adapter_add(api: AdminClient, printer: Printer, tenant_id: str, name: str, folder: Path) -> None:
    """Load the adapter in FOLDER (on the server) and serve it as NAME. A server must run."""
    body = {"name": name, "path": str(folder.absolute())}
    printer.show(api.post("/tenants/{}/adapters", tenant_id, body=body), ADAPTER)


@adapter.command("list")
@click.argument("tenant_id", metavar="TENANT")
@_admin
def adapter_list(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """List a tenant's adapters."""
    printer.show(list(api.pages("/tenants/{}/adapters", tenant_id)), ADAPTER)


@adapter.command("remove")
@click.argument("tenant_id", metavar="TENANT")
@click.argument("name")
@_admin
def adapter_remove(api: AdminClient, printer: Printer, tenant_id: str, name: str) -> None:
    """Take an adapter away; returns when its last running request has ended."""
    api.delete("/tenants/{}/adapters/{}", tenant_id, name)
    printer.say("Removed.")


main.add_command(price_commands(_admin))
for _terms in terms_commands(_admin):
    main.add_command(_terms)


# --- money ---------------------------------------------------------------------------------------


@main.group()
def credit() -> None:
    """Prepaid credit."""


class Negative(click.Command):
    """A command that hears what is wrong with -3 from the ledger, and not that there is no option of that name."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.ignore_unknown_options = any(re.fullmatch(r"-[0-9.]+", argument) for argument in args)
        return super().parse_args(context, args)


@credit.command("grant", cls=Negative)
@click.argument("tenant_id", metavar="TENANT")
@click.argument("amount")
@click.option("--currency", default="usd", show_default=True)
@click.option("--reason", required=True, help="Why, for the ledger.")
@click.option(
    "--priority", type=click.IntRange(0, 100), help="Of several grants the lowest is used first. [default: 50]"
)
@click.option("--expires-at", help="When it ends: RFC 3339 or epoch seconds. [default: never]")
@click.option("--top-up", help="The request for a top-up that it answers.")
@_admin
def credit_grant(api: AdminClient, printer: Printer, tenant_id: str, **fields: str) -> None:
    """Give TENANT credit, AMOUNT as 10.00."""
    granted = api.post("/tenants/{}/credits", tenant_id, body=_given(**fields))
    printer.show(granted, ("id", "tenant", "amount", "currency", "reason", "priority", "expires_at", "created_at"))


add_grants(credit, _admin)
main.add_command(budget_commands(_admin))


@main.command()
@click.argument("tenant_id", metavar="TENANT")
@_admin
def balance(api: AdminClient, printer: Printer, tenant_id: str) -> None:
    """Show what a tenant has left."""
    printer.show(api.get("/tenants/{}/balance", tenant_id), BALANCE)


_start = click.option("--start", help="RFC 3339 or epoch seconds.")
_end = click.option("--end", help="RFC 3339 or epoch seconds, excluded. [default: now]")


class Defaulting(click.Group):
    """A group whose `show` is meant when no command is named: `meterhouse usage --tenant acme`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *context.help_option_names):
            args = ["show", *args]
        return super().parse_args(context, args)


@main.group(cls=Defaulting)
def usage() -> None:
    """Usage by time (`show`, the default), and what has no charge."""


@usage.command("show")
@click.option("--tenant", "tenant_id", help="Only this tenant's.")
@_start
@_end
@click.option("--bucket", type=click.Choice(["hour", "day", "month"]), default="day", show_default=True)
@click.option("--group-by", default="model", show_default=True, help="Comma-separated dimensions.")
@_admin
def usage_show(
    api: AdminClient,
    printer: Printer,
    tenant_id: str | None,
    start: str | None,
    end: str | None,
    bucket: str,
    group_by: str,
) -> None:
    """Show tokens and exact amounts by time. [default: this month]"""
    rows = list(api.pages("/usage", tenant=tenant_id, start=start, end=end, bucket=bucket, group_by=group_by))
    dimensions = [name for name in group_by.replace(" ", "").split(",") if name not in ("", "tenant")]
    printer.show(rows, ("start", "tenant", *dimensions, *COUNTS))


@usage.command("unrated")
@click.option("--tenant", "tenant_id", help="Only this tenant's.")
@_admin
def usage_unrated(api: AdminClient, printer: Printer, tenant_id: str | None) -> None:
    """List requests that have no charge, and why."""
    printer.show(list(api.pages("/usage/unrated", tenant=tenant_id)), UNRATED)


@usage.command("rate")
@_admin
def usage_rate(api: AdminClient, printer: Printer) -> None:
    """Charge requests that had no price and have one now.

    The price must be effective when they began: set it with --effective-at.
    """
    total = 0
    while rated := api.post("/usage/rate")["rated"]:
        total += rated
    printer.show({"rated": total}, ("rated",))


_invoice = invoice_group(_admin)
add_statement(_invoice, _admin)
main.add_command(_invoice)
main.add_command(credit_note_group(_admin))


@main.group()
def gateway() -> None:
    """Gateways on this ledger: how far each has stored its usage."""


@gateway.command("list")
@_admin
def gateway_list(api: AdminClient, printer: Printer) -> None:
    """List the gateways that hold, or may hold, usage that is not stored yet."""
    printer.show(list(api.pages("/gateways")), GATEWAY)


@gateway.command("adopt")
@click.argument("gateway_id", metavar="GATEWAY")
@click.argument("folder", type=click.Path(path_type=Path))
@_admin
def gateway_adopt(api: AdminClient, printer: Printer, gateway_id: str, folder: Path) -> None:
    """Settle and deliver what GATEWAY, which is gone, left in its data FOLDER (on the server); safe to repeat."""
    body = {"path": str(folder.absolute())}
    printer.show(api.put("/gateways/{}/adoption", gateway_id, body=body), ("gateway", "settled", "delivered"))


@gateway.command("remove")
@click.argument("gateway_id", metavar="GATEWAY")
@_admin
def gateway_remove(api: AdminClient, printer: Printer, gateway_id: str) -> None:
    """Give up a gateway whose data folder is lost, so that invoices no longer wait for it."""
    api.delete("/gateways/{}", gateway_id)
    printer.say("Removed.")


@main.command()
@_start
@_end
@_admin
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


for _command in (*store_commands(_admin), *invoice_commands(_admin), backup_command(_admin), restore):
    main.add_command(_command)


@main.group()
def admin() -> None:
    """Admin keys: who may administer, and as what."""


@admin.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["owner", "billing", "read_only"]), required=True, help="What it may change.")
@_admin
def admin_create(api: AdminClient, printer: Printer, name: str, role: str) -> None:
    """Create an admin key for NAME and print it, this once."""
    printer.show(api.post("/admin-keys", body={"name": name, "role": role}), ("id", "name", "role", "key"))
    printer.say("Keep the key now: it is not shown again.")


@admin.command("list")
@_admin
def admin_list(api: AdminClient, printer: Printer) -> None:
    """List admin keys."""
    printer.show(list(api.pages("/admin-keys")), ADMIN_KEY)


@admin.command("revoke")
@click.argument("key_id", metavar="KEY_ID")
@_admin
def admin_revoke(api: AdminClient, printer: Printer, key_id: str) -> None:
    """Revoke an admin key: it opens nothing from now on."""
    api.delete("/admin-keys/{}", key_id)
    printer.say("Revoked.")


@main.command()
@click.option("--actor", help="Only of this actor, as admin:admin-3f….")
@click.option("--kind", help="Only events of this type, as price.set, or invoice.* for all of those.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@_start
@_end
@_admin
def audit(
    api: AdminClient,
    printer: Printer,
    actor: str | None,
    kind: str | None,
    limit: int,
    start: str | None,
    end: str | None,
) -> None:
    """Show who did what, the newest first; refused commands too."""
    query: dict[str, str | int | None] = {"actor": actor, "kind": kind, "limit": limit, "start": start, "end": end}
    found = api.get("/audit", query=query)
    printer.show(found["data"], AUDIT)


@main.group(cls=Defaulting)
def alerts() -> None:
    """Alerts to the operator's webhook (`show`, the default)."""


@alerts.command("show")
@click.option("--status", type=click.Choice(["pending", "delivered", "dead", "kept"]), help="Only those.")
@_admin
def alerts_show(api: AdminClient, printer: Printer, status: str | None) -> None:
    """List alerts, the newest first."""
    printer.show(list(api.pages("/alerts", status=status)), ALERT)


@alerts.command("send")
@click.argument("alert_id", metavar="ALERT")
@_admin
def alerts_send(api: AdminClient, printer: Printer, alert_id: str) -> None:
    """Send an alert again, under its id."""
    printer.show(api.patch("/alerts/{}", alert_id, body={"state": "pending"}), ALERT)


@main.group(cls=Defaulting)
def meters() -> None:
    """Usage on its way to Stripe's meters (`show`, the default)."""


@meters.command("show")
@_admin
def meters_show(api: AdminClient, printer: Printer) -> None:
    """Show how far the export is, and what was put aside."""
    found = {**api.get("/meters"), "events": list(api.pages("/meters/events"))}
    printer.show(found, METERS)
    if not printer.as_json:
        printer.show(found["events"], METER_EVENT)


def _meters_decision(name: str, send: bool, help: str) -> None:
    @meters.command(name, help=help)
    @click.argument("identifier")
    @_admin
    def command(api: AdminClient, printer: Printer, identifier: str) -> None:
        printer.show(api.patch("/meters/events/{}", identifier, body={"send": send}), METER_EVENT)


_meters_decision("send", True, "Send a meter event that was put aside (again).")
_meters_decision("leave", False, "Decide that a meter event that was put aside is not to be sent.")


@main.group()
def stripe() -> None:
    """What stands at Stripe."""


stripe.add_command(release_command(_admin))


@stripe.command("sync")
@_admin
def stripe_sync(api: AdminClient, printer: Printer) -> None:
    """Let every exported invoice catch up with what Stripe has now."""
    printer.show(api.patch("/stripe/invoices", body={})["data"], INVOICE)


@main.group(cls=Defaulting)
def margin() -> None:
    """What is left of what was charged (`show`, the default)."""


@margin.command("show")
@click.option("--group-by", default="tenant", show_default=True, help="Of tenant, model, adapter, hour, by commas.")
@_start
@_end
@_admin
def margin_show(api: AdminClient, printer: Printer, group_by: str, start: str | None, end: str | None) -> None:
    """Show charges, costs and margins. [default: the last day]"""
    found = api.get("/margin", query={"group_by": group_by, "start": start, "end": end})
    printer.show(found["data"], MARGIN)


@margin.command("rate")
@click.option("--compute-second", required=True, help="Cost of a second of engine time, as 0.0004.")
@click.option("--kv-block-second", required=True, help="Of a KV-cache block held for a second.")
@click.option("--hour", required=True, help="Of an hour, whatever runs.")
@click.option("--currency", default="usd", show_default=True)
@click.option("--effective-at", help="From when on: RFC 3339 or epoch seconds. [default: now]")
@_admin
def margin_rate(api: AdminClient, printer: Printer, **fields: str | None) -> None:
    """Enter what the house pays."""
    printer.show(api.post("/margin/rates", body=_given(**fields)), COST_RATE)


# --- how fast it is --------------------------------------------------------------------------------

main.add_command(bench)


if __name__ == "__main__":
    main()
