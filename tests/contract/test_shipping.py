"""Spool to store with everything real: every settled event is counted once, whatever happens to the server."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import msgspec
import pytest

from metering.clickhouse import UsageStore
from metering.counts import HOUR_US, add_rows
from metering.events import Outcome, UsageEvent
from metering.queries import Query
from metering.shipper import Shipper
from metering.spool import Spool
from migrations.runner import migrate_clickhouse
from tests.doubles.clickhouse_server import ClickHouseServer
from tests.doubles.tcp_proxy import TcpProxy
from tests.sums import row_of

HOUR = 490_000 * HOUR_US


def make_event(i: int, **changes: object) -> UsageEvent:
    event = UsageEvent(
        event_id=f"ship-{i:06d}",
        ts_us=HOUR + i * 10_000_019,
        settled_us=HOUR + i * 10_000_019 + 17,
        tenant=f"t{i % 3}",
        key_id="k",
        model="m",
        base_model="m",
        endpoint="completions",
        gateway="g",
        outcome=Outcome.FINISHED,
        prompt_tokens=10,
        completion_tokens=i,
    )
    return msgspec.structs.replace(event, **changes)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool.sqlite3", consumers=("clickhouse",))
    yield spool
    spool.close()


@pytest.fixture
def own_server(clickhouse_library: Path, tmp_path: Path) -> Iterator[ClickHouseServer]:
    server = ClickHouseServer(clickhouse_library, tmp_path / "server")
    server.start()
    yield server
    server.kill()


def check_counted_once(store: UsageStore, events: list[UsageEvent]) -> None:
    assert list(store.events(None, 0, 1 << 61)) == events
    assert store.counts(0, 1 << 61) == add_rows(row_of(event) for event in events)
    (row,) = store.usage(tenant=None, start_us=0, end_us=1 << 61, bucket="month")
    assert (row.requests, row.completion_tokens) == (len(events), sum(e.completion_tokens for e in events))
    assert store.conflicts(0, 1 << 61) == []


@pytest.mark.parametrize("kind", ["usage_store", "server_store"])
def test_poison_goes_to_the_dead_letters_and_the_rest_is_counted(
    request: pytest.FixtureRequest, spool: Spool, kind: str
) -> None:
    store: UsageStore = request.getfixturevalue(kind)
    events = [make_event(i) for i in range(40)]
    poison = make_event(99, cached_tokens=11)
    wait([spool.settle(event) for event in [*events[:7], poison, *events[7:]]])
    shipper = Shipper(spool, store, max_age_s=0.05)
    shipper.start()
    assert shipper.stop(30)
    check_counted_once(store, events)
    assert shipper.buried_total == 1
    assert store._query(Query("SELECT event_id FROM usage_dead_letters FINAL", {})) == [(poison.event_id,)]
    assert spool.count("clickhouse") == 0


def test_usage_shows_within_a_second(usage_store: UsageStore, spool: Spool) -> None:
    usage_store.counts(0, 1)  # opens the client
    shipper = Shipper(spool, usage_store)
    shipper.start()
    started = time.monotonic()
    spool.settle(make_event(1)).result()
    while not usage_store.counts(0, 1 << 61):
        time.sleep(0.02)
    took_s = time.monotonic() - started
    assert shipper.stop(10)
    assert took_s < 3, "half a second on a quiet machine"


def test_the_server_is_killed_between_and_in_inserts(own_server: ClickHouseServer, spool: Spool) -> None:
    url = f"{own_server.url}/meter"
    migrate_clickhouse(url)
    store = UsageStore(url)
    shipper = Shipper(spool, store, max_events=20, max_age_s=0.01, max_pause_s=0.2)
    shipper.start()
    rng = random.Random(4)
    events = []
    for _ in range(6):
        batch = [make_event(len(events) + i) for i in range(150)]
        events += batch
        wait([spool.settle(event) for event in batch])
        time.sleep(rng.uniform(0.0, 0.15))
        own_server.kill()
        own_server.start()
    assert shipper.flush(60)
    check_counted_once(store, events)
    assert shipper.failures_total > 0, "no kill was noticed"
    assert shipper.buried_total == 0
    shipper.stop()
    store.close()


def test_answers_are_lost_after_the_insert_took_place(own_server: ClickHouseServer, spool: Spool) -> None:
    direct = f"{own_server.url}/meter"
    migrate_clickhouse(direct)
    proxy = TcpProxy(own_server.http_port)
    store = UsageStore(f"http://default@127.0.0.1:{proxy.port}/meter")
    shipper = Shipper(spool, store, max_events=25, max_age_s=0.01, max_pause_s=0.1)
    shipper.start()
    events = []
    for mode in ("swallow", "pass", "swallow", "refuse", "swallow"):
        proxy.refuse() if mode == "refuse" else setattr(proxy, "mode", mode)
        batch = [make_event(len(events) + i) for i in range(50)]
        events += batch
        wait([spool.settle(event) for event in batch])
        time.sleep(0.4)
    assert spool.count("clickhouse") > 0
    proxy.mode = "pass"
    assert shipper.flush(60)
    assert proxy.swallowed > 0
    assert shipper.buried_total == 0
    check_counted_once(store, events)
    shipper.stop()
    store.close()
    proxy.close()


def test_a_slow_server_is_waited_for(own_server: ClickHouseServer, spool: Spool) -> None:
    url = f"{own_server.url}/meter"
    migrate_clickhouse(url)
    store = UsageStore(f"{url}?send_receive_timeout=1")  # the answer comes later than anybody waits
    shipper = Shipper(spool, store, max_age_s=0.01, max_pause_s=0.2)
    shipper.start()
    events = [make_event(i) for i in range(30)]
    wait([spool.settle(event) for event in events[:10]])
    assert shipper.flush(20)
    own_server.pause()
    wait([spool.settle(event) for event in events[10:]])
    assert not shipper.flush(2.5)
    assert spool.writable(), "a store that hangs does not close the door"
    own_server.resume()
    assert shipper.flush(60)
    check_counted_once(store, events)
    shipper.stop()
    store.close()
