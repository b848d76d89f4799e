"""Usage events: what happened to one request, never what it is sold for.

Knows: the `UsageEvent`, its versions, their codec and the content hash. Does not know: prices, HTTP, where events are
kept. An event is immutable: its id and its time are minted once at the door, everything else is fixed when it
is settled, so that encoding it again gives the same bytes and a replay changes nothing.

Its version says which fields are its bytes, for ever. A new field is a new version: what was `UsageEvent` becomes the
layout of the version before, and `UsageEvent` adds the field to it, with the default that older events are read with.
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


VERSION = 3
"""Of the events that are made now."""


class VersionError(ValueError):
    """The event is of a version that this code does not know, or has what its version has not."""


class _Version1(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The fields of version 1, in the order of its bytes; never to be changed, since such bytes are kept everywhere.

    Times are microseconds since the epoch, UTC; counts are tokens.
    """

    v: int = VERSION  # what a new event is
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


class _Version2(_Version1, frozen=True, kw_only=True):
    """Version 2 adds what the request took of the engine, which is 0 where the engine did not say it any more.

    It is measured and not checked: a wrong measurement keeps nobody from being billed.
    """

    compute_us: int = 0  # its part of the engine's steps
    kv_block_us: int = 0  # KV-cache blocks that it held, times how long
    preemptions: int = 0  # of its choices


class UsageEvent(_Version2, frozen=True, kw_only=True):
    """One settled request; of an older version, what that version lacks has its default.

    Version 3 adds what can have a price of its own: tokens that the client had kept in the prefix cache, out of the
    prompt's computed ones, and what is not counted in tokens.
    """

    cache_write_tokens: int = 0
    images: int = 0
    audio_ms: int = 0
    tool_calls: int = 0

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
                    self.cache_write_tokens,
                    self.images,
                    self.audio_ms,
                    self.tool_calls,
                )
                >= 0,
                "a count is negative",
            ),
            (self.cached_tokens <= self.prompt_tokens, "cached exceeds prompt"),
            (
                self.cache_write_tokens <= self.prompt_tokens - self.cached_tokens,
                "cache writes exceed the computed prompt",
            ),
            (self.reasoning_tokens <= self.completion_tokens, "reasoning exceeds completion"),
            (self.settled_us >= 0 and self.ts_us > 0, "a time is not set"),
            (bool(self.event_id and self.tenant and self.model), "an identity is empty"),
        ]
        reasons = [reason for holds, reason in checks if not holds]
        if fault := _version_fault(self):
            reasons.append(fault)
        return reasons


class _Tag(msgspec.Struct, frozen=True):
    """What is read of an event before anything else."""

    v: int


_LAYOUTS: dict[int, type[_Version1]] = {1: _Version1, 2: _Version2, VERSION: UsageEvent}
_LACKING = {v: UsageEvent.__struct_fields__[len(layout.__struct_fields__) :] for v, layout in _LAYOUTS.items()}
_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(UsageEvent)
_tag_decoder = msgspec.json.Decoder(_Tag)


def encode(event: UsageEvent) -> bytes:
    """The canonical bytes of an event: JSON with the fields of its version in their order, and sorted metadata.

    Raises `VersionError` for what has no such bytes.
    """
    if fault := _version_fault(event):
        raise VersionError(fault)
    layout = _LAYOUTS[event.v]
    return _encoder.encode(event if layout is UsageEvent else msgspec.convert(event, layout, from_attributes=True))


def decode(data: bytes) -> UsageEvent:
    """Inverse of `encode`: what it returns has these very bytes.

    Raises `VersionError`, and `msgspec.DecodeError` or `msgspec.ValidationError` for what `encode` never gave.
    """
    if fault := _unknown(_tag_decoder.decode(data).v):
        raise VersionError(fault)
    event = _decoder.decode(data)
    if encode(event) != data:
        raise msgspec.ValidationError("not the canonical bytes of an event")
    return event


def content_hash(event: UsageEvent) -> str:
    """SHA-256 hex of the canonical bytes: two events of one id are the same if and only if this agrees.

    Raises `VersionError`.
    """
    return hashlib.sha256(encode(event)).hexdigest()


def _version_fault(event: UsageEvent) -> str | None:
    if event.v == VERSION:  # which nothing is lacking in
        return None
    if fault := _unknown(event.v):
        return fault
    extra = [name for name in _LACKING[event.v] if getattr(event, name)]
    return f"an event of version {event.v} has no {' and no '.join(extra)}" if extra else None


def _unknown(version: int) -> str | None:
    if version in _LAYOUTS:
        return None
    return f"an event of version {version}: this version of Meterhouse knows 1 to {VERSION}"
