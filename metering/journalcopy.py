"""What a journal knows at one instant, without its segments: for a backup.

Knows: the sums of the requests that ended, and how far those that run had come; how a new folder is made of them, whose
next owner settles what ran, as after a crash. Does not know: where a copy is kept, what else belongs to a backup.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from metering.counts import CountRow, Counts, CountsTuple, add_rows, row_of
from metering.disk import fsync
from metering.events import UsageEvent
from metering.segments import FORMAT, Carried, Header, OpenedRecord, record_frame, segment_path
from metering.totals import Totals


class OpenRequest(msgspec.Struct, frozen=True):
    """A request that runs, with its last journalled counts."""

    opened: OpenedRecord
    counts: CountsTuple


class JournalCopy(msgspec.Struct, frozen=True, kw_only=True):
    """`settled` has one row per tenant, model and hour; `damage` what `Totals` tells of."""

    settled: list[CountRow]
    open: list[OpenRequest]
    damage: list[tuple[int, int, int]]

    def ended(self, events: dict[str, UsageEvent]) -> JournalCopy:
        """The copy as the journal was a moment later, when these of its open requests (id → event) had ended."""
        left = [request for request in self.open if request.opened.event_id not in events]
        return msgspec.structs.replace(
            self, settled=add_rows([*self.settled, *map(row_of, events.values())]), open=left
        )


def write_journal(folder: Path, copy: JournalCopy) -> None:
    """Make a journal's folder, which has no file yet, of a copy; it is on the disk when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    totals = Totals(folder)
    try:
        totals.add(1, copy.settled, copy.damage)
    finally:
        totals.close()
    if copy.open:
        path = segment_path(folder, 2)
        frames = [record_frame(Header(FORMAT, 2))]
        frames += [record_frame(Carried(request.opened, Counts(*request.counts))) for request in copy.open]
        path.write_bytes(b"".join(frames))
        fsync(path)
    fsync(folder)
