"""Meter events: each token of each charge at Stripe once, whatever is killed, whenever it goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from billing.books import new_event
from billing.errors import ExportError, NotFound
from billing.line import InvoiceLine, LineKind
from billing.meter_events import METERS, event_name, identifier
from billing.meter_rejects import LEFT, REFUSED, UNSURE, WAITING
from billing.meters import MeterExport, Progress
from billing.modes import ExportMode
from billing.restorations import LedgerRestored
from billing.store import EventStore
from billing.stripe import StripeExporter
from billing.stripe_calls import StripeRefused, StripeUnavailable
from billing.tiers import TokenClass
from tests.contract.test_stripe_export import Killed, _invoice, _no_waiting
from tests.doubles.stripe import Fault, StripeDouble
from tests.doubles.stripe.faults import KINDS, Kind
from tests.doubles.stripe.inprocess import InProcessClient

__all__ = ["_no_waiting"]

HOUR_S = 3600


class Works:
    """A ledger with charges, a double, and as many exporters as are asked for; one clock for all."""

    def __init__(self, house: Any) -> None:
        self.house = house
        self.double = StripeDouble()  # spoken to in process
        self.stores: list[EventStore] = []
        self.set_clock()

    def set_clock(self) -> None:
        self.double.clock.freeze(self.house.clock.now_us // 1_000_000)

    def later(self, hours: float) -> None:
        self.house.clock.now_us += int(hours * 3_600_000_000)
        self.set_clock()

    def export(self, client: InProcessClient | None = None, holder: str = "gw0", **more: Any) -> MeterExport:
        http = client or InProcessClient(self.double)
        exporter = StripeExporter(self.double.api_key, self.double.url, http_client=http, sleep=lambda _: None)
        store = EventStore(self.house.url)
        self.stores.append(store)
        given = {"workers": 1, "mode": ExportMode.METER, **more}
        return MeterExport(store, self.house.billing, exporter, holder=holder, clock_us=self.house.clock, **given)

    def run(self, **more: Any) -> Progress:
        progress = self.export(**more).run()
        assert progress is not None
        return progress

    def at_stripe(self) -> Counter[str]:
        """Tokens by meter."""
        found: Counter[str] = Counter()
        for fact in self.double.state.all("metered"):
            found[fact["event_name"]] += int(fact["payload"]["value"])
        return found

    def used(self) -> Counter[str]:
        """Tokens by meter, as the charges say."""
        found: Counter[str] = Counter()
        for event in self.house.shelf.kept:
            found[event_name("prompt")] += event.prompt_tokens - event.cached_tokens
            found[event_name("cached")] += event.cached_tokens
            found[event_name("completion")] += event.completion_tokens
        return +found


@pytest.fixture
def works(house: Any) -> Iterator[Works]:
    made = Works(house)
    yield made
    made.double.drop()
    for store in made.stores:
        store.close()


def begun(works: Works, requests: int = 0) -> Works:
    """Meters are in use from here on; then so many requests."""
    works.run()
    for number in range(requests):
        works.house.use(prompt=10 + number, cached=number % 3, completion=number % 2)
    works.set_clock()
    return works


def test_every_class_of_every_charge_is_told_at_its_time(works: Works) -> None:
    works.house.use(prompt=99)  # before meters: invoiced otherwise
    works.house.shelf.kept.clear()
    begun(works)
    event = works.house.use(prompt=10, cached=4, completion=5)
    works.set_clock()
    progress = works.run()
    assert (progress.delivered, progress.put_aside) == (3, 0)
    assert (
        works.at_stripe()
        == works.used()
        == {event_name("prompt"): 6, event_name("cached"): 4, event_name("completion"): 5}
    )
    facts = works.double.state.all("metered")
    assert {fact["timestamp"] for fact in facts} == {event.ts_us // 1_000_000}
    assert {fact["identifier"] for fact in facts} == {
        identifier(event.event_id, kind) for kind in ("prompt", "cached", "completion")
    }
    assert works.run().delivered == 0


def test_after_a_restore_nothing_is_sent_until_somebody_has_looked(works: Works) -> None:
    begun(works, 2)
    billing, now_us = works.house.billing, works.house.clock.now_us
    restored = LedgerRestored(backup_id="backup-1", instant_us=now_us, seq=1, at_us=now_us)
    with works.house.billing._store.exclusive() as log:
        log.append([new_event("ledger", restored)], actor="restore", time_us=now_us)
    billing.refresh()
    with pytest.raises(ExportError, match="stripe release"):
        works.run()
    assert works.at_stripe() == {}
    billing.release_exports()
    works.run()
    assert works.at_stripe() == works.used()


def test_an_identifier_is_short_and_its_own() -> None:
    assert identifier("e1", "prompt") == "e1:prompt"
    long = {identifier("e" * 200 + str(n), kind) for n in range(3) for kind in ("prompt", "cached")}
    assert len(long) == 6
    assert max(map(len, long)) <= 100


def test_each_class_has_a_meter_that_says_its_unit() -> None:
    named = {kind: (meter.event_name, meter.unit) for kind, meter in METERS.items()}
    assert named["prompt"] == ("meterhouse_prompt", "token")
    assert named["tool_call"] == ("meterhouse_tool_call", "call")
    assert named["audio_second"] == ("meterhouse_audio_millisecond", "millisecond")
    assert named["compute_second"] == ("meterhouse_compute_microsecond", "microsecond")
    assert set(named) == {one.value for one in TokenClass} - {"adapter_month"}
    assert len({name for name, _ in named.values()}) == len(named)


def test_batches_and_workers_change_nothing(works: Works) -> None:
    begun(works, 40)
    works.run(batch=7, workers=8)
    assert works.at_stripe() == works.used()


class Dying(InProcessClient):
    """Dies at a call: before it is sent, or after its effect. What other threads still want to send goes nowhere."""

    def __init__(self, double: StripeDouble, call: int, when: str) -> None:
        super().__init__(double)
        self._at, self._when, self._dead = call, when, False

    def request(self, *args: Any, **more: Any) -> Any:
        dies = self.calls == self._at
        if self._dead or (dies and self._when == "before"):
            self._dead = True
            raise Killed
        answer = super().request(*args, **more)
        if dies:
            self._dead = True
            raise Killed
        return answer


@pytest.mark.parametrize("hours", [0, 19, 30, 24 * 10])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_call_and_begun_again(works: Works, when: str, hours: int) -> None:
    """One request a batch: what is under way is one call, and Stripe's sums tell whether it came through."""
    begun(works)
    for call in range(10):
        works.house.use(prompt=7 + call, cached=3, completion=5)
        works.set_clock()
        with pytest.raises(Killed):
            works.export(Dying(works.double, call % 3, when), batch=1).run()
        works.later(hours)
        works.run(batch=1)
        unsure = [reject for reject in works.export().rejects() if reject.state == UNSURE]
        assert not unsure
        assert works.at_stripe() == works.used()


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_struck_once(works: Works, kind: Kind) -> None:
    begun(works, 12)
    seen: set[str] = set()

    def struck(call: str, number: int) -> Kind | None:
        known = call in seen
        seen.add(call)
        return None if known else kind

    client = InProcessClient(works.double, struck)
    for _ in range(60):
        try:
            works.run(client=client)
        except StripeUnavailable:
            works.later(0.2)
        else:
            break
    assert works.at_stripe() == works.used()
    assert works.export().rejects() == []


