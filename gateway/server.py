"""The HTTP server around the application: uvicorn, with a limit on how long a client may not read.

Knows: sockets, signals, connections. Does not know what is served. A client that leaves what was written to it unread
for `write_timeout_s` is cut, so that nobody's buffer grows for ever; the application sees a disconnect and settles.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.stores import StartError

CLOSE_S = 5
"""How long connections get to take their last bytes at shutdown."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises `StartError` when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            raise StartError(
                f"Port {port} on {host} is taken: stop what listens there, or choose another with --port."
            ) from None
        if code == errno.EACCES:
            raise StartError(f"Port {port} on {host} may not be used by this user: choose one above 1023.") from None
        raise StartError(f"{host}:{port} cannot be listened on: {error}.") from None
    return bound


def protocol_class(write_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which cuts a connection whose client reads nothing for so long."""

    class Protocol(HttpToolsProtocol):
        _stalled: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stalled is None:
                self._stalled = self.loop.call_later(write_timeout_s, self._cut)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._read_again()

        def connection_lost(self, exc: Exception | None) -> None:
            self._read_again()
            super().connection_lost(exc)

        def _read_again(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _cut(self) -> None:
            self._stalled = None
            self.transport.abort()

    return Protocol


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handling: `lifecycle` drains first and then sets `should_exit`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp | Any, *, write_timeout_s: float) -> Server:
    """A server that is to be given its bound sockets with `serve(sockets=[…])`."""
    return Server(
        uvicorn.Config(
            app,
            http=protocol_class(write_timeout_s),
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
