"""Kill gateway, engine and ClickHouse again and again under load; then count: nothing lost, nothing double.

    make chaos                                                  # 210 kills; minutes
    python -m tests.chaos --kills 500 --seed 7 --keep folder

One data folder is served by one gateway after the other. Each is killed: at a point (right after a durable write of
the states table in `metering/README.md`, each in its turn) or at a random instant. Meanwhile its engine and the real
ClickHouse server are killed at random instants too, and a proxy before ClickHouse delays, refuses, and cuts connections
after the insert took place; clients hang up, and ask again with their Idempotency-Key. In the end everything runs in
peace until the books agree, and every request that any journal or any client has seen is looked up in ClickHouse.

Everything drawn hangs on the seed; what the scheduler makes of it does not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx

from gateway.settings import Settings
from metering.clickhouse import UsageStore
from metering.counts import Counts
from metering.events import Outcome, UsageEvent
from metering.segments import read_folder
from metering.totals import Totals
from tests.chaos import gateway
from tests.chaos.load import TENANTS, Ask, Attempt, Crowd
from tests.chaos.points import POINTS
from tests.doubles.clickhouse_server import ClickHouseServer
from tests.doubles.tcp_proxy import TcpProxy
from tests.fixtures.server import ADMIN_KEY, free_port

PRICE = {"prompt": "1000.000000001", "cached": "100", "completion": "3000"}
CREDIT = Decimal(100_000)
STREAMS = 12
START_TIMEOUT_S = 60.0
POINT_TIMEOUT_S = 4.0  # a point that does not come by then: the gateway is killed where it stands
PEACE_TIMEOUT_S = 90.0
RANDOM_INSTANT = "a random instant"
ALARM = re.compile(
    r'meterhouse_alarms_total{kind="(spool_.*|journal_damaged|.*_conflict|dead_letter|usage_unrated)"}|meterhouse_stuck'
)
"""What must not have happened, in the words of the last gateway's metrics."""


@dataclass
class Seen:
    """What the folder told of its requests whenever its gateway was dead."""

    ids: set[str] = field(default_factory=set)
    orphans: dict[str, Counts] = field(default_factory=dict)  # open then, with their last journalled counts


@dataclass
class Tally:
    """What was done and what came of it."""

    gateway_kills: Counter[str] = field(default_factory=Counter)  # by row of the states table
    engine_kills: int = 0
    clickhouse_kills: int = 0
    starts_refused: int = 0
    proxy: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    asks: int = 0
    retried: int = 0
    known: int = 0
    orphans: int = 0
    received: int = 0
    billed: int = 0
    charged: Decimal = Decimal(0)
    lost: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # sentences
    differences: list[Any] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.gateway_kills.total() + self.engine_kills + self.clickhouse_kills

    @property
    def clean(self) -> bool:
        return not (self.lost or self.double or self.wrong or self.differences)

    def __str__(self) -> str:
        rows = "\n".join(f"      {count:4}  {row}" for row, count in sorted(self.gateway_kills.items()))
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        proxy = ", ".join(f"{count} x {mode}" for mode, count in sorted(self.proxy.items()))
        faults = [*self.wrong, *(f"difference: {difference}" for difference in self.differences)]
        return "\n".join(
            [
                f"  {self.kills} kills: {self.engine_kills} of the engine, {self.clickhouse_kills} of ClickHouse, "
                f"{self.gateway_kills.total()} of the gateway, of these right after",
                rows,
                f"  the proxy before ClickHouse: {proxy}; starts refused for want of it: {self.starts_refused}",
                f"  {self.asks} clients' wishes, {self.retried} of them asked again with their key; attempts: {ends}",
                f"  {sum(self.outcomes.values())} events: {outcomes}",
                f"  {self.known} requests seen in journals or by clients, {self.orphans} open when their gateway died",
                f"  completion tokens: {self.received} received <= {self.billed} billed; charged {self.charged:f} usd",
                f"  lost {len(self.lost)}, double {len(self.double)}, "
                f"reconcile {'clean' if not self.differences else 'NOT clean'}, otherwise wrong {len(self.wrong)}",
                *(f"    {fault}" for fault in faults[:20]),
            ]
        )


