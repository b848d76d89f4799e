"""What the gateway's process and the engine's say to each other, and how it is framed.

Knows: the messages and the frames on the socket between `process` (the parent's end) and `child`. Does not
know: what either end does with them. Both ends are of one installation: there is no version to negotiate.
A frame is the payload's length as four bytes, little-endian, and the payload in MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types import AdapterInfo, AdapterRef, EngineConfig, ModelInfo, Request, StepOutput


class Configure(msgspec.Struct, array_like=True, tag=True):
    """The first message: what to serve, and how to log (`engine.logs`)."""

    config: EngineConfig
    log_level: str = "info"
    log_format: str = "auto"


class Submit(msgspec.Struct, array_like=True, tag=True):
    arrived_us: int  # on the clock that all processes of a machine share: CLOCK_MONOTONIC
    request: Request


class Abort(msgspec.Struct, array_like=True, tag=True):
    request_id: str


class SetCeiling(msgspec.Struct, array_like=True, tag=True):
    request_id: str
    tokens: int
    final: bool


class Load(msgspec.Struct, array_like=True, tag=True):
    """`restored`: a child before this one has checked it, and it is read when it is wanted; there is no answer."""

    adapter: AdapterRef
    restored: bool = False


class Unload(msgspec.Struct, array_like=True, tag=True):
    adapter_id: str


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The model is loaded; requests are taken from now on."""

    info: ModelInfo


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The engine cannot start; the process ends."""

    reason: str


class Stepped(msgspec.Struct, array_like=True, tag=True):
    """All that one step did."""

    output: StepOutput


class Loaded(msgspec.Struct, array_like=True, tag=True):
    adapter_id: str
    info: AdapterInfo | None
    reason: str = ""  # why not, when there is no info


class Unloaded(msgspec.Struct, array_like=True, tag=True):
    adapter_id: str


class Waiting(msgspec.Struct, array_like=True, tag=True):
    """Nothing can be computed for whoever is open, but the engine is there: a disk or a grammar keeps it waiting."""


ToChild = Configure | Submit | Abort | SetCeiling | Load | Unload
ToParent = Ready | Failed | Stepped | Loaded | Unloaded | Waiting

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)

_HEAD = 4


def frame(message: ToChild | ToParent) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_HEAD, "little") + payload


class Unframer:
    """Bytes as they come → whole messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @classmethod
    def at_child(cls) -> Unframer:
        return cls(_to_child)

    @classmethod
    def at_parent(cls) -> Unframer:
        return cls(_to_parent)

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now. Raises `msgspec.MsgspecError` for bytes that are none."""
        self._buffer += data
        messages = []
        start = 0
        while (body := start + _HEAD) <= len(self._buffer):
            end = body + int.from_bytes(self._buffer[start:body], "little")
            if end > len(self._buffer):
                break
            messages.append(self._decoder.decode(self._buffer[body:end]))
            start = end
        del self._buffer[:start]
        return messages
