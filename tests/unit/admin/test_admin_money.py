"""Prices, credit, balances, usage and its amounts, invoices from draft to Stripe, reconciliation."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import stripe

from billing.stripe import StripeExporter
from gateway.admin import comparing, reconcile, usage
from gateway.admin.times import format_time
from tests.doubles.stripe import StripeDouble
from tests.unit.admin.conftest import PRICE, START_US, World

HOUR_US = 3_600_000_000


async def draft(world: World, tenant: str = "acme", start_us: int = START_US, expect: int = 201, **options: Any) -> Any:
    """An invoice for everything up to now."""
    body = {"tenant": tenant, "period_start": format_time(start_us), "period_end": format_time(world.clock.us)}
    return await world.post("/invoices", body, expect=expect, **options)


async def test_a_price_is_entered_and_listed(world: World) -> None:
    body = {"model": "*", "effective_at": "2026-01-01T01:00:00+01:00", "currency": "usd", "per_million": PRICE}
    made = await world.post("/prices", body)
    assert made == {
        "id": made["id"],
        "model": "*",
        "tenant": None,
        "endpoint": None,
        "currency": "usd",
        "per_million": PRICE,
        "classes": {},
        "effective_at": "2026-01-01T00:00:00Z",
        "recorded_at": "2026-11-18T11:06:40Z",
    }
    tiny = {"prompt": "0.00000012", "cached": "0", "completion": "1000000.000000001"}
    small = await world.post("/prices", body | {"effective_at": 1_767_225_600, "per_million": tiny})
    assert small["per_million"] == {"prompt": "0.00000012", "cached": "0.00", "completion": "1000000.000000001"}
    assert [price["id"] for price in (await world.get("/prices"))["data"]] == [made["id"], small["id"]]


async def test_a_price_by_classes_is_entered_as_it_was_told_and_its_invoice_can_be_computed_again(world: World) -> None:
    tiers = [{"price": "10.00", "up_to": 5}, {"price": "4.00", "up_to": None}]
    completion = {"model": "graduated", "price": None, "tiers": tiers, "package_size": None, "allowance": 2}
    image = {"model": "flat", "price": "0.25", "tiers": [], "package_size": None, "allowance": 0, "minimum": None}
    body = {
        "model": "*",
        "currency": "usd",
        "effective_at": 1,
        "endpoint": "completions",
        "per_million": {"prompt": "0.00", "cached": "0.00"},
        "classes": {"completion": completion | {"minimum": "1.50"}, "image": image},
    }
    made = await world.post("/prices", body)
    assert {name: made[name] for name in body if name != "effective_at"} == {
        name: value for name, value in body.items() if name != "effective_at"
    }
    assert (await world.get("/prices"))["data"][-1] == made
    refused = await world.post("/prices", body | {"classes": {"image": image}}, expect=400)
    assert "per_million.completion: is missing" in refused["error"]["message"]
    refused = await world.post("/prices", body | {"classes": body["classes"] | {"gpu": image}}, expect=400)
    assert "classes.gpu: is unknown" in refused["error"]["message"]


async def test_every_fault_of_a_price_is_named(world: World) -> None:
    per_million = {"prompt": "-1", "cached": "1e-12", "completion": "NaN"}
    body = {"model": "*", "effective_at": "soon", "currency": "doubloon", "per_million": per_million}
    answer = await world.client.post("/prices", json=body)
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    for field in ("currency", "effective_at", "per_million.prompt", "per_million.cached", "per_million.completion"):
        assert f"{field}:" in told
    assert (await world.get("/prices"))["data"] == []


@pytest.mark.parametrize("amount", [10, 10.5, "ten", "", "0", "-1", "1e400", "0.0000000000000001", "Infinity"])
async def test_money_is_a_decimal_string_above_zero(world: World, amount: object) -> None:
    await world.tenant()
    body = {"amount": amount, "currency": "usd", "reason": "test"}
    answer = await world.client.post("/tenants/acme/credits", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "amount"
    assert (await world.get("/tenants/acme/balance"))["granted"] == "0.00"


async def test_a_balance_counts_what_is_settled_before_it_is_stored_anywhere(world: World) -> None:
    await world.tenant()
    grant = await world.post("/tenants/acme/credits", {"amount": "10.00", "currency": "usd", "reason": "first"})
    assert (grant["amount"], grant["currency"], grant["reason"]) == ("10.00", "usd", "first")
    world.request("acme", prompt=10, cached=4, completion=5)
    spent = Decimal("6E-6") + 4 * Decimal("1E-7") + 15 * Decimal("1E-6")
    found = await world.get("/tenants/acme/balance")
    assert Decimal(found["charged"]) == spent
    assert Decimal(found["available"]) == 10 - spent
    assert (found["granted"], found["held"], found["currency"]) == ("10.00", "0.00", "usd")


async def test_a_repeated_credit_is_granted_once(world: World) -> None:
    await world.tenant()
    body = {"amount": "10.00", "currency": "usd", "reason": "first"}
    first = await world.post("/tenants/acme/credits", body, headers={"idempotency-key": "c"})
    assert await world.post("/tenants/acme/credits", body, headers={"idempotency-key": "c"}) == first
    assert (await world.get("/tenants/acme/balance"))["granted"] == "10.00"


async def test_usage_is_summed_by_time_and_dimension(world: World) -> None:
    await world.tenant()
    await world.tenant("globex")
    world.request("acme", 10, 4, 5, key_id="k1")
    world.request("acme", 20, 0, 1, key_id="k2", user="ann")
    world.later(3600)
    world.request("acme", 1, 0, 1, key_id="k1")
    world.request("globex", 2, 0, 2, key_id="k3")
    rows = (await world.get("/usage", tenant="acme", bucket="hour", start=format_time(START_US)))["data"]
    assert rows == [
        {
            "start": "2026-11-18T11:00:00Z",
            "tenant": "acme",
            "model": "base",
            "requests": 2,
            "prompt_tokens": 30,
            "cached_tokens": 4,
            "completion_tokens": 6,
            "currency": "usd",
            "amount": "0.0000444",
        },
        {
            "start": "2026-11-18T12:00:00Z",
            "tenant": "acme",
            "model": "base",
            "requests": 1,
            "prompt_tokens": 1,
            "cached_tokens": 0,
            "completion_tokens": 1,
            "currency": "usd",
            "amount": "0.000004",
        },
    ]
    by_key = (await world.get("/usage", group_by="key,user"))["data"]
    assert [(row["tenant"], row["key"], row["user"], row["requests"]) for row in by_key] == [
        ("acme", "k1", "", 2),
        ("acme", "k2", "ann", 1),
        ("globex", "k3", "", 1),
    ]
    assert all("model" not in row for row in by_key)
    month = (await world.get("/usage", bucket="month", group_by="tenant"))["data"]
    assert [(row["start"], row["tenant"], row["requests"]) for row in month] == [
        ("2026-11-01T00:00:00Z", "acme", 3),
        ("2026-11-01T00:00:00Z", "globex", 1),
    ]


async def test_the_range_of_usage_has_no_end_and_a_begin(world: World) -> None:
    await world.tenant()
    first = world.request("acme")
    second = world.request("acme")
    for start, end, requests in [
        (first.ts_us, second.ts_us, 1),
        (first.ts_us, second.ts_us + 1, 2),
        (first.ts_us + 1, second.ts_us + 1, 1),
    ]:
        rows = (await world.get("/usage", start=format_time(start), end=format_time(end)))["data"]
        assert sum(row["requests"] for row in rows) == requests


async def test_a_price_that_changes_within_a_bucket_prices_each_request_by_its_own_time(world: World) -> None:
    await world.tenant()
    world.request("acme", 0, 0, 1)  # 3.00 per million
    await world.price(tenant="acme", per_million=PRICE | {"completion": "7.00"})
    world.request("acme", 0, 0, 1)
    await world.price(tenant="acme", effective_at=format_time(world.clock.us + 60_000_000), per_million=PRICE)
    world.request("acme", 0, 0, 1)
    world.later(60)
    world.request("acme", 0, 0, 1)
    (row,) = (await world.get("/usage", tenant="acme"))["data"]
    assert row["requests"] == 4
    assert Decimal(row["amount"]) == Decimal("3E-6") + 2 * Decimal("7E-6") + Decimal("3E-6")
    assert row["amount"] == (await world.get("/tenants/acme/balance"))["charged"]


async def test_usage_without_a_price_has_no_amount_rather_than_none_at_all(world: World) -> None:
    await world.tenant(price=None)
    world.request("acme")
    await world.price(tenant="acme")
    world.request("acme", model="other")
    rows = (await world.get("/usage"))["data"]
    assert [(row["model"], row["requests"], row["amount"]) for row in rows] == [
        ("base", 1, None),
        ("other", 1, "0.000025"),
    ]


async def test_usage_without_a_price_is_listed_and_charged_once_there_is_one(world: World) -> None:
    await world.tenant(price=None)
    first, second = world.request("acme"), world.request("acme")
    world.later(1)
    assert world.stores.flush(10)
    found = await world.get("/usage/unrated", tenant="acme", limit=1)
    assert found["data"] == [
        {
            "event_id": first.event_id,
            "tenant": "acme",
            "model": "base",
            "started_at": format_time(first.ts_us),
            "reason": "no price",
        }
    ]
    rest = await world.get("/usage/unrated", limit=1, after=found["next"])
    assert ([one["event_id"] for one in rest["data"]], rest["has_more"]) == ([second.event_id], False)
    waits = await draft(world, expect=409)
    assert first.event_id in waits["error"]["message"]
    assert await world.post("/usage/rate", expect=200) == {"rated": 0}

    await world.price(tenant="acme", effective_at=format_time(START_US))
    headers = {"idempotency-key": "r"}
    for _ in range(2):
        assert await world.post("/usage/rate", expect=200, headers=headers) == {"rated": 2}
    assert await world.post("/usage/rate", expect=200) == {"rated": 0}
    assert (await world.get("/usage/unrated"))["data"] == []
    assert Decimal((await world.get("/tenants/acme/balance"))["charged"]) == 2 * Decimal("25E-6")
    assert (await draft(world))["requests"] == 2


async def test_usage_is_paged(world: World) -> None:
    await world.tenant()
    for number in range(5):
        world.request("acme", model=f"m{number}")
    seen: list[str] = []
    after = None
    for size in (2, 2, 1):
        found = await world.get("/usage", limit=2, **({"after": after} if after else {}))
        assert len(found["data"]) == size
        seen += [row["model"] for row in found["data"]]
        after = found["next"]
    assert (seen, after) == ([f"m{number}" for number in range(5)], None)


async def test_the_pages_of_usage_are_of_one_report_that_is_computed_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.tenant()
    late = world.opened("acme", model="a-late-one")
    for number in range(5):
        world.request("acme", model=f"m{number}")
    computed = 0
    compute = usage.usage_rows

    def counted(*about: Any) -> Any:
        nonlocal computed
        computed += 1
        return compute(*about)

    monkeypatch.setattr(usage, "usage_rows", counted)
    pages = [await world.get("/usage", limit=2)]
    world.settled(late, 1, 0, 1)  # began before the end, so it would come first
    while (after := pages[-1]["next"]) is not None:
        world.later(1)
        pages.append(await world.get("/usage", limit=2, after=after))
    assert [row["model"] for found in pages for row in found["data"]] == [f"m{number}" for number in range(5)]
    assert computed == 1
    again = await world.get(
        "/usage", limit=2, after=pages[0]["next"]
    )  # no longer kept: computed again, to the same end
    assert [row["model"] for row in again["data"]] == ["m1", "m2"]


async def test_the_pages_of_usage_have_one_end(world: World) -> None:
    await world.tenant()
    for number in range(3):
        world.request("acme", model=f"m{number}")
    first = await world.get("/usage", limit=1)
    for model in ("m0", "a-new-one"):
        world.request("acme", model=model)
    world.later(20 * 86_400)  # and into another month, which a report asked for now would be about
    second = await world.get("/usage", limit=1, after=first["next"])
    third = await world.get("/usage", limit=1, after=second["next"])
    rows = [row for found in (first, second, third) for row in found["data"]]
    assert [(row["model"], row["requests"]) for row in rows] == [("m0", 1), ("m1", 1), ("m2", 1)]
    assert third["next"] is None


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"start": "x"}, "start"),
        ({"end": "x"}, "end"),
        ({"group_by": "colour"}, "group_by"),
        ({"bucket": "week"}, "bucket"),
        ({"start": "2026-11-02T00:00:00Z", "end": "2026-11-01T00:00:00Z"}, "end"),
        ({"start": "2024-11-02T00:00:00Z", "end": "2026-11-01T00:00:00Z"}, "end"),
        ({"after": "zzz"}, "after"),
        ({"after": "2"}, "after"),
        ({"start": "2026-11-02T00:00:00Z", "after": "2.1"}, "end"),
    ],
)
async def test_a_bad_question_about_usage_is_refused_by_name(world: World, query: dict[str, str], field: str) -> None:
    answer = await world.client.get("/usage", params=query)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


async def test_an_invoice_goes_from_draft_to_stripe(world: World, stripe_double: StripeDouble) -> None:
    dear = {"prompt": "2500.000000007", "cached": "250.50", "completion": "12500.123456789"}
    await world.tenant(price=dear)
    world.request("acme", 101, 16, 77)
    world.request("acme", 33, 0, 1)
    world.later(1)
    made = await draft(world)
    assert (made["status"], made["requests"], made["currency"]) == ("draft", 2, "usd")
    quantities = {line["token_class"]: line["quantity"] for line in made["lines"]}
    assert quantities == {"prompt": 118, "cached": 16, "completion": 78}
    for line in made["lines"]:
        assert Decimal(line["exact"]) == line["quantity"] * Decimal(line["unit_price"]) / 1_000_000
        assert line["unit_price"] == dear[line["token_class"]]
    exact = sum(Decimal(line["exact"]) for line in made["lines"])
    assert Decimal(made["exact_total"]) == exact
    assert made["total"] == "1.27"
    assert sum(Decimal(line["amount"]) for line in made["lines"]) == Decimal(made["total"])
    (usage,) = (await world.get("/usage", tenant="acme"))["data"]
    assert usage["amount"] == made["exact_total"]

    final = await world.post(f"/invoices/{made['id']}/finalize", expect=200)
    assert final["status"] == "finalized"
    sent = await world.post(f"/invoices/{made['id']}/export", expect=200)
    assert (sent["status"], sent["total"]) == ("exported", "1.27")
    again = await world.post(f"/invoices/{made['id']}/export", expect=200)
    assert again == sent
    (theirs,) = stripe_double.state.objects["invoice"].values()
    assert (theirs["id"], theirs["total"]) == (sent["stripe_invoice_id"], 127)
    assert await world.get(f"/invoices/{made['id']}") == sent
    assert (await world.get("/invoices", tenant="acme"))["data"] == [sent]
    report = await world.get("/reconcile", start=format_time(START_US), end=format_time(world.clock.us))
    assert report["ok"] is True


async def exported(world: World) -> Any:
    """An invoice over 2.50 that Stripe has."""
    await world.tenant(price=PRICE | {"prompt": "250000"})
    world.request("acme")
    world.later(1)
    made = await draft(world)
    await world.post(f"/invoices/{made['id']}/finalize", expect=200)
    return await world.post(f"/invoices/{made['id']}/export", expect=200)


async def test_an_exported_invoice_is_voided_in_stripe_too(world: World, stripe_double: StripeDouble) -> None:
    sent = await exported(world)
    headers = {"idempotency-key": "v"}
    void = await world.post(f"/invoices/{sent['id']}/void", expect=200, headers=headers)
    assert (void["status"], void["stripe_invoice_id"]) == ("void", sent["stripe_invoice_id"])
    assert await world.post(f"/invoices/{sent['id']}/void", expect=200, headers=headers) == void
    assert [one["status"] for one in stripe_double.invoices()] == ["void"]
    assert (await draft(world))["total"] == sent["total"]
    assert (await world.get("/reconcile"))["ok"] is True


async def test_a_paid_invoice_is_not_voided(world: World, stripe_double: StripeDouble) -> None:
    sent = await exported(world)
    client = stripe.StripeClient(stripe_double.api_key, base_addresses={"api": stripe_double.url})
    await asyncio.to_thread(client.v1.invoices.pay, sent["stripe_invoice_id"])
    refused = await world.post(f"/invoices/{sent['id']}/void", expect=409)
    assert "credit note" in refused["error"]["message"]
    assert await world.get(f"/invoices/{sent['id']}") == sent


async def test_without_a_stripe_key_an_export_is_not_voided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = await exported(world)
    monkeypatch.setattr(world.state, "exporter", StripeExporter(None))
    refused = await world.post(f"/invoices/{sent['id']}/void", expect=409)
    assert refused["error"]["code"] == "stripe_not_configured"
    assert "STRIPE_API_KEY" in refused["error"]["message"]


async def test_a_period_that_is_not_closed_is_refused_until_it_is(world: World) -> None:
    await world.tenant()
    world.request("acme")
    record = world.opened("acme")
    world.later(5)
    body = {"tenant": "acme", "period_start": format_time(START_US), "period_end": format_time(world.clock.us)}
    refused = await world.client.post("/invoices", json=body)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "period_not_closed"
    assert refused.headers["retry-after"] == "5"
    future = await world.client.post("/invoices", json=body | {"period_end": format_time(world.clock.us + HOUR_US)})
    assert (future.status_code, int(future.headers["retry-after"]) > 3590) == (409, True)
    assert future.json()["error"]["message"].startswith("the period is not over: it ends at ")
    world.settled(record, 3, 0, 3)
    made = await world.post("/invoices", body)
    assert made["requests"] == 2


async def test_what_the_usage_store_does_not_have_yet_is_not_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.tenant()
    await asyncio.to_thread(world.stores.shipper.stop)  # the store is cut off: settled, and nowhere else
    monkeypatch.setattr(world.state, "flush", lambda timeout: False)
    world.request("acme")
    world.later(5)
    refused = await draft(world, expect=409)
    assert refused["error"]["code"] == "period_not_closed"


async def test_a_void_draft_gives_its_period_free(world: World) -> None:
    await world.tenant()
    world.request("acme")
    world.later(1)
    first = await draft(world)
    overlap = await draft(world, expect=409)
    assert overlap["error"]["code"] == "period_overlaps"
    assert (await world.post(f"/invoices/{first['id']}/void", expect=200))["status"] == "void"
    second = await draft(world)
    assert (second["total"], second["requests"]) == (first["total"], 1)


async def test_a_repeated_invoice_is_cut_once(world: World) -> None:
    await world.tenant()
    world.request("acme")
    world.later(1)
    headers = {"idempotency-key": "i"}
    first = await draft(world, headers=headers)
    body = {"tenant": "acme", "period_start": first["period_start"], "period_end": first["period_end"]}
    assert await world.post("/invoices", body, headers=headers) == first
    assert len((await world.get("/invoices"))["data"]) == 1


async def test_without_a_stripe_key_the_export_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.state, "exporter", StripeExporter(None))
    await world.tenant()
    world.request("acme")
    world.later(1)
    made = await draft(world)
    await world.post(f"/invoices/{made['id']}/finalize", expect=200)
    refused = await world.post(f"/invoices/{made['id']}/export", expect=409)
    assert refused["error"]["code"] == "stripe_not_configured"
    assert "STRIPE_API_KEY" in refused["error"]["message"]
    assert (await world.get(f"/invoices/{made['id']}"))["status"] == "finalized"


async def test_a_draft_is_not_exported(world: World, stripe_double: StripeDouble) -> None:
    await world.tenant()
    world.later(1)
    made = await draft(world)
    await world.post(f"/invoices/{made['id']}/export", expect=409)
    assert not stripe_double.state.objects.get("invoice")


@pytest.mark.parametrize(
    ("period", "field"),
    [
        ({"period_start": "x", "period_end": "2026-11-01T00:00:00Z"}, "period_start"),
        ({"period_start": "2026-11-01T00:00:00Z", "period_end": "2026-11-01T00:00:00Z"}, "period_end"),
        ({"period_start": "2026-11-01T00:00:00Z"}, "period_end"),
    ],
)
async def test_a_bad_period_is_refused_by_name(world: World, period: dict[str, str], field: str) -> None:
    await world.tenant()
    answer = await world.client.post("/invoices", json={"tenant": "acme", **period})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_reconcile_shows_where_the_books_part(world: World) -> None:
    await world.tenant()
    event = world.request("acme", 10, 0, 5)
    agreed = await world.get("/reconcile")
    assert (agreed["ok"], agreed["differences"]) == (True, [])
    (row,) = agreed["rows"]
    tokens = {"requests": 1, "prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 5}
    assert (row["journal"], row["stored"], row["rated"]) == (tokens, tokens, tokens)
    assert row["amount"] == "0.000025"
    events = world.stores.billing._books.seq
    assert agreed["chain"] == {"ok": True, "from_event": 1, "to_event": events, "broken_at_event": None}
    # The engine did more for the request than was settled: journalled, and on nobody's bill.
    world.stores.journal.step([(event.event_id, (10, 0, 9, 0, 0, 0))])
    parted = await world.get("/reconcile")
    assert parted["ok"] is False
    assert [(one["between"], one["tenant"], one["model"]) for one in parted["differences"]] == [
        ("engine journal and usage store", "acme", "base")
    ]


async def test_reconcile_tells_of_a_second_content(world: World) -> None:
    await world.tenant()
    event = world.request("acme", 10, 0, 5)
    assert (await world.get("/reconcile"))["ok"] is True
    second = msgspec.structs.replace(event, completion_tokens=6)
    await asyncio.to_thread(world.stores.usage.insert, [second])
    parted = await world.get("/reconcile")
    assert [(one["between"], one["event_ids"]) for one in parted["differences"]] == [
        ("event content", [event.event_id])
    ]
    assert parted["ok"] is False


async def test_reconcile_does_not_take_a_running_request_for_a_difference(world: World) -> None:
    await world.tenant()
    world.request("acme")
    record = world.opened("acme")
    world.stores.journal.step([(record.event_id, (3, 0, 2, 0, 0, 0))])
    report = await world.get("/reconcile")
    assert report["ok"] is True
    assert report["rows"][0]["journal"] is None


async def test_reconcile_compares_in_slices_what_is_too_much_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "MAX_EVENTS", 2)
    await world.tenant()
    for _ in range(2):
        world.request("acme")
    world.later(3600)
    for _ in range(2):
        world.request("acme")
    report = await world.get("/reconcile")
    assert (report["ok"], [row["stored"]["requests"] for row in report["rows"]]) == (True, [2, 2])
    for cut_off in (False, True):  # in the usage store, and settled but in the spool alone
        if cut_off:
            await asyncio.to_thread(world.stores.shipper.stop)
            monkeypatch.setattr(world.state, "flush", lambda timeout: False)
            world.later(3600)
            world.request("acme")
            world.request("acme")
        world.request("acme")  # one too many in an hour
        report = await world.get("/reconcile")
        assert (report["ok"], report["differences"], len(report["rows"])) == (False, [], 1)
        assert {one["between"] for one in report["missing"]} == {"all books"}
        assert len(report["missing"]) == 1 + cut_off
        assert "compared at once" in report["missing"][0]["reason"]


async def test_reconcile_says_which_invoices_no_slice_could_compare(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "MAX_EVENTS", 2)
    await world.tenant()
    start = world.clock.us // 3_600_000_000 * 3600
    for _ in range(2):
        world.request("acme")
        world.request("acme")
        world.later(3600)
    body = {"tenant": "acme", "period_start": start, "period_end": start + 7200}
    await world.post("/invoices", body)
    (missing,) = (await world.get("/reconcile"))["missing"]
    assert missing["between"] == "invoice lines and ledger"


async def test_reconcile_refuses_more_requests_than_one_answer_is_of(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "MAX_EVENTS", 1)
    monkeypatch.setattr(reconcile, "MAX_SLICES", 1)
    await world.tenant()
    for _ in range(2):
        world.request("acme")
    await asyncio.to_thread(world.state.flush, 5.0)
    refused = await world.client.get("/reconcile")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "start")
    assert "ask for less time" in refused.json()["error"]["message"]


async def test_reconcile_refuses_a_range_too_long_to_hold(world: World) -> None:
    answer = await world.client.get("/reconcile", params={"start": "2026-01-01"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "end")
