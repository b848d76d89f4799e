"""Suspension and dunning over the admin API: from a message of Stripe to the door, and back by a payment."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.telemetry import Telemetry
from gateway.watch import Watch
from tests.doubles.stripe import StripeDouble
from tests.unit.admin.conftest import World
from tests.unit.admin.test_admin_watch import Door, at_stripe, exported

DAY_S = 86_400


async def failed(world: World, stripe_double: StripeDouble) -> dict[str, Any]:
    """An invoice of whose failed payment Stripe has told."""
    invoice = await exported(world)
    made = stripe_double.invoices()[0]
    made["attempt_count"] = 1
    stripe_double.state.touch(made, "invoice.payment_failed")
    for _ in range(2):  # Stripe may say it twice
        assert (await Door(world).send(stripe_double.state.events[-1])).status_code == 200
    return invoice


async def test_a_failed_payment_leads_to_the_door_and_a_payment_opens_it(
    world: World, stripe_double: StripeDouble
) -> None:
    watch = Watch(world.settings, world.stores, world.state, Telemetry("m", "0"), world.clock)
    watch._follow()
    await world.tenant("other", price=None)
    billing = world.stores.billing
    invoice = await failed(world, stripe_double)
    await world.call("PATCH", "/tenants/acme", {"dunning_steps": "notice@1,suspend@2"})
    billing.notice()
    (shown,) = (await world.get("/dunning", tenant="acme"))["data"]
    assert (shown["invoice"], shown["outcome"]) == (invoice["id"], None)
    assert shown["steps"] == [
        {"day": 1, "kind": "notice", "taken_at": None},
        {"day": 2, "kind": "suspend", "taken_at": None},
    ]
    for _ in range(2):
        world.later(DAY_S)
        billing.notice()
    tenant = await world.get("/tenants/acme")
    assert (tenant["status"], tenant["dunning_steps"]) == ("suspended", "notice@1,suspend@2")
    assert [(one["by"], one["invoice"]) for one in tenant["suspensions"]] == [("dunning", invoice["id"])]
    assert (await world.get("/tenants/other"))["status"] == "active"
    await world.post("/tenants/acme/reactivate", {"reason": "x"}, expect=409)
    assert (await world.call("PATCH", "/tenants/acme", {"status": "active"}))["status"] == "suspended"
    at_stripe(stripe_double).pay(invoice["stripe_invoice_id"])
    await world.call("PATCH", "/stripe/invoices", {})
    billing.notice()
    assert (await world.get("/tenants/acme"))["status"] == "active"
    assert (await world.get("/dunning"))["data"] == []
    assert (await world.get(f"/invoices/{invoice['id']}/dunning"))["outcome"] == "paid"
    for _ in range(2):
        await asyncio.to_thread(watch._follow)
    kinds = [one["kind"] for one in (await world.get("/alerts"))["data"]]
    assert sorted(kinds) == [
        *("dunning.step", "dunning.step", "payment.failed", "tenant.reactivated", "tenant.suspended"),
    ]


async def test_by_hand_with_a_reason_by_whom_it_may(world: World) -> None:
    await world.tenant()
    await world.post("/tenants/acme/suspend", {}, expect=400)
    await world.post("/tenants/nobody/suspend", {"reason": "x"}, expect=404)
    once = {"headers": {"idempotency-key": "s1"}}
    first = await world.post("/tenants/acme/suspend", {"reason": "Abuse."}, expect=200, **once)
    assert first["suspensions"] == [
        {"by": "operator", "invoice": None, "reason": "Abuse.", "since": "2026-11-18T11:06:40.000001Z"}
    ]
    assert await world.post("/tenants/acme/suspend", {"reason": "Abuse."}, expect=200, **once) == first
    await world.post("/tenants/acme/suspend", {"reason": "Other."}, expect=409, **once)
    reader = await world.post("/admin-keys", {"name": "r", "role": "read_only"})
    clerk = await world.post("/admin-keys", {"name": "b", "role": "billing"})
    back = {"reason": "Sorry."}
    for key, status in ((reader, 403), (clerk, 200), (clerk, 200)):
        headers = {"authorization": f"Bearer {key['key']}"}
        await world.post("/tenants/acme/reactivate", back, expect=status, headers=headers)
    audited = (await world.get("/audit", kind="suspension.*"))["data"]
    assert [(one["type"], one["actor_name"]) for one in audited] == [
        ("suspension.lifted", "b"),
        ("suspension.placed", None),
    ]
    await world.get("/invoices/none/dunning", expect=404)
    await world.post("/invoices/none/dunning/waive", {"reason": "x"}, expect=404)
