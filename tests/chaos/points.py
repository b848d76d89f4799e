"""Where a gateway is killed: right after each durable write of the states table in `metering/README.md`.

Knows: by which call of the product each write is made. The product knows nothing of it: a gateway that is to die at a
point has that call wrapped before it starts, in its own process, and kills itself when the call has returned for the
nth time. So the instant is exact, which no signal from outside is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import metering.journal
from billing.service import Billing
from gateway import idempotency
from metering.clickhouse import UsageStore
from metering.journal import Journal
from metering.spool import Spool
from metering.totals import Totals


class Point(NamedTuple):
    """One instant: `owner.name` has returned (or, with `before`, is about to be called) and `counts` of its call."""

    row: str
    owner: Any
    name: str
    often: int  # how many times it may come in a life of a second: the nth is drawn up to here
    before: bool = False
    counts: Callable[..., bool] = lambda *_, **__: True


POINTS = (
    Point("1 opened", Journal, "opened", 20),
    Point("2 in progress", Journal, "step", 80),
    Point("3 settled", Spool, "_commit", 15, counts=lambda _, entries, __: bool(entries)),
    Point("4 closed in the journal", Journal, "settled", 15),
    Point("5 carried", Journal, "_start", 2, counts=lambda journal, _: hasattr(journal, "_worker")),  # not the first
    Point("6 sums added", Totals, "add", 2),
    Point("6 file deleted", Spool, "forget", 2, before=True),
    Point("7a in ClickHouse", UsageStore, "insert", 8),
    Point("7b in the ledger", Billing, "record", 8),
    Point("8 acknowledged", Spool, "ack", 8),
    Point("answer kept, not settled", idempotency.Store, "put", 6),
    Point("orphans settled, journal not cleared", metering.journal, "retire", 1, before=True),
    Point("journal cleared, not opened", metering.journal, "retire", 1),
)
BY_ROW = {point.row: point for point in POINTS}


def arm(point: Point, nth: int) -> None:
    """From now on this process dies at the nth time."""
    real = getattr(point.owner, point.name)
    left = [nth]

    def hit(*arguments: Any, **named: Any) -> None:
        if point.counts(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if point.before:
            hit(*arguments, **named)
            return real(*arguments, **named)
        result = real(*arguments, **named)
        hit(*arguments, **named)
        return result

    setattr(point.owner, point.name, wrapped)
