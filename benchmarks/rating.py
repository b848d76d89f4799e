"""What charges cost to make and an invoice to cut: rating alone, `record()`, `draft_invoice` of a month.

    python benchmarks/rating.py                                  # 50,000 events in the month
    python benchmarks/rating.py --events 50000 300000 --folder FOLDER   # keeps ledgers and stores, and uses them again

The price book has prices of all and of one tenant, of one endpoint, in four versions each over the month; one tenant
pays flat prices, the other graduated ones with an allowance and a minimum. The ledger is SQLite, the usage store chDB,
both as a server has them. Medians of `--repeats`; a month is cut, and the draft voided, each time.
"""

from __future__ import annotations

import argparse
import functools
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from billing.charges import move, rate
from billing.offers import ClassOffer, TierOffer
from billing.positions import Positions
from billing.service import Billing
from billing.store import EventStore
from billing.tiers import PriceModel
from metering.clickhouse import UsageStore
from metering.events import Outcome, UsageEvent, content_hash
from migrations.runner import migrate_clickhouse, migrate_ledger

DAY_US = 86_400_000_000
START_US = 1_788_220_800_000_000  # 2026-09-01T00:00:00Z
END_US = START_US + 30 * DAY_US
TENANTS = ("flat", "tiered")
AT_ONCE = 10_000
RATED = 100_000
RECORDED = 20_000


class Clock:
    """The time that the ledger writes; moved by hand."""

    def __init__(self) -> None:
        self.now_us = START_US - DAY_US

    def __call__(self) -> int:
        self.now_us += 1
        return self.now_us


def make_events(count: int, tenant: str, seed: int = 1) -> Iterator[UsageEvent]:
    """A tenant's month in order of time, of three models and two endpoints."""
    draw = random.Random(f"{seed} {tenant}")  # the same events each time
    step = (END_US - START_US) // count
    for number in range(count):
        model = draw.choice(("base", "base", "pirate", "lawyer"))
        prompt, ts_us = draw.randrange(50, 2000), START_US + number * step + draw.randrange(step)
        yield UsageEvent(
            event_id=f"{ts_us // 1000:012x}-{TENANTS.index(tenant):x}{number:015x}",
            ts_us=ts_us,
            settled_us=ts_us + draw.randrange(200_000, 5_000_000),
            tenant=tenant,
            key_id=f"key-{draw.randrange(4)}",
            model=model,
            base_model="base",
            adapter="" if model == "base" else model,
            endpoint=draw.choice(("chat.completions", "completions")),
            gateway="gw0",
            outcome=Outcome.FINISHED,
            finish_reason="stop",
            prompt_tokens=prompt,
            cached_tokens=prompt // 32 * 16 if draw.random() < 0.25 else 0,
            completion_tokens=draw.randrange(1, 500),
            stream=True,
            queue_us=draw.randrange(1000),
            ttft_us=draw.randrange(2000, 300_000),
            duration_us=draw.randrange(200_000, 5_000_000),
            compute_us=draw.randrange(100_000),
            kv_block_us=draw.randrange(10_000_000),
        )


def open_billing(url: str) -> tuple[Billing, Clock]:
    """A ledger with two tenants and the price book, made if it is new."""
    migrate_ledger(url)
    clock = Clock()
    billing = Billing(EventStore(url), base_model="base", clock=clock, price_lead_us=0)
    if not billing.tenants():
        for tenant in TENANTS:
            billing.create_tenant(id=tenant, name=tenant)
        _set_prices(billing, clock)
    clock.now_us = END_US + DAY_US
    return billing, clock


def _set_prices(billing: Billing, clock: Clock) -> None:
    graduated = ClassOffer(
        model=PriceModel.GRADUATED,
        tiers=(TierOffer(price="0.50", up_to=5_000_000), TierOffer(price="0.40")),
        allowance=1_000_000,
        minimum="20",
    )
    for version in range(4):
        clock.now_us = START_US - DAY_US + version * 8 * DAY_US
        for model, tenant, endpoint in (
            ("*", None, ""),
            ("base", None, ""),
            ("base", None, "completions"),
            ("pirate", None, ""),
            ("pirate", "flat", ""),
        ):
            flat = {"prompt": f"0.{50 + version}", "cached": "0.05", "completion": f"1.{10 + version}"}
            billing.set_price(
                model=model, tenant=tenant, endpoint=endpoint, currency="usd", effective_at_us=0, per_million=flat
            )
        billing.set_price(
            model="*",
            tenant="tiered",
            currency="usd",
            effective_at_us=0,
            per_million={"cached": "0.05", "completion": "1.25"},
            classes={"prompt": graduated, "request": ClassOffer(price="0.0001")},
        )


