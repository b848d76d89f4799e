"""Every SQL of the dashboards, its macros written out, run against chDB, a ClickHouse server and PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import clickhouse_connect
import pytest
import sqlalchemy as sa

from billing.accounts import Tenant, TenantCreated
from billing.books import new_event
from billing.ledger import UsageRated, UsageUnrated
from billing.store import EventStore
from dashboards import panels
from metering.clickhouse import UsageStore, client_options
from metering.events import Outcome, UsageEvent
from migrations.runner import migrate_ledger
from tests.unit.dashboards.test_boards import queries

START_S = 1_793_491_200
END_S = START_S + 7200


def _event(n: int, **more: Any) -> UsageEvent:
    fields: dict[str, Any] = {
        "event_id": f"e{n}",
        "ts_us": (START_S + 60 * n) * 10**6,
        "settled_us": (START_S + 60 * n + 5) * 10**6,
        "tenant": "acme",
        "key_id": "k1",
        "model": "smollm",
        "base_model": "smollm",
        "endpoint": "chat.completions",
        "gateway": "gw0",
        "outcome": Outcome.FINISHED,
        "prompt_tokens": 100,
        "cached_tokens": 25,
        "completion_tokens": 10,
    }
    return UsageEvent(**{**fields, **more})


EVENTS = [
    _event(0),
    _event(61),
    _event(61),  # a replay: counted once
    _event(2, tenant="o'hara", outcome=Outcome.ABORT, prompt_tokens=0, cached_tokens=0, completion_tokens=0),
    _event(3, tenant="elsewhere"),  # not chosen
    _event(500),  # after the time shown
]


def _clickhouse(sql: str) -> str:
    """What the plugin sends: macros and the variable written out."""
    recent = (
        r"\1 >= now() - INTERVAL 1 HOUR AND \1 <= now() + INTERVAL 1 HOUR"  # when it was set aside, not when it was
    )
    sql = re.sub(r"\$__timeFilter\((found|buried)\)", recent, sql)
    sql = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 >= toDateTime({START_S}) AND \1 <= toDateTime({END_S})", sql)
    sql = re.sub(r"\$__timeInterval\((\w+)\)", r"toStartOfInterval(toDateTime(\1), INTERVAL 3600 second)", sql)
    sql = sql.replace("${tenant:singlequote}", r"'acme','o\'hara'")
    assert "$" not in sql
    return sql


def _postgresql(sql: str) -> str:
    sql = sql.replace("$__unixEpochFrom()", str(START_S)).replace("$__unixEpochTo()", str(END_S))
    sql = sql.replace("${tenant:singlequote}", "'acme','o''hara'")
    assert "$" not in sql
    return sql


@pytest.fixture(params=["chdb", "server"])
def clickhouse(request: pytest.FixtureRequest) -> Iterator[Any]:
    store: UsageStore = request.getfixturevalue("usage_store" if request.param == "chdb" else "server_store")
    store.insert(EVENTS)
    store.insert(EVENTS[:2])
    store.insert([_event(0, completion_tokens=999)])  # other content under a known id: shown apart, counted nowhere
    url = request.getfixturevalue("chdb_url" if request.param == "chdb" else "server_url")
    client = clickhouse_connect.get_client(**client_options(url))
    yield client
    client.close()


def test_every_clickhouse_panel(clickhouse: Any) -> None:
    answers = {}
    for title, sql in queries(panels.CLICKHOUSE):
        answer = clickhouse.query(_clickhouse(sql))
        answers[title] = [dict(zip(answer.column_names, row, strict=True)) for row in answer.result_rows]
        assert answers[title], title
    assert [list(answers[name][0].values()) for name in ("Requests", "Prompt tokens", "Completion tokens")] == [
        [3],
        [200],
        [20],
    ]
    assert next(iter(answers["Cached share"][0].values())) == 0.25
    tokens = [(row["prompt"], row["cached"], row["completion"]) for row in answers["Tokens"]]
    assert tokens == [(75, 25, 10), (75, 25, 10)]
    outcomes = {(row["outcome"], row["requests"]) for row in answers["Requests by outcome"]}
    assert outcomes == {("finished", 1), ("abort", 1)}
    models = {row["tenant"]: (row["requests"], row["cached_share"]) for row in answers["Models"]}
    assert models == {"acme": (2, 0.25), "o'hara": (1, 0.0)}
    assert {row["tenant"] for row in answers["variable tenant"]} == {"acme", "o'hara", "elsewhere"}
    assert [(row["kind"], row["event_id"]) for row in answers["Set aside"]] == [("second content", "e0")]
    for title, sql in queries(panels.CLICKHOUSE):
        if "$__timeInterval" in sql:
            assert all("time" in row for row in answers[title]), title


def _charge(tenant: str, minute: int, femto: int) -> UsageRated:
    return UsageRated(
        event_id=f"{tenant}{minute}",
        event_hash="0" * 64,
        ts_us=(START_S + 60 * minute) * 10**6,
        settled_us=(START_S + 60 * minute + 5) * 10**6,
        tenant=tenant,
        model="smollm",
        adapter="",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        price_id="p",
        amount_femto=str(femto),
    )


def _unrated(n: int) -> UsageUnrated:
    event = _event(n, event_id=f"acme{n}", model="unpriced")
    return UsageUnrated(event=event, event_hash="0" * 64, reason="no price")


@pytest.fixture
def ledger(postgres_url: str) -> str:
    """A ledger on PostgreSQL with charges in and outside the time shown."""
    migrate_ledger(postgres_url)
    store = EventStore(postgres_url)
    facts: list[tuple[str, Any]] = [
        (f"tenant:{name}", TenantCreated(tenant=Tenant(id=name, name=name, currency=currency, created_us=1)))
        for name, currency in (("acme", "usd"), ("o'hara", "eur"), ("elsewhere", "usd"))
    ]
    facts += [
        ("usage:acme", _charge("acme", 0, 1)),
        ("usage:acme", _charge("acme", 61, 2 * 10**15)),
        ("usage:acme", _charge("acme", 500, 10**15)),
        ("usage:o'hara", _charge("o'hara", 2, 10**14)),
        ("usage:elsewhere", _charge("elsewhere", 2, 10**15)),
        ("usage:acme", _unrated(7)),
        ("usage:acme", _unrated(61)),  # it has a charge now
    ]
    with store.exclusive() as log:
        rows = [new_event(stream, fact) for stream, fact in facts]
        log.append(rows, actor="test", time_us=(END_S + 60) * 10**6)
    store.close()
    return postgres_url


def test_every_ledger_panel(ledger: str) -> None:
    engine = sa.create_engine(ledger)
    answers = {}
    with engine.connect() as connection:
        for title, sql in queries(panels.POSTGRESQL):
            answers[title] = [dict(row) for row in connection.exec_driver_sql(_postgresql(sql)).mappings()]
    engine.dispose()
    assert set(answers) == {"Cost", "Cost by tenant", "Usage without a price"}
    waiting = [tuple(row.values()) for row in answers["Usage without a price"]]
    assert waiting == [("acme", "unpriced", "no price", 1)]
    cost = {row["tenant"]: (row["currency"], row["requests"], row["amount"]) for row in answers["Cost"]}
    assert cost == {"acme": ("USD", 2, Decimal("2.000000000000001")), "o'hara": ("EUR", 1, Decimal("0.1"))}
    hours = [(int(row["time"].timestamp()) - START_S, row["metric"]) for row in answers["Cost by tenant"]]
    assert sorted(hours) == [(0, "acme USD"), (0, "o'hara EUR"), (3600, "acme USD")]
