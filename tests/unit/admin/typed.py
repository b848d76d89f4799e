"""Commands as somebody types them, against the admin API of a test's world: no process, no socket."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import click
import httpx
from click.testing import CliRunner

from gateway.client import AdminClient
from gateway.printing import Printer
from tests.unit.admin.conftest import ADMIN_KEY, World


class Typed:
    """Commands as somebody types them, against the API of a world."""

    def __init__(self, world: World, commands: Callable[[Any], tuple[click.Command, ...]]) -> None:
        loop = asyncio.get_running_loop()

        def send(request: httpx.Request) -> httpx.Response:
            return asyncio.run_coroutine_threadsafe(world.client.send(request), loop).result()

        api = AdminClient("http://test", ADMIN_KEY, send)

        def admin(command: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(command)
            def run(**given: Any) -> None:
                command(api, Printer(as_json=True), **given)

            return run

        self._commands = {command.name: command for command in commands(admin)}

    async def __call__(self, name: str, *arguments: str) -> Any:
        """What the command prints. Raises what it ended with."""
        done = await asyncio.to_thread(CliRunner().invoke, self._commands[name], arguments, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return json.loads(done.stdout)
