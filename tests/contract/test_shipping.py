"""Spool to store with everything real: every settled event is counted once, whatever happens to the server.

METERHOUSE_TEST_SHIPPING_ORDERS says how many orders of its troubles are played.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import clickhouse_connect
import msgspec
import pytest

from metering.clickhouse import UsageStore, client_options
from metering.counts import HOUR_US, add_rows
from metering.events import Outcome, UsageEvent
from metering.queries import EVENTS, Query
from metering.shipper import Shipper
from metering.spool import Spool
from migrations.runner import migrate_clickhouse
from tests.doubles.clickhouse_server import ClickHouseServer
from tests.doubles.tcp_proxy import TcpProxy
from tests.sums import row_of

HOUR = 490_000 * HOUR_US
ORDERS = int(os.environ.get("METERHOUSE_TEST_SHIPPING_ORDERS", "1"))


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


def refusal(code: int, text: str) -> bytes:
    """What ClickHouse answers over HTTP when it cannot."""
    body = f"Code: {code}. DB::Exception: {text}\n".encode()
    head = (
        f"HTTP/1.1 500 Internal Server Error\r\nX-ClickHouse-Exception-Code: {code}\r\n"
        f"Content-Type: text/plain\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Store:
    """A server behind a proxy, and everything that may befall it. Each method returns how it ends."""

    def __init__(self, server: ClickHouseServer, proxy: TcpProxy) -> None:
        self.server, self.proxy = server, proxy

    def down(self) -> Callable[[], object]:
        self.server.kill()
        return self.server.start

    def restarted(self) -> Callable[[], object]:
        self.server.kill()
        self.server.start()
        return lambda: None

    def hung(self) -> Callable[[], object]:
        self.server.pause()
        return self.server.resume

    def slow(self) -> Callable[[], object]:
        self.proxy.mode, self.proxy.delay_s = "delay", 0.05
        return self._passes

    def resetting_after_commit(self) -> Callable[[], object]:
        self.proxy.mode = "swallow"
        return self._passes

    def read_only(self) -> Callable[[], object]:
        self.proxy.say(refusal(242, "Table is in readonly mode (TABLE_IS_READ_ONLY)"))
        return self._passes

    def disk_full(self) -> Callable[[], object]:
        self.proxy.say(refusal(243, "Cannot reserve 1.00 MiB, not enough space (NOT_ENOUGH_SPACE)"))
        return self._passes

    def schema_older(self) -> Callable[[], object]:
        self._alter("RENAME COLUMN preemptions TO preemptions_of_tomorrow")
        return lambda: self._alter("RENAME COLUMN preemptions_of_tomorrow TO preemptions")

    def schema_newer(self) -> Callable[[], object]:
        self._alter("ADD COLUMN IF NOT EXISTS tomorrow String DEFAULT 'unheard of'")
        return lambda: None

    def _passes(self) -> None:
        self.proxy.mode = "pass"

    def _alter(self, change: str) -> None:
        client = clickhouse_connect.get_client(**client_options(f"{self.server.url}/meter"))
        client.command(f"ALTER TABLE {EVENTS} {change}")
        client.close()


TROUBLES = (
    "down",
    "restarted",
    "hung",
    "slow",
    "resetting_after_commit",
    "read_only",
    "disk_full",
    "schema_older",
    "schema_newer",
)
HARMLESS = ("restarted", "slow", "schema_newer")  # events may arrive all the while


@pytest.mark.parametrize("seed", range(ORDERS))
def test_whatever_order_its_troubles_come_in_every_event_is_counted_once(
    own_server: ClickHouseServer, spool: Spool, seed: int
) -> None:
    """Each follows each other in turn, with events settled before, in and after it; some find a backlog, some none."""
    migrate_clickhouse(f"{own_server.url}/meter")
    proxy = TcpProxy(own_server.http_port)
    store = UsageStore(f"http://default@127.0.0.1:{proxy.port}/meter?send_receive_timeout=1")
    shipper = Shipper(spool, store, max_events=20, max_age_s=0.01, max_pause_s=0.1)
    shipper.start()
    rng = random.Random(seed)
    events: list[UsageEvent] = []

    def settle(count: int) -> None:
        batch = [make_event(len(events) + i) for i in range(count)]
        events.extend(batch)
        wait([spool.settle(event) for event in batch])

    for trouble in rng.sample(TROUBLES, len(TROUBLES)):
        settle(25)
        ends = getattr(Store(own_server, proxy), trouble)()
        failures = shipper.failures_total
        settle(25)
        if trouble not in HARMLESS:
            deadline = time.monotonic() + 20
            while shipper.failures_total == failures:
                assert time.monotonic() < deadline, f"{trouble} was not noticed"
                time.sleep(0.01)
            assert spool.count("clickhouse") > 0, trouble
        ends()
        if rng.random() < 0.5:
            assert shipper.flush(30), f"after {trouble}: {shipper.last_error}"
    assert shipper.flush(60)
    assert proxy.swallowed > 0
    assert shipper.buried_total == 0, "no trouble of the store's is an event's fault"
    check_counted_once(store, events)
    assert shipper.stop()
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
