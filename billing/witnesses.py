"""The two witnesses of a cut, matched as both stream by: the ledger's charges and the usage store's events.

The ledger gives charges in the order in which they were recorded, the store events in the order of time and id. A
charge is recorded moments after its request ended, so the two run side by side: of each only what the other has not
shown yet is kept, and a month of any size is matched in little memory.

Pure. Does not know: prices, which charges an invoice may take, where either comes from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from billing.invoice import Invoice
from billing.ledger import UsageRated
from metering.events import UsageEvent, content_hash

AHEAD_US = 600_000_000
"""The ledger is read so far past an event that it does not show yet; one that is recorded later waits in memory."""


class Entry(msgspec.Struct, frozen=True):
    """A charge of the ledger, and what keeps an invoice from taking it as its own."""

    rated: UsageRated
    late_of: Invoice | None  # the standing invoice that it comes too late for
    free: bool = True  # no standing invoice has it


class _Seen:
    """An event that the store showed, and whether its charge did."""

    __slots__ = ("decided", "entry", "event")

    def __init__(self, event: UsageEvent) -> None:
        self.event = event
        self.entry: Entry | None = None  # of a free charge with this content
        self.decided = False


class Witnesses:
    """Matches events with one stream of charges; each charge with at most one event."""

    def __init__(self, charges: Iterable[Entry]) -> None:
        self._charges = iter(charges)
        self._read_us = 0  # how far in time the charges have been read
        self._charged: dict[str, Entry] = {}  # that no event was seen of
        self._uncharged: dict[str, list[_Seen]] = {}  # of each id every content that was seen

    def match(self, events: Iterable[UsageEvent]) -> Iterator[tuple[Entry, UsageEvent]]:
        """The events whose charge is free and of the same content, in the order in which they come.

        When it ends, all charges have been read, and `unknown` has the events that have none.
        """
        if (first := next(self._charges, None)) is not None:  # so the events are asked for when the ledger was
            self._show(first)
        queue: deque[_Seen] = deque()
        for event in events:
            entry = self._charge_of(event)
            if entry is not None and not queue:
                if self._same(entry, event):
                    yield entry, event
                continue
            seen = _Seen(event)
            queue.append(seen)
            if entry is None:
                self._uncharged.setdefault(event.event_id, []).append(seen)
            else:
                self._decide(seen, entry)
            while queue and queue[0].decided:
                yield from _taken(queue.popleft())
        for entry in self._charges:
            self._show(entry)
        for seen in queue:
            yield from _taken(seen)

    def match_rest(self, events: Iterable[UsageEvent]) -> Iterator[tuple[Entry, UsageEvent]]:
        """The same when all charges have been read, of events among which are others that have no charge to be seen."""
        for event in events:
            entry = self._charged.get(event.event_id)
            if entry is not None and self._same(entry, event):
                yield entry, event

    def unknown(self) -> list[UsageEvent]:
        """Events without any charge, as far as the charges have been read; they are given once."""
        found = [seen.event for contents in self._uncharged.values() for seen in contents]
        self._uncharged.clear()
        return found

    def unseen(self) -> list[Entry]:
        """Free charges that no event was seen of."""
        return [entry for entry in self._charged.values() if entry.free]

    def _charge_of(self, event: UsageEvent) -> Entry | None:
        """Its charge, which is read for where it may be near."""
        id, until_us = event.event_id, event.ts_us + AHEAD_US
        while id not in self._charged and self._read_us <= until_us:
            entry = next(self._charges, None)
            if entry is None:
                break
            self._show(entry)
        return self._charged.get(id)

    def _show(self, entry: Entry) -> None:
        self._read_us = max(self._read_us, entry.rated.ts_us)
        self._charged[entry.rated.event_id] = entry
        for seen in self._uncharged.pop(entry.rated.event_id, ()):
            self._decide(seen, entry)

    def _decide(self, seen: _Seen, entry: Entry) -> None:
        seen.decided = True
        if entry.rated.event_id in self._charged and self._same(entry, seen.event):
            seen.entry = entry

    def _same(self, entry: Entry, event: UsageEvent) -> bool:
        """Whether the charge is free and of this content; then it is used up. Another content leaves it unseen."""
        if entry.free and content_hash(event) != entry.rated.event_hash:
            return False
        del self._charged[event.event_id]
        return entry.free


def _taken(seen: _Seen) -> Iterator[tuple[Entry, UsageEvent]]:
    if seen.entry is not None:
        yield seen.entry, seen.event
