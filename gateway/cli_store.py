"""Commands about the usage store: its hourly sums.

`commands(admin)` makes them; `admin` is the command line's decorator that gives a command the admin API and a printer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gateway.client import AdminClient
from gateway.printing import Printer

DRIFT = ("start", "groups", "events", "summed")

_start = click.option("--start", help="RFC 3339 or epoch seconds. [default: a month before the end]")
_end = click.option("--end", help="RFC 3339 or epoch seconds, excluded. [default: now]")


def commands(admin: Callable[[Callable[..., None]], Any]) -> list[click.Command]:
    """All commands of this file."""
    return [_rollup(admin)]


def _rollup(admin: Callable[[Callable[..., None]], Any]) -> click.Command:
    @click.group()
    def rollup() -> None:
        """The usage store's hourly sums."""

    @rollup.command("check")
    @_start
    @_end
    @admin
    def check(api: AdminClient, printer: Printer, start: str | None, end: str | None) -> None:
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
    def rebuild(api: AdminClient, printer: Printer, start: str, end: str) -> None:
        """Make the sums of the hours from START up to END (excluded) anew from the events."""
        printer.show(api.post("/rollups/rebuild", body={"start": start, "end": end}), ("hours",))

    return rollup
