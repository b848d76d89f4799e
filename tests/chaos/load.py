"""The clients of the campaign, and what each of them saw.

Knows: OpenAI's stream of completions, cutting it, and asking again with the same Idempotency-Key. Does not know who is
killed. The engine without a model says one ASCII character a token, so what a client received can be counted.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field

import httpx

TENANTS = ("red", "green", "blue")
Told = tuple[int, int, int]  # prompt, cached, completion tokens of an answer's usage


@dataclass
class Attempt:
    """One HTTP request as its client saw it. `id` is the event's, once an answer has begun."""

    id: str = ""
    received: int = 0  # tokens
    end: str = "broken"  # finished, cut, told (an error frame), refused (a status), broken
    told: Told | None = None


@dataclass
class Ask:
    """What one client wanted, in as many attempts as it took. `label` is sent as `user`."""

    label: str
    tenant: str
    max_tokens: int
    key: str | None = None  # Idempotency-Key
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def finished(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.end == "finished"), None)


class Crowd:
    """Clients that ask without a pause, each in its own way, drawn from `rng`."""

    def __init__(self, url: str, keys: dict[str, str], rng: random.Random, streams: int) -> None:
        self.asks: list[Ask] = []
        self.stopping = False
        self._keys, self._rng, self._streams = keys, rng, streams
        limits = httpx.Limits(max_connections=4 * streams)
        self._client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(20, connect=2), limits=limits)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def attempts(self) -> list[Attempt]:
        return [attempt for ask in self.asks for attempt in ask.attempts]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_on(i)) for i in range(self._streams)]

    async def stop(self) -> None:
        """Let each client come to the end of what it is asking."""
        self.stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _ask_on(self, number: int) -> None:
        while not self.stopping:
            tenant = TENANTS[number % len(TENANTS)]
            label = f"{tenant}-{len(self.asks)}"
            kept = self._rng.random() < 0.3
            ask = Ask(label, tenant, self._rng.randint(1, 60), f"key-{label}" if kept else None)
            self.asks.append(ask)
            stream, cut = self._rng.random() < 0.8, self._rng.randint(1, 40) if self._rng.random() < 0.2 else None
            while True:
                attempt = Attempt()
                ask.attempts.append(attempt)
                await self._attempt(ask, attempt, stream, None if kept else cut)
                if attempt.end in ("refused", "broken"):
                    await asyncio.sleep(self._rng.uniform(0.05, 0.25))
                if attempt.end in ("finished", "cut") or self.stopping or not kept:
                    break

    async def _attempt(self, ask: Ask, attempt: Attempt, stream: bool, cut: int | None) -> None:
        body = {
            "prompt": f"Tell {ask.tenant} a story of {ask.label}.",
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "user": ask.label,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        headers = {"authorization": f"Bearer {self._keys[ask.tenant]}"}
        if ask.key is not None:
            headers["idempotency-key"] = ask.key
        try:
            async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    attempt.end = "refused"
                    await answer.aread()
                    return
                async for line in answer.aiter_lines():
                    if line and not line.startswith(":"):
                        self._read(attempt, line.removeprefix("data: "))
                    if cut is not None and attempt.received >= cut and attempt.end == "broken":
                        attempt.end = "cut"
                        return
        except httpx.HTTPError:
            attempt.end = "broken" if attempt.end != "finished" else attempt.end

    @staticmethod
    def _read(attempt: Attempt, line: str) -> None:
        if line == "[DONE]":
            return
        said = json.loads(line)
        if "error" in said:
            attempt.end = "told"
            return
        attempt.id = said["id"].removeprefix("cmpl-")
        attempt.received += sum(len(choice["text"]) for choice in said["choices"])
        if usage := said.get("usage"):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            attempt.told = (usage["prompt_tokens"], cached, usage["completion_tokens"])
            attempt.end = "finished"
