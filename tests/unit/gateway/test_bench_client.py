"""The benchmark's HTTP client against servers that answer in every way, well or badly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest

from gateway.bench import arrivals, client
from gateway.bench.client import Target, UrlError
from gateway.bench.record import Answer

Pieces = list[bytes | float]  # what is written, in turn; a number is a pause in seconds
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}], usage=None)


USAGE = event(
    choices=[],
    usage={"prompt_tokens": 7, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}},
)
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


@asynccontextmanager
async def server(pieces: Pieces, seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """Answers every request with the same bytes, then closes; the URL."""

    open_: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        body = await reader.readexactly(length)
        if seen is not None:
            seen.append(head + body)
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            else:
                await asyncio.sleep(piece)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(answer(reader, writer))
        open_.add(task)
        await asyncio.wait([task])
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
        await asyncio.sleep(0.01)  # the connections close


async def asked(pieces: Pieces, *, timeout_s: float = 5.0, endpoint: str = "chat") -> tuple[Answer, str]:
    async with server(pieces) as url:
        target = Target.parse(url, timeout_s=timeout_s)
        began = time.perf_counter()
        reply = await client.ask(target, target.request(endpoint, b"{}"))
        return client.read(reply, repeat=2, index=5, model="m", zero=began)


async def test_a_stream_is_read_to_its_last_count() -> None:
    pieces: Pieces = [OK, chunk(event(choices=[{"delta": {"role": "assistant", "content": ""}}]))]
    pieces += [0.02, chunk(said("one")), 0.02, chunk(b": keep-alive\n\n" + said(" two") + said(" three"))]
    pieces += [0.02, chunk(USAGE + DONE) + END]
    answer, text = await asked(pieces)
    assert text == "one two three"
    assert (answer.error, answer.detail, answer.repeat, answer.index, answer.model) == ("", "", 2, 5, "m")
    assert (answer.prompt, answer.completion, answer.cached) == (7, 6, 4)
    one, two, three = answer.text_s
    assert 0 <= answer.start_s < one < two == three < answer.end_s
    assert one - answer.start_s > 0.015
    assert two - one > 0.015
    assert answer.end_s - three > 0.015


async def test_lines_cut_anywhere_are_put_together_and_stamped_when_whole() -> None:
    body = said("héllo") + said(" wörld") + USAGE + DONE
    for size in (1, 7, 50):
        pieces: Pieces = [OK, *(chunk(body[at : at + size]) for at in range(0, len(body), size)), END]
        answer, text = await asked(pieces)
        assert (text, answer.error, len(answer.text_s), answer.completion) == ("héllo wörld", "", 2, 6)
    half = len(said("late")) // 2
    answer, _ = await asked([OK, chunk(said("late")[:half]), 0.03, chunk(said("late")[half:]), chunk(DONE), END])
    assert answer.text_s[0] - answer.start_s > 0.025


async def test_plain_completions_reasoning_and_several_choices_are_text_too() -> None:
    body = event(choices=[{"text": "a"}, {"text": "b"}]) + event(choices=[{"text": ""}])
    body += event(choices=[{"delta": {"reasoning_content": "c"}}]) + event(choices=[{"delta": {"reasoning": "d"}}])
    answer, text = await asked([OK, chunk(body + DONE), END], endpoint="completions")
    assert (text, len(answer.text_s), answer.prompt, answer.completion) == ("abcd", 4, None, None)


async def test_the_end_is_where_done_is_said_whatever_the_model_writes() -> None:
    answer, text = await asked([OK, chunk(said("data: [DONE]\n\n")), 0.03, chunk(said(" go on")), chunk(DONE), 5.0])
    assert (text, answer.error) == ("data: [DONE]\n\n go on", "")
    assert answer.end_s < 3  # the server kept the connection for longer
    without, text = await asked([OK, chunk(said("no done")), END])
    assert (text, without.error) == ("no done", "")
    closed, text = await asked([b"HTTP/1.0 200 OK\r\n\r\n", said("until closed"), DONE[:-2]])
    assert (text, closed.error) == ("until closed", "")
    sized, text = await asked([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said("sized")), said("sized")])
    assert (text, sized.error) == ("sized", "")


@pytest.mark.parametrize(
    ("pieces", "kind", "detail"),
    [
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nslow down"], "http 429", "slow down"),
        ([b"HTTP/1.1 402 Payment Required\r\nContent-Length: 0\r\n\r\n"], "http 402", ""),
        (
            [OK, chunk(said("a")), chunk(event(error={"message": "engine died"})), chunk(DONE), END],
            "stream error",
            "died",
        ),
        ([OK, chunk(said("a")), chunk(b"data: {not json\n\n"), END], "bad answer", "malformed"),
        ([OK, chunk(event(choices=[{"delta": {"content": 3}}])), END], "bad answer", "Expected `str"),
        ([b"SMTP ready\r\n\r\n"], "bad answer", ""),
        ([OK, chunk(said("a"))], "connection lost", ""),
        ([], "connection lost", ""),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n", said("a")], "connection lost", ""),
        ([OK, chunk(USAGE + DONE), END], "no text", ""),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"], "no text", ""),
    ],
)
async def test_every_failure_has_a_kind(pieces: Pieces, kind: str, detail: str) -> None:
    answer, _ = await asked(pieces)
    assert answer.error == kind
    assert detail in answer.detail


async def test_silence_ends_a_request_and_a_slow_stream_does_not() -> None:
    answer, _ = await asked([OK, chunk(said("a")), 1.0], timeout_s=0.1)
    assert (answer.error, len(answer.text_s)) == ("timeout", 1)
    slow: Pieces = [OK]
    for _ in range(5):
        slow += [0.08, chunk(said("a"))]
    answer, _ = await asked([*slow, chunk(DONE), END], timeout_s=0.2)
    assert (answer.error, len(answer.text_s)) == ("", 5)


async def test_who_is_stopped_leaves_no_connection_open() -> None:
    gone = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + chunk(said("a")))
        await reader.read()  # to the end: the client has closed
        gone.set()
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        target = Target.parse(f"http://127.0.0.1:{port}/v1")
        asking = asyncio.create_task(client.ask(target, target.request("chat", b"{}")))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(5):
            await gone.wait()


async def test_nobody_listening_and_no_such_host_are_told() -> None:
    async with server([]) as url:
        port = int(url.split(":")[2].split("/")[0])
    for target, kind in (
        (Target.parse(f"http://127.0.0.1:{port}/v1"), "connection refused"),
        (Target.parse("http://nobody.invalid:1/v1"), "no such host"),
    ):
        reply = await client.ask(target, target.request("chat", b"{}"))
        answer, _ = client.read(reply, repeat=0, index=0, model="m", zero=0.0)
        assert answer.error == kind


async def test_a_request_says_what_it_must() -> None:
    seen: list[bytes] = []
    async with server([OK, chunk(said("a") + DONE), END], seen) as url:
        target = Target.parse(url, api_key="mh-key")
        await client.ask(target, target.request("completions", b'{"model":"m"}'))
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer mh-key\r\n" in head
    assert b"Host: 127.0.0.1:%d\r\n" % target.port in head
    assert body == b'{"model":"m"}'


def test_urls() -> None:
    assert Target.parse("https://api.example.com/v1/").request("chat", b"").startswith(b"POST /v1/chat/completions ")
    assert Target.parse("https://api.example.com/v1").port == 443
    assert b"Host: [::1]:8000\r\n" in Target.parse("http://[::1]:8000").request("chat", b"")
    for url in ("127.0.0.1:8000/v1", "ftp://host/v1", "http:///v1", "http://host:port/v1", "http://host/a b"):
        with pytest.raises(UrlError):
            Target.parse(url)
    with pytest.raises(UrlError):
        Target.parse("http://host/v1", api_key="a\r\nb: c")


# --- arrivals ------------------------------------------------------------------------------------


def counting(delay_s: float, sent: list[tuple[int, int]]) -> Callable[[int], Awaitable[int]]:
    """A send that notes (number, how many are in flight with it)."""
    flying = 0

    async def send(number: int) -> int:
        nonlocal flying
        flying += 1
        sent.append((number, flying))
        await asyncio.sleep(delay_s * (1 + number % 3))
        flying -= 1
        return number * 10

    return send


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    sent: list[tuple[int, int]] = []
    assert await arrivals.closed_loop(counting(0.001, sent), 20, 4) == [number * 10 for number in range(20)]
    assert [number for number, _ in sent] == list(range(20))
    assert max(flying for _, flying in sent) == 4
    assert await arrivals.closed_loop(counting(0.0, []), 2, 8) == [0, 10]


async def test_an_open_loop_does_not_wait_for_answers_unless_it_is_told_to() -> None:
    sent: list[tuple[int, int]] = []
    times = [0.0, 0.0, 0.0, 0.0]
    assert await arrivals.open_loop(counting(0.01, sent), times) == [0, 10, 20, 30]
    assert max(flying for _, flying in sent) == 4
    sent.clear()
    assert await arrivals.open_loop(counting(0.001, sent), times, 2) == [0, 10, 20, 30]
    assert max(flying for _, flying in sent) == 2
    began = time.perf_counter()
    await arrivals.open_loop(counting(0.0, []), [0.0, 0.05])
    assert time.perf_counter() - began >= 0.05


def test_arrivals_are_poisson_and_the_seeds() -> None:
    times = arrivals.poisson(4.0, 4000, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.0625, rel=0.15)  # exponential
    assert times == arrivals.poisson(4.0, 4000, seed=1) != arrivals.poisson(4.0, 4000, seed=2)
    assert arrivals.poisson(float("inf"), 3, seed=1) == [0.0, 0.0, 0.0]
