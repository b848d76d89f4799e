"""A server that keeps no account of what it serves, to be measured beside one that does. For `overhead.py` alone.

Everything is as `meterhouse serve` has it (the same flags, the engine, HTTP, limits, metrics) but that nothing is
written down or paid for: no journal, no settlement, no hold, no charge, no lease. It is put together here, from the
parts that the composition root takes, so that no setting of the product can turn its accounting off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

from billing.prices import Rate
from billing.service import Billing, Hold
from gateway import lifecycle
from gateway.app import Gateway, create_gateway
from gateway.cli import main
from gateway.idempotency import Idempotency
from metering.counts import CountsTuple
from metering.events import UsageEvent
from metering.journal import Journal, OpenedRecord
from metering.spool import Spool

_FREE = Rate(price_id="free", currency="usd", prompt=0, cached=0, completion=0)
_ALL = Hold(10**12, True)


class _Over:
    """Some methods of its own, all others those of the part below."""

    def __init__(self, below: Any) -> None:
        self._below = below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


class NoJournal(_Over):
    """Takes every record and keeps none."""

    def opened(self, record: OpenedRecord) -> None: ...

    def step(self, counts: Iterable[tuple[str, CountsTuple]]) -> None: ...

    def settled(self, event_id: str) -> None: ...


class NoSpool(_Over):
    """Says at once that an event is durable, which it is not."""

    def settle(self, event: UsageEvent) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


class NoMoney(_Over):
    """Lets everything through for nothing."""

    leased = False

    def quote(self, *_: object) -> Rate:
        return _FREE

    def open_hold(self, *_: object, **__: object) -> Hold:
        return _ALL

    def extend_hold(self, *_: object) -> Hold:
        return _ALL

    def reprice_prompt(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...

    def settle(self, event: UsageEvent) -> None: ...


class Unmetered(lifecycle.Runtime):
    """The runtime with nothing behind the door."""

    def _make_gateway(self) -> Gateway:
        stores = self.stores
        return create_gateway(
            self.settings,
            engine=self.engine,
            billing=cast(Billing, NoMoney(stores.billing)),
            spool=cast(Spool, NoSpool(stores.spool)),
            journal=cast(Journal, NoJournal(stores.journal)),
            tokenizer=self._tokenizer,
            idempotency=Idempotency(stores.answers, self._clock_us),
            admin=self.admin,
            clock_us=self._clock_us,
        )


if __name__ == "__main__":
    lifecycle.Runtime = Unmetered  # type: ignore[misc]  # what `serve` makes
    main(sys.argv[1:])
