"""`Idempotency-Key` on admin POSTs: what the ledger needs to give a repeated call its first answer.

The ledger keeps key and payload hash with the event that the first call appended, in one transaction, so the
promise survives every crash. The hash covers path and body: one key on two routes is a conflict, not a replay.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, TypeAlias

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.params import HeaderParameter

from billing.service import Idempotency

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="A repeated call with the same key and body gets the first answer; with another body, 409.",
    ),
]

Once: TypeAlias = NamedDependency[Idempotency | None]
"""The call's idempotency, as a route's handler asks for it under the name `idempotency`."""


async def provide_idempotency(
    request: Request[Any, Any, Any], idempotency_key: IdempotencyKey = None
) -> Idempotency | None:
    """The call's key with the hash of what it asks for; None when it has no key."""
    if idempotency_key is None:
        return None
    return Idempotency(
        key=idempotency_key,
        payload_hash=payload_hash(request.method, request.url.path, await request.body()),
    )


def payload_hash(method: str, path: str, raw: bytes) -> str:
    """SHA-256 hex of a call; the same for bodies that differ only in white space or the order of fields."""
    body = msgspec.json.encode(msgspec.json.decode(raw), order="sorted") if raw else b""
    return hashlib.sha256(b"\0".join((method.encode(), path.encode(), body))).hexdigest()
