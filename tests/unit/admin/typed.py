"""Commands as somebody types them, against the admin API of a test's world: no process, no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.client import AdminClient
from gateway.commands import base
from tests.unit.admin.conftest import ADMIN_KEY, World


class Typed:
    """Commands as somebody types them, against the API of a world."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()

        def send(request: httpx.Request) -> httpx.Response:
            return asyncio.run_coroutine_threadsafe(world.client.send(request), loop).result()

        @contextmanager
        def connect(*_: object) -> Iterator[AdminClient]:
            yield AdminClient("http://test", ADMIN_KEY, send)

        monkeypatch.setattr(base, "connect", connect)

    async def __call__(self, *arguments: str) -> Any:
        """What the command prints. Raises what it ended with."""
        done = await asyncio.to_thread(CliRunner().invoke, main, (*arguments, "--json"), standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return json.loads(done.stdout)
