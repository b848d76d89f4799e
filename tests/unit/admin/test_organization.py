"""Usage and costs in OpenAI's shape, asked for by OpenAI's own SDK and checked by its own models."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl

import httpx
import httpx2
import msgspec
import openai
import pytest
from litestar import Litestar

from gateway.errors import BadRequest, handle
from gateway.openai import organization
from gateway.openai.organization import organization_router
from gateway.openai.usage_query import COSTS, USAGE, parse_query
from tests.unit.admin.conftest import ADMIN_KEY, START_US, World

START_S = START_US // 1_000_000  # 11:06:40 of a day
DAY_S = 86_400
MIDNIGHT_S = START_S - START_S % DAY_S


class Desk:
    """The API as SDK clients have it: the admin's, acme's and globex's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app = Litestar(
            [organization_router(world.state)], exception_handlers={Exception: handle}, openapi_config=None
        )
        self.keys = {"admin": ADMIN_KEY}

    def usage(self, who: str = "admin") -> Any:
        client = openai.AsyncOpenAI(
            api_key="none",
            admin_api_key=self.keys[who],
            base_url="http://test/v1",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app)),
            _strict_response_validation=True,
        )
        return client.admin.organization.usage

    async def raw(self, path: str, who: str = "admin", **query: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test") as client:
            headers = {"authorization": f"Bearer {self.keys.get(who, who)}"}
            return await client.get(f"/v1/organization/{path}", params=query, headers=headers)


@pytest.fixture
async def desk(world: World) -> Desk:
    desk = Desk(world)
    for tenant in ("acme", "globex"):
        await world.tenant(tenant)
        key, secret = world.stores.billing.create_key(tenant, "test")
        desk.keys[tenant] = str(secret)
        desk.keys[f"{tenant}-id"] = key.id
    return desk


async def stored(desk: Desk, *, rolled: bool = True) -> None:
    """Everything settled is in both stores, and summed."""
    assert await asyncio.to_thread(desk.world.state.flush, 10.0)
    if rolled:
        await asyncio.to_thread(desk.world.state.usage.rollups.roll)


async def test_usage_by_day_model_and_tenant_as_the_sdk_reads_it(desk: Desk) -> None:
    world = desk.world
    world.request("acme", 100, 30, 7)
    world.request("acme", 10, 0, 1, model="pirate", adapter="pirate", user="zoe")
    world.later(DAY_S)
    world.request("globex", 1000, 0, 50)
    await stored(desk)
    page = await desk.usage().completions(start_time=START_S, group_by=["project_id", "model"])
    assert (page.object, page.has_more, page.next_page) == ("page", False, None)
    first, second = page.data
    assert (first.start_time, first.end_time) == (START_S, MIDNIGHT_S + DAY_S), "cut to what was asked for"
    assert (second.start_time, second.end_time) == (MIDNIGHT_S + DAY_S, world.clock.us // 1_000_000 + 1)
    shown = [
        (r.project_id, r.model, r.num_model_requests, r.input_tokens, r.input_cached_tokens, r.output_tokens)
        for r in first.results
    ]
    assert shown == [("acme", "base", 1, 100, 30, 7), ("acme", "pirate", 1, 10, 0, 1)]
    (result,) = second.results
    assert (result.project_id, result.input_uncached_tokens, result.input_text_tokens) == ("globex", 1000, 1000)
    assert (result.user_id, result.api_key_id, result.batch, result.service_tier) == (None, None, None, None)
    assert (result.input_tokens, result.input_cache_write_tokens) == (1000, 0)
    (alone, _) = (await desk.usage().completions(start_time=START_S)).data
    assert [(r.model, r.project_id, r.input_tokens) for r in alone.results] == [(None, None, 110)]


async def test_tokens_written_to_the_cache_are_told_from_the_events_and_from_the_sums(desk: Desk) -> None:
    event = msgspec.structs.replace(desk.world.request("acme", 1, 0, 1), event_id="written")
    event = msgspec.structs.replace(event, prompt_tokens=100, cached_tokens=30, cache_write_tokens=25)
    await stored(desk)
    await asyncio.to_thread(desk.world.state.usage.insert, [event])
    for _ in range(2):
        (bucket,) = (await desk.usage().completions(start_time=START_S)).data
        (result,) = bucket.results
        assert (result.input_tokens, result.input_cache_write_tokens) == (101, 25)
        assert (result.input_uncached_tokens, result.input_text_tokens, result.input_cached_tokens) == (46, 46, 30)
        await stored(desk)


async def test_every_group_and_filter(desk: Desk) -> None:
    world = desk.world
    world.request("acme", 1, 0, 1, key_id="k1", user="zoe")
    world.request("acme", 2, 0, 1, key_id="k2", user="zoe", model="pirate")
    world.request("globex", 4, 0, 1, key_id="k3", user="bob")
    await stored(desk)

    async def tokens(who: str = "admin", **asked: Any) -> dict[Any, int]:
        page = await desk.usage(who).completions(start_time=START_S, **asked)
        names = asked.get("group_by", [])
        return {tuple(getattr(r, name) for name in names): r.input_tokens for b in page.data for r in b.results}

    assert await tokens(group_by=["user_id"]) == {("zoe",): 3, ("bob",): 4}
    assert await tokens(group_by=["api_key_id"]) == {("k1",): 1, ("k2",): 2, ("k3",): 4}
    assert await tokens(group_by=["batch", "service_tier", "api_source"]) == {(False, None, "unlabeled"): 7}
    assert await tokens(models=["pirate", "nobody"]) == {(): 2}
    assert await tokens(api_key_ids=["k1", "k3"]) == {(): 5}
    assert await tokens(project_ids=["globex"]) == {(): 4}
    assert await tokens(user_ids=["zoe"], models=["base"]) == {(): 1}
    assert await tokens(batch=False) == {(): 7}
    assert await tokens(batch=True) == {}
    assert await tokens(models=["' OR 1=1 --"]) == {}


async def test_more_groups_than_a_page_takes_are_refused_before_they_are_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        desk.world.request("acme", 1, 0, 1, key_id=f"k{i}", user=f"user-{i}")
    await stored(desk)
    for most, refused in ((3, True), (4, False)):
        monkeypatch.setattr(organization, "MAX_RESULTS", most)
        for name in ("user_id", "api_key_id"):
            asked = desk.usage("acme").completions(start_time=START_S, group_by=[name])
            if refused:
                with pytest.raises(openai.BadRequestError, match="group_by: gives more than 3 results"):
                    await asked
            else:
                assert len((await asked).data[0].results) == 4
    assert (await desk.usage("acme").completions(start_time=START_S)).data[0].results[0].num_model_requests == 4


async def test_a_tenants_key_sees_its_own_and_nothing_else_whatever_it_asks_for(desk: Desk) -> None:
    world = desk.world
    world.request("acme", 1, 0, 1, key_id="same", user="zoe")
    world.request("globex", 4, 0, 1, key_id="same", user="zoe")
    await stored(desk)
    for asked in (
        {},
        {"group_by": ["project_id", "api_key_id", "user_id", "model"]},
        {"api_key_ids": ["same"]},
        {"bucket_width": "1m"},
    ):
        page = await desk.usage("acme").completions(start_time=START_S, **asked)
        assert sum(r.input_tokens for b in page.data for r in b.results) == 1
        assert {r.project_id for b in page.data for r in b.results} <= {None, "acme"}
    for asked in ({"project_ids": ["globex"]}, {"project_ids": ["nobody"]}):
        page = await desk.usage("acme").completions(start_time=START_S, **asked)
        assert [b.results for b in page.data] == [[]], "another's is as if there were nobody"
        page = await desk.usage("acme").costs(start_time=START_S, **asked)
        assert [b.results for b in page.data] == [[]]
    costs = await desk.usage("globex").costs(start_time=START_S, group_by=["project_id"])
    assert [(r.project_id, r.amount.value) for b in costs.data for r in b.results] == [("globex", 7e-6)]
    for who in ("nobody", "mh-" + "x" * 5000):
        assert (await desk.raw("costs", who, start_time=START_S)).status_code == 401
    refused = await desk.raw("usage/completions", "acme", start_time="yesterday")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "start_time")


async def test_costs_are_the_ledgers_charges_to_the_last_digit(desk: Desk) -> None:
    world = desk.world
    events = [world.request("acme", 333_333 + i, 1, 77_777, key_id=f"k{i % 2}") for i in range(5)]
    world.request("acme", 1, 0, 0, model="pirate", adapter="pirate")
    await world.price(tenant="acme", model="base", per_million={"prompt": "9", "cached": "9", "completion": "9"})
    await stored(desk)
    charged = world.stores.billing._store.find_all([f"usage:{event.event_id}" for event in events])
    exact = sum(int(msgspec.json.decode(row.payload)["amount_femto"]) for row in charged.values())
    answer = await desk.raw("costs", start_time=START_S, group_by="line_item")
    body = msgspec.json.decode(answer.content)
    (bucket,) = body["data"]
    assert (bucket["start_time"], bucket["end_time"]) == (MIDNIGHT_S, MIDNIGHT_S + DAY_S), "a whole day"
    base, pirate = bucket["results"]
    assert Decimal(base["amount"]["exact"]) == Decimal(exact) / 10**15
    assert f'"value":{base["amount"]["exact"]},' in answer.text, "all digits, as a JSON number"
    assert (base["line_item"], base["quantity"], base["quantity_unit"]) == (
        "base",
        sum(e.prompt_tokens + e.completion_tokens for e in events),
        "tokens",
    )
    assert (pirate["line_item"], pirate["amount"]["exact"], pirate["amount"]["currency"]) == (
        "pirate",
        "0.000001",
        "usd",
    )
    sdk = await desk.usage().costs(start_time=START_S, group_by=["api_key_id"], api_key_ids=["k0", "k1"])
    assert [(r.api_key_id, r.line_item) for r in sdk.data[0].results] == [("k0", None), ("k1", None)]
    assert sum(Decimal(str(r.amount.value)) for r in sdk.data[0].results) == Decimal(exact) / 10**15


async def test_two_currencies_are_two_results(desk: Desk) -> None:
    world = desk.world
    await world.tenant("tokyo", price=None, currency="jpy")
    await world.price(currency="jpy", per_million={"prompt": "100", "cached": "100", "completion": "100"})
    world.request("acme", 1, 0, 0)
    world.request("tokyo", 1, 0, 0)
    await stored(desk)
    page = await desk.usage().costs(start_time=START_S)
    assert [(r.amount.currency, r.amount.value) for r in page.data[0].results] == [("jpy", 1e-4), ("usd", 1e-6)]


async def test_pages_tile_the_range_and_keep_its_end(desk: Desk) -> None:
    world = desk.world
    for _ in range(4):
        world.request("acme", 1, 0, 1)
        world.later(3600)
    await stored(desk)
    asked: dict[str, Any] = {"start_time": START_S + 1, "bucket_width": "1h", "limit": 2}
    buckets, page = [], await desk.usage().completions(**asked)
    buckets += page.data
    while page.has_more:
        world.later(7200)  # the end that was not given stays what it was
        page = await desk.usage().completions(**asked, page=page.next_page)
        buckets += page.data
    assert page.next_page is None
    times = [time for b in buckets for time in (b.start_time, b.end_time)]
    assert times[0] == START_S + 1
    assert times[1:-1:2] == times[2::2]
    assert times[-1] == START_S + 4 * 3600 + 1
    assert [sum(r.input_tokens for r in b.results) for b in buckets] == [0, 1, 1, 1, 0]
    minutes = await desk.usage().completions(start_time=START_S - 30, end_time=START_S + 31, bucket_width="1m")
    assert [(b.start_time - START_S, b.end_time - START_S, len(b.results)) for b in minutes.data] == [
        (-30, 20, 1),
        (20, 31, 0),
    ], "the minute ends twenty seconds past"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=-1", "start_time"),
        ("start_time=1.5", "start_time"),
        ("start_time=99999999999", "start_time"),
        ("start_time=1&start_time=2", "start_time"),
        ("start_time=10&end_time=10", "end_time"),
        ("start_time=10&end_time=0", "end_time"),
        ("start_time=1&bucket_width=2d", "bucket_width"),
        ("start_time=1&limit=0", "limit"),
        ("start_time=1&limit=32", "limit"),
        ("start_time=1&bucket_width=1h&limit=169", "limit"),
        ("start_time=1&group_by[]=colour", "group_by"),
        ("start_time=1&batch=maybe", "batch"),
        ("start_time=1&page=page_x", "page"),
        ("start_time=100000&page=page_86400_200000", "page"),
        ("start_time=1&page=page_86401_200000", "page"),
        ("start_time=1&models=", "models"),
        ("start_time=1&colour=red", "colour"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(query: str, param: str) -> None:
    with pytest.raises(BadRequest, match=param) as caught:
        parse_query(parse_qsl(query, keep_blank_values=True), USAGE, START_S)
    assert caught.value.param == param


def test_costs_take_days_and_their_own_groups() -> None:
    given = [("start_time", str(START_S)), ("end_time", str(START_S + 1)), ("group_by", "project_id,line_item")]
    query = parse_query(given, COSTS, START_S)
    assert (query.start_s, query.end_s, query.group_by) == (MIDNIGHT_S, MIDNIGHT_S + DAY_S, ("project_id", "line_item"))
    for wrong in (
        ("bucket_width", "1h"),
        ("group_by", "user_id"),
        ("batch", "true"),
        ("models", "x"),
        ("limit", "181"),
    ):
        with pytest.raises(Exception, match=wrong[0]):
            parse_query([*given[:2], wrong], COSTS, START_S)
    assert parse_query([*given, ("limit", "180")], COSTS, START_S).limit == 180


def test_buckets_lie_between_multiples_of_their_width() -> None:
    for start in range(0, 3 * 60, 7):
        for end in range(start + 1, 4 * 60, 11):
            given = [("start_time", str(start)), ("end_time", str(end)), ("bucket_width", "1m"), ("limit", "2")]
            buckets: list[tuple[int, int]] = []
            page: str | None = None
            while True:
                query = parse_query([*given, *([("page", page)] if page else [])], USAGE, 0)
                buckets += query.buckets()
                page = query.next_page()
                if page is None:
                    break
            assert (buckets[0][0], buckets[-1][1]) == (start, end)
            assert all(left[1] == right[0] and right[0] % 60 == 0 for left, right in pairwise(buckets))
