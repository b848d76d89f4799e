"""A tenant's events page by page, in order of time and id, however many there are.

A query is about a window of time that is made smaller where events are dense, so that no page reads much more than
itself, and nothing of the store is held between two pages.

Knows: the order of events, cursors. Does not know: where events are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple

from metering.events import UsageEvent

Events = Callable[[int, int], Iterator[UsageEvent]]
"""[start, end) in microseconds → its events by time and id, a generator."""

FIRST_WINDOW_US = 3_600_000_000
SMALLEST_WINDOW_US = 1_000_000


class Cursor(NamedTuple):
    """The event after which to go on."""

    ts_us: int
    event_id: str

    def __str__(self) -> str:
        return f"{self.ts_us}:{self.event_id}"

    @classmethod
    def of(cls, event: UsageEvent) -> Cursor:
        return cls(event.ts_us, event.event_id)

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Inverse of `str`. Raises `ValueError`."""
        ts_us, colon, event_id = text.partition(":")
        if not colon or not event_id or not (ts_us.isascii() and ts_us.isdigit() and len(ts_us) < 20):
            raise ValueError(text)
        return cls(int(ts_us), event_id)


class Pages:
    """The events of ranges of time that rise and do not overlap, behind `after`."""

    def __init__(
        self, events: Events, ranges: Sequence[tuple[int, int]], *, size: int, after: Cursor | None = None
    ) -> None:
        self._events = events
        self._ranges = list(ranges)
        self._size = size
        self._after = after or Cursor(-1, "")
        self._from_us = self._after.ts_us
        self._window_us = FIRST_WINDOW_US

    def next(self) -> list[UsageEvent]:
        """The next events, `size` of them while there are so many; none at the end."""
        found: list[UsageEvent] = []
        while self._ranges and len(found) < self._size:
            start_us, end_us = self._ranges[0]
            first_us = max(start_us, self._from_us)
            if first_us >= end_us:
                self._ranges.pop(0)
                continue
            last_us = min(end_us, first_us + self._window_us)
            wanted = self._size - len(found)
            with closing(self._events(first_us, last_us)) as events:  # type: ignore[type-var]  # it is a generator
                behind = (event for event in events if Cursor.of(event) > self._after)
                new = list(islice(behind, wanted))
            found += new
            if len(new) == wanted:
                self._after, self._from_us = Cursor.of(new[-1]), new[-1].ts_us
                self._window_us = max(SMALLEST_WINDOW_US, self._window_us // 2)
            else:
                self._from_us = last_us
                self._window_us *= 2
        return found
