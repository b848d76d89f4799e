"""Budgets, grants with an order and an end, and how a tenant pays, over the admin API."""

from __future__ import annotations

from typing import Any

import pytest

BUDGET = {"name": "daily", "scope": "tenant", "period": "day", "amount": "0.00100"}
GRANT = {"amount": "1.00", "currency": "usd", "reason": "trial"}


async def test_a_budget_from_its_setting_to_its_end(world: Any) -> None:
    await world.tenant(timezone="Europe/Berlin")
    once = {"Idempotency-Key": "b1"}
    made = await world.post("/tenants/acme/budgets", BUDGET, headers=once)
    assert (await world.post("/tenants/acme/budgets", BUDGET, headers=once))["id"] == made["id"]
    assert (made["window_start"], made["window_end"]) == ("2026-11-17T23:00:00Z", "2026-11-18T23:00:00Z")
    assert (made["amount"], made["spent"], made["left"], made["thresholds"]) == ("0.001", "0.00", "0.001", [80, 100])
    await world.post("/tenants/acme/credits", GRANT)
    world.request("acme", prompt=100, completion=0)
    shown = await world.get(f"/budgets/{made['id']}")
    assert (shown["spent"], shown["held"], shown["left"]) == ("0.0001", "0.00", "0.0009")
    changed = await world.call("PATCH", f"/budgets/{made['id']}", {"amount": "0.0002", "thresholds": [50]})
    assert (changed["left"], changed["thresholds"], changed["hard"]) == ("0.0001", [50], True)
    assert [one["id"] for one in (await world.get("/tenants/acme/budgets"))["data"]] == [made["id"]]
    await world.call("DELETE", f"/budgets/{made['id']}", expect=204)
    await world.get(f"/budgets/{made['id']}", expect=404)
    assert (await world.get("/tenants/acme/budgets"))["data"] == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"amount": "-1"}, "amount"),
        ({"scope": "house"}, "scope"),
        ({"subject": "k"}, "subject"),
        ({"thresholds": [0]}, "thresholds"),
        ({"period": "year"}, "period"),
        ({"hard": "yes"}, "hard"),
        ({"limit": 5}, "limit"),
    ],
)
async def test_a_bad_budget_is_refused_by_its_field(world: Any, change: dict[str, Any], param: str) -> None:
    await world.tenant()
    error = (await world.post("/tenants/acme/budgets", BUDGET | change, expect=400))["error"]
    assert error["param"].startswith(param)


async def test_the_balance_is_shown_by_grant(world: Any) -> None:
    await world.tenant()
    trial = await world.post("/tenants/acme/credits", GRANT | {"expires_at": "2026-11-19T00:00:00Z", "priority": 10})
    paid = await world.post("/tenants/acme/credits", GRANT)
    assert (trial["expires_at"], trial["priority"], paid["expires_at"]) == ("2026-11-19T00:00:00Z", 10, None)
    world.request("acme", prompt=1000, completion=0)
    world.stores.flush(5)
    balance = await world.get("/tenants/acme/balance")
    assert balance["available"] == "1.999"
    assert [(one["id"], one["used"], one["left"]) for one in balance["grants"]] == [
        (trial["id"], "0.001", "0.999"),
        (paid["id"], "0.00", "1.00"),
    ]
    world.later(86_400)
    world.stores.billing.notice()
    balance = await world.get("/tenants/acme/balance")
    assert (balance["available"], balance["expired"]) == ("1.00", "0.999")
    listed = (await world.get("/tenants/acme/credits"))["data"]
    assert [(one["expired"], one["left"]) for one in listed] == [("0.999", "0.00"), ("0.00", "1.00")]
    refused = await world.post("/tenants/acme/credits", GRANT | {"expires_at": "2026-11-18"}, expect=400)
    assert refused["error"]["param"] == "expires_at"


async def test_how_a_tenant_pays_can_be_set_and_changed(world: Any) -> None:
    made = await world.post("/tenants", {"id": "later", "name": "L", "billing_mode": "postpaid", "monthly_cap": "5"})
    assert (made["billing_mode"], made["monthly_cap"], made["top_up"]) == ("postpaid", "5", None)
    (cap,) = (await world.get("/tenants/later/budgets"))["data"]
    assert (cap["name"], cap["left"], cap["period"]) == ("monthly cap", "5.00", "month")
    refused = await world.call("PATCH", "/tenants/later", {"billing_mode": "prepaid"}, expect=400)
    assert refused["error"]["param"] == "monthly_cap"
    top_up = {"threshold": "1.00", "amount": "20.00"}
    changed = await world.call(
        "PATCH", "/tenants/later", {"billing_mode": "prepaid", "monthly_cap": None, "top_up": top_up}
    )
    assert (changed["monthly_cap"], changed["top_up"]) == (None, top_up)
    assert (await world.get("/tenants/later/balance"))["billing_mode"] == "prepaid"
    assert (await world.call("PATCH", "/tenants/later", {"top_up": None}))["top_up"] is None