class Campaign:
    """One campaign in one folder. `run` once."""

    def __init__(self, folder: Path, library: Path, *, seed: int, kills: int) -> None:
        self.rng = random.Random(seed)
        self.kills = kills
        self.tally = Tally()
        self.seen = Seen()
        self.clickhouse = ClickHouseServer(library, folder / "clickhouse")
        self.log = folder / "gateway.log"
        self._port = free_port()
        self._folder = folder
        self._gateway: ForkServerProcess
        self._rows = itertools.cycle([*(point.row for point in POINTS), *[RANDOM_INSTANT] * 4])

    async def run(self) -> Tally:
        """Play it, and say what came of it."""
        self.clickhouse.start()
        proxy = TcpProxy(self.clickhouse.http_port)
        self.settings = Settings(
            data_dir=self._folder / "data",
            port=self._port,
            admin_key=ADMIN_KEY,
            clickhouse_url=f"http://default@127.0.0.1:{proxy.port}/meter?send_receive_timeout=5",
            journal_max_bytes=1 << 16,
            ship_max_age_s=0.05,
            request_timeout_s=20.0,
            abort_timeout_s=3.0,
            drain_s=2.0,
        )
        try:
            await self._start(None)
            crowd = Crowd(self.settings.base_url, await self._customers(), self.rng, STREAMS)
            crowd.start()
            await self._harm(proxy)
            await self._peace(proxy)
            await crowd.stop()
            self._judge(crowd, await self._books())
            await self._stop()
        finally:
            if self._gateway.is_alive():
                self._gateway.kill()
            self._gateway.join()
            self.clickhouse.kill()
            proxy.close()
        return self.tally

    # -- harm ------------------------------------------------------------------------------------

    async def _harm(self, proxy: TcpProxy) -> None:
        beside = [asyncio.create_task(work) for work in (self._kill_clickhouse(proxy), self._kill_engines())]
        beside.append(asyncio.create_task(self._spoil(proxy)))
        try:
            self._gateway.kill()  # the first of all, before any load: also an instant
            row = RANDOM_INSTANT
            while True:
                await self._died(row)
                if self.tally.kills >= self.kills:
                    return
                row = await self._life()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for task in beside:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

    async def _life(self) -> str:
        """One gateway from its start to its death; returns where it died."""
        row = next(self._rows)
        await self._start(None if row == RANDOM_INSTANT else row)
        if row != RANDOM_INSTANT:
            if await self._ends(POINT_TIMEOUT_S):
                return row
        elif await self._ends(self.rng.uniform(0.0, 3.0)):
            raise AssertionError(f"the gateway ended by itself: {self._words()}")
        self._gateway.kill()
        return RANDOM_INSTANT

    async def _start(self, row: str | None) -> None:
        """A gateway that answers, or one that has met its point before it did."""
        deadline = time.monotonic() + START_TIMEOUT_S
        point = next((point for point in POINTS if point.row == row), None)
        nth = self.rng.randint(1, point.often) if point is not None else 0
        while True:
            self._gateway = gateway.start(self.settings, self.log, row, nth)
            async with httpx.AsyncClient(base_url=self.settings.base_url, timeout=2) as client:
                while self._gateway.is_alive():
                    assert time.monotonic() < deadline, f"no start: {self._words()}"
                    with suppress(httpx.HTTPError):
                        await client.get("/health/live")
                        return
                    await asyncio.sleep(0.01)
            if self._killed():
                return
            self.tally.starts_refused += 1  # ClickHouse was away just then
            assert time.monotonic() < deadline, f"no start: {self._words()}"
            await asyncio.sleep(0.05)

    async def _ends(self, timeout_s: float) -> bool:
        """Whether the gateway has killed itself within that time."""
        await asyncio.to_thread(self._gateway.join, timeout_s)
        if self._gateway.is_alive():
            return False
        assert self._killed(), f"the gateway ended by itself: {self._words()}"
        return True

    def _killed(self) -> bool:
        return self._gateway.exitcode == -signal.SIGKILL

    def _words(self) -> str:
        """The last ones of the gateways."""
        return self.log.read_text()[-2000:] if self.log.exists() else "it said nothing"

    async def _died(self, row: str) -> None:
        """Note what the folder has, before the next gateway comes."""
        await asyncio.to_thread(self._gateway.join)
        self.tally.gateway_kills[row] += 1
        journal = self.settings.journal_dir
        totals = Totals(journal)
        try:
            state = read_folder(journal, totals.through()).state
        finally:
            totals.close()
        self.seen.ids |= state.requests.keys()
        for orphan in state.orphans():
            before = self.seen.orphans.setdefault(orphan.opened.event_id, orphan.counts)
            if before != orphan.counts:
                self.tally.wrong.append(f"{orphan.opened.event_id} went on after its gateway had died")

    async def _kill_engines(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
            pid = await asyncio.to_thread(gateway.engine_pid, self._gateway.pid or 0)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.tally.engine_kills += 1

    async def _kill_clickhouse(self, proxy: TcpProxy) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(1.0, 6.0))
            self.clickhouse.kill()
            self.tally.clickhouse_kills += 1
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
            await asyncio.to_thread(self.clickhouse.start)

    async def _spoil(self, proxy: TcpProxy) -> None:
        proxy.delay_s = 0.1
        while True:
            proxy.mode = "pass"
            await asyncio.sleep(self.rng.uniform(0.3, 1.5))
            mode = self.rng.choice(("swallow", "refuse", "delay"))
            self.tally.proxy[mode] += 1
            if mode == "refuse":
                proxy.refuse()
            else:
                proxy.mode = mode
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))

    # -- the end ---------------------------------------------------------------------------------

    async def _peace(self, proxy: TcpProxy) -> None:
        proxy.mode = "pass"
        if self.clickhouse.process is None:
            await asyncio.to_thread(self.clickhouse.start)
        await self._start(None)

    async def _stop(self) -> None:
        self._gateway.terminate()
        await asyncio.to_thread(self._gateway.join, 30)
        assert self._gateway.exitcode == 0, f"a polite stop: {self._gateway.exitcode}"

    async def _customers(self) -> dict[str, str]:
        """Tenants with credit and a price; a key of each."""
        keys = {}
        async with self._admin() as admin:
            for tenant in TENANTS:
                await self._post(admin, "/tenants", {"id": tenant, "name": tenant})
                credit = {"amount": str(CREDIT), "currency": "usd", "reason": "chaos"}
                await self._post(admin, f"/tenants/{tenant}/credits", credit)
                keys[tenant] = (await self._post(admin, f"/tenants/{tenant}/keys", {"name": "x"}))["key"]
            price = {"model": "*", "effective_at": 0, "currency": "usd", "per_million": PRICE}
            await self._post(admin, "/prices", price)
        return keys

    def _admin(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.AsyncClient(base_url=f"{self.settings.base_url}/admin/v1", headers=headers, timeout=60)

    @staticmethod
    async def _post(admin: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        return (await admin.post(path, json=body)).raise_for_status().json()

    async def _books(self) -> list[UsageEvent]:
        """Wait until all books agree; the events as ClickHouse has them."""
        deadline = time.monotonic() + PEACE_TIMEOUT_S
        async with self._admin() as admin:
            while not (report := (await admin.get("/reconcile")).raise_for_status().json())["ok"]:
                if time.monotonic() > deadline:
                    self.tally.differences = report["differences"]
                    break
                await asyncio.sleep(0.2)
            for tenant in TENANTS:
                balance = (await admin.get(f"/tenants/{tenant}/balance")).raise_for_status().json()
                self.tally.charged += Decimal(balance["charged"])
                if Decimal(balance["held"]) != 0:
                    self.tally.wrong.append(f"{tenant} has {balance['held']} held for nothing")
        async with httpx.AsyncClient(base_url=self.settings.base_url) as client:
            shown = (await client.get("/metrics")).raise_for_status().text
        self.tally.wrong += [line for line in shown.splitlines() if ALARM.match(line) and not line.endswith(" 0.0")]
        store = UsageStore(f"{self.clickhouse.url}/meter")
        try:
            self.tally.double += await asyncio.to_thread(store.conflicts, 0, 1 << 61)
            return await asyncio.to_thread(lambda: list(store.events(None, 0, 1 << 61)))
        finally:
            store.close()

    def _judge(self, crowd: Crowd, events: list[UsageEvent]) -> None:
        tally = self.tally
        tally.outcomes = Counter(event.outcome.value for event in events)
        tally.ends = Counter(attempt.end for attempt in crowd.attempts)
        tally.asks, tally.retried = len(crowd.asks), sum(len(ask.attempts) > 1 for ask in crowd.asks)
        tally.received = sum(attempt.received for ask in crowd.asks for attempt in _originals(ask))
        tally.billed = sum(event.completion_tokens for event in events)
        known = self.seen.ids | {attempt.id for attempt in crowd.attempts if attempt.id}
        tally.known, tally.orphans = len(known), len(self.seen.orphans)
        by_id = {event.event_id: event for event in events}
        tally.lost += sorted(known - by_id.keys())
        tally.double += [id for id, count in Counter(event.event_id for event in events).items() if count > 1]
        tally.wrong += wrong(crowd.asks, by_id, self.seen.orphans)
        charged = sum(map(_cost, events), Decimal(0))
        if charged != tally.charged:
            tally.wrong.append(f"charged {tally.charged:f}, and the events cost {charged:f}")


def _cost(event: UsageEvent) -> Decimal:
    """What an event costs, by a rule of this test's own."""
    fresh = event.prompt_tokens - event.cached_tokens
    counts = {"prompt": fresh, "cached": event.cached_tokens, "completion": event.completion_tokens}
    return sum((Decimal(PRICE[kind]) * count / 1_000_000 for kind, count in counts.items()), Decimal(0))


def _originals(ask: Ask) -> list[Attempt]:
    """The attempts that read a generation of their own: a replay reads another one's."""
    return list({attempt.id: attempt for attempt in ask.attempts if attempt.id}.values())


def wrong(asks: list[Ask], events: dict[str, UsageEvent], orphans: dict[str, Counts]) -> list[str]:
    """What contradicts itself between clients, journals and events; in sentences."""
    found = []
    for id, counts in orphans.items():
        event = events.get(id)
        if event is not None and _counts(event) != (counts.prompt, counts.cached, counts.completion):
            found.append(f"{id} had {counts} journalled when its gateway died, and {_counts(event)} is billed")
    by_label: dict[str, list[UsageEvent]] = {}
    for event in events.values():
        by_label.setdefault(event.user, []).append(event)
    for ask in asks:
        found += _wrong_ask(ask, by_label.pop(ask.label, []), events)
    return found + [f"nobody asked for {label}" for label in by_label]


def _wrong_ask(ask: Ask, own: list[UsageEvent], events: dict[str, UsageEvent]) -> list[str]:
    found = []
    if len(own) > len(ask.attempts):
        found.append(f"{ask.label}: {len(own)} events of {len(ask.attempts)} attempts")
    if sum(event.outcome is Outcome.FINISHED for event in own) > 1:
        found.append(f"{ask.label}: generated to its end more than once")
    for attempt in ask.attempts:
        event = events.get(attempt.id)
        if event is None:
            continue
        if event.tenant != ask.tenant or event.user != ask.label:
            found.append(f"{attempt.id} is another's: {event.tenant}, {event.user}")
        if not attempt.received <= event.completion_tokens <= ask.max_tokens:
            found.append(f"{attempt.id}: {attempt.received} received, {event.completion_tokens} billed")
        if attempt.told is not None and attempt.told != _counts(event):
            found.append(f"{attempt.id}: its client was told {attempt.told}, {_counts(event)} is billed")
    return found


def _counts(event: UsageEvent) -> tuple[int, int, int]:
    return event.prompt_tokens, event.cached_tokens, event.completion_tokens
