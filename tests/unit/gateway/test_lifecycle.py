"""A server's start and stop, whatever goes wrong on the way: every step is taken, and nothing is left behind."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from billing.errors import LedgerUnavailable
from billing.service import Billing
from engine.fake import FakeEngine
from gateway import lifecycle, stores
from gateway.admin.adapters import sweep
from gateway.app import now_us
from gateway.demo import DemoError
from gateway.ids import uuid7
from gateway.lifecycle import Runtime
from gateway.server import bind
from gateway.settings import Settings
from gateway.stores import StartError, Stores
from metering.events import Outcome, UsageEvent
from metering.journal import OpenedRecord
from metering.shipper import Drain
from migrations.runner import MigrationError
from tests.fixtures.clickhouse import empty
from tests.fixtures.server import ADMIN_KEY, ByteTokenizer


class SlowEngine(FakeEngine):
    """Its start takes for ever."""

    started = stopped = False

    async def start(self) -> None:
        self.started = True
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


@pytest.fixture
async def settings(tmp_path: Path, chdb_url: str) -> Settings:
    await asyncio.to_thread(empty, chdb_url)
    return Settings(data_dir=tmp_path / "data", clickhouse_url=chdb_url, admin_key=ADMIN_KEY, drain_s=0.5)


def make(settings: Settings, engine: FakeEngine | None = None) -> Runtime:
    engine = engine or FakeEngine(ByteTokenizer())
    return Runtime(settings, engine=engine, tokenizer=ByteTokenizer(), base_model="fake")


async def opens(settings: Settings) -> Stores:
    """The stores can be opened, so nobody has them. Returns them closed again."""
    found = Stores(settings, now_us)
    await asyncio.to_thread(found.open, "fake")
    await asyncio.to_thread(found.close)
    return found


# -- the start --------------------------------------------------------------------------------------------------------


async def test_a_start_that_is_cancelled_leaves_nothing_open(settings: Settings) -> None:
    engine = SlowEngine()
    starting = asyncio.create_task(make(settings, engine).start())
    while not (settings.data_dir / "idempotency.sqlite3").exists():  # noqa: ASYNC110  # no event for it
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 10)
    assert engine.stopped
    await opens(settings)


async def test_a_fault_of_the_stores_does_not_wait_for_the_engine(settings: Settings, tmp_path: Path) -> None:
    engine = SlowEngine()
    no_file = msgspec.structs.replace(settings, ledger_url=f"sqlite:///{tmp_path}")
    with pytest.raises(MigrationError):
        await asyncio.wait_for(make(no_file, engine).start(), 10)
    assert engine.started
    assert engine.stopped
    await opens(settings)


async def test_a_folder_in_use_is_told_before_the_engine_is_started(settings: Settings) -> None:
    first = Stores(settings, now_us)
    first.claim()
    engine = SlowEngine()
    with pytest.raises(StartError, match="Another Meterhouse server"):
        await asyncio.wait_for(make(settings, engine).start(), 10)
    assert not engine.started
    first.claim()  # again: nothing
    first.close()
    await opens(settings)


def event() -> UsageEvent:
    record = OpenedRecord(
        event_id=uuid7(now_us()),
        ts_us=now_us(),
        tenant="acme",
        key_id="k",
        model="fake",
        base_model="fake",
        endpoint="completions",
        gateway="gw0",
    )
    return record.event((7, 0, 3, 0, 0, 0), outcome=Outcome.FINISHED, settled_us=now_us(), finish_reason="stop")


@pytest.fixture
async def backlog(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Six settlements that the ledger lacks, to be recorded one at a time. What `open` says."""
    found = await opens(settings)
    spool = stores.Spool(settings.spool_dir / "spool.sqlite3")
    for _ in range(6):
        spool.settle(event()).result(5)
    spool.close()
    assert found.recovered == 0
    monkeypatch.setattr(stores, "Drain", functools.partial(Drain, max_events=1))
    monkeypatch.setattr(stores, "POLL_S", 0.01)
    monkeypatch.setattr(stores, "TELL_S", 0.0)
    return []


