"""What a benchmark saw, as it is kept: one JSON object a line, from which every statistic can be computed again.

Knows: the file's lines. Does not know: what is computed from them (`statistics`) or how they came about (`client`).
A time is in seconds of a monotonic clock that is 0 when its repeat began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1


class RecordError(Exception):
    """A file is no record of a benchmark; the text says where."""


class Begin(msgspec.Struct, kw_only=True, tag_field="line", tag="bench"):
    """The first line: what was asked of whom. Holds no key."""

    format: int = FORMAT
    at: str  # RFC 3339
    options: dict[str, Any] = {}


class Answer(msgspec.Struct, kw_only=True, tag_field="line", tag="request", omit_defaults=True):
    """One request. Its error is one of a few kinds ("http 429", "timeout", …), with the detail beside it."""

    repeat: int
    index: int
    model: str = ""
    start_s: float  # before the connection was opened
    text_s: list[float] = []  # one for each piece of text, when it was received
    end_s: float  # `[DONE]`, or the end of the answer
    prompt: int | None = None  # None: the server told no usage
    completion: int | None = None
    cached: int = 0
    error: str = ""
    detail: str = ""


class Repeat(msgspec.Struct, kw_only=True, tag_field="line", tag="repeat"):
    """The end of a repeat. `wall_s` is from before its first request to after its last."""

    repeat: int
    wall_s: float
    client_cpu_s: float = 0.0  # what the client itself used, of one core


Line = Begin | Answer | Repeat

_decoder = msgspec.json.Decoder(Line)


class Record(msgspec.Struct):
    """All of a record's lines."""

    begin: Begin
    repeats: list[Repeat] = []
    answers: list[Answer] = []

    def of(self, repeat: int) -> list[Answer]:
        """The answers of one repeat, in the order of the requests."""
        return sorted((a for a in self.answers if a.repeat == repeat), key=lambda answer: answer.index)


def append(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a record, made if it is not there. Raises `OSError`."""
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)


def load(path: Path) -> Record:
    """A whole record. Raises `RecordError`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"the record cannot be read: {error.strerror}") from error
    decoded = [_decode(number, line) for number, line in enumerate(lines, 1)]
    if not decoded or not isinstance(decoded[0], Begin):
        raise RecordError("line 1 does not begin a benchmark")
    if decoded[0].format != FORMAT:
        raise RecordError(f"the record has format {decoded[0].format}, and only {FORMAT} is known")
    return gather(decoded[0], decoded[1:])


def gather(begin: Begin, lines: Sequence[Line]) -> Record:
    """A record of lines that follow its beginning. Raises `RecordError`."""
    record = Record(begin)
    for line in lines:
        match line:
            case Begin():
                raise RecordError("the record holds two benchmarks")
            case Repeat():
                record.repeats.append(line)
            case Answer():
                record.answers.append(line)
    whole = {repeat.repeat for repeat in record.repeats}
    if len(whole) != len(record.repeats):
        raise RecordError("the record ends one repeat twice")
    if not whole:
        raise RecordError("the record has no whole repeat")
    record.answers = [answer for answer in record.answers if answer.repeat in whole]
    return record


def _decode(number: int, line: bytes) -> Line:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise RecordError(f"line {number} is not a benchmark's: {error}") from error
