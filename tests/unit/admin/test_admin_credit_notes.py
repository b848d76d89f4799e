"""Credit notes over the admin API and by the command line, with Stripe behind it."""

from __future__ import annotations

from typing import Any

import click
import pytest

from tests.doubles.stripe import StripeDouble
from tests.unit.admin.conftest import World
from tests.unit.admin.typed import Typed

DOLLARS = {"prompt": "1000000", "cached": "0", "completion": "1000000"}


async def final(world: World) -> dict[str, Any]:
    """20 dollars and 3.80 of tax."""
    await world.tenant(price=DOLLARS)
    await world.call("PUT", "/tenants/acme/tax", {"mode": "fixed", "rates": [{"name": "VAT", "percent": "19"}]})
    start = world.clock.us // 1_000_000
    world.request("acme", prompt=20, completion=0)
    world.later(3600)
    invoice = await world.post("/invoices", {"tenant": "acme", "period_start": start, "period_end": start + 3600})
    done: dict[str, Any] = await world.post(f"/invoices/{invoice['id']}/finalize", expect=200)
    return done


async def test_a_note_is_issued_exported_and_compared(world: World, stripe_double: StripeDouble) -> None:
    invoice = await final(world)
    path = f"/invoices/{invoice['id']}/credit-notes"
    note = await world.post(path, {"reason": "outage", "amount": "11.90"}, headers={"idempotency-key": "n"})
    assert await world.post(path, {"reason": "outage", "amount": "11.90"}, headers={"idempotency-key": "n"}) == note
    assert (note["number"], note["status"], note["amount"], note["tax"], note["way"]) == (
        *(f"{invoice['id']}-CN1", "issued", "11.90", "1.90"),
        "balance",
    )
    assert (await world.get("/tenants/acme/balance"))["charged"] == "10.00"
    await world.post(f"/credit-notes/{note['id']}/export", expect=409)
    await world.post(f"/invoices/{invoice['id']}/export", expect=200)
    query = {"start": invoice["period_start"], "end": invoice["period_end"]}
    (difference,) = (await world.get("/reconcile", **query))["differences"]
    (theirs,) = stripe_double.invoices()
    assert (difference["left"], difference["right"]) == ("credit notes 1190", f"{theirs['id']} credit notes 0")
    done = await world.post(f"/credit-notes/{note['id']}/export", expect=200)
    (made,) = stripe_double.state.all("credit_note")
    assert (done["status"], done["stripe_credit_note_id"], made["amount"]) == ("exported", made["id"], 1190)
    assert (await world.get("/reconcile", **query))["ok"]
    assert await world.get(f"/credit-notes/{note['id']}") == done
    await world.post(f"/invoices/{invoice['id']}/void", expect=409)
    void = await world.post(f"/credit-notes/{note['id']}/void", expect=200)
    assert (void["status"], made["status"]) == ("void", "void")
    assert (await world.get("/tenants/acme/balance"))["charged"] == "20.00"
    assert (await world.get("/reconcile", **query))["ok"]
    assert (await world.get(f"/invoices/{invoice['id']}"))["total"] == invoice["total"]


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"reason": "r"}, "amount"),
    ({"reason": "r", "amount": "1", "all": True}, "amount"),
    ({"reason": "r", "amount": "23.81"}, "amount"),
    ({"reason": "r", "lines": [{"line": "x", "amount": "1"}]}, "lines.x"),
    ({"reason": "r", "lines": [{"line": "x", "amount": "1"}] * 2}, "lines"),
    ({"reason": "r", "all": True, "way": "cash"}, "way"),
    ({"all": True}, "reason"),
]


async def test_a_fault_is_a_400_that_names_the_field(world: World) -> None:
    invoice = await final(world)
    for body, param in FAULTS:
        refused = await world.post(f"/invoices/{invoice['id']}/credit-notes", body, expect=400)
        assert refused["error"]["param"] == param
    assert (await world.get("/credit-notes"))["data"] == []
    await world.post("/invoices/nothing/credit-notes", {"reason": "r", "all": True}, expect=404)


async def test_credit_notes_by_the_command_line(
    world: World, stripe_double: StripeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoice = await final(world)
    await world.post(f"/invoices/{invoice['id']}/export", expect=200)
    typed = Typed(world, monkeypatch)
    line = invoice["lines"][0]["id"]
    made = await typed("credit-note", "issue", invoice["id"], "--reason=wrong model", f"--line={line}=5")
    assert (made["amount"], made["tax"], made["lines"]) == ("5.95", "0.95", [{"line": line, "amount": "5.00"}])
    assert (await typed("credit-note", "export", made["id"]))["status"] == "exported"
    rest = await typed("credit-note", "issue", invoice["id"], "--reason=goodwill", "--all", "--way=out_of_band")
    assert (rest["amount"], rest["way"]) == ("17.85", "out_of_band")
    assert (await typed("credit-note", "void", rest["id"]))["status"] == "void"
    assert [one["id"] for one in await typed("credit-note", "list", "--tenant=acme")] == [made["id"], rest["id"]]
    assert [one["id"] for one in await typed("credit-note", "list", f"--invoice={invoice['id']}")] == [
        made["id"],
        rest["id"],
    ]
    assert (await typed("credit-note", "show", rest["id"]))["reason"] == "goodwill"
    with pytest.raises(click.BadParameter):
        await typed("credit-note", "issue", invoice["id"], "--reason=r", "--line=5")
    with pytest.raises(click.ClickException, match="amount"):
        await typed("credit-note", "issue", invoice["id"], "--reason=r")
