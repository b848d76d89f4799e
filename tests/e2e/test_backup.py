"""`meterhouse backup` beside a server under load, and `meterhouse restore` elsewhere, as an operator runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.server import ADMIN_KEY, ServerProcess, free_port

PRICE = {"prompt": "1.00", "cached": "0.10", "completion": "3.00"}


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", *arguments],
        env={**os.environ, "METERHOUSE_ADMIN_KEY": ADMIN_KEY},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def run(*arguments: str, code: int = 0) -> Any:
    """The decoded `--json` output of a command, or the error of one that fails."""
    process = started(*arguments, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, (out, err)
    return json.loads(out) if code == 0 else err


def now() -> str:
    return datetime.now(UTC).isoformat()


def killed_when(process: subprocess.Popen[str], sign: Path) -> None:
    """SIGKILL as soon as a file is there."""
    while not sign.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()


def test_a_backup_under_load_is_restored_elsewhere(real_server: ServerProcess, tmp_path: Path) -> None:
    admin = real_server.admin()
    admin.post("/tenants", json={"id": "saved", "name": "Saved"}).raise_for_status()
    admin.post(
        "/prices", json={"tenant": "saved", "model": "*", "effective_at": 0, "currency": "usd", "per_million": PRICE}
    )
    admin.post("/tenants/saved/credits", json={"amount": "10.00", "currency": "usd", "reason": "test"})
    key = admin.post("/tenants/saved/keys", json={"name": "test"}).json()["key"]
    client = httpx.Client(base_url=real_server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "user": "somebody"}
    begin = now()
    for _ in range(3):
        client.post("/v1/completions", json=body).raise_for_status()
    end = now()
    done = threading.Event()

    def load() -> None:
        while not done.is_set():
            client.post("/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    folder = tmp_path / "backup"
    try:
        beside = (f"--port={real_server.port}", f"--data-dir={real_server.data_dir}")
        taken = run("backup", str(folder), *beside)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert (taken["state"], taken["lacking"]) == ("done", 0)
    client.close()
    data = tmp_path / "elsewhere"
    flags = (f"--data-dir={data}",)
    killed_when(started("restore", str(folder), *flags), data / "ledger.sqlite3")
    found = run("restore", str(folder), *flags)
    assert (found["faults"], found["requests"]) == ([], taken["requests"])
    alone = (*flags, f"--port={free_port()}")
    copied = run("invoice", "create", "saved", begin, end, *alone)
    original = admin.post("/invoices", json={"tenant": "saved", "period_start": begin, "period_end": end}).json()
    admin.close()
    same = ("requests", "total", "exact_total")
    assert [copied[name] for name in same] == [original[name] for name in same]
    assert [{**line, "id": ""} for line in copied["lines"]] == [{**line, "id": ""} for line in original["lines"]]
    assert copied["requests"] == 3

    killed_when(started("backup", str(tmp_path / "half"), *alone), tmp_path / "half" / "waiting.jsonl.gz")
    assert "was not finished" in run("restore", str(tmp_path / "half"), f"--data-dir={tmp_path / 'third'}", code=1)
    assert not (tmp_path / "third").exists()