async def test_a_ledger_that_is_slow_is_waited_for(
    settings: Settings, backlog: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Billing.record

    def slow(self: Billing, events: list[UsageEvent]) -> None:
        time.sleep(0.3)
        record(self, events)

    monkeypatch.setattr(Billing, "record", slow)
    monkeypatch.setattr(stores, "STALL_S", 1.5)  # less than all of them take, more than one does
    opened = Stores(settings, now_us)
    await asyncio.to_thread(opened.open, "fake", backlog.append)
    assert opened.spool.count("ledger") == 0
    told = [int(line.split()[-4]) for line in backlog if "are left" in line]
    assert told == sorted(told, reverse=True)
    assert len({left for left in told if 1 <= left <= 6}) >= 3
    assert 0 not in told
    await asyncio.to_thread(opened.close)


def refuse(*_: Any) -> None:
    raise LedgerUnavailable("the ledger's database cannot be used now")


async def test_a_ledger_that_takes_nothing_is_told_with_its_reason(
    settings: Settings, backlog: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setattr(Billing, "record", refuse)
        away.setattr(stores, "STALL_S", 0.3)
        away.setattr(stores, "STOP_S", 0.1)
        with pytest.raises(StartError, match=r"lacks 6 settled requests.*database cannot be used now"):
            await asyncio.to_thread(Stores(settings, now_us).open, "fake", backlog.append)
    await opens(settings)


async def test_who_waits_for_the_ledger_can_give_up(
    settings: Settings, backlog: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Stores(settings, now_us)
    with monkeypatch.context() as away:
        away.setattr(Billing, "record", refuse)
        opening = asyncio.create_task(asyncio.to_thread(waiting.open, "fake", lambda _: waiting.give_up()))
        began_s = time.monotonic()
        with pytest.raises(stores.GivenUp):
            await asyncio.wait_for(opening, 10)
        assert time.monotonic() - began_s < stores.STOP_S / 2
    await opens(settings)


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapter_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


async def test_adapters_past_the_limit_are_told_and_the_oldest_serve(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(settings)
    await first.start()
    await asyncio.to_thread(first.stores.billing.create_tenant, id="acme", name="Acme")
    ids = [str(uuid.uuid4()) for _ in range(4)]
    for number, load_id in enumerate(ids):
        folder = adapter_folder(settings.adapters_dir.absolute() / load_id)
        given = {"path": str(folder), "id": load_id, "digest": "", "base_model": "fake"}
        await asyncio.to_thread(functools.partial(first.stores.billing.add_adapter, "acme", name=f"a{number}", **given))
    await first.drain(0.0)
    await first.stop()
    listed = Billing.adapters
    monkeypatch.setattr(Billing, "adapters", lambda self, after: listed(self, None, 3, after))  # two pages of them
    (settings.adapters_dir / ids[0] / "adapter_config.json").unlink()  # takes no place
    stray = adapter_folder(settings.adapters_dir / str(uuid.uuid4()))
    engine = FakeEngine(ByteTokenizer())
    again = make(Settings(**{**_fields(settings), "max_adapters": 2}), engine)
    with capture_logs() as logs:
        await again.start()
    await again.drain(0.0)
    await again.stop()
    assert sorted(engine._adapters) == sorted(ids[1:3])
    assert not stray.exists()
    told = {line["event"]: line for line in logs}
    assert told["adapter_not_loaded"]["adapter"] == "a0"
    assert {name: told["adapters_left_out"][name] for name in ("count", "loaded", "max_adapters")} == {
        "count": 1,
        "loaded": 2,
        "max_adapters": 2,
    }


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_the_sweep_takes_only_copies_that_are_its_own(tmp_path: Path) -> None:
    known, stray = str(uuid.uuid4()), str(uuid.uuid4())
    for name in (known, stray, "mine"):
        adapter_folder(tmp_path / name)
    sweep(tmp_path, [])
    sweep(tmp_path, ["another"])  # a ledger that knows none of them
    assert len(list(tmp_path.iterdir())) == 3
    sweep(tmp_path, [known])
    assert {path.name for path in tmp_path.iterdir()} == {known, "mine"}
    sweep(tmp_path / "absent", [known])


# -- the stop ---------------------------------------------------------------------------------------------------------


async def test_a_step_of_the_stop_that_fails_skips_no_other(settings: Settings) -> None:
    engine = FakeEngine(ByteTokenizer())
    runtime = make(settings, engine)
    await runtime.start()
    stop = engine.stop

    async def fails() -> None:
        await stop()
        raise OSError("broken")

    engine.stop = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        await runtime.stop()
    await opens(settings)


class Program:
    """`meterhouse serve`'s `_serve` over the fake engine, with signals that a test sends."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., Any]) -> None:
        self.settings = settings
        self.stopping, self.hurry = asyncio.Event(), asyncio.Event()
        self.engine = FakeEngine(ByteTokenizer())
        self.drained: list[float] = []
        drain = Runtime.drain

        async def drained(runtime: Runtime, timeout_s: float) -> None:
            self.drained.append(timeout_s)
            await drain(runtime, timeout_s)

        monkeypatch.setattr(lifecycle, "EngineProcess", lambda *_, **__: self.engine)
        monkeypatch.setattr(lifecycle, "Tokenizer", lambda _: ByteTokenizer())
        monkeypatch.setattr(lifecycle, "_watch_signals", lambda: (self.stopping, self.hurry))
        monkeypatch.setattr(lifecycle.demo, "prepare", prepare)
        monkeypatch.setattr(Runtime, "drain", drained)

    async def run(self) -> None:
        demo_settings = Settings(**{**_fields(self.settings), "demo": True})
        with bind("127.0.0.1", 0) as bound:
            await asyncio.wait_for(lifecycle._serve(demo_settings, bound, Path("fake")), 20)


async def test_a_demo_that_cannot_be_made_ends_the_server_in_order(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(*_: Any) -> list[str]:
        raise DemoError("no demo")

    program = Program(settings, monkeypatch, prepare)
    with pytest.raises(DemoError):
        await program.run()
    assert program.drained == [settings.drain_s, 0.0]
    assert not program.engine.ready
    await opens(settings)


async def test_a_signal_is_heeded_while_the_demo_is_made(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = threading.Event()

    async def prepare(*_: Any) -> list[str]:
        program.stopping.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return []

    program = Program(settings, monkeypatch, prepare)
    await program.run()
    assert cleaned.is_set()
    assert program.drained == [settings.drain_s, 0.0]
    await opens(settings)


async def test_a_signal_during_the_start_ends_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(*_: Any) -> list[str]:
        raise AssertionError("never served")

    program = Program(settings, monkeypatch, prepare)
    program.engine = SlowEngine()
    asyncio.get_running_loop().call_later(0.2, program.stopping.set)
    await program.run()
    assert program.engine.stopped
    assert program.drained == []
    await opens(settings)
