"""What should never happen is on `/metrics`, from the start, and counted where it happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.fake import FakeEngine
from gateway.alarms import sample_delivery
from gateway.app import now_us
from gateway.telemetry import ALARM_KINDS, Telemetry
from metering.clickhouse import UsageStore
from metering.errors import Rejected
from metering.events import Outcome, UsageEvent
from metering.shipper import Drain
from metering.spool import Spool, SpoolConflict
from tests.fixtures.server import ByteTokenizer, RunningGateway


def event(number: int = 1, **fields: Any) -> UsageEvent:
    base = UsageEvent(
        event_id=f"e{number}",
        ts_us=now_us(),
        settled_us=now_us(),
        tenant="acme",
        key_id="k",
        model="fake",
        base_model="fake",
        endpoint="completions",
        gateway="gw0",
        outcome=Outcome.FINISHED,
        prompt_tokens=5,
        completion_tokens=5,
    )
    return msgspec.structs.replace(base, **fields)


def alarms(gateway: RunningGateway) -> dict[str, float]:
    """The kinds that are not 0."""
    found = {kind: gateway.metric("meterhouse_alarms_total", kind=kind) for kind in ALARM_KINDS}
    return {kind: value for kind, value in found.items() if value}


def test_every_kind_is_shown_before_it_happens(gateway: RunningGateway) -> None:
    text = httpx.get(f"{gateway.url}/metrics").text
    for kind in ALARM_KINDS:
        assert f'meterhouse_alarms_total{{kind="{kind}"}} 0.0' in text
    for gauge in ("meterhouse_holds_open", "meterhouse_unrated_requests"):
        assert f"{gauge} 0.0" in text


def test_usage_without_a_price_is_an_alarm_and_stays_a_number_until_it_is_rated(gateway: RunningGateway) -> None:
    gateway.billing.create_tenant(id="acme", name="Acme")
    gateway.billing.record([event()])
    assert alarms(gateway) == {"usage_unrated": 1}
    assert gateway.metric("meterhouse_unrated_requests") == 1
    price = {"prompt": "1", "cached": "1", "completion": "1"}
    gateway.billing.set_price(model="*", effective_at_us=1, currency="usd", per_million=price)
    assert gateway.billing.rate_unrated() == 1
    assert gateway.metric("meterhouse_unrated_requests") == 0
    assert alarms(gateway) == {"usage_unrated": 1}  # a counter does not go back


def test_conflicts_and_unknown_progress_are_counted_once_however_often_they_are_scraped(
    gateway: RunningGateway,
) -> None:
    gateway.tenant()
    gateway.spool.settle(event()).result(5)
    with pytest.raises(SpoolConflict):
        gateway.spool.settle(event(completion_tokens=6)).result(5)
    gateway.billing.record([event()])
    gateway.billing.record([event(completion_tokens=6)])
    gateway.journal.step([("nobody", (1, 0, 1, 0, 0, 0))])
    for _ in range(2):
        assert alarms(gateway) == {"spool_conflict": 1, "usage_conflict": 1, "journal_unknown": 1}


def test_a_running_request_has_a_hold(make_gateway: Callable[..., RunningGateway]) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), step_s=0.02))
    key = gateway.tenant()
    body = {"model": "fake", "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with gateway.http(key) as client, client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert gateway.metric("meterhouse_holds_open") == 1
    gateway.idle()
    assert gateway.metric("meterhouse_holds_open") == 0


def test_what_a_consumer_never_takes_is_buried_or_stuck(tmp_path: Path) -> None:
    def refuse(events: list[UsageEvent]) -> None:
        raise Rejected("never")

    spool = Spool(tmp_path / "spool.sqlite3")
    store = UsageStore(f"chdb://{tmp_path}/unused")
    buried: list[UsageEvent] = []
    drains = (
        Drain(spool, "clickhouse", refuse, bury=lambda event, _: buried.append(event), max_age_s=0.01),
        Drain(spool, "ledger", refuse, max_age_s=0.01),
    )
    telemetry = Telemetry("fake", "0")
    sample_delivery(telemetry, store, drains)
    assert 'meterhouse_stuck_events{consumer="ledger"} 0.0' in telemetry.exposition().decode()
    for number in (1, 2):
        spool.settle(event(number)).result(5)
    store.conflicts_total = 3  # as `insert` counts them
    try:
        for drain in drains:
            drain.start()
            assert drain.flush(10)
        assert len(buried) == 2
        sample_delivery(telemetry, store, drains)
    finally:
        for drain in drains:
            drain.stop()
        spool.close()
        store.close()
    shown = telemetry.exposition().decode()
    assert 'meterhouse_stuck_events{consumer="ledger"} 2.0' in shown
    assert 'meterhouse_stuck_events{consumer="clickhouse"} 0.0' in shown
    assert 'meterhouse_alarms_total{kind="dead_letter"} 2.0' in shown
    assert 'meterhouse_alarms_total{kind="store_conflict"} 3.0' in shown
