"""Servers to be measured, started one at a time and ended as a group: ours as it ships, and any other by its command.

Knows: how each is started, when it answers, and how it is asked. Does not know: what is measured.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import family

from gateway.client import AdminClient, CallFailed

ROOT = Path(__file__).resolve().parents[1]
READY_S = 900.0
PROGRAM = ("-m", "gateway.cli")
STOP_S = 30.0


class Absent(Exception):
    """A server is not there to be measured; the text says why."""


@dataclass
class Server:
    """A server that answers: where, and what its requests look like. `models` and `bodies` are walked in turn."""

    name: str
    url: str  # up to and including /v1
    models: Sequence[str]
    bodies: Sequence[dict[str, Any]] = ()
    api_key: str = ""
    ignore_eos: bool = True  # whether it takes the field; one that does not has a body that says so in its way
    endpoint: str = "chat"
    adapters: Sequence[str] = ()  # names of adapters, beside the base model
    ready_s: float | None = None  # from its start until it was ready; None: it ran already
    pid: int | None = None  # of its first process, where it was started here

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile its processes get no time at all. Some servers look around when they have nothing to do."""
        processes = [] if self.pid is None else family(self.pid)
        try:
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@dataclass
class Peer:
    """Another server, from `name=…,url=…,model=…[,models=a;b][,bodies=FILE][,workloads=short;lora][,ignore_eos=no]
    [,endpoint=completions][,start=COMMAND]`; the command is the rest of the text, commas and all."""

    server: Server
    workloads: Sequence[str] = ("short", "mixed")
    start: str = ""

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Raises `ValueError`."""
        fields, _, start = text.partition(",start=")
        given = {name: value for name, _, value in (part.partition("=") for part in fields.split(","))}
        known = {"name", "url", "model", "models", "bodies", "workloads", "ignore_eos", "endpoint"}
        if odd := set(given) - known:
            raise ValueError(f"a peer has no {sorted(odd)[0]!r}; it has {', '.join(sorted(known))} and at last start")
        models = given.get("models") or given.get("model")
        if not given.get("name") or not given.get("url") or not models:
            raise ValueError("a peer needs name=, url= and model= or models=")
        lines = Path(given["bodies"]).read_text().splitlines() if "bodies" in given else []
        server = Server(
            name=given["name"],
            url=given["url"],
            models=models.split(";"),
            bodies=[json.loads(line) for line in lines if line.strip()],
            ignore_eos=given.get("ignore_eos", "yes") != "no",
            endpoint=given.get("endpoint", "chat"),
        )
        return cls(server, given.get("workloads", "short;mixed").split(";"), start)


@contextmanager
def peer(of: Peer, log: Path) -> Iterator[Server]:
    """The peer, started if it has a command. Raises `Absent`."""
    if not of.start:
        _wait(of.server.url + "/models", None, log, 5.0)
        yield of.server
        return
    if _answers(of.server.url + "/models"):
        raise Absent("something listens at its address already")
    with _group(["/bin/sh", "-c", f"exec {of.start}"], {}, log) as child:
        of.server.pid = child.pid
        of.server.ready_s = _wait(of.server.url + "/models", child, log, READY_S)
        yield of.server


@dataclass(frozen=True)
class Ours:
    """A `meterhouse serve` that runs: its gateway's process, where it is, and the key of its administrator."""

    pid: int
    url: str
    admin_key: str
    ready_s: float


@contextmanager
def running(
    flags: Sequence[str], log: Path, *, model: str = "default", program: Sequence[str] = PROGRAM
) -> Iterator[Ours]:
    """`meterhouse serve` as it ships, or what takes its place, on a new data folder. Raises `Absent`."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    admin_key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="meterhouse-bench-") as folder:
        command = [sys.executable, *program, "serve", f"--port={port}", f"--data-dir={folder}/data"]
        command += [f"--model={model}", *flags]
        with _group(command, {"METERHOUSE_ADMIN_KEY": admin_key}, log) as child:
            yield Ours(child.pid, url, admin_key, _wait(f"{url}/health/ready", child, log, READY_S))


@contextmanager
def meterhouse(
    name: str,
    flags: Sequence[str],
    adapters: Sequence[Path],
    log: Path,
    *,
    model: str = "default",
    program: Sequence[str] = PROGRAM,
) -> Iterator[Server]:
    """The same with a tenant who can pay and owns `adapters`."""
    with running(flags, log, model=model, program=program) as ours:
        names = [f"adapter-{number}" for number in range(len(adapters))]
        try:
            base, key = prepare(ours, dict(zip(names, adapters, strict=True)))
        except CallFailed as error:
            raise Absent(str(error)) from error
        yield Server(
            name=name,
            url=f"{ours.url}/v1",
            models=[base],
            api_key=key,
            adapters=names,
            ready_s=ours.ready_s,
            pid=ours.pid,
        )


def prepare(ours: Ours, adapters: dict[str, Path], *, tenant: str = "bench") -> tuple[str, str]:
    """Make the tenant, its credit and its adapters; the base model's name and the tenant's key."""
    with httpx.Client(timeout=120) as client:
        admin = AdminClient(ours.url, ours.admin_key, client.send)
        admin.post("/tenants", body={"name": tenant, "id": tenant, "currency": "usd"})
        price = {"prompt": "0.50", "cached": "0.05", "completion": "1.50"}
        admin.post("/prices", body={"model": "*", "currency": "usd", "per_million": price})
        admin.post(f"/tenants/{tenant}/credits", body={"amount": "1000000", "currency": "usd", "reason": "bench"})
        key = str(admin.post(f"/tenants/{tenant}/keys", body={"name": "bench"})["key"])
        for name, path in adapters.items():
            admin.post(f"/tenants/{tenant}/adapters", body={"name": name, "path": str(path.absolute())})
        models = client.get(f"{ours.url}/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
    return next(str(model["id"]) for model in models if model["id"] not in adapters), key


@contextmanager
def _group(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group of its own; the whole group is ended."""
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        _end(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while _alive(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        _end(child, signal.SIGKILL)
        child.wait()


def _end(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _alive(child: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group is left."""
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(url: str, child: subprocess.Popen[bytes] | None, log: Path, timeout_s: float) -> float:
    """Seconds until the URL answers well. Raises `Absent`."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if child is not None and child.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise Absent(f"it ended with {child.returncode} before it answered: {last[0]}")
        if _answers(url):
            return time.monotonic() - began
        time.sleep(0.2)
    raise Absent(f"it did not answer within {timeout_s:g} s")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=15).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
