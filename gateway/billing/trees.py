"""The leaves of invoices' trees that were asked for lately: they never change, and to read them takes seconds.

Who verifies asks for a path for each of its receipts, one after the other. Knows: how many leaves are kept. Does not
know: how they are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Leaves = list[tuple[str, bytes]]

KEPT_LEAVES = 250_000
"""Of all kept trees together: some 50 MB. One that has more is read each time."""


class Trees:
    """By invoice; the one that was asked for longest ago goes first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, Leaves] = {}

    def leaves(self, invoice_id: str, read: Callable[[], Leaves]) -> Leaves:
        """Those of an invoice, read if they are not kept. Not to be changed."""
        with self._lock:
            kept = self._kept.pop(invoice_id, None)
            if kept is not None:
                self._kept[invoice_id] = kept
                return kept
        found = read()
        if len(found) <= KEPT_LEAVES:
            with self._lock:
                self._kept[invoice_id] = found
                while sum(map(len, self._kept.values())) > KEPT_LEAVES:
                    del self._kept[next(iter(self._kept))]
        return found
