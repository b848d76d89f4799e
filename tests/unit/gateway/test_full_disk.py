"""A disk that is really full: nothing new is let in, nothing that ran is lost, and all by itself when space returns."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.fake import FakeEngine
from metering.spool import Spool
from tests.fixtures.server import ByteTokenizer, RunningGateway

DISK_BYTES = 1 << 20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, of `DISK_BYTES`, mounted at `folder`."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing may be mounted here; test_bad_disk fails every write instead")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the space there is."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    return ballast


def within(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_full_disk_refuses_new_requests_and_settles_the_old_ones_when_space_returns(
    make_gateway: Callable[..., RunningGateway], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "gateway1") as disk:
        gateway = make_gateway(
            engine=FakeEngine(ByteTokenizer(), 0.01),
            spool=lambda path: Spool(path, min_free_bytes=0),
            ledger_url=f"sqlite:///{tmp_path}/ledger.sqlite3",
            ready_cache_s=0,
        )
        key = gateway.tenant()
        body = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        answers: list[httpx.Response] = []

        def stream() -> None:
            with gateway.http(key) as client:
                answers.append(client.post("/v1/completions", json=body))

        threads = [threading.Thread(target=stream) for _ in range(3)]
        for thread in threads:
            thread.start()
        within(lambda: gateway.metric("meterhouse_tokens_total", kind="completion") > 10)
        ballast = fill(disk)
        for thread in threads:
            thread.join(30)
        assert [last_error(answer) for answer in answers] == ["no_spool"] * 3
        submitted = len(gateway.engine.submitted)
        with gateway.http(key) as client:
            refused = client.post("/v1/completions", json={"prompt": "abc"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_spool")
            assert refused.headers["retry-after"] == "1"
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "usage cannot be recorded")
        assert gateway.metric("meterhouse_spool_writable") == 0
        assert gateway.metric("meterhouse_alarms_total", kind="spool_failure") >= 1
        assert len(gateway.engine.submitted) == submitted
        assert gateway.events() == []
        assert gateway.billing.holds_open() == 0
        charged = gateway.billing.balance("acme").charged_femto
        assert charged > 0

        ballast.unlink()
        events = gateway.wait_events(3, 20)
        assert {event.outcome for event in events} == {"engine_died"}, "a step that is not journalled ends its streams"
        for kind in ("prompt", "completion"):
            total = sum(getattr(event, f"{kind}_tokens") for event in events)
            assert total == gateway.metric("meterhouse_tokens_total", kind=kind)
        assert gateway.billing.balance("acme").charged_femto == charged
        gateway.idle(20)
        within(gateway.spool.writable)
        with gateway.http(key) as client:
            assert client.get("/health/ready").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        assert gateway.spool.conflicts_total == gateway.journal.damaged_total == 0
        gateway.stop()


def last_error(answer: httpx.Response) -> Any:
    """The code in the last frame of a stream."""
    frames = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(frames[-1][6:]).get("error", {}).get("code")


def test_too_little_space_for_what_runs_closes_the_door(
    make_gateway: Callable[..., RunningGateway], tmp_path: Path
) -> None:
    gateway = make_gateway(spool=lambda path: Spool(path, min_free_bytes=1 << 60))
    with gateway.http(gateway.tenant()) as client:
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 503
    assert gateway.engine.submitted == []


def test_a_store_that_takes_nothing_for_too_long_closes_the_door(make_gateway: Callable[..., RunningGateway]) -> None:
    now_us = [time.time_ns() // 1000]
    gateway = make_gateway(spool=lambda path: Spool(path, max_age_s=3600, clock_us=lambda: now_us[0]))
    with gateway.http(gateway.tenant()) as client:
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        (event,) = gateway.wait_events(1)
        now_us[0] = event.ts_us + 3600 * 1_000_000 - 1
        assert gateway.spool.writable()
        now_us[0] += 1
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 503
        gateway.spool.ack("clickhouse", [event.event_id])
        assert not gateway.spool.writable()
        gateway.spool.ack("ledger", [event.event_id])
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_a_journal_that_cannot_shrink_closes_the_door(make_gateway: Callable[..., RunningGateway]) -> None:
    gateway = make_gateway()
    key = gateway.tenant()
    with gateway.http(key) as client:
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        gateway.journal.max_total_bytes = gateway.journal.nbytes
        refused = client.post("/v1/completions", json={"prompt": "abc"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_journal")
        assert client.get("/health/ready").status_code == 503
    assert gateway.metric("meterhouse_journal_writable") == 0
    assert gateway.metric("meterhouse_journal_bytes") == gateway.journal.max_total_bytes
    assert len(gateway.engine.submitted) == 1
    gateway.idle()
