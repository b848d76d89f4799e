"""The dashboard "usage per tenant": what was used, from ClickHouse, and what it cost, from the ledger.

ClickHouse knows tokens and no prices; the ledger knows what each request was charged. So money is read where it
is exact. Numbers are for looking at: an invoice is never made from here.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import (
    CLICKHOUSE,
    POSTGRESQL,
    choice_variable,
    column,
    number,
    rows,
    source_variable,
    sql_lines,
)
from metering.queries import CONFLICTS, DEAD_LETTERS, EVENTS, STANDING

TIME = column("ts")

PROMPT = f"sum({column('prompt_tokens')})"
CACHED = f"sum({column('cached_tokens')})"
COMPLETION = f"sum({column('completion_tokens')})"
SHARE = f"if({PROMPT} = 0, 0, {CACHED} / {PROMPT})"
TENANT = column("tenant")

# FINAL: the store may hold an event twice until its parts are merged. STANDING: of two contents the first counts.
SHOWN = f"FROM {EVENTS} FINAL WHERE $__timeFilter({TIME}) AND {TENANT} IN (${{tenant:singlequote}}) AND {STANDING}"
BUCKET = f"$__timeInterval({TIME}) AS time"

CHARGES = """
FROM (
  SELECT payload::jsonb AS fact FROM events
  WHERE type = 'usage.rated' AND time_us >= $__unixEpochFrom()::bigint * 1000000
) AS charges
JOIN (
  SELECT DISTINCT payload::jsonb->'tenant'->>'id' AS id, payload::jsonb->'tenant'->>'currency' AS currency
  FROM events WHERE type = 'tenant.created'
) AS tenants ON tenants.id = fact->>'tenant'
WHERE (fact->>'ts_us')::bigint >= $__unixEpochFrom()::bigint * 1000000
  AND (fact->>'ts_us')::bigint < $__unixEpochTo()::bigint * 1000000
  AND tenants.id IN (${tenant:singlequote})
""".strip()
AMOUNT = "sum((fact->>'amount_femto')::numeric) / 1000000000000000"

UNRATED = """
SELECT fact->'event'->>'tenant' AS tenant, fact->'event'->>'model' AS model, fact->>'reason' AS reason,
  count(*) AS requests
