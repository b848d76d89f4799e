"""Limits of a tenant: requests a minute, tokens a minute, requests at once.

Knows: one token bucket per tenant and limit, in memory, on a monotonic clock in seconds that callers pass in. Does not
know: money, HTTP. What is refused, by a limit or later at the door, takes nothing: a `Lease` gives back what it took.

A bucket holds a minute's allowance and fills evenly. A request takes its prompt and a first stretch of the tokens it
asks for at the start, and at its end the difference to what was done is given back or taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from billing.checks import CONCURRENT, REQUESTS, TOKENS
from gateway.errors import RateLimited

WINDOW_S = 60.0


class Bucket:
    """So many units a minute, refilled evenly; the level may fall below zero when more was done than taken."""

    __slots__ = ("level", "limit", "refilled_s")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self.refilled_s = now_s

    def resize(self, limit: int) -> None:
        """A changed limit keeps what was used."""
        self.level += limit - self.limit
        self.limit = limit

    def refill(self, now_s: float) -> None:
        self.level = min(self.limit, self.level + max(0.0, now_s - self.refilled_s) * self.limit / WINDOW_S)
        self.refilled_s = now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 when it is."""
        if self.level >= amount:
            return 0.0
        return (amount - self.level) * WINDOW_S / self.limit if self.limit else WINDOW_S

    def headers(self, kind: str) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*` for this bucket."""
        return {
            f"x-ratelimit-limit-{kind}": str(self.limit),
            f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(self.level))),
            f"x-ratelimit-reset-{kind}": f"{self.wait_s(self.limit):.3f}s",
        }


class _Usage:
    """What one tenant uses now."""

    __slots__ = ("buckets", "open")

    def __init__(self) -> None:
        self.open = 0
        self.buckets: dict[str, Bucket] = {}


class Lease:
    """One request's place under the limits. `take_tokens` once the prompt is counted, then `close` or `refund`."""

    __slots__ = ("_limits", "_taken", "_usage", "closed", "headers")

    def __init__(self, limits: Limits, usage: _Usage) -> None:
        self._limits = limits
        self._usage = usage
        self._taken: dict[str, int] = {}
        self.closed = False
        self.headers: dict[str, str] = {}

    def take_tokens(self, prompt: int, wanted: int) -> None:
        """Take the prompt and what may follow. Raises `RateLimited` after a refund."""
        bucket = self._usage.buckets.get(TOKENS)
        if bucket is None:
            return
        if prompt > bucket.limit:
            self.refund()
            raise RateLimited(
                f"Request too large: {prompt} prompt tokens, and the limit is {bucket.limit} tokens per minute.",
                limit="tokens",
                headers={**bucket.headers("tokens"), "x-should-retry": "false"},
            )
        self._limits.take(self, TOKENS, "tokens", min(prompt + wanted, bucket.limit))

    def close(self, tokens: int) -> None:
        """The request ended having used `tokens`. Again: nothing."""
        if self.closed:
            return
        self._leave()
        bucket = self._usage.buckets.get(TOKENS)
        if bucket is not None:
            bucket.level = min(bucket.limit, bucket.level + self._taken.get(TOKENS, 0) - tokens)

    def refund(self) -> None:
        """The request was refused: it took nothing. Again: nothing."""
        if self.closed:
            return
        self._leave()
        for name, amount in self._taken.items():
            if name in self._usage.buckets:
                bucket = self._usage.buckets[name]
                bucket.level = min(bucket.limit, bucket.level + amount)

    def _leave(self) -> None:
        self.closed = True
        self._usage.open -= 1
        self._limits.left()


class Limits:
    """All tenants' limits, and the gateway's own on requests in flight."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._tenants: dict[str, _Usage] = {}
        self.open = 0

    def enter(self, tenant: str, limits: Mapping[str, int]) -> Lease:
        """A place for one request. Raises `RateLimited`; then nothing was taken."""
        usage = self._tenants.setdefault(tenant, _Usage())
        self._configure(usage, limits)
        most = limits.get(CONCURRENT)
        if most is not None and usage.open >= most:
            raise RateLimited(
                f"Too many requests at once: the limit is {most}.", limit="requests", headers={"retry-after": "1"}
            )
        usage.open += 1
        self.open += 1
        lease = Lease(self, usage)
        self.take(lease, REQUESTS, "requests", 1)
        return lease

    def take(self, lease: Lease, name: str, kind: str, amount: int) -> None:
        """Take from a bucket for a lease, or refund the lease and raise `RateLimited`."""
        bucket = lease._usage.buckets.get(name)
        if bucket is None:
            return
        bucket.refill(self._clock_s())
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            headers = {
                **bucket.headers(kind),
                "retry-after": str(math.ceil(wait_s)),
                "retry-after-ms": str(math.ceil(wait_s * 1000)),
            }
            lease.refund()
            raise RateLimited(
                f"Rate limit reached: {bucket.limit} {kind} per minute. Try again in {wait_s:.3f} s.",
                limit=kind,
                headers=headers,
            )
        bucket.level -= amount
        lease._taken[name] = amount
        lease.headers.update(bucket.headers(kind))

    def left(self) -> None:
        self.open -= 1

    def _configure(self, usage: _Usage, limits: Mapping[str, int]) -> None:
        for name in (REQUESTS, TOKENS):
            limit, bucket = limits.get(name), usage.buckets.get(name)
            if limit is None:
                usage.buckets.pop(name, None)
            elif bucket is None:
                usage.buckets[name] = Bucket(limit, self._clock_s())
            elif bucket.limit != limit:
                bucket.refill(self._clock_s())
                bucket.resize(limit)
