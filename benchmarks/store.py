"""The usage store under ten million events: what an invoice, the usage API and reconciliation ask of it, one table.

    python benchmarks/store.py [--events 10000000] [--tenants 100] [--days 60] [--folder FOLDER]

The events are made inside ClickHouse (`INSERT … SELECT … FROM numbers`), with the canonical bytes and hashes that
Python would give them, so that everything that reads them checks them as it always does. They are inserted in order of
time, one in a hundred days late, one in a hundred a second time. Times are medians of `--repeats`, in milliseconds,
in one run on one machine.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from billing.service import Billing
from billing.store import EventStore
from metering import hourly, queries
from metering.clickhouse import UsageStore
from metering.counts import HOUR_US
from metering.queries import EVENTS
from migrations.runner import migrate_clickhouse, migrate_ledger

DAY_US = 24 * HOUR_US
START_US = 1_788_220_800_000_000  # 2026-09-01T00:00:00Z
AT_ONCE = 200_000  # rows of one insert

# Every field by the row's number alone: an insert that is repeated gives the same events.
_FIELDS = """
    {step:Int64} AS step,
    toInt64({start:Int64} + number * step + sipHash64(number, 1) % step) AS ts_us,
    ts_us + 200000 + sipHash64(number, 2) % 5000000 AS settled_us,
    concat(substring(lower(hex(toUInt64(ts_us))), 3), '-7', lower(leftPad(hex(number), 15, '0'))) AS event_id,
    concat('tenant-', toString(sipHash64(number, 3) % {tenants:UInt64})) AS tenant,
    concat('key-', toString(sipHash64(number, 4) % 4)) AS key_id,
    ['base', 'base', 'pirate', 'lawyer'][1 + sipHash64(number, 5) % 4] AS model,
    if(model = 'base', '', model) AS adapter,
    ['stop', 'stop', 'length'][1 + sipHash64(number, 6) % 3] AS finish_reason,
    50 + sipHash64(number, 7) % 2000 AS prompt_tokens,
    if(sipHash64(number, 8) % 4 = 0, intDiv(prompt_tokens, 32) * 16, 0) AS cached_tokens,
    1 + sipHash64(number, 9) % 500 AS completion_tokens,
    sipHash64(number, 10) % 1000 AS queue_us,
    2000 + sipHash64(number, 11) % 300000 AS ttft_us
"""
_BYTES = """
    concat('{"v":2,"event_id":"', event_id, '","ts_us":', toString(ts_us), ',"settled_us":', toString(settled_us),
        ',"tenant":"', tenant, '","key_id":"', key_id, '","model":"', model, '","base_model":"base","adapter":"',
        adapter, '","endpoint":"chat.completions","gateway":"gw0","outcome":"finished","finish_reason":"',
        finish_reason, '","prompt_tokens":', toString(prompt_tokens), ',"cached_tokens":', toString(cached_tokens),
        ',"completion_tokens":', toString(completion_tokens), ',"reasoning_tokens":0,"recomputed_tokens":0,',
        '"rejected_tokens":0,"n":1,"stream":true,"estimated":false,"user":"","metadata":{},"queue_us":',
        toString(queue_us), ',"ttft_us":', toString(ttft_us), ',"duration_us":', toString(settled_us - ts_us),
        ',"compute_us":0,"kv_block_us":0,"preemptions":0}')
"""
_INSERT = f"""
INSERT INTO {EVENTS} (v, event_id, ts, settled, tenant, key_id, model, base_model, adapter, endpoint, gateway, outcome,
    finish_reason, prompt_tokens, cached_tokens, completion_tokens, n, stream, queue_us, ttft_us, duration_us,
    content_hash)
WITH {_FIELDS}
SELECT 2, event_id, fromUnixTimestamp64Micro(ts_us, 'UTC'), fromUnixTimestamp64Micro(settled_us, 'UTC'), tenant, key_id,
    model, 'base', adapter, 'chat.completions', 'gw0', 'finished', finish_reason, prompt_tokens, cached_tokens,
    completion_tokens, 1, true, queue_us, ttft_us, settled_us - ts_us, lower(hex(SHA256({_BYTES})))
