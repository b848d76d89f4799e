"""A gateway's process for the campaign: `gateway.lifecycle.serve` itself, over the engine without a model.

Forked from a process that has imported everything already, so a start takes a fraction of a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from gateway import lifecycle
from gateway.settings import Settings
from tests.chaos.points import BY_ROW, arm
from tests.fixtures.server import ByteTokenizer

ROOT = Path(__file__).parents[2]
MODEL = "fake"  # as the engine without a model calls itself
ENGINE = "tests.chaos.engine"


def start(settings: Settings, log: Path, row: str | None, nth: int) -> ForkServerProcess:
    """A gateway in a process of its own, which kills itself at the nth time of a point, if one is given."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.gateway"])
    values = {name: getattr(settings, name) for name in settings.__struct_fields__}
    process = context.Process(target=_serve, args=(values, str(log), row, nth))
    process.start()
    return process


def engine_pid(gateway_pid: int) -> int | None:
    """The engine's process of a gateway, if one is up."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == gateway_pid and ENGINE.encode() in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue  # it ended while we looked
    return None


def _serve(values: dict[str, Any], log: str, row: str | None, nth: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no gateway outlives its campaign
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    spawn = asyncio.create_subprocess_exec

    async def spawn_ours(program: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        rest = arguments[arguments.index("engine.process") + 1 :]
        return await spawn(program, "-m", ENGINE, *rest, cwd=ROOT, **options)

    asyncio.create_subprocess_exec = spawn_ours  # type: ignore[assignment]
    lifecycle.Tokenizer = lambda _: ByteTokenizer()  # type: ignore[assignment, misc]
    lifecycle.resolve_model = lambda *_, **__: Path(MODEL)  # type: ignore[assignment]
    if row is not None:
        arm(BY_ROW[row], nth)
    try:
        lifecycle.serve(Settings(**values))
    except lifecycle.StartError as error:  # a store is away; whoever watches over a server starts it again
        os.write(2, f"not started: {error}\n".encode())
        os._exit(1)
