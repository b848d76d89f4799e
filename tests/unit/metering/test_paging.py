"""Pages of events: each event once, in order, whatever the size of a page and however dense they are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from metering.events import Outcome, UsageEvent
from metering.paging import Cursor, Pages

DAY_US = 86_400_000_000


def event(ts_us: int, event_id: str) -> UsageEvent:
    return UsageEvent(
        event_id=event_id,
        ts_us=ts_us,
        settled_us=ts_us,
        tenant="t",
        key_id="k",
        model="m",
        base_model="m",
        endpoint="e",
        gateway="g",
        outcome=Outcome.FINISHED,
    )


class Shelf:
    """Sorted events; how many were read of it."""

    def __init__(self, events: list[UsageEvent]) -> None:
        self.kept = sorted(events, key=Cursor.of)
        self.read = self.open = 0

    def events(self, start_us: int, end_us: int) -> Iterator[UsageEvent]:
        self.open += 1
        try:
            for one in self.kept:
                if start_us <= one.ts_us < end_us:
                    self.read += 1
                    yield one
        finally:
            self.open -= 1


def pages(shelf: Shelf, size: int, after: Cursor | None = None) -> list[list[UsageEvent]]:
    ranges = [(0, 3 * DAY_US), (5 * DAY_US, 9 * DAY_US)]
    reader = Pages(shelf.events, ranges, size=size, after=after)
    found = []
    while page := reader.next():
        assert shelf.open == 0
        found.append(page)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_each_event_once_in_order(size: int) -> None:
    rng = random.Random(size)
    times = [rng.randrange(10 * DAY_US) for _ in range(60)] + [DAY_US] * 40 + [2 * DAY_US + n for n in range(100)]
    shelf = Shelf([event(ts_us, f"e{n:03}") for n, ts_us in enumerate(times)])
    wanted = [one for one in shelf.kept if one.ts_us < 3 * DAY_US or 5 * DAY_US <= one.ts_us < 9 * DAY_US]
    found = pages(shelf, size)
    assert [one for page in found for one in page] == wanted
    assert all(len(page) == size for page in found[:-1])
    half = Cursor.of(wanted[len(wanted) // 2])
    assert [one for page in pages(shelf, size, half) for one in page] == wanted[len(wanted) // 2 + 1 :]


def test_a_dense_hour_is_not_read_again_for_each_page() -> None:
    shelf = Shelf([event(second * 1_000_000, f"e{second:05}") for second in range(3600)])
    assert sum(map(len, pages(shelf, 100))) == 3600
    assert shelf.read < 4 * 3600


@pytest.mark.parametrize("text", ["", "1", ":e", "1:", "-1:e", "1.5:e", "x:e", "9" * 20 + ":e", "١:e"])
def test_what_is_no_cursor_is_told(text: str) -> None:
    with pytest.raises(ValueError):
        Cursor.parse(text)
    assert Cursor.parse("5:a:b") == Cursor(5, "a:b")
    assert str(Cursor(5, "a:b")) == "5:a:b"
