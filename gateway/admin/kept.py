"""Reports that are read page by page: computed once, not once a page, so that all pages are of one report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

KEPT = 2  # a report may have a hundred thousand rows


class KeptReports:
    """The rows of the last few reports that have more pages. Thread-safe; one that is gone is computed again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[Hashable, list[Any]] = {}

    def rows(self, query: Hashable, begin: int, end: int, compute: Callable[[], list[Any]]) -> list[Any]:
        """Rows [begin, end] of the report on `query`: one more than the page has, if there is one."""
        with self._lock:
            kept = self._rows.pop(query, None) if begin else None
        rows = compute() if kept is None else kept
        if len(rows) > end:
            with self._lock:
                self._rows[query] = rows
                while len(self._rows) > KEPT:
                    del self._rows[next(iter(self._rows))]
        return rows[begin : end + 1]
