"""The records of the journal, their fold, and the folder of segments as a crash left it.

Knows: what a record means and which segments are still to be read. Does not know: how they are written
while requests run (`metering.journal`), where settlements go.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from metering.counts import CountRow, Counts, CountsTuple, add_rows, hour_of
from metering.disk import fsync
from metering.events import Outcome, UsageEvent
from metering.frames import frame, scan
from metering.totals import Totals

log = logging.getLogger(__name__)

FORMAT = 1


class JournalError(Exception):
    """The journal cannot be opened, read or written; the text says why."""


class OpenedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a `UsageEvent` that is known when its request is let in."""

    event_id: str
    ts_us: int
    tenant: str
    key_id: str
    model: str
    base_model: str
    adapter: str = ""
    endpoint: str
    gateway: str
    n: int = 1
    stream: bool = False
    user: str = ""
    metadata: dict[str, str] = {}
    prompt_tokens: int = 0  # size of the prompt that was submitted; what is billed is what was computed

    def event(
        self,
        counts: CountsTuple,
        *,
        outcome: Outcome,
        settled_us: int,
        gateway: str | None = None,
        finish_reason: str = "",
        queue_us: int = 0,
        ttft_us: int = 0,
        duration_us: int = 0,
        compute_us: int = 0,
        kv_block_us: int = 0,
        preemptions: int = 0,
    ) -> UsageEvent:
        """The request's settlement, from its cumulative counts. `gateway`: who settles it, if not who opened it."""
        total = Counts(*counts)
        return UsageEvent(
            event_id=self.event_id,
            ts_us=self.ts_us,
            settled_us=settled_us,
            tenant=self.tenant,
            key_id=self.key_id,
            model=self.model,
            base_model=self.base_model,
            adapter=self.adapter,
            endpoint=self.endpoint,
            gateway=self.gateway if gateway is None else gateway,
            outcome=outcome,
            finish_reason=finish_reason,
            prompt_tokens=total.prompt,
            cached_tokens=total.cached,
            completion_tokens=total.completion,
            reasoning_tokens=total.reasoning,
            recomputed_tokens=total.recomputed,
            rejected_tokens=total.rejected,
            n=self.n,
            stream=self.stream,
            user=self.user,
            metadata=self.metadata,
            queue_us=queue_us,
            ttft_us=ttft_us,
            duration_us=duration_us,
            compute_us=compute_us,
            kv_block_us=kv_block_us,
            preemptions=preemptions,
        )


class Orphan(NamedTuple):
    """A request that was opened and never settled, with its last journalled counts."""

    opened: OpenedRecord
    counts: Counts


# -- records on disk -----------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    format: int
    number: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    opened: OpenedRecord


class Carried(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    opened: OpenedRecord
    counts: CountsTuple


class Step(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    progress: list[tuple[str, CountsTuple]]


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    event_id: str


Record = Header | Opened | Carried | Step | Settled
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def record_frame(record: Record) -> bytes:
    """The framed bytes of one record."""
    return frame(_encoder.encode(record))


class Tracked:
    """One request as the records tell it."""

    __slots__ = ("counts", "opened", "settled")

    def __init__(self, opened: OpenedRecord, counts: CountsTuple) -> None:
        self.opened = opened
        self.counts = counts
        self.settled = False

    def row(self) -> CountRow:
        record, counts = self.opened, Counts(*self.counts)
        return CountRow(
            record.tenant, record.model, hour_of(record.ts_us), 1, counts.prompt, counts.cached, counts.completion
        )


class State:
    """The fold of the records: the running journal and the recovery after a crash share it."""

    def __init__(self) -> None:
        self.requests: dict[str, Tracked] = {}
        self.unknown_total = 0  # counts of requests that were never opened here, or were retired before

    def apply(self, record: Record) -> None:
        if isinstance(record, Step):
            for event_id, counts in record.progress:
                request = self.requests.get(event_id)
                if request is None:
                    self.unknown_total += 1
                else:  # also after it was settled: what the engine did beyond the bill must show up in reconciliation
                    request.counts = counts
        elif isinstance(record, Settled):
            if record.event_id in self.requests:
                self.requests[record.event_id].settled = True
        elif isinstance(record, Opened):
            self.requests.setdefault(record.opened.event_id, Tracked(record.opened, Counts()))
        elif isinstance(record, Carried):
            self.requests[record.opened.event_id] = Tracked(record.opened, record.counts)

    def orphans(self) -> list[Orphan]:
        return [Orphan(r.opened, Counts(*r.counts)) for r in self.requests.values() if not r.settled]

    def take_settled(self) -> list[Tracked]:
        """Remove the settled requests and return them."""
        settled = [request for request in self.requests.values() if request.settled]
        self.requests = {key: request for key, request in self.requests.items() if not request.settled}
        return settled


# -- the folder ----------------------------------------------------------------------------------


class Folder(NamedTuple):
    """The live segments of a folder, read: oldest first."""

    state: State
    segments: list[tuple[int, Path]]
    damage: list[tuple[int, int, int]]  # (segment number, offset, length)


def segment_path(folder: Path, number: int) -> Path:
    """Where a segment lies; numbers only grow."""
    return folder / f"segment-{number:010d}.mhj"


def live_segments(folder: Path) -> list[tuple[int, Path]]:
    """The segments in the folder, oldest first."""
    return sorted((int(path.stem.removeprefix("segment-")), path) for path in folder.glob("segment-*.mhj"))


def read_folder(folder: Path, through: int) -> Folder:
    """Fold every segment after `through`. Raises `JournalError` when a newer version wrote one."""
    state = State()
    damage: list[tuple[int, int, int]] = []
    segments = [(number, path) for number, path in live_segments(folder) if number > through]
    for number, path in segments:
        found = scan(path.read_bytes())
        damage += [(number, *stretch) for stretch in found.damage]
        for stretch in found.damage:
            log.error("journal: %s: %d damaged bytes at %d", path.name, stretch.length, stretch.offset)
        if found.torn:
            log.warning("journal: %s: its last %d bytes are no whole record: torn", path.name, found.torn)
        for payload in found.payloads:
            try:
                record = _decoder.decode(payload)
            except msgspec.MsgspecError as error:
                raise JournalError(f"{path} holds a record this version cannot read: {error}") from error
            if isinstance(record, Header) and record.format > FORMAT:
                raise JournalError(f"{path} was written by a newer version (format {record.format})")
            state.apply(record)
    return Folder(state, segments, damage)


def retire(folder: Path, totals: Totals, found: Folder) -> None:
    """Add all of a folder's requests to the totals, then drop its segments (keep damaged ones to look at)."""
    if found.segments:
        rows = add_rows(request.row() for request in found.state.requests.values())
        totals.add(found.segments[-1][0], rows, found.damage)
    damaged = {number for number, _, _ in found.damage}
    through = totals.through()
    for number, path in live_segments(folder):
        if number in damaged:
            (folder / "damaged").mkdir(exist_ok=True)
            path.rename(folder / "damaged" / path.name)
        elif number <= through:
            path.unlink()
    fsync(folder)
