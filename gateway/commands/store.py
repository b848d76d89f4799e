"""The usage store: `meterhouse rollup check | rebuild`, of its hourly sums, and `archive list | create | check`."""

from __future__ import annotations

import click

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

ARCHIVE = ("month", "events", "second_contents", "files", "nbytes", "dropped")
DRIFT = ("start", "groups", "events", "summed")

_start = click.option("--start", help="A date, RFC 3339 or epoch seconds. [default: a month before the end]")
_end = click.option("--end", help="A date, RFC 3339 or epoch seconds, excluded. [default: now]")


@click.group(cls=Noun)
def rollup() -> None:
    """The usage store's hourly sums."""


@rollup.command("check")
@_start
@_end
@admin
def rollup_check(api: AdminClient, printer: Printer, start: str | None, end: str | None) -> None:
    """Compare the sums with the events they are of; exit code 1 when they part."""
    found = api.get("/rollups/drift", query={"start": start, "end": end})["data"]
    if found or printer.as_json:
        printer.show(found, DRIFT)
    else:
        printer.say("The sums are those of the events.")
    if found:
        raise click.exceptions.Exit(1)


@rollup.command("rebuild")
@click.argument("start")
@click.argument("end")
@admin
def rollup_rebuild(api: AdminClient, printer: Printer, start: str, end: str) -> None:
    """Make the sums of the hours from START up to END (excluded) anew from the events."""
    printer.show(api.put("/rollups", body={"start": start, "end": end}), ("hours",))


@click.group(cls=Noun)
def archive() -> None:
    """Months of events in Parquet files, and no longer in the usage store."""


@archive.command("list")
@admin
def archive_list(api: AdminClient, printer: Printer) -> None:
    """List the months in the archive."""
    printer.show(list(api.pages("/archives")), ARCHIVE)


@archive.command("create")
@click.argument("month")
@admin
def archive_create(api: AdminClient, printer: Printer, month: str) -> None:
    """Archive MONTH (as 2026-11) and drop what is archived from the usage store; safe to repeat."""
    printer.show(api.put("/archives/{}", month, body={}), ARCHIVE)


@archive.command("check")
@click.argument("month")
@admin
def archive_check(api: AdminClient, printer: Printer, month: str) -> None:
    """Read every event of an archived MONTH; exit code 1 when one is not what was archived."""
    found = api.get("/archives/{}/check", month)
    printer.show(found, ("month", "ok", "events", "fault"))
    if not found["ok"]:
        raise click.exceptions.Exit(1)
