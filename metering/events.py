"""Usage events: what happened to one request, never what it costs.

Knows: the `UsageEvent`, its codec and its content hash. Does not know: prices, HTTP, where events are kept.
An event is immutable: its id and its time are minted once at the door, everything else is fixed when it
is settled, so that encoding it again gives the same bytes and a replay changes nothing.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"  # stop or length; also where the money ended (finish_reason "quota")
    ABORT = "abort"  # the client went away
    DEADLINE = "deadline"
    EXPIRED = "expired"  # it waited in the engine's queue for longer than it may
    ENGINE_DIED = "engine_died"
    ERROR = "error"  # this request alone failed in the engine
    SHUTDOWN = "shutdown"
    INTERRUPTED = "interrupted"  # the gateway died; settled at the next start from the journal


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One settled request. Times are microseconds since the epoch, UTC; counts are tokens."""

    v: int = 1
    event_id: str  # the request id, a UUIDv7
    ts_us: int  # when the request began: the event's time for ever, and the price's
    settled_us: int  # when it was settled; fixed in the spool
    tenant: str
    key_id: str
    model: str  # the name the client asked for, which is the name that is priced
    base_model: str
    adapter: str = ""  # adapter name; empty: the base model
    endpoint: str  # "chat.completions", "completions", …
    gateway: str  # the gateway instance that settled it
    outcome: Outcome
    finish_reason: str = ""  # "stop", "length", "quota" or empty
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    recomputed_tokens: int = 0
    rejected_tokens: int = 0
    n: int = 1
    stream: bool = False
    estimated: bool = False
    user: str = ""
    metadata: dict[str, str] = {}
    queue_us: int = 0
    ttft_us: int = 0  # 0: no token came
    duration_us: int = 0

    def faults(self) -> list[str]:
        """What contradicts the rules of counting; empty for an event that may be stored."""
        checks = [
            (
                min(
                    self.prompt_tokens,
                    self.cached_tokens,
                    self.completion_tokens,
                    self.reasoning_tokens,
                    self.recomputed_tokens,
                    self.rejected_tokens,
                )
                >= 0,
                "a count is negative",
            ),
            (self.cached_tokens <= self.prompt_tokens, "cached exceeds prompt"),
            (self.reasoning_tokens <= self.completion_tokens, "reasoning exceeds completion"),
            (self.settled_us >= 0 and self.ts_us > 0, "a time is not set"),
            (bool(self.event_id and self.tenant and self.model), "an identity is empty"),
        ]
        return [reason for holds, reason in checks if not holds]


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(UsageEvent)


def encode(event: UsageEvent) -> bytes:
    """The canonical bytes of an event: JSON with a fixed field order and sorted metadata."""
    return _encoder.encode(event)


def decode(data: bytes) -> UsageEvent:
    """Inverse of `encode`. Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _decoder.decode(data)


def content_hash(event: UsageEvent) -> str:
    """SHA-256 hex of the canonical bytes: two events of one id are the same if and only if this agrees."""
    return hashlib.sha256(encode(event)).hexdigest()
