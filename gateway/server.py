"""The HTTP server around the application: uvicorn, with limits on what a connection may keep from everybody else.

Knows: sockets, signals, connections. Does not know what is served. A client that leaves what was written to it unread
for `write_timeout_s` is cut, so that nobody's buffer grows for ever; the application sees a disconnect and settles.
One whose head of a request is larger than `MAX_HEAD_BYTES`, or not there after `HEAD_TIMEOUT_S`, is cut too: both come
before any key is asked for. Answers to what is no HTTP are written here, in OpenAI's envelope.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import ApiError, BadRequest, HeadTooLarge
from gateway.sse import error_body
from gateway.stores import StartError

CLOSE_S = 5
"""How long connections get to take their last bytes at shutdown."""

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
"""For a request line and its headers, from the moment the connection waits for them."""


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


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it: each idle connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with the limits of this module. `write_timeout_s` is set by `protocol_class`."""

    write_timeout_s: float
    head_timeout_s = HEAD_TIMEOUT_S

    _stalled: asyncio.TimerHandle | None = None
    _waiting: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # with pipelining not the last one read, which `cycle` is
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # a socket's is a Transport
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reads_again()
        self._head_is_there()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    # -- a client that does not read ---------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads_again()

    def _reads_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # -- a client that does not say what it wants --------------------------------------------------

    def data_received(self, data: bytes) -> None:
        all_head = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and all_head:  # a head's first piece may come with the body before it: not counted here
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")
                return
        if self._in_head or not self._answers():
            self._watch_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("head too large")  # the parser stops, and `send_400_response` is called
        self._in_head = False
        self._head_is_there()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed, and close. `msg` is uvicorn's; the client gets the envelope."""
        error: ApiError = BadRequest("The request is not valid HTTP/1.1.", code="invalid_http")
        if self._head_bytes > MAX_HEAD_BYTES:
            error = HeadTooLarge(f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes.")
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _answers(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _watch_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _head_is_there(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _head_is_late(self) -> None:
        self._waiting = None
        if self._answers():  # half of a pipelined request must not cut the answer before it
            self._watch_head()
        else:
            self.transport.abort()


def protocol_class(write_timeout_s: float) -> type[Connection]:
    """The protocol of a server whose clients may leave what is written to them unread for so long."""
    return type("Connection", (Connection,), {"write_timeout_s": write_timeout_s})


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
