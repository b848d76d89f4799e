"""What only a cluster has: shards, of which one may be away."""

from __future__ import annotations

from pathlib import Path

import clickhouse_connect
import pytest

from metering.archive import Archive
from metering.clickhouse import UsageStore, client_options
from metering.errors import StoreError, StoreUnavailable
from metering.retention import Retention
from tests.contract.test_usage_store import make_event, stored
from tests.doubles.clickhouse_server import ClickHouseServer
from tests.fixtures.clickhouse import PEERS


def parts(url: str, query: str) -> list[list[str]]:
    """What each server's own table has."""
    found = []
    for each in PEERS[url]:
        client = clickhouse_connect.get_client(**client_options(each))
        found.append([row[0] for row in client.query(query).result_rows])
        client.close()
    return found


def test_replays_and_second_contents_meet_the_first_on_its_shard(cluster_store: UsageStore, cluster_url: str) -> None:
    events = [make_event(i) for i in range(40)]
    for batch in (events, events[7:], events[::-1]):
        cluster_store.insert(batch)
    cluster_store.insert([make_event(3, tenant="initech", model="other")])
    ids = parts(cluster_url, "SELECT DISTINCT event_id FROM usage_events_local")
    assert all(ids)
    assert sorted(ids[0] + ids[1]) == [event.event_id for event in events]
    assert cluster_store.conflicts(0, 1 << 61) == [events[3].event_id]
    assert stored(cluster_store) == events


def test_without_a_shard_nothing_is_taken_for_stored_and_no_sum_is_told(
    cluster_store: UsageStore, clickhouse_nodes: list[ClickHouseServer]
) -> None:
    events = [make_event(i) for i in range(40)]
    cluster_store.insert(events[:20])
    clickhouse_nodes[1].kill()
    try:
        with pytest.raises(StoreUnavailable):
            cluster_store.insert(events)
        for read in (cluster_store.counts, cluster_store.conflicts):
            with pytest.raises(StoreUnavailable):
                read(0, 1 << 61)
        with pytest.raises(StoreUnavailable):
            cluster_store.usage(tenant=None, start_us=0, end_us=1 << 61, bucket="month")
        with pytest.raises(StoreUnavailable):
            stored(cluster_store)
    finally:
        clickhouse_nodes[1].start()
    cluster_store.insert(events)  # as the shipper does, which was not answered
    assert stored(cluster_store) == events
    assert sum(row.requests for row in cluster_store.counts(0, 1 << 61)) == 40
    cluster_store.rollups.roll()
    assert cluster_store.rollups.check(0, 1 << 51) == []


def test_months_are_not_archived_on_a_cluster(cluster_store: UsageStore, tmp_path: Path) -> None:
    retention = Retention(cluster_store, Archive(tmp_path))
    for refused in (lambda: retention.run(202511), lambda: retention.months(1 << 51)):
        with pytest.raises(StoreError, match="not archived on a cluster"):
            refused()
