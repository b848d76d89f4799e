"""Discounts, minimums and tax over the admin API, and by the command line."""

from __future__ import annotations

from typing import Any

import click
import pytest

from gateway.admin.times import format_time
from tests.doubles.stripe import StripeDouble
from tests.unit.admin.conftest import START_US, World
from tests.unit.admin.typed import Typed

DOLLARS = {"prompt": "1000000", "cached": "0", "completion": "1000000"}


async def test_an_invoice_with_discount_minimum_and_tax(world: World) -> None:
    await world.tenant(price=DOLLARS)
    made = await world.post("/tenants/acme/discounts", {"name": "Ten", "percent": "10", "from": 0})
    assert made == {
        "id": made["id"],
        "tenant": "acme",
        "name": "Ten",
        "percent": "10",
        "amount": None,
        "from": "1970-01-01T00:00:00Z",
        "to": None,
        "model": None,
        "token_class": None,
        "created_at": made["created_at"],
    }
    await world.call("PUT", "/tenants/acme/commitment", {"amount": "100", "from": START_US // 1_000_000})
    taxed = await world.call(
        "PUT", "/tenants/acme/tax", {"mode": "fixed", "rates": [{"name": "VAT", "percent": "19.0"}]}
    )
    assert taxed == {"mode": "fixed", "rates": [{"name": "VAT", "percent": "19"}]}
    world.request("acme", prompt=20, completion=0)
    world.clock.us = START_US + 3_600_000_000
    period = {"period_start": format_time(START_US), "period_end": format_time(world.clock.us)}
    invoice = await world.post("/invoices", {"tenant": "acme"} | period)
    assert [(line["kind"], line["amount"]) for line in invoice["lines"]] == [
        ("usage", "20.00"),
        ("discount", "-2.00"),
        ("tax", "3.42"),
    ]
    assert (invoice["subtotal"], invoice["tax"], invoice["total"], invoice["tax_mode"]) == (
        *("18.00", "3.42", "21.42"),
        "fixed",
    )
    discount, tax = invoice["lines"][1:]
    assert (discount["term"], discount["rate"], discount["base"], discount["unit"]) == (made["id"], "10", "20.00", None)
    assert (tax["name"], tax["description"]) == ("VAT", "VAT 19% on 18.00 USD")


async def test_a_minimum_shows_what_it_is_computed_from(world: World) -> None:
    await world.tenant(price=None)
    await world.call("PUT", "/tenants/acme/commitment", {"amount": "720", "from": START_US // 1_000_000})
    world.clock.us = START_US + 3_600_000_000
    period = {"period_start": format_time(START_US), "period_end": format_time(world.clock.us)}
    invoice = await world.post("/invoices", {"tenant": "acme"} | period)
    (line,) = invoice["lines"]
    assert (line["kind"], line["exact"], line["amount"]) == ("commitment", "1.00", "1.00")
    (part,) = line["parts"]
    assert (part["amount"], part["end_us"] - part["start_us"], part["period_us"]) == (
        *("720.00", 3_600_000_000),
        720 * 3_600_000_000,
    )
    await world.post(f"/invoices/{invoice['id']}/finalize", expect=200)
    assert (await world.get("/tenants/acme/balance"))["charged"] == "1.00"


FAULTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "discounts", {"name": "x"}, "percent"),
    ("POST", "discounts", {"name": "x", "percent": "101"}, "percent"),
    ("POST", "discounts", {"name": "x", "percent": "1", "from": "soon"}, "from"),
    ("PUT", "commitment", {"amount": "-1"}, "amount"),
    ("PUT", "tax", {"mode": "some"}, "mode"),
    ("PUT", "tax", {"mode": "fixed"}, "rates"),
]


async def test_a_fault_is_a_400_that_names_the_field(world: World) -> None:
    await world.tenant(price=None)
    for method, what, body, param in FAULTS:
        refused = await world.call(method, f"/tenants/acme/{what}", body, expect=400)
        assert refused["error"]["param"] == param
    assert (await world.get("/tenants/acme/discounts"))["data"] == []
    assert await world.get("/tenants/acme/terms") == {
        "tenant": "acme",
        "currency": "usd",
        "commitments": [],
        "tax": {"mode": "none", "rates": []},
        "carried": "0.00",
    }
    await world.get("/tenants/nobody/terms", expect=404)


async def test_tax_that_stripe_found_is_shown(world: World, stripe_double: StripeDouble) -> None:
    stripe_double.state.tax_percent = 25
    await world.tenant(price=DOLLARS)
    await world.call("PUT", "/tenants/acme/tax", {"mode": "stripe"})
    world.request("acme", prompt=20, completion=0)
    world.clock.us = START_US + 3_600_000_000
    period = {"period_start": format_time(START_US), "period_end": format_time(world.clock.us)}
    invoice = await world.post("/invoices", {"tenant": "acme"} | period)
    await world.post(f"/invoices/{invoice['id']}/finalize", expect=200)
    exported = await world.post(f"/invoices/{invoice['id']}/export", expect=200)
    assert (exported["total"], exported["provider_tax"]) == ("20.00", "5.00")
    query = {"start": period["period_start"], "end": period["period_end"]}
    assert (await world.get("/reconcile", **query))["ok"]
    (theirs,) = stripe_double.invoices()
    theirs["total"] += 1
    (difference,) = (await world.get("/reconcile", **query))["differences"]
    assert (difference["left"], difference["right"]) == ("tax 500", f"{theirs['id']} tax 501")


async def test_terms_by_the_command_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.tenant(price=None)
    typed = Typed(world, monkeypatch)
    made = await typed(
        "discount", "give", "acme", "Spring", "--amount=5", "--to=2030-01-01T00:00:00Z", "--class=prompt"
    )
    assert (made["amount"], made["to"], made["token_class"]) == ("5.00", "2030-01-01T00:00:00Z", "prompt")
    ended = await typed("discount", "end", made["id"])
    assert ended["to"] == made["from"]
    assert await typed("discount", "list", "acme") == [ended]
    minimum = await typed("commitment", "set", "acme", "100", "--from=2026-01-01T00:00:00Z")
    assert await typed("commitment", "list", "acme") == [minimum]
    tax = await typed("tax", "set", "acme", "fixed", "--rate=GST=5", "--rate=QST=9.975")
    assert tax["rates"] == [{"name": "GST", "percent": "5"}, {"name": "QST", "percent": "9.975"}]
    assert (await typed("tax", "show", "acme"))["tax"] == tax
    with pytest.raises(click.BadParameter):
        await typed("tax", "set", "acme", "fixed", "--rate=5")
    with pytest.raises(click.ClickException, match="rates"):
        await typed("tax", "set", "acme", "fixed")