def record(billing: Billing, clock: Clock, events: Sequence[UsageEvent]) -> None:
    """As the recorder does: a second after each batch was settled."""
    for first in range(0, len(events), 1000):
        some = events[first : first + 1000]
        clock.now_us = max(clock.now_us, some[-1].settled_us + 1_000_000)
        billing.record(some)


def timed(run: Callable[[], object], repeats: int) -> float:
    """The median seconds of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def rating_alone(billing: Billing, repeats: int) -> Iterator[tuple[str, float, int]]:
    """Price found, quantities counted, tiers moved, charge made; the content's hash is there, as the spool has it."""
    for name in TENANTS:
        events = [(event, content_hash(event)) for event in make_events(RATED, name)]
        yield f"rating alone, {name}", timed(functools.partial(_rate_all, billing, name, events), repeats), RATED


def _rate_all(billing: Billing, name: str, events: Sequence[tuple[UsageEvent, str]]) -> None:
    prices, tariffs, positions = billing._books.prices, billing._books.tariffs, Positions()
    tenant = billing.tenant(name)
    for event, digest in events:
        at_us = event.ts_us
        price = prices.resolve(name, event.model, "base", "usd", ts_us=at_us, known_us=at_us, endpoint=event.endpoint)
        tariff = tariffs.of(price.id)
        move(positions, rate(event, digest, tenant, tariff, positions, later=False).rated, tariff)


def recording(folder: Path, repeats: int) -> Iterator[tuple[str, float, int]]:
    for name in TENANTS:
        seconds = []
        for again in range(repeats):
            billing, clock = open_billing(f"sqlite:///{folder}/record-{name}-{again}.sqlite3")
            clock.now_us = START_US
            events = list(make_events(RECORDED, name))
            seconds.append(timed(functools.partial(record, billing, clock, events), 1))
            billing.close()
        yield f"record(), {name}", statistics.median(seconds), RECORDED


def cutting(folder: Path, count: int, repeats: int) -> Iterator[tuple[str, float, int]]:
    """The month of each tenant, from a store that has both."""
    ledger, store_path = f"sqlite:///{folder}/ledger-{count}.sqlite3", folder / f"store-{count}"
    fresh = not store_path.exists()
    migrate_clickhouse(f"chdb://{store_path}")
    billing, clock = open_billing(ledger)
    store = UsageStore(f"chdb://{store_path}", "benchmark")
    try:
        if fresh:
            for name in TENANTS:
                clock.now_us = START_US
                events = list(make_events(count, name))
                for first in range(0, count, AT_ONCE):
                    store.insert(events[first : first + AT_ONCE])
                record(billing, clock, events)
        clock.now_us = END_US + DAY_US
        for name in TENANTS:
            yield f"draft_invoice, {name}", timed(functools.partial(_cut, billing, store, name, count), repeats), count
    finally:
        store.close()
        billing.close()


def _cut(billing: Billing, store: UsageStore, name: str, count: int) -> None:
    draft = billing.draft_invoice(name, START_US, END_US, usage=store, watermark_us=END_US)
    if draft.event_count != count:
        raise SystemExit(f"{draft.event_count} events of {count} on the invoice")
    billing.void_invoice(draft.id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="*", default=[50_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep ledgers and stores here, and use them again")
    parser.add_argument("--only-cut", action="store_true", help="leave out rating alone and record()")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="meterhouse-rating-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print("| what | events | seconds | events/s | peak RSS, MB |\n|---|---|---|---|---|")

    def show(found: Iterator[tuple[str, float, int]]) -> None:
        for what, seconds, count in found:
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"| {what} | {count:,} | {seconds:.2f} | {count / seconds:,.0f} | {rss} |", flush=True)

    try:
        if not options.only_cut:
            scratch = Path(tempfile.mkdtemp(prefix="records-", dir=folder))
            billing, _ = open_billing(f"sqlite:///{scratch}/book.sqlite3")
            show(rating_alone(billing, options.repeats))
            billing.close()
            show(recording(scratch, options.repeats))
            shutil.rmtree(scratch)
        for count in options.events:
            show(cutting(folder, count, options.repeats))
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
