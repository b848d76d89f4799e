"""Backup and restore over real stores: what was taken beside a gateway that works is restored with books that agree."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from billing.errors import Conflict, NotFound
from billing.leases import Holder, LeaseTable
from gateway.backup import restore as restoring
from gateway.backup.manifest import Backup, BackupError, read_manifest
from gateway.backup.restore import check, restore
from gateway.backup.take import Backups, take
from gateway.ids import uuid7
from gateway.settings import Settings
from gateway.stores import StartError, Stores
from metering.events import Outcome, UsageEvent
from metering.journal import OpenedRecord

START_US = 1_795_000_000_000_000  # 2026-11-18T11:06:40Z
HOUR_US = 3_600_000_000
PRICE = {"prompt": "1.00", "cached": "0.10", "completion": "3.00"}


class Clock:
    """Each look is a millisecond later."""

    def __init__(self) -> None:
        self.us = START_US
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.us += 1000
            return self.us


class House:
    """A gateway's stores, and requests that pass through them as the gateway lets them."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.stores = Stores(settings, clock)
        self.stores.open("base")
        self.stores.billing._price_lead_us = 0

    def prepare(self) -> None:
        billing = self.stores.billing
        billing.create_tenant(id="acme", name="Acme")
        billing.set_price(model="*", effective_at_us=1, currency="usd", per_million=PRICE)
        billing.grant_credit("acme", "1000.00", "usd", "test")

    def opened(self, **fields: Any) -> OpenedRecord:
        ts_us = fields.pop("ts_us", None) or self.clock()
        record = OpenedRecord(
            event_id=uuid7(ts_us),
            ts_us=ts_us,
            tenant="acme",
            key_id="key-1",
            model="base",
            base_model="base",
            endpoint="chat.completions",
            gateway=self.settings.gateway_id,
            **fields,
        )
        self.stores.journal.opened(record)
        return record

    def settled(self, record: OpenedRecord, prompt: int = 10, completion: int = 5) -> UsageEvent:
        counts = (prompt, 0, completion, 0, 0, 0)
        self.stores.journal.step([(record.event_id, counts)])
        event = record.event(counts, outcome=Outcome.FINISHED, settled_us=self.clock(), finish_reason="stop")
        self.stores.spool.settle(event).result(5)
        self.stores.billing.settle(event)
        self.stores.journal.settled(event.event_id)
        return event

    def request(self, **fields: Any) -> UsageEvent:
        return self.settled(self.opened(**fields))

    def take(self, folder: Path) -> Backup:
        folder.mkdir()
        return take(self.settings, self.stores, folder, id="backup-1", clock_us=self.clock, turn=lambda: None)

    def close(self) -> None:
        self.stores.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def house(tmp_path: Path, server_url: str, clock: Clock) -> Iterator[House]:
    made = House(Settings(data_dir=tmp_path / "data", clickhouse_url=server_url, admin_key="k" * 20), clock)
    made.prepare()
    yield made
    made.close()


def target(house: House, name: str = "restored", **settings: Any) -> Settings:
    """Empty stores: SQLite, and a database beside the house's own."""
    assert house.settings.clickhouse_url is not None
    url = f"{house.settings.clickhouse_url}_{name}"
    return Settings(
        **{
            "data_dir": house.settings.data_dir.with_name(name),
            "clickhouse_url": url,
            "admin_key": "k" * 20,
            **settings,
        }
    )


def restored(settings: Settings, folder: Path, clock: Clock) -> restoring.Restored:
    return restore(settings, folder, clock, lambda _: None)


@contextmanager
def reopened(settings: Settings, clock: Clock) -> Iterator[House]:
    house = House(settings, clock)
    try:
        yield house
    finally:
        house.close()


def ids(house: House) -> list[str]:
    assert house.stores.flush(20)
    return [event.event_id for event in house.stores.usage.events(None, 1, 1 << 52)]