def test_a_batch_broken_off_for_days_is_not_repeated_blindly(works: Works) -> None:
    """Some of an hour's events came through and some did not: which is not known, so they are named."""
    begun(works, 6)
    works.run()
    for number in range(6):
        works.house.use(prompt=100 + number, completion=7)
    works.set_clock()
    with pytest.raises(Killed):
        works.export(Dying(works.double, 10, "after")).run()
    some = works.at_stripe()
    works.later(30)
    progress = works.run()
    rejects = works.export().rejects()
    assert {reject.state for reject in rejects} == {UNSURE}
    assert {reject.unit.event_id for reject in rejects} <= {event.event_id for event in works.house.shelf.kept}
    assert progress.put_aside == len(rejects) > 0
    missing = works.used() - works.at_stripe()
    assert sum(missing.values()) <= sum(reject.unit.quantity for reject in rejects)
    assert all(works.at_stripe()[name] <= works.used()[name] for name in some)  # nothing twice
    there = {fact["identifier"] for fact in works.double.state.all("metered")}
    for reject in rejects:  # a person looks at Stripe's events, and decides
        works.export().resolve(reject.unit.identifier, send=reject.unit.identifier not in there)
    assert works.at_stripe() == works.used()
    assert {reject.state for reject in works.export().rejects()} <= {LEFT}


