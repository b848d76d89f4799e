"""What a server watches: Stripe's messages, drift, the hourly comparison, alerts, meters; over real stores."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import pytest
import stripe
from litestar import Litestar
from litestar.di import Provide

from billing.alerts import AlertKind
from billing.errors import ExportError
from billing.stripe_calls import StripeUnavailable
from billing.webhooks import StripeWebhooks
from gateway.admin import comparing
from gateway.errors import handle
from gateway.settings import Settings, SettingsError
from gateway.telemetry import Telemetry
from gateway.watch import Watch, export_failed, money_parts
from gateway.webhooks import MAX_BYTES, StripeDoor, stripe_webhook
from metering.counts import HOUR_US, hour_of
from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.webhooks import signature
from tests.unit.admin.conftest import World
from tests.unit.admin.typed import Typed

SECRET = "whsec_double"
DECEMBER_US = 1_796_083_200_000_000


class Door:
    """The endpoint as Stripe has it."""

    def __init__(self, world: World, *, configured: bool = True) -> None:
        hooks = StripeWebhooks(world.stores.billing, world.state.exporter, (SECRET,)) if configured else None
        self.telemetry = Telemetry("m", "0")
        door = StripeDoor(hooks, self.telemetry)
        app = Litestar(
            [stripe_webhook],
            dependencies={"stripe_door": Provide(lambda: door, sync_to_thread=False)},
            exception_handlers={Exception: handle},
            signature_types=[StripeDoor],
            openapi_config=None,
            logging_config=None,
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def send(self, event: dict[str, Any] | bytes, *, secret: str = SECRET, age_s: int = 0) -> httpx.Response:
        raw = event if isinstance(event, bytes) else json.dumps(event).encode()
        headers = {"stripe-signature": signature(raw, secret, int(time.time()) - age_s)}
        return await self.client.post("/webhooks/stripe", content=raw, headers=headers)


async def exported(world: World) -> dict[str, Any]:
    """An invoice at Stripe, for an hour that is over."""
    await world.tenant(price={"prompt": "100000", "cached": "1", "completion": "100000"})
    await world.post("/tenants/acme/credits", {"amount": "1000", "currency": "usd", "reason": "test"})
    start = world.clock.us // 1_000_000
    world.request("acme")
    world.later(3600)
    body = {"tenant": "acme", "period_start": start, "period_end": start + 3600}
    invoice = await world.post("/invoices", body)
    await world.post(f"/invoices/{invoice['id']}/finalize", expect=200)
    found: dict[str, Any] = await world.post(f"/invoices/{invoice['id']}/export", expect=200)
    return found


def at_stripe(double: StripeDouble) -> Any:
    return stripe.StripeClient(double.api_key, base_addresses={"api": double.url}).v1.invoices


async def test_a_message_moves_the_invoice_and_is_never_a_500(world: World, stripe_double: StripeDouble) -> None:
    invoice = await exported(world)
    at_stripe(stripe_double).pay(invoice["stripe_invoice_id"])
    (paid,) = [event for event in stripe_double.state.events if event["type"] == "invoice.paid"]
    door = Door(world)
    stripe_double.faults.append(Fault("error_before", "GET /v1/invoices/.*"))
    answers = [
        await door.send(paid),  # Stripe cannot be asked
        await door.send(paid),
        await door.send(paid),
        await door.send({**paid, "id": "evt_new", "type": "something.new", "data": {"object": {}}}),
        await door.send({**paid, "id": "evt_odd", "data": {"object": {"object": "invoice", "id": 7, "metadata": []}}}),
        await door.send(paid, secret="whsec_wrong"),
        await door.send(paid, age_s=400),
        await door.send(paid, age_s=-400),
        await door.send(b"\xff\xfe"),
        await door.send(b"[]"),
        await door.client.post("/webhooks/stripe", content=b"{}"),
        await door.client.post("/webhooks/stripe", content=b" " * (MAX_BYTES + 1)),
    ]
    assert [answer.status_code for answer in answers] == [503, 200, 200, 200, 200, 400, 400, 400, 400, 400, 400, 413]
    assert [answer.json()["outcome"] for answer in answers[1:5]] == ["moved", "duplicate", "unchanged", "unchanged"]
    assert all(set(answer.json()) == {"error"} for answer in answers[5:])
    assert (await world.get(f"/invoices/{invoice['id']}"))["status"] == "paid"
    counted = door.telemetry.exposition().decode()
    for outcome, times in (("moved", 1), ("duplicate", 1), ("unchanged", 2), ("refused", 6), ("again", 1)):
        assert f'meterhouse_webhooks_total{{outcome="{outcome}"}} {times}.0' in counted
    assert (await Door(world, configured=False).send(paid)).status_code == 404


async def test_drift_is_found_with_its_ids_and_made_up(world: World, stripe_double: StripeDouble) -> None:
    invoice = await exported(world)
    query = {"start": invoice["period_start"], "end": invoice["period_end"]}
    assert (await world.get("/reconcile", **query))["ok"]
    at_stripe(stripe_double).pay(invoice["stripe_invoice_id"])
    report = await world.get("/reconcile", **query)
    (difference,) = report["differences"]
    assert (difference["invoice"], difference["between"]) == (invoice["id"], "invoice and payment provider")
    assert difference["right"] == f"{invoice['stripe_invoice_id']} status paid instead of open"
    moved = await world.call("PATCH", "/stripe/invoices")
    assert [(one["id"], one["status"]) for one in moved["data"]] == [(invoice["id"], "paid")]
    assert (await world.get("/reconcile", **query))["ok"]


def metering(world: World) -> tuple[Watch, Telemetry]:
    """A server whose setting is to meter."""
    parts = money_parts(msgspec.structs.replace(world.settings, export_mode="meter"), world.stores, world.clock)
    world.state.exporter, world.state.meters = parts["exporter"], parts["meters"]
    return watching(world, export_mode="meter")


def watching(world: World, **settings: Any) -> tuple[Watch, Telemetry]:
    telemetry = Telemetry("m", "0")
    changed = msgspec.structs.replace(world.settings, **settings)
    return Watch(changed, world.stores, world.state, telemetry, world.clock), telemetry


async def alerts(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await world.get("/alerts"))["data"]
    return found


async def test_the_books_compare_themselves_and_a_difference_is_one_alert(
    world: World, stripe_double: StripeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "PAUSE_S", 0.0)
    watch, telemetry = watching(world)
    invoice = await exported(world)
    world.later(3600)
    world.stores.publish(world.clock.us)
    await asyncio.to_thread(watch.comparison.run)
    assert "meterhouse_reconcile_differences 0.0" in telemetry.exposition().decode()
    assert await alerts(world) == []
    at_stripe(stripe_double).void_invoice(invoice["stripe_invoice_id"])
    for _ in range(2):
        await asyncio.to_thread(watch.comparison.run)
    shown = telemetry.exposition().decode()
    assert "meterhouse_reconcile_differences 1.0" in shown
    (stamp,) = [line for line in shown.splitlines() if line.startswith("meterhouse_reconcile_timestamp_seconds ")]
    assert float(stamp.split()[1]) == world.clock.us // 1_000_000
    (alert,) = await alerts(world)
    assert (alert["kind"], alert["state"]) == (AlertKind.RECONCILE, "kept")
    (told,) = alert["message"]["data"]["differences"]
    assert (told["invoice"], told["tenant"]) == (invoice["id"], "acme")
    world.later(86_400)
    world.stores.publish(world.clock.us)
    await asyncio.to_thread(watch.comparison.run)  # another day
    assert len(await alerts(world)) == 2
    world.later(86_400)
    world.stores.publish(world.clock.us)
    await asyncio.to_thread(watch.comparison.run)  # out of the range, but Stripe is asked for all of the last months
    assert len(await alerts(world)) == 3
    world.later(3600)
    world.stores.publish(world.clock.us)
    await asyncio.to_thread(watch.comparison.run)  # once a day
    assert "meterhouse_reconcile_differences 0.0" in telemetry.exposition().decode()


async def test_stripe_away_keeps_no_other_book_from_being_compared(
    world: World, stripe_double: StripeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "PAUSE_S", 0.0)
    watch, telemetry = watching(world)
    await exported(world)
    event = world.request("acme", 10, 0, 5)
    world.stores.journal.step([(event.event_id, (10, 0, 9, 0, 0, 0))])
    world.later(3600)
    world.stores.publish(world.clock.us)
    stripe_double.faults.append(Fault("error_before", "GET /v1/invoices/.*", times=1))
    await asyncio.to_thread(watch.comparison.run)
    shown = telemetry.exposition().decode()
    assert "meterhouse_reconcile_differences 1.0" in shown
    assert "meterhouse_reconcile_missing 1.0" in shown
    found = {alert["kind"]: alert["message"]["data"] for alert in await alerts(world)}
    assert set(found) == {"reconcile.difference", "reconcile.incomplete"}
    assert [one["between"] for one in found["reconcile.incomplete"]["missing"]] == ["invoice and payment provider"]
    await asyncio.to_thread(watch.comparison.run)
    assert "meterhouse_reconcile_missing 0.0" in telemetry.exposition().decode()


async def test_hours_that_wait_for_a_gateway_that_is_gone_are_compared_once_it_is_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "PAUSE_S", 0.0)
    watch, telemetry = watching(world)
    await world.tenant()
    world.stores.gateways.claim("gone", "a-lost-folder", world.clock.us, world.clock.us)
    await asyncio.to_thread(watch.comparison.run)
    event = world.request("acme", 10, 0, 5)
    world.stores.journal.step([(event.event_id, (10, 0, 9, 0, 0, 0))])
    world.later(3 * 86_400)
    world.stores.publish(world.clock.us)
    await asyncio.to_thread(watch.comparison.run)
    (behind,) = await alerts(world)
    assert behind["kind"] == AlertKind.NOT_COMPARED
    assert behind["message"]["data"]["slowest_gateway"] == "gone"
    await world.call("DELETE", "/gateways/gone", expect=204)
    again, telemetry = watching(world)  # another process has what the first one noted
    await asyncio.to_thread(again.comparison.run)
    assert "meterhouse_reconcile_differences 1.0" in telemetry.exposition().decode()
    assert f"meterhouse_reconcile_until_timestamp_seconds {hour_of(world.clock.us) // 1_000_000:.0f}" in _plain(
        telemetry
    )
    assert [alert["kind"] for alert in await alerts(world)].count(AlertKind.RECONCILE) == 1


def _plain(telemetry: Telemetry) -> str:
    """The samples with whole numbers written out."""
    lines = (line.rsplit(" ", 1) for line in telemetry.exposition().decode().splitlines() if not line.startswith("#"))
    return "\n".join(f"{name} {float(value):.0f}" for name, value in lines)


async def test_a_comparison_that_fails_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watching(world)

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the journal cannot be read")

    monkeypatch.setattr(world.state.journal, "totals", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="journal"):
            await asyncio.to_thread(watch.comparison.run)
    (alert,) = [one for one in await alerts(world) if "reason" in one["message"]["data"]]
    assert (alert["kind"], alert["message"]["data"]["reason"]) == ("reconcile.incomplete", "the journal cannot be read")


async def test_comparisons_wait_for_each_other(world: World) -> None:
    running: list[int] = []
    most: list[int] = []
    reads = world.state.journal.totals

    def slow(*args: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return reads(*args)

    world.state.journal.totals = slow  # type: ignore[method-assign]
    try:
        await asyncio.gather(*(world.get("/reconcile") for _ in range(4)))
    finally:
        del world.state.journal.totals  # type: ignore[attr-defined]
    assert len(most) >= 4
    assert max(most) == 1


async def test_a_spool_that_lags_is_an_alert_an_hour(world: World) -> None:
    watch, _ = watching(world, alert_spool_lag_s=60.0)
    await world.tenant()
    world.stores.shipper._sink = _down  # type: ignore[method-assign]
    world.request("acme")
    watch._look_at_spool()
    assert await alerts(world) == []
    world.later(61)
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    for _ in range(3):
        watch._look_at_spool()
    (alert,) = await alerts(world)
    assert alert["kind"] == AlertKind.SPOOL_LAG
    assert {name: alert["message"]["data"][name] for name in ("consumer", "events", "gateway")} == {
        "consumer": "clickhouse",
        "events": 1,
        "gateway": "gw0",
    }
    world.later(3600)
    watch._look_at_spool()
    assert len(await alerts(world)) == 2
    world.stores.shipper._sink = world.stores.usage.insert  # type: ignore[method-assign]


def _down(_: object) -> None:
    raise OSError("down")


async def test_an_export_that_fails_is_an_alert(world: World, stripe_double: StripeDouble) -> None:
    invoice = await exported(world)
    assert await alerts(world) == []
    world.clock.us += 1
    start = world.clock.us // 1_000_000 + 1
    world.clock.us = start * 1_000_000
    world.request("acme")
    world.later(3600)
    second = await world.post("/invoices", {"tenant": "acme", "period_start": start, "period_end": start + 3600})
    await world.post(f"/invoices/{second['id']}/finalize", expect=200)
    stripe_double.faults.append(Fault("reset_before", times=3))
    for status in (502, 200):
        await world.post(f"/invoices/{second['id']}/export", expect=status)
    (alert,) = await alerts(world)
    assert (alert["kind"], alert["message"]["data"]["invoice"]) == (AlertKind.EXPORT_FAILED, second["id"])
    assert second["id"] != invoice["id"]
    export_failed(world.state.alerts, world.stores.billing.invoice(second["id"]), ExportError("x"), world.clock.us)
    assert len(await alerts(world)) == 1  # one an hour


async def test_an_alert_that_cannot_be_told_hides_no_error(world: World, stripe_double: StripeDouble) -> None:
    invoice = world.stores.billing.invoice((await exported(world))["id"])

    def broken(*_: object) -> None:
        raise OSError("the outbox is away")

    world.state.exporter.on_failure = broken
    stripe_double.faults.append(Fault("reset_before", times=3))
    with pytest.raises(StripeUnavailable, match="could not be reached"):
        await asyncio.to_thread(world.state.exporter.export, invoice, world.stores.billing.tenant("acme"), {})


async def test_old_alerts_go_where_nothing_is_sent_too(world: World) -> None:
    watch, _ = watching(world)
    world.state.alerts.tell(AlertKind.EXPORT_FAILED, "old", {}, world.clock.us)
    watch._follow()
    assert len(await alerts(world)) == 1
    world.later(91 * 86_400)
    watch._follow()
    assert await alerts(world) == []


async def test_a_batch_that_breaks_behind_what_it_put_aside_is_told_of(
    world: World, stripe_double: StripeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, _ = metering(world)
    stripe_double.clock.freeze(world.clock.us // 1_000_000)
    watch._meter()
    await world.tenant()
    event = world.request("acme", cached=0, completion=0)
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    world.later(86_400 * 36)
    stripe_double.clock.freeze(world.clock.us // 1_000_000)
    keep = world.state.meters._keep

    def dies(rejects: Any) -> None:
        keep(rejects)
        raise OSError("killed behind it")

    monkeypatch.setattr(world.state.meters, "_keep", dies)
    with pytest.raises(OSError, match="killed"):
        watch._meter()
    (alert,) = await alerts(world)
    assert [one["event"] for one in alert["message"]["data"]["events"]] == [event.event_id]
    monkeypatch.undo()
    watch._meter()
    assert len(await alerts(world)) == 1


async def test_suspension_and_failed_payments_are_alerts(world: World, stripe_double: StripeDouble) -> None:
    watch, _ = watching(world)
    watch._follow()
    invoice = await exported(world)
    made = stripe_double.invoices()[0]
    made["attempt_count"] = 1
    stripe_double.state.touch(made, "invoice.payment_failed")
    await Door(world).send(stripe_double.state.events[-1])
    await world.call("PATCH", "/tenants/acme", {"status": "suspended"})
    for _ in range(2):
        watch._follow()
    found = {alert["kind"]: alert["message"]["data"] for alert in await alerts(world)}
    assert set(found) == {AlertKind.PAYMENT_FAILED, AlertKind.SUSPENDED}
    assert (found[AlertKind.PAYMENT_FAILED]["invoice_id"], found[AlertKind.PAYMENT_FAILED]["attempt"]) == (
        invoice["id"],
        1,
    )
    assert (found[AlertKind.SUSPENDED]["tenant"], found[AlertKind.SUSPENDED]["by"]) == ("acme", "admin")


async def test_meters_instead_of_invoices(world: World, stripe_double: StripeDouble) -> None:
    watch, telemetry = metering(world)
    stripe_double.clock.freeze(world.clock.us // 1_000_000)
    assert (await world.get("/meters"))["begun_at"] is None
    watch._meter()
    await world.tenant(price={"prompt": "100000", "cached": "1", "completion": "100000"})
    start = world.clock.us // 1_000_000
    event = world.request("acme", prompt=10, cached=2, completion=5)
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    watch._meter()
    facts = {fact["identifier"]: fact["payload"]["value"] for fact in stripe_double.state.all("metered")}
    assert facts == {
        f"{event.event_id}:{kind}": n for kind, n in (("prompt", "8"), ("cached", "2"), ("completion", "5"))
    }
    assert 'meterhouse_meter_events_total{outcome="delivered"} 3.0' in telemetry.exposition().decode()
    shown = await world.get("/meters")
    assert (shown["put_aside"], shown["done_event"] > shown["from_event"]) == (0, True)
    world.later(3600)
    invoice = await world.post("/invoices", {"tenant": "acme", "period_start": start, "period_end": start + 3600})
    await world.post(f"/invoices/{invoice['id']}/finalize", expect=200)
    refused = await world.post(f"/invoices/{invoice['id']}/export", expect=409)
    assert "meters" in refused["error"]["message"]
    assert stripe_double.invoices() == []
    await world.post(f"/invoices/{invoice['id']}/void", expect=200)  # nothing was sent


async def test_what_stripe_never_takes_is_an_alert_that_names_it(world: World, stripe_double: StripeDouble) -> None:
    watch, _ = metering(world)
    stripe_double.clock.freeze(world.clock.us // 1_000_000)
    watch._meter()
    await world.tenant()
    event = world.request("acme", cached=0, completion=0)
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    world.later(86_400 * 36)
    stripe_double.clock.freeze(world.clock.us // 1_000_000)
    watch._meter()
    (alert,) = await alerts(world)
    (named,) = alert["message"]["data"]["events"]
    assert (alert["kind"], named["event"]) == (AlertKind.EXPORT_FAILED, event.event_id)
    (aside,) = (await world.get("/meters/events"))["data"]
    assert (aside["event_id"], aside["state"], aside["quantity"]) == (event.event_id, "refused", 10)
    left = await world.call("PATCH", f"/meters/events/{aside['identifier']}", {"send": False})
    assert left["identifier"] == aside["identifier"]
    assert (await world.get("/meters/events"))["data"][0]["state"] == "left"
    await world.call("PATCH", "/meters/events/e1:prompt", {"send": True}, expect=404)


async def test_all_rounds_run_and_end(world: World) -> None:
    watch, _ = watching(world, export_mode="meter", alert_url="http://127.0.0.1:9/", alert_secret=_secret())
    watch.start()
    await asyncio.sleep(0.05)
    await asyncio.to_thread(watch.stop)
    await asyncio.to_thread(watch.stop)
    assert {each.name for each in watch.rounds} == {
        "alert-feed",
        "alert-delivery",
        "spool-lag",
        "reconcile",
        "meters",
    }
    quiet, _ = watching(world, reconcile_every_s=0.0)
    assert [each.name for each in quiet.rounds] == ["alert-feed", "spool-lag", "meters"]


def _secret() -> str:
    return "whsec_" + "a" * 44


@pytest.mark.parametrize("secret", [None, "whsec_short", "x"])
def test_a_url_without_a_secret_stops_the_start(world: World, secret: str | None) -> None:
    settings: Settings = msgspec.structs.replace(world.settings, alert_url="http://x/", alert_secret=secret)
    with pytest.raises(SettingsError, match="alert_secret"):
        money_parts(settings, world.stores, world.clock)


async def test_invoices_go_by_themselves_and_a_failure_is_an_alert_a_day(
    world: World, stripe_double: StripeDouble
) -> None:
    watch, _ = watching(world, invoice_automation="export")
    assert "invoices" in [each.name for each in watch.rounds]
    assert "invoices" not in [each.name for each in watching(world)[0].rounds]
    await world.tenant(price={"prompt": "100000", "cached": "1", "completion": "100000"})
    await world.tenant("other", price=None)
    world.request("acme")
    world.request("other")
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    await asyncio.to_thread(world.stores.shipper.flush, 5)
    world.clock.us = DECEMBER_US + 2 * HOUR_US
    await asyncio.to_thread(watch._invoice)  # this gateway has not said yet that the period's usage is stored
    assert (await world.get("/invoices"))["data"] == []
    world.stores.publish(world.clock.us)
    for _ in range(2):
        await asyncio.to_thread(watch._invoice)
    (invoice,) = (await world.get("/invoices"))["data"]
    assert (invoice["tenant"], invoice["status"], invoice["automatic"]) == ("acme", "exported", True)
    assert [one["status"] for one in stripe_double.invoices()] == ["open"]
    (alert,) = await alerts(world)
    data = alert["message"]["data"]
    assert (alert["kind"], data["tenant"], data["step"]) == (AlertKind.INVOICE_FAILED, "other", "draft")
    assert (data["period_start"], data["period_end"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert data["behind"] == {"gateway": "gw0", "stored_until": "2026-12-01T02:00:00Z"}


async def test_what_is_due_is_listed_and_made_when_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.tenant()
    world.request("acme")
    assert (await world.get("/invoices/due"))["data"] == []
    world.later(14 * 86_400)
    due = {"tenant": "acme", "period_start": "2026-11-01T00:00:00Z", "period_end": "2026-12-01T00:00:00Z"}
    await asyncio.to_thread(world.stores.recorder.flush, 5)
    assert (await world.get("/invoices/due"))["data"] == [due]
    typed = Typed(world, monkeypatch)
    assert await typed("invoice", "due") == [due]
    done = await typed("invoice", "due", "--run=finalize")
    assert (done["finalized"], done["failures"]) == (done["drafted"], [])
    (invoice,) = (await world.get("/invoices"))["data"]
    assert (invoice["id"], invoice["status"]) == (done["drafted"][0], "finalized")
    assert await typed("invoice", "due") == []
    assert (await world.call("PATCH", "/invoices/due", {"mode": "export"}))["exported"] == done["drafted"]
    await world.call("PATCH", "/invoices/due", {"mode": "off"}, expect=400)


def test_exports_by_the_clock_need_somewhere_to_go(world: World) -> None:
    for settings in ({"export_mode": "meter"}, {"stripe_api_key": None}):
        changed = msgspec.structs.replace(world.settings, invoice_automation="export", **settings)
        with pytest.raises(SettingsError, match="invoice_automation"):
            money_parts(changed, world.stores, world.clock)