FROM (
  SELECT payload::jsonb AS fact FROM events
  WHERE type = 'usage.unrated' AND time_us >= $__unixEpochFrom()::bigint * 1000000
) AS waiting
WHERE fact->'event'->>'tenant' IN (${tenant:singlequote}) AND fact->'event'->>'event_id' NOT IN (
  SELECT payload::jsonb->>'event_id' FROM events
  WHERE type = 'usage.rated' AND time_us >= $__unixEpochFrom()::bigint * 1000000
)
GROUP BY 1, 2, 3 ORDER BY requests DESC
""".strip()

SET_ASIDE = f"""
SELECT 'second content' AS kind, event_id, '' AS reason, found AS at FROM {CONFLICTS} FINAL WHERE $__timeFilter(found)
UNION ALL
SELECT 'dead letter' AS kind, event_id, reason, buried AS at FROM {DEAD_LETTERS} FINAL WHERE $__timeFilter(buried)
ORDER BY at DESC LIMIT 100
""".strip()  # noqa: S608  # names of ours


def _over_time(selected: str, *, split: str = "") -> str:
    grouped = f", {split}" if split else ""
    return f"SELECT {BUCKET}{grouped}, {selected} {SHOWN} GROUP BY time{grouped} ORDER BY time"


def _tokens() -> str:
    parts = f"{PROMPT} - {CACHED} AS prompt, {CACHED} AS cached, {COMPLETION} AS completion"
    return _over_time(parts)


def _by(*names: str) -> str:
    keys = ", ".join(column(name) for name in names)
    return (
        f"SELECT {keys}, count() AS requests, {PROMPT} AS prompt, {CACHED} AS cached, {COMPLETION} AS completion, "
        f"round({SHARE}, 3) AS cached_share {SHOWN} GROUP BY {keys} ORDER BY completion DESC LIMIT 100"
    )


def build() -> dashboard.Dashboard:
    everyone = f"SELECT DISTINCT {TENANT} FROM {EVENTS} WHERE $__timeFilter({TIME}) ORDER BY {TENANT}"  # noqa: S608  # names of ours
    board = (
        dashboard.Dashboard("Meterhouse: usage per tenant")
        .uid("meterhouse-usage")
        .description("Tokens, cached share and requests from the usage store; cost from the ledger.")
        .tags(["meterhouse"])
        .time("now-24h", "now")
        .refresh("1m")
        .timezone("utc")
        .readonly()
        .with_variable(source_variable(CLICKHOUSE, "Usage store"))
        .with_variable(source_variable(POSTGRESQL, "Ledger"))
        .with_variable(choice_variable("tenant", "Tenant", CLICKHOUSE, everyone))
    )
    for panel in (
        number("Requests", "Requests settled, however they ended.", CLICKHOUSE, f"SELECT count() {SHOWN}"),
        number("Prompt tokens", "Computed and reused.", CLICKHOUSE, f"SELECT {PROMPT} {SHOWN}"),
        number("Completion tokens", "Sampled, over all choices.", CLICKHOUSE, f"SELECT {COMPLETION} {SHOWN}"),
        number(
            "Cached share", "Prompt tokens reused / all.", CLICKHOUSE, f"SELECT {SHARE} {SHOWN}", unit="percentunit"
        ),
        sql_lines("Tokens", "By the class that is priced.", CLICKHOUSE, _tokens(), width=12, stacked=True),
        sql_lines(
            "Completion tokens by tenant",
            "Who generates.",
            CLICKHOUSE,
            _over_time(f"{COMPLETION} AS completion", split=TENANT),
            width=12,
            stacked=True,
        ),
        sql_lines(
            "Requests by outcome",
            "How they ended.",
            CLICKHOUSE,
            _over_time("count() AS requests", split=column("outcome")),
            stacked=True,
        ),
        sql_lines(
            "Cached share by tenant",
            "Prompt tokens reused / all prompt tokens.",
            CLICKHOUSE,
            _over_time(f"{SHARE} AS cached", split=TENANT),
            unit="percentunit",
        ),
        sql_lines(
            "Cost by tenant",
            "What was charged, in the tenant's currency. Needs a ledger in PostgreSQL.",
            POSTGRESQL,
            "SELECT to_timestamp((fact->>'ts_us')::bigint / 3600000000 * 3600) AS time, "
            f"tenants.id || ' ' || upper(currency) AS metric, {AMOUNT} AS value {CHARGES} GROUP BY 1, 2 ORDER BY 1",
            stacked=True,
        ),
        rows("Models", "Per tenant and the model asked for.", CLICKHOUSE, _by("tenant", "model", "adapter")),
        rows(
            "Cost",
            "What was charged, exact. Needs a ledger in PostgreSQL.",
            POSTGRESQL,
            "SELECT tenants.id AS tenant, fact->>'model' AS model, upper(currency) AS currency, count(*) AS requests, "
            f"{AMOUNT} AS amount {CHARGES} GROUP BY 1, 2, 3 ORDER BY amount DESC LIMIT 100",
        ),
        rows("Keys", "Per key and end user.", CLICKHOUSE, _by("tenant", "key_id", "user"), width=24),
        rows(
            "Usage without a price",
            "Must be empty: set the price, then rate it. Needs a ledger in PostgreSQL.",
            POSTGRESQL,
            UNRATED,
        ),
        rows(
            "Set aside",
            "Must be empty: events that the store counts nowhere, and why.",
            CLICKHOUSE,
            SET_ASIDE,
        ),
    ):
        board = board.with_panel(panel)
    return board