def test_stripes_sums_are_waited_for(works: Works) -> None:
    begun(works, 2)
    with pytest.raises(Killed):
        works.export(Dying(works.double, 4, "after")).run()
    works.later(19.9)
    with pytest.raises(Killed):
        works.export(Dying(works.double, 4, "after")).run()
    works.later(0.5)
    with pytest.raises(StripeUnavailable, match="waited for"):
        works.run()
    works.later(1)
    works.run()
    assert works.export().position() is not None


def test_what_is_too_old_is_named_and_the_rest_goes_on(works: Works) -> None:
    begun(works)
    old = works.house.use(prompt=10, cached=0, completion=0)
    works.later(24 * 35 + 1)
    works.house.use(prompt=3, completion=0)
    works.set_clock()
    assert (works.run().delivered, works.export().reject_count()) == (1, 1)
    (reject,) = works.export().rejects()
    assert (reject.unit.event_id, reject.state) == (old.event_id, REFUSED)
    assert "35 days" in reject.reason
    assert works.at_stripe() == {event_name("prompt"): 3}


def test_what_is_dated_ahead_is_not_sent_before_it_may_be(works: Works) -> None:
    begun(works)
    works.house.use(prompt=10, completion=0, ts_us=works.house.clock.now_us + 7_200_000_000)
    calls = len(works.double.calls)
    works.run()
    assert not [call for call in works.double.calls[calls:] if call.path.endswith("meter_events")]
    assert [reject.state for reject in works.export().rejects()] == [WAITING]
    works.later(2)
    assert (works.run().delivered, works.export().rejects()) == (1, [])
    assert works.at_stripe() == works.used()


def test_a_duplicate_is_delivered_and_the_rest_goes_on(works: Works) -> None:
    begun(works, 3)
    with pytest.raises(Killed):
        works.export(Dying(works.double, 9, "after")).run()
    works.run()
    assert works.at_stripe() == works.used()


def test_a_customer_that_is_gone_holds_nobody_else_up(works: Works) -> None:
    begun(works)
    works.house.billing.create_tenant(id="lost", name="Lost", stripe_customer_id="cus_nobody")
    works.house.use(prompt=10, completion=0)
    works.set_clock()
    original = works.double.state.objects
    works.run()
    assert works.at_stripe() == works.used()
    assert original is works.double.state.objects


def test_a_meter_that_sleeps_stops_everything_and_loses_nothing(works: Works) -> None:
    begun(works, 1)
    works.run()
    for meter in works.double.state.all("meter"):
        meter["status"] = "inactive"
    works.house.use(prompt=5, completion=0)
    works.set_clock()
    exporter = works.export()
    exporter._meters = {meter["event_name"]: meter["id"] for meter in works.double.state.all("meter")}
    with pytest.raises(StripeRefused, match="meter"):
        exporter.run()
    assert exporter.rejects() == []
    for meter in works.double.state.all("meter"):
        meter["status"] = "active"
    works.run()
    assert works.at_stripe() == works.used()


