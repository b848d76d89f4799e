"""CRC-framed records in a file that is only appended to: `[magic][length][crc32][payload]`.

Knows: how to frame bytes and how to read frames out of a file that a crash, a power cut or a bad disk has
been at. Does not know: what the payloads mean.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

MAGIC = b"MHj1"
MAX_PAYLOAD = 64 << 20
_HEAD = struct.Struct("<4sII")  # magic, payload length, crc32 of the length and the payload
_LENGTH = struct.Struct("<I")


class Damage(NamedTuple):
    """A stretch of a file that holds no valid frame although bytes were written there."""

    offset: int
    length: int


class Scan(NamedTuple):
    """What a file held: the payloads in order, the damaged stretches, and the bytes of a torn tail (0: none)."""

    payloads: list[bytes]
    damage: list[Damage]
    torn: int


def frame(payload: bytes) -> bytes:
    """The bytes to append for one record. Raises `ValueError` past `MAX_PAYLOAD`."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record of {len(payload)} bytes is past {MAX_PAYLOAD}")
    return _HEAD.pack(MAGIC, len(payload), _crc(payload)) + payload


def scan(data: bytes) -> Scan:
    """Read every frame; over a damaged stretch go on at the next valid one.

    An unfinished frame at the end is torn (a process was killed in its write): expected, nothing was
    promised about it. A finished one with a wrong checksum, or anything before a later valid frame, is damage.
    """
    payloads: list[bytes] = []
    damage: list[Damage] = []
    at = 0
    while at < len(data):
        payload = _payload_at(data, at)
        if payload is not None:
            payloads.append(payload)
            at += _HEAD.size + len(payload)
            continue
        after = _next_frame(data, at + 1)
        if after < 0:
            if _is_torn(data, at):
                return Scan(payloads, damage, len(data) - at)
            after = len(data)
        damage.append(Damage(at, after - at))
        at = after
    return Scan(payloads, damage, 0)


def _crc(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _payload_at(data: bytes, at: int) -> bytes | None:
    if len(data) - at < _HEAD.size:
        return None
    magic, length, crc = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    if magic != MAGIC or length > MAX_PAYLOAD or length > len(data) - start:
        return None
    payload = data[start : start + length]
    return payload if _crc(payload) == crc else None


def _next_frame(data: bytes, at: int) -> int:
    while (at := data.find(MAGIC, at)) >= 0:
        if _payload_at(data, at) is not None:
            return at
        at += 1
    return -1


def _is_torn(data: bytes, at: int) -> bool:
    """Whether what begins here is the beginning of a frame, or blocks that never reached the disk (zeros)."""
    rest = data[at:]
    if not rest.strip(b"\0"):
        return True
    if len(rest) < _HEAD.size:
        return MAGIC.startswith(rest[:4])
    magic, length, _ = _HEAD.unpack_from(rest)
    return bool(magic == MAGIC and _HEAD.size + length > len(rest))