def test_what_is_restored_is_what_was_taken(house: House, clock: Clock, tmp_path: Path) -> None:
    events = [house.request(user=f"user {i}") for i in range(5)]
    assert house.stores.flush(20)
    waiting = house.request()
    running = house.opened()
    house.stores.journal.step([(running.event_id, (7, 0, 3, 0, 0, 0))])
    (house.settings.adapters_dir / "one").mkdir(parents=True)
    (house.settings.adapters_dir / "one" / "weights").write_bytes(b"weights")
    before = house.stores.billing.balance("acme")
    backup = house.take(tmp_path / "backup")
    assert (backup.requests, backup.usage.open, backup.lacking) == (7, 1, 0)
    assert read_manifest(tmp_path / "backup") == backup == check(tmp_path / "backup")

    settings = target(house)
    found = restored(settings, tmp_path / "backup", clock)
    assert (found.faults, found.requests, found.settled) == ([], 7, 1)
    assert (settings.adapters_dir / "one" / "weights").read_bytes() == b"weights"
    with reopened(settings, clock) as copy:
        assert sorted(ids(copy)) == sorted([*(event.event_id for event in events), waiting.event_id, running.event_id])
        stored = {event.event_id: event for event in copy.stores.usage.events("acme", 1, 1 << 52)}
        assert [stored[event.event_id] for event in events] == events
        cut = stored[running.event_id]
        assert (cut.outcome, cut.prompt_tokens, cut.completion_tokens) == (Outcome.INTERRUPTED, 7, 3)
        after = copy.stores.billing.balance("acme")
        assert before.available_femto - after.available_femto == 7 * 10**9 + 3 * 3 * 10**9
        assert copy.stores.folder != house.stores.folder


def test_under_load_the_books_of_every_instant_agree(house: House, clock: Clock, tmp_path: Path) -> None:
    going = threading.Event()
    going.set()

    def load() -> None:
        while going.is_set():
            record = house.opened()
            house.stores.journal.step([(record.event_id, (10, 0, 1, 0, 0, 0))])
            house.settled(record)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        taken = []
        for i in range(3):
            taken.append(house.take(tmp_path / f"backup{i}"))
    finally:
        going.clear()
        for thread in threads:
            thread.join()
    assert [backup.lacking for backup in taken] == [0, 0, 0]
    assert 0 < taken[0].requests < taken[1].requests < taken[2].requests
    standing = set(ids(house))
    for i in (0, 2):
        settings = target(house, f"copy{i}")
        assert restored(settings, tmp_path / f"backup{i}", clock).faults == []
        with reopened(settings, clock) as copy:
            assert set(ids(copy)) <= standing
            assert len(ids(copy)) == taken[i].requests


