"""The word of an invoice: the keys that sign it (`meterhouse signing-key list | rotate`), `replay`, `verify`."""

from __future__ import annotations

import click

from billing import verify as verifier
from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

REPLAY = ("invoice", "tenant", "status", "equal", "content_hash", "difference")
SIGNING_KEY = ("key_id", "this", "published_at", "retired_at")


@click.group("signing-key", cls=Noun)
def signing_key() -> None:
    """Keys that sign invoices."""


@signing_key.command("list")
@admin
def list_keys(api: AdminClient, printer: Printer) -> None:
    """List every key that ever signed an invoice, of all gateways."""
    printer.show(list(api.pages("/signing-keys")), SIGNING_KEY)


@signing_key.command("rotate")
@admin
def rotate(api: AdminClient, printer: Printer) -> None:
    """Let a new key take the place of this gateway's; the old one stays published."""
    printer.show(api.post("/signing-keys"), SIGNING_KEY)


@click.command()
@click.argument("invoice_id", metavar="[INVOICE]", required=False)
@click.option("--start", help="All final invoices of periods since: a date, RFC 3339 or epoch seconds.")
@click.option("--end", help="A date, RFC 3339 or epoch seconds, excluded. [default: now]")
@admin
def replay(api: AdminClient, printer: Printer, invoice_id: str | None, start: str | None, end: str | None) -> None:
    """Rebuild INVOICE, or all of a range, from the log and the usage store; exit code 1 when bytes differ."""
    if invoice_id is None and start is None:
        raise click.UsageError("name an invoice, or a range with --start")
    found = api.get("/replay", query={"invoice": invoice_id, "start": start, "end": end})
    if printer.as_json:
        printer.json(found)
    else:
        printer.show(found["data"], REPLAY)
    if not found["ok"]:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("files", metavar="INVOICE EVENTS [RECEIPTS]", nargs=-1)
@click.option("--keys", help="The seller's public keys, as they were trusted.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(files: tuple[str, ...], keys: str | None, as_json: bool) -> None:
    """Verify an invoice from files alone, without a server; exit code 1 where it does not hold.

    The same as `python billing/verify.py`, a file that stands alone: give it to tenants.
    """
    if len(files) not in (2, 3):
        raise click.UsageError("name the invoice's file and the events', and perhaps the receipts'")
    flags = [*(["--keys", keys] if keys else []), *(["--json"] if as_json else [])]
    code = verifier.main([*flags, "--", *files])
    if code:
        raise click.exceptions.Exit(code)
