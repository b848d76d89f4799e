"""The commands of the price book: `meterhouse price set | list`.

Knows: flags and columns. Does not know: how a price is checked, which the admin API says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.client import AdminClient
from gateway.printing import Printer

PRICE = ("model", "tenant", "currency", "per_million.prompt", "per_million.cached", "per_million.completion")
PRICE_TIMES = ("effective_at", "recorded_at")
PRICE_MORE = ("endpoint", "classes")

Admin = Callable[[Callable[..., None]], Callable[..., None]]


def read_table(path: Path) -> dict[str, Any]:
    """A JSON or TOML file's object. Raises `click.BadParameter`."""
    try:
        text = path.read_text()
        found = tomllib.loads(text) if path.suffix == ".toml" else msgspec.json.decode(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise click.BadParameter(f"{path.name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{path.name} is not an object")
    return found


def price_commands(admin: Admin) -> click.Group:
    """The group; `admin` gives a command the admin API, a printer and their flags."""

    @click.group()
    def price() -> None:
        """The price book, per million tokens."""

    @price.command("set")
    @click.argument("model")
    @click.option("--prompt", help="Price of a million prompt tokens, as 0.50.")
    @click.option("--cached", help="Of a million that were found in the cache.")
    @click.option("--completion", help="Of a million completion tokens.")
    @click.option(
        "--classes",
        type=click.Path(path_type=Path),
        help="JSON or TOML file with prices by class: tiers, packages, allowances, images, requests …",
    )
    @click.option("--endpoint", help="For requests of this endpoint only, as chat.completions.")
    @click.option("--currency", default="usd", show_default=True)
    @click.option("--effective-at", help="From when on: RFC 3339 or epoch seconds. [default: now]")
    @click.option("--tenant", "tenant_id", help="For this tenant only.")
    @admin
    def price_set(
        api: AdminClient,
        printer: Printer,
        model: str,
        prompt: str | None,
        cached: str | None,
        completion: str | None,
        classes: Path | None,
        endpoint: str | None,
        currency: str,
        effective_at: str | None,
        tenant_id: str | None,
    ) -> None:
        """Enter a price for MODEL: a model's or adapter's name, or * for all.

        Prompt, cached and completion need a price each, by their flags or in --classes.
        """
        flat = {"prompt": prompt, "cached": cached, "completion": completion}
        body: dict[str, Any] = {
            "model": model,
            "currency": currency,
            "effective_at": effective_at,
            "tenant": tenant_id,
            "endpoint": endpoint,
            "per_million": {name: text for name, text in flat.items() if text is not None},
            "classes": {} if classes is None else read_table(classes),
        }
        body = {name: value for name, value in body.items() if value is not None}
        printer.show(api.post("/prices", body=body), PRICE + PRICE_TIMES + PRICE_MORE)

    @price.command("list")
    @admin
    def price_list(api: AdminClient, printer: Printer) -> None:
        """List every price ever entered."""
        printer.show(list(api.pages("/prices")), PRICE + PRICE_TIMES)

    return price
