"""`meterhouse price set | list | simulate`.

Knows: flags and columns. Does not know: how a price is checked, which the admin API says.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.client import AdminClient
from gateway.commands.base import Noun, admin
from gateway.printing import Printer

PRICE = ("model", "tenant", "currency", "per_million.prompt", "per_million.cached", "per_million.completion")
PRICE_TIMES = ("effective_at", "recorded_at")
PRICE_MORE = ("endpoint", "classes")
SIMULATED = ("tenant", "model", "requests", "charged", "would_be", "difference", "percent", "currency")
MISSING = ("tenant", "model", "endpoint", "requests", "reason")
BOOK = frozenset({"prices", "alone"})


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


@click.group(cls=Noun)
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
@click.option("--effective-at", help="From when on: a date, RFC 3339 or epoch seconds. [default: now]")
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


@price.command("simulate")
@click.option(
    "--book",
    type=click.Path(path_type=Path),
    help="JSON or TOML file of candidate prices: a list `prices`, each as POST /admin/v1/prices takes it: "
    "{model = '*', currency = 'usd', per_million = {prompt = '0.50', cached = '0.05', completion = '1.50'}}, "
    "or {price = 'an id'}; with an own effective_at if it has one; `alone = true`: no price but these.",
)
@click.option("--as-if", "ids", multiple=True, metavar="PRICE_ID", help="A version that stands; may be repeated.")
@click.option("--effective-at", help="From when on, for --as-if. [default: the start]")
@click.option("--start", required=True, help="A date, RFC 3339 or epoch seconds.")
@click.option("--end", required=True, help="A date, RFC 3339 or epoch seconds, excluded.")
@click.option("--tenant", "tenant_id", help="This tenant only.")
@click.option("--by", type=click.Choice(["tenant", "model"]), default="tenant", show_default=True)
@admin
def price_simulate(
    api: AdminClient,
    printer: Printer,
    book: Path | None,
    ids: tuple[str, ...],
    effective_at: str | None,
    start: str,
    end: str,
    tenant_id: str | None,
    by: str,
) -> None:
    """Rate past usage again by other prices, beside what it was charged. Writes nothing.

    A candidate takes the place of what stands for the same tenant, model, endpoint and currency, from its time on.
    Exit code 1 when some requests have no candidate price.
    """
    body = {**_candidates(book, ids, effective_at), "start": start, "end": end, "by_model": by == "model"}
    found = api.post("/prices/simulation", body=body if tenant_id is None else {**body, "tenant": tenant_id})
    if printer.as_json:
        printer.json(found)
    else:
        printer.show(found["data"], SIMULATED)
        for tenant, count in found["uncharged"].items():
            printer.say(f"{tenant}: {count} requests have no charge yet")
        if found["missing"]:
            printer.say("Without a candidate price:")
            printer.show(found["missing"], MISSING)
    if found["missing"]:
        raise click.exceptions.Exit(1)


def _candidates(book: Path | None, ids: tuple[str, ...], effective_at: str | None) -> dict[str, Any]:
    """The body's part that says by which prices. Raises `click.UsageError`."""
    if effective_at is not None and not ids:
        raise click.UsageError("--effective-at is for --as-if; a book says it with each price")
    found = {"prices": []} if book is None else read_table(book)
    if strange := sorted(found.keys() - BOOK):
        raise click.UsageError(f"the book has {', '.join(map(repr, strange))}; known are prices, alone")
    prices = found.get("prices")
    if not isinstance(prices, list):
        raise click.UsageError("the book needs a list of prices")
    timed = {} if effective_at is None else {"effective_at": effective_at}
    found["prices"] = [*prices, *({"price": id, **timed} for id in ids)]
    if not found["prices"]:
        raise click.UsageError("nothing to simulate: give --book or --as-if")
    return found
