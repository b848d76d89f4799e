"""Ids: UUIDv7 (RFC 9562, section 5.7), so that they sort by the time they were minted.

A *request* id is a usage event's; an *exchange* id is one HTTP answer's, sent as `x-request-id` and logged.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

REQUEST_ID = "x-request-id"


def uuid7(now_us: int, entropy: bytes | None = None) -> str:
    """UUIDv7 text for a time in microseconds; the sub-millisecond part fills `rand_a`, `entropy` (8 bytes) the rest."""
    random = int.from_bytes(os.urandom(8) if entropy is None else entropy, "big") & ((1 << 62) - 1)
    milliseconds, rest_us = divmod(now_us, 1000)
    fraction = (rest_us << 12) // 1000
    value = (milliseconds & ((1 << 48) - 1)) << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | random
    return str(uuid.UUID(int=value))


def exchange_id(scope: Any) -> str:
    """The id of one HTTP exchange, minted when it is first asked for and kept in its ASGI state."""
    state = scope["state"]
    if REQUEST_ID not in state:
        state[REQUEST_ID] = "req_" + uuid7(time.time_ns() // 1000).replace("-", "")
    return str(state[REQUEST_ID])