def test_an_event_between_the_parts_is_in_one_of_them(
    house: House, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled before the instant, acknowledged by all while the parts are read one after the other."""
    first = house.request()
    running = house.opened()
    spool_waiting = house.stores.spool.waiting
    late: list[UsageEvent] = []

    def waiting(consumer: str) -> Iterator[UsageEvent]:
        yield from spool_waiting(consumer)
        late.append(house.settled(running))  # shipped before the store is read
        late.append(house.request())  # began after the instant
        assert house.stores.flush(20)

    monkeypatch.setattr(house.stores.spool, "waiting", waiting)
    backup = house.take(tmp_path / "backup")
    assert (backup.usage.standing, backup.usage.open, backup.lacking) == (2, 0, 0)
    settings = target(house)
    found = restored(settings, tmp_path / "backup", clock)
    assert (found.faults, found.settled) == ([], 0)
    with reopened(settings, clock) as copy:
        assert ids(copy) == [first.event_id, running.event_id]
        stored = {event.event_id: event for event in copy.stores.usage.events(None, 1, 1 << 52)}
        assert stored[running.event_id] == late[0]


def test_archive_conflicts_dead_letters_and_quarantine_come_back(house: House, clock: Clock, tmp_path: Path) -> None:
    old = [house.request() for _ in range(3)]
    assert house.stores.flush(20)
    house.stores.retention.run(202611)
    clock.us += 20 * 24 * HOUR_US
    new = house.request()
    assert house.stores.flush(20)
    second = msgspec.structs.replace(new, completion_tokens=99)
    house.stores.usage.insert([second])
    house.stores.usage.bury(msgspec.structs.replace(new, event_id="bad"), "a reason")
    house.stores.spool.set_aside([(b"torn", "checksum mismatch", b"\0\1", b"\xff")])
    backup = house.take(tmp_path / "backup")
    assert (backup.usage.standing, backup.usage.archived, backup.usage.second) == (4, 3, 1)
    settings = target(house)
    found = restored(settings, tmp_path / "backup", clock)
    assert len(found.faults) == 1  # the second content is told of, as it was before
    assert "content" in found.faults[0]
    with reopened(settings, clock) as copy:
        usage = copy.stores.usage
        assert ids(copy) == [event.event_id for event in (*old, new)]
        assert list(usage.events(None, 1, 1 << 52)) == [*old, new]
        assert usage.conflicts(1, 1 << 52) == [new.event_id]
        assert sum(row.requests for row in usage.counts(1, 1 << 52)) == 4
        assert [noted.dropped for noted in usage.archived()] == [True]
        assert copy.stores.spool.quarantined() == [(b"torn", "checksum mismatch", b"\0\1", b"\xff")]


def test_leases_duties_and_the_row_of_the_gateway_are_not_taken_over(
    house: House, clock: Clock, tmp_path: Path
) -> None:
    with house.stores.events.exclusive() as log:
        LeaseTable(log.connection).enter(Holder("gw0", house.stores.folder, "epoch", 1, 1 << 60, 1))
    running = house.opened()
    house.take(tmp_path / "backup")
    settings = target(house)
    assert restored(settings, tmp_path / "backup", clock).settled == 1
    engine = sa.create_engine(settings.ledger)
    with engine.connect() as connection:
        for name in ("lease_holders", "leases", "gateways"):
            assert connection.execute(sa.text(f"SELECT count(*) FROM {name}")).scalar() == 0, name
    engine.dispose()
    house.settled(running)


def test_from_sqlite_to_postgresql_and_back(house: House, clock: Clock, tmp_path: Path, postgres_url: str) -> None:
    house.request()
    assert house.stores.flush(20)
    house.take(tmp_path / "backup")
    on_postgres = target(house, "postgres", ledger_url=postgres_url)
    assert restored(on_postgres, tmp_path / "backup", clock).faults == []
    with reopened(on_postgres, clock) as copy:
        copy.request()
        assert copy.stores.flush(20)
        copy.take(tmp_path / "again")
        head = copy.stores.events.read(limit=1000)
    on_sqlite = target(house, "sqlite")
    assert restored(on_sqlite, tmp_path / "again", clock).requests == 2
    with reopened(on_sqlite, clock) as copy:
        billing, end_us = copy.stores.billing, clock() + 1
        drafted = billing.draft_invoice("acme", 1, end_us, usage=copy.stores.usage, watermark_us=end_us)
        assert "look for it in Stripe" in billing.export_refusal(drafted)
        held = billing.held_after_restore()
        assert held is not None
        assert (held.backup_id, held.seq) == ("backup-1", len(head))
        assert (billing.release_exports(), billing.release_exports()) == (True, False)
        assert billing.export_refusal(drafted) == ""
        assert copy.stores.events.read(limit=len(head)) == head
        assert copy.stores.events.verify_chain() >= len(head)


# -- what is refused ------------------------------------------------------------------------------


def test_a_backup_is_whole_or_is_none(house: House, clock: Clock, tmp_path: Path) -> None:
    house.request()
    backup = house.take(tmp_path / "backup")
    with pytest.raises(BackupError, match="there is no such folder"):
        check(tmp_path / "nowhere")
    for file in backup.files:
        path = tmp_path / "backup" / file.path
        whole = path.read_bytes()
        spoiled = bytearray(whole)
        spoiled[len(spoiled) // 2] ^= 1
        for content in (bytes(spoiled), whole[:-1]):
            path.write_bytes(content)
            with pytest.raises(BackupError, match=path.name):
                check(tmp_path / "backup")
        path.unlink()
        with pytest.raises(BackupError, match=f"{path.name} of the backup is missing"):
            check(tmp_path / "backup")
        path.write_bytes(whole)
    (tmp_path / "backup" / "strange").touch()
    with pytest.raises(BackupError, match="strange lies in the backup"):
        check(tmp_path / "backup")
    (tmp_path / "backup" / "strange").unlink()
    manifest = tmp_path / "backup" / "manifest.json"
    sealed = json.loads(manifest.read_bytes())
    sealed["backup"]["usage"]["standing"] += 1
    manifest.write_text(json.dumps(sealed))
    with pytest.raises(BackupError, match="it is not what was written"):
        check(tmp_path / "backup")
    manifest.unlink()
    with pytest.raises(BackupError, match="it was not finished"):
        restored(target(house), tmp_path / "backup", clock)
    assert not target(house).data_dir.exists()


def test_only_an_empty_target_is_filled(house: House, clock: Clock, tmp_path: Path, server_url: str) -> None:
    house.request()
    assert house.stores.flush(20)
    house.take(tmp_path / "backup")
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    refused = {
        "is not empty": target(house, data_dir=full),
        "ledger has events": target(house, ledger_url=house.settings.ledger),
        "usage store has usage": target(house, clickhouse_url=server_url),
        "--gateway-id": target(house, gateway_id="another"),
    }
    for reason, settings in refused.items():
        with pytest.raises(BackupError, match=reason):
            restored(settings, tmp_path / "backup", clock)
    assert [path.name for path in full.iterdir()] == ["something"]
    assert not (tmp_path / "restored").exists()


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("step", ["load", "restore_store", "put_back", "_compare"])
def test_a_restore_that_was_killed_is_run_again(
    house: House, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    house.request()
    house.opened()
    house.take(tmp_path / "backup")
    settings = target(house, ledger_url=f"sqlite:///{tmp_path}/beside.sqlite3")  # not in the folder that is emptied
    whole: Callable[..., Any] = getattr(restoring, step)

    def killed(*args: Any) -> Any:
        if step != "_compare":  # right before it; the others right after
            whole(*args)
        raise Killed

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(restoring, step, killed)
        restored(settings, tmp_path / "backup", clock)
    if step == "_compare":  # all of it stands
        with pytest.raises(BackupError, match="is not empty"):
            restored(settings, tmp_path / "backup", clock)
    else:
        with pytest.raises(StartError, match="run `meterhouse restore` again"):
            Stores(settings, clock).open("base")
        found = restored(settings, tmp_path / "backup", clock)
        assert (found.faults, found.requests, found.settled) == ([], 2, 1)
    with reopened(settings, clock) as copy:
        assert len(ids(copy)) == 2


def test_where_a_backup_may_lie(house: House, clock: Clock, tmp_path: Path) -> None:
    backups = Backups(house.settings, house.stores, clock)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused = {
        "must be empty": tmp_path / "full",
        "whole path": Path("relative"),
        "does not lie in the folder": house.settings.data_dir / "backup",
        "cannot be used": tmp_path / "full" / "file" / "below",
    }
    for reason, folder in refused.items():
        with pytest.raises(Conflict, match=reason):
            backups.start("one", folder)
    with pytest.raises(NotFound):
        backups.find("one")
    backups.close()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_backup_that_fails_leaves_nothing_and_says_why(
    house: House, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.request()
    backups = Backups(house.settings, house.stores, clock)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/secret/path")

    monkeypatch.setattr("gateway.backup.take.seal", full)
    run = backups.start("one", tmp_path / "backup")
    while run.state == "running":
        time.sleep(0.01)
    backups.close()
    assert (run.state, run.fault) == ("failed", "the backup cannot be written (No space left on device)")
    assert list((tmp_path / "backup").iterdir()) == []
