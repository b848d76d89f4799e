"""Commands about the word of an invoice: the keys that sign it.

`commands(admin)` makes them; `admin` is the command line's decorator that gives a command the admin API and a printer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gateway.client import AdminClient
from gateway.printing import Printer

SIGNING_KEY = ("key_id", "this", "published_at", "retired_at")


def commands(admin: Callable[[Callable[..., None]], Any]) -> list[click.Command]:
    """All commands of this file."""
    return [_signing_key(admin)]


def _signing_key(admin: Callable[[Callable[..., None]], Any]) -> click.Command:
    @click.group("signing-key")
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

    return signing_key