def test_one_process_at_a_time_and_the_next_goes_on(works: Works) -> None:
    begun(works, 2)

    class Meddling(InProcessClient):
        met: list[Progress | None] = []

        def request(self, *args: Any, **more: Any) -> Any:
            if not self.met:
                self.met.append(works.export(holder="gw1").run())
            return super().request(*args, **more)

    client = Meddling(works.double)
    works.run(client=client)
    assert client.met == [None]
    works.house.use(prompt=5)
    works.set_clock()
    with pytest.raises(Killed):  # it dies with the lease in hand
        works.export(Dying(works.double, 0, "after")).run()
    assert works.export(holder="gw1").run() is None
    works.later(0.2)
    assert works.export(holder="gw1").run() is not None
    assert works.at_stripe() == works.used()


def test_one_that_slept_through_its_lease_doubles_nothing(works: Works) -> None:
    begun(works, 3)

    class Sleeping(InProcessClient):
        slept = False

        def request(self, *args: Any, **more: Any) -> Any:
            if self.calls == 6 and not self.slept:
                self.slept = True
                works.later(0.2)
                assert works.export(holder="gw1").run() is not None
            return super().request(*args, **more)

    assert works.export(Sleeping(works.double)).run() is None  # what it wanted to note is not noted
    assert works.at_stripe() == works.used()
    assert works.run().delivered == 0


@pytest.mark.parametrize("seed", range(4))
def test_faults_kills_and_pauses_at_random(works: Works, seed: int) -> None:
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not kind.startswith("hang")]
    begun(works, 20)
    for _ in range(60):
        works.double.faults.append(Fault(chance.choice(kinds), nth=chance.randrange(10)))
        client = Dying(works.double, chance.randrange(5, 40), chance.choice(("before", "after")))
        try:
            done = works.run(client=client, batch=chance.choice((1, 5, 50)))
        except (Killed, ExportError):
            works.later(chance.choice((0, 0.2, 5)))
        else:
            if not done.delivered:
                break
    works.double.faults.clear()
    works.later(2)
    works.run()
    there = {fact["identifier"] for fact in works.double.state.all("metered")}
    for reject in works.export().rejects():  # of a batch that was broken off for too long
        assert reject.state == UNSURE
        works.export().resolve(reject.unit.identifier, send=reject.unit.identifier not in there)
    assert works.at_stripe() == works.used()


def test_an_invoice_that_asks_for_no_usage_is_not_exported_beside_meters(works: Works) -> None:
    export = works.export()
    usage = InvoiceLine(
        id="l1",
        model="base",
        adapter="",
        token_class=TokenClass.PROMPT,
        price_id="p",
        period_start_us=0,
        period_end_us=1,
        quantity=1,
        unit_price_nano=1,
        amount_minor=0,
    )
    month = msgspec.structs.replace(usage, id="l2", kind=LineKind.ADAPTER)
    tax = msgspec.structs.replace(usage, id="l3", kind=LineKind.TAX, token_class=None)
    minimum = msgspec.structs.replace(usage, id="l4", kind=LineKind.COMMITMENT, token_class=None)
    nothing, with_month = _invoice(lines=(), event_count=0), _invoice(lines=(month, tax), event_count=0)
    with_usage, with_minimum = _invoice(lines=(usage, tax)), _invoice(lines=(usage, minimum))
    assert not [export.refusal(one) for one in (nothing, with_month, with_usage, with_minimum) if export.refusal(one)]
    begun(works, 2)
    told = [
        export.refusal(msgspec.structs.replace(one, left_out=works.house.billing.metered().stretches, cut_seq=99))
        for one in (nothing, with_month, with_usage, with_minimum)
    ]
    assert "export_mode" in told[0]
    assert told[1].endswith("its lines of the kind adapter, tax are on no meter: they are agreed in Stripe")
    assert told[2] == ""
    assert "minimum" in told[3]


def test_what_is_not_put_aside_cannot_be_decided(works: Works) -> None:
    with pytest.raises(NotFound):
        works.export().resolve("e1:prompt", send=True)
