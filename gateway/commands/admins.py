"""`meterhouse admin create | list | revoke`, and who did what: `meterhouse audit`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import END, START, Noun, admin
from gateway.printing import Printer

ADMIN_KEY = ("id", "name", "role", "prefix", "created_at", "revoked_at")
AUDIT = ("event", "at", "actor", "actor_name", "type", "detail")


@click.group("admin", cls=Noun)
def admin_key() -> None:
    """Admin keys: who may administer, and as what."""


@admin_key.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["owner", "billing", "read_only"]), required=True, help="What it may change.")
@admin
def admin_create(api: AdminClient, printer: Printer, name: str, role: str) -> None:
    """Create an admin key for NAME and print it, this once."""
    printer.show(api.post("/admin-keys", body={"name": name, "role": role}), ("id", "name", "role", "key"))
    printer.say("Keep the key now: it is not shown again.")


@admin_key.command("list")
@admin
def admin_list(api: AdminClient, printer: Printer) -> None:
    """List admin keys."""
    printer.show(list(api.pages("/admin-keys")), ADMIN_KEY)


@admin_key.command("revoke")
@click.argument("key_id", metavar="KEY_ID")
@admin
def admin_revoke(api: AdminClient, printer: Printer, key_id: str) -> None:
    """Revoke an admin key: it opens nothing from now on."""
    api.delete("/admin-keys/{}", key_id)
    printer.say("Revoked.")


@click.command()
@click.option("--actor", help="Only of this actor, as admin:admin-3f….")
@click.option("--kind", help="Only events of this type, as price.set, or invoice.* for all of those.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@START
@END
@admin
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