FROM numbers({{first:UInt64}}, {{count:UInt64}}) WHERE """  # noqa: S608  # all written here
_LATE = "sipHash64(number, 12) % 100 = 0"
_AGAIN = "sipHash64(number, 13) % 100 = 0"


def fill(store: UsageStore, events: int, tenants: int, days: int) -> float:
    """Make the events; the seconds it took."""
    began = time.perf_counter()
    parameters = {"start": START_US, "step": days * DAY_US // events, "tenants": tenants}
    with store._client() as client:
        for first in range(0, events, AT_ONCE):
            some = {**parameters, "first": first, "count": min(AT_ONCE, events - first)}
            client.command(f"{_INSERT} NOT ({_LATE})", parameters=some)
            client.command(f"{_INSERT} {_AGAIN} AND NOT ({_LATE})", parameters=some)
        for first in range(0, events, 10 * AT_ONCE):
            some = {**parameters, "first": first, "count": min(10 * AT_ONCE, events - first)}
            client.command(f"{_INSERT} {_LATE}", parameters=some)
    return time.perf_counter() - began


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def measure(store: UsageStore, repeats: int, days: int) -> Iterator[tuple[str, float, int]]:
    """(what was asked, milliseconds, rows it gave)."""
    month, ever = (START_US, START_US + 30 * DAY_US), (START_US, START_US + days * DAY_US)
    week = (ever[1] - 7 * DAY_US, ever[1])
    whole: dict[str, Any] = {"tenant": None, "start_us": ever[0], "end_us": ever[1]}
    by_events = queries.usage(None, *ever, "day", ["tenant"])
    asked: list[tuple[str, Callable[[], Sequence[Any]]]] = [
        ("a tenant's month, every event read and checked", lambda: list(store.events("tenant-1", *month))),
        ("usage by day, all together", lambda: store.usage(**whole)),
        ("usage by day and tenant", lambda: store.usage(**whole, group_by=["tenant"])),
        ("usage by day, tenant and model", lambda: store.usage(**whole, group_by=["tenant", "model"])),
        ("usage by day and tenant, from the events", lambda: store._query(by_events)),
        (
            "usage by hour and model of one tenant, a week",
            lambda: store.usage(tenant="tenant-1", start_us=week[0], end_us=week[1], bucket="hour", group_by=["model"]),
        ),
        ("sums of a month by tenant, model and hour, for reconcile", lambda: store.counts(*month)),
    ]
    for what, run in asked:
        yield what, median_ms(run, repeats), len(run())


def draft_ms(store: UsageStore, folder: Path, repeats: int) -> tuple[str, float, int]:
    """The whole of `draft_invoice` over a tenant's month, by a ledger that has its charges."""
    url = f"sqlite:///{folder / 'ledger.sqlite3'}"
    (folder / "ledger.sqlite3").unlink(missing_ok=True)
    migrate_ledger(url)
    now_us = [START_US - 1]
    billing = Billing(EventStore(url), base_model="base", clock=lambda: now_us[0], price_lead_us=0)
    billing.create_tenant(id="tenant-1", name="tenant-1")
    for model, completion in (("*", "1.25"), ("pirate", "2"), ("lawyer", "3")):
        prices = {"prompt": "0.50", "cached": "0.05", "completion": completion}
        billing.set_price(model=model, currency="usd", effective_at_us=0, per_million=prices)
    month = (START_US, START_US + 30 * DAY_US)
    now_us[0] = START_US
    events = list(store.events("tenant-1", *month))
    for first in range(0, len(events), 1000):
        now_us[0] = max(now_us[0], events[first].settled_us)
        billing.record(events[first : first + 1000])
    now_us[0] = month[1] + DAY_US

    def draft() -> None:
        billing.void_invoice(billing.draft_invoice("tenant-1", *month, usage=store, watermark_us=month[1]).id)

    found = median_ms(draft, repeats)
    billing.close()
    return "a tenant's month as an invoice: `draft_invoice`, whole", found, len(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the store here, and use it again")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="meterhouse-store-"))
    url = f"chdb://{folder.absolute() / 'db'}"
    migrate_clickhouse(url)
    store = UsageStore(url, "benchmark")
    try:
        if not store._query(hourly.span())[0][2]:
            seconds = fill(store, options.events, options.tenants, options.days)
            print(f"{options.events:,} events, {options.tenants} tenants, {options.days} days: made in {seconds:.0f} s")
        if not store._query(hourly.clean_hours(START_US, START_US + options.days * DAY_US)):
            began = time.perf_counter()
            hours = store.rollups.rebuild(START_US, START_US + options.days * DAY_US)
            print(f"{hours} hours summed in {time.perf_counter() - began:.1f} s\n")
        print("| what is read | ms | rows |\n|---|---|---|")
        for what, ms, rows in measure(store, options.repeats, options.days):
            print(f"| {what} | {ms:,.0f} | {rows:,} |", flush=True)
        what, ms, rows = draft_ms(store, folder, options.repeats)
        print(f"| {what} | {ms:,.0f} | {rows:,} |", flush=True)
    finally:
        store.close()
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
