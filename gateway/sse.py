"""Answers on the wire: what has been said so far (`Answer`), and the ASGI application that sends it (`Reply`).

Knows: server-sent events as pre-encoded bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html),
`[DONE]`, keep-alive comments, error frames, and how a client that goes away is noticed. Does not know what the frames
mean. An answer is written by one task and read by any number of clients (a retry joins the first attempt); the writer
never waits for a reader, and a reader that does not read is cut by the server's write timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.errors import ApiError, envelope

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

GONE_S = 1.0
"""How long the word that a client has left may take after a write to it failed."""

_encode = msgspec.json.Encoder().encode

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def frame(payload: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + _encode(payload) + b"\n\n"


def error_body(error: ApiError) -> bytes:
    """The body of an answer that is an error."""
    return _encode(envelope(error))


def error_frame(error: ApiError) -> bytes:
    """The event that ends a stream which had begun: OpenAI's SDKs raise on it."""
    return frame(envelope(error))


class Answer:
    """What is to be sent, growing until `done`. `keep` retains everything for readers that come later."""

    def __init__(self, *, stream: bool, keep: bool) -> None:
        self.stream = stream
        self.keep = keep
        self.done = False
        self.error: ApiError | None = None
        self.headers: dict[str, str] = {}
        self.readers = 0
        self._frames: list[bytes] = []
        self._waiting: set[asyncio.Future[None]] = set()

    def say(self, frames: list[bytes]) -> None:
        """Add frames (of a stream) or the body."""
        if frames:
            self._frames += frames
            self._wake()

    def end(self, frames: list[bytes]) -> None:
        """Add the last frames; nothing follows."""
        self._frames += frames
        self.done = True
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End with an error: a status where nothing was sent yet, a frame and `[DONE]` where a stream had begun."""
        self.error = error
        self.done = True
        self._wake()

    def since(self, position: int) -> bytes:
        """All frames from `position` on, as one piece of bytes. Without `keep` they are dropped: one reader only."""
        if self.keep:
            return b"".join(self._frames[position:])
        frames, self._frames = self._frames, []
        return b"".join(frames)

    @property
    def said(self) -> int:
        """How many frames there are (kept ones, or those not yet taken)."""
        return len(self._frames)

    def body(self) -> bytes:
        """Everything said so far; whole only with `keep`."""
        return b"".join(self._frames)

    async def more(self, position: int, gone: asyncio.Future[Any], timeout_s: float | None) -> None:
        """Return when there is more after `position`, it is done, the reader is gone, or the time is over."""
        if self.done or self.said > position or gone.done():
            return
        loop = asyncio.get_running_loop()
        wake: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout_s, _set, wake) if timeout_s is not None else None
        self._waiting.add(wake)
        wake_on_gone = _waker(wake)
        gone.add_done_callback(wake_on_gone)
        try:
            await wake
        finally:
            self._waiting.discard(wake)
            gone.remove_done_callback(wake_on_gone)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for waiting in self._waiting:
            _set(waiting)
        self._waiting.clear()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _waker(future: asyncio.Future[None]) -> Callable[[asyncio.Future[Any]], None]:
    return lambda _: _set(future)


class Reply:
    """ASGI application: sends one answer to one client.

    `on_gone` is called when this was the last reader and it left before the end.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        keepalive_s: float,
        on_gone: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._answer = answer
        self._keepalive_s = keepalive_s
        self._on_gone = on_gone
        self._headers = dict(headers or {})
        self._position = 0
        answer.readers += 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        complete = False
        try:
            complete = await (self._send_stream(send, gone) if self._answer.stream else self._send_body(send, gone))
        except (OSError, RuntimeError):
            # Servers raise when they have closed the connection, and say that the client has left only then.
            await asyncio.wait({gone}, timeout=GONE_S)
            if not gone.done():
                raise
        finally:
            gone.cancel()
            self._answer.readers -= 1
            if not complete and self._answer.readers == 0 and self._on_gone is not None:
                self._on_gone()

    async def _send_body(self, send: Any, gone: asyncio.Future[None]) -> bool:
        answer = self._answer
        while not answer.done and not gone.done():
            await answer.more(1 << 62, gone, None)
        if gone.done():
            return answer.done
        if answer.error is not None:
            await self._send_error(send, answer.error)
            return True
        body = answer.body()
        await self._start(send, ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))))
        await send({"type": "http.response.body", "body": body})
        return True

    async def _send_stream(self, send: Any, gone: asyncio.Future[None]) -> bool:
        answer, started = self._answer, False
        while not gone.done():
            if answer.said > self._position:
                piece = self._next()
            elif answer.done:
                break
            else:
                await answer.more(self._position, gone, self._keepalive_s)
                if answer.said <= self._position and not answer.done and not gone.done():
                    piece = KEEP_ALIVE
                else:
                    continue
            if not started:
                started = True
                await self._start(send, _STREAM_HEADERS)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if gone.done():
            return answer.done
        if answer.error is not None and not started:
            await self._send_error(send, answer.error)
            return True
        ending = error_frame(answer.error) + DONE if answer.error is not None else b""
        await send({"type": "http.response.body", "body": ending, "more_body": False})
        return True

    def _next(self) -> bytes:
        piece = self._answer.since(self._position)
        if self._answer.keep:
            self._position = self._answer.said
        return piece

    async def _send_error(self, send: Any, error: ApiError) -> None:
        body = error_body(error)
        await self._start(
            send,
            ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))),
            status=error.status,
            extra=error.headers,
        )
        await send({"type": "http.response.body", "body": body})

    async def _start(
        self,
        send: Any,
        headers: tuple[tuple[bytes, bytes], ...],
        *,
        status: int = 200,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        merged = {**self._answer.headers, **self._headers, **(extra or {})}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *encoded]})


async def _disconnected(receive: Any) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
