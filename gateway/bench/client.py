"""One streamed request to an OpenAI-compatible server, and when each piece of its answer came.

Knows: HTTP/1.1 and server-sent events as far as a benchmark needs them. Does not know: what is asked, how often, or
what the times mean. A server may share its cores with this client, so little is done while an answer arrives: a time is
taken, the bytes are kept. What they say is read once the answer has ended.

Each request has a connection of its own: a server may close an idle one at the moment it is used again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from gateway.bench.record import Answer

DETAIL_CHARS = 300
ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}


class UrlError(ValueError):
    """The server's URL cannot be used."""


class Target(msgspec.Struct, frozen=True):
    """Where requests go. `prefix` is the path before an endpoint's, `/v1` for most."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str = ""
    timeout_s: float = 300.0  # longest silence, while connecting and while streaming

    @classmethod
    def parse(cls, url: str, *, api_key: str = "", timeout_s: float = 300.0) -> Target:
        """Of a URL up to and including /v1. Raises `UrlError`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UrlError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise UrlError(f"{url!r} is not an http:// or https:// URL")
        tls = parts.scheme == "https"
        if any(ord(character) <= 32 for character in url + api_key) or not api_key.isascii():
            raise UrlError("neither the URL nor the key may hold spaces or control characters")
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"), api_key, timeout_s)

    def request(self, endpoint: str, body: bytes) -> bytes:
        """The bytes of a POST of a JSON body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.prefix}{ENDPOINTS[endpoint]} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Reply(msgspec.Struct):
    """What came back, unread. Times are `time.perf_counter`'s."""

    start: float
    end: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = []  # of the body, as they came
    error: str = ""  # kind
    detail: str = ""


async def ask(target: Target, request: bytes) -> Reply:
    """Send the bytes of a request and take in the answer. A failure is told in the reply, not raised."""
    loop = asyncio.get_running_loop()
    reply = Reply(time.perf_counter())
    stream = _Stream(request, reply, target.timeout_s, loop)
    try:
        async with asyncio.timeout(target.timeout_s):
            await loop.create_connection(lambda: stream, target.host, target.port, ssl=target.tls or None)
        await asyncio.wait({stream.ended})  # a bare await would cancel it too, and the connection would stay open
    except OSError as error:  # TimeoutError is one too
        stream.end(_connect_error(error), str(error))
    finally:
        stream.end("cut", "the benchmark was stopped")  # nothing, once it has ended
    return reply


def _connect_error(error: OSError) -> str:
    match error:
        case ConnectionRefusedError():
            return "connection refused"
        case TimeoutError():
            return "timeout"
        case ssl.SSLError():
            return "TLS failed"
        case socket.gaierror():
            return "no such host"
    return "connection failed"


class _Stream(asyncio.Protocol):
    """Takes one answer into its `Reply`. `ended` is done when no more of it is waited for."""

    def __init__(self, request: bytes, reply: Reply, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._reply = reply
        self._timeout_s = timeout_s
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._heard = reply.start  # when the last bytes came
        self._sized = False  # the answer says itself where it ends
        self._transport: asyncio.Transport | None = None
        self._timer = loop.call_later(timeout_s, self._watch)

    def end(self, error: str = "", detail: str = "") -> None:
        """The answer is over; the first call says how."""
        if self.ended.done():
            return
        self._reply.end = time.perf_counter()
        self._reply.error, self._reply.detail = error, detail[:DETAIL_CHARS]
        self.ended.set_result(None)
        self._timer.cancel()
        if self._transport is not None:
            self._transport.close()

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it
        if self.ended.done():
            self._transport.close()
        else:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.end("bad answer", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._reply.status and not self._sized:
            self.end()  # HTTP/1.0's way: the answer ends where the connection does
        self.end("connection lost", "" if error is None else str(error))

    # httptools'

    def on_header(self, name: bytes, value: bytes) -> None:
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.pieces.append((self._heard, body))
        # No JSON holds a bare line feed, so this is the end, whatever the model wrote.
        if body.endswith(b"[DONE]\n\n"):
            self.end()

    def on_message_complete(self) -> None:
        if self._reply.status >= 200:  # 1xx is followed by the answer
            self.end()

    def _watch(self) -> None:
        silent_s = time.perf_counter() - self._heard
        if silent_s >= self._timeout_s:
            self.end("timeout", f"nothing came for {self._timeout_s:g} s")
        else:
            self._timer = self._loop.call_later(self._timeout_s - silent_s, self._watch)


# --- reading -------------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_chunks = msgspec.json.Decoder(_Chunk)


def read(reply: Reply, *, repeat: int, index: int, model: str, zero: float) -> tuple[Answer, str]:
    """What a reply says, with times from `zero` on, and its text."""
    answer = Answer(repeat=repeat, index=index, model=model, start_s=reply.start - zero, end_s=reply.end - zero)
    answer.error, answer.detail = reply.error, reply.detail
    if reply.status not in (0, 200):
        body = b"".join(piece for _, piece in reply.pieces)[:DETAIL_CHARS]
        answer.error, answer.detail = f"http {reply.status}", body.decode("utf-8", "replace")
        return answer, ""
    text: list[str] = []
    try:
        for at, data in _events(reply.pieces):
            if data == b"[DONE]":
                answer.end_s, answer.error, answer.detail = at - zero, "", ""
                break
            if not _take(answer, _chunks.decode(data), at - zero, text):
                break
    except msgspec.DecodeError as error:
        answer.error, answer.detail = "bad answer", str(error)[:DETAIL_CHARS]
    if not answer.error and not answer.text_s:
        answer.error = "no text"
    return answer, "".join(text)


def _events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of each event line, with the time at which the line was whole."""
    events: list[tuple[float, bytes]] = []
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        events += [(at, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    if rest.startswith(b"data:"):  # the last line of a server that sends no line feed after it
        events.append((pieces[-1][0], rest[5:].strip()))
    return events


def _take(answer: Answer, chunk: _Chunk, at_s: float, text: list[str]) -> bool:
    """Add what a chunk says; False when it says that the answer failed."""
    if bytes(chunk.error) not in (b"", b"null", b"false", b'""', b"{}"):
        answer.error, answer.detail = "stream error", bytes(chunk.error).decode("utf-8", "replace")[:DETAIL_CHARS]
        return False
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        answer.prompt, answer.completion = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        answer.cached = (details.cached_tokens if details is not None else None) or 0
    for choice in chunk.choices or []:
        delta = choice.delta or _Delta()
        said = choice.text or delta.content or delta.reasoning_content or delta.reasoning
        if said:
            answer.text_s.append(at_s)
            text.append(said)
    return True
