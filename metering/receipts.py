"""What a tenant sees of an event, and the receipt that its client is given for it.

A `TenantEvent` is a projection: what was asked, how it ended and everything that can have a price. It has no `user` and
no `metadata`, which are personal and may be erased while an invoice stays provable, and nothing of how the house runs.
Its canonical bytes (JSON, keys sorted, no spaces, no float) are a leaf of the invoice's Merkle tree; they are the same
whatever version the event is of.

The bytes are fixed for ever. A field that is added later stands in them only where it has not its default, so that
older events keep theirs.

Pure. Does not know: the tree, invoices, HTTP.
"""

from __future__ import annotations

import hashlib

import msgspec

from metering.events import UsageEvent


class TenantEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One settled request as its tenant sees it. Times are microseconds since the epoch, UTC; counts are whole."""

    v: int = 1
    event_id: str
    ts_us: int
    tenant: str
    key_id: str
    model: str
    base_model: str
    adapter: str
    endpoint: str
    outcome: str
    finish_reason: str
    n: int
    stream: bool
    estimated: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cache_write_tokens: int
    images: int
    audio_ms: int
    tool_calls: int
    compute_us: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the client keeps: the event's id, its counts, and the hash of its leaf (hex)."""

    event_id: str
    leaf: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


_encoder = msgspec.json.Encoder(order="sorted")


def seen(event: UsageEvent) -> TenantEvent:
    """The tenant's view of an event."""
    return TenantEvent(
        event_id=event.event_id,
        ts_us=event.ts_us,
        tenant=event.tenant,
        key_id=event.key_id,
        model=event.model,
        base_model=event.base_model,
        adapter=event.adapter,
        endpoint=event.endpoint,
        outcome=event.outcome.value,
        finish_reason=event.finish_reason,
        n=event.n,
        stream=event.stream,
        estimated=event.estimated,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        reasoning_tokens=event.reasoning_tokens,
        cache_write_tokens=event.cache_write_tokens,
        images=event.images,
        audio_ms=event.audio_ms,
        tool_calls=event.tool_calls,
        compute_us=event.compute_us,
    )


def leaf_bytes(event: UsageEvent) -> bytes:
    """The canonical bytes of the tenant's view: a leaf, and a line of `events.jsonl`."""
    return _encoder.encode(seen(event))


def leaf_of(event: UsageEvent) -> bytes:
    """The hash of the event's leaf (RFC 6962: SHA-256 behind a zero byte)."""
    return hashlib.sha256(b"\x00" + leaf_bytes(event)).digest()


def receipt_of(event: UsageEvent) -> Receipt:
    """The receipt for a settled event; it needs nothing but the event."""
    return Receipt(
        event_id=event.event_id,
        leaf=leaf_of(event).hex(),
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        reasoning_tokens=event.reasoning_tokens,
    )


def encode_receipt(receipt: Receipt) -> bytes:
    """One line of JSON, keys sorted: a header's value, and a line of `receipts.jsonl`."""
    return _encoder.encode(receipt)
