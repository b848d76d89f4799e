"""What every part of the service stands on: the books, their two locks, and how a command is carried out.

`_writing` is held by whoever changes the ledger, across the disk. `_state` guards the books in memory and
is held for microseconds, so that requests never wait for a disk. Taken in this order only.

A price counts from an instant that is chosen before it is written (`_undecided_us` until it is known to stand
or not): what is quoted for an earlier instant is right with and without it, and a later one is refused meanwhile.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import msgspec

from billing.books import Books
from billing.checks import Faults
from billing.errors import IdempotencyConflict, Invalid
from billing.holds import Holds
from billing.ledger import UsageRated, UsageUnrated
from billing.quotas import QuotaBook, elapsed_s
from billing.signer import Signer
from billing.steps import NO_DUNNING, Policy
from billing.store import EventStore, Log, NewEvent, StoredEvent
from metering.events import UsageEvent

T = TypeVar("T")
SYSTEM = "system"  # the actor of what no person asked for
ACTOR: ContextVar[str] = ContextVar("actor", default="")
"""Who asks for what is done in this context, for the log; empty: nobody in particular."""

PAGE_MAX = 10_000
PRICE_LEAD_US = 250_000  # from choosing the instant from which a price counts to that instant: it is written by then


class Idempotency(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's promise that equal keys mean one command. `payload_hash` covers the whole request."""

    key: str
    payload_hash: str
    actor: str = "admin"


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


def new_id(kind: str) -> str:
    """An id nobody had before, as `tenant-3f…`."""
    return f"{kind}-{secrets.token_hex(12)}"


class Shell:
    """The books, folded from the store, and the one way to change them."""

    def __init__(
        self,
        store: EventStore,
        *,
        base_model: str = "",
        clock: Callable[[], int] = now_us,
        new_id: Callable[[str], str] = new_id,
        price_lead_us: int = PRICE_LEAD_US,
        elapsed: Callable[[], float] = elapsed_s,
        signer: Signer | None = None,
        dunning: Policy = NO_DUNNING,
    ) -> None:
        """`signer` has the key of final invoices; without one none is made final here."""
        self.base_model = base_model  # the name the engine's own model is asked for by
        self._store = store
        self._signer = signer
        self._clock = clock
        self._new_id = new_id
        self._writing = threading.RLock()
        self._state = threading.RLock()
        self._books = Books()
        self._holds = Holds(self._books.ledger)
        self._quotas = QuotaBook(self._books.accounts, self._books.ledger, self._books.budgets, elapsed)
        self._elapsed = elapsed
        self._wanting: set[str] = set()  # quotas at whose end a request was refused or stopped
        self._gateway = ""  # whose leases these are; empty: this process may commit all that the books leave
        self._alarms: Counter[str] = Counter()
        self._exporting: set[str] = set()
        self._price_lead_us = price_lead_us
        self._dunning = dunning  # for dunnings that begin here
        self._quoted_us = 0  # the newest request that was quoted a price
        self._undecided_us: int | None = None  # from when a price counts of which is not known whether it stands
        self.refresh()

    def refresh(self) -> None:
        """Catch up with what other processes appended to the same store."""
        with self._writing:
            if self._undecided_us is None:
                self._catch_up(self._store.read)
                return
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)

    def close(self) -> None:
        """Give back the store's connections."""
        self._store.close()

    def alarms(self) -> dict[str, int]:
        """How often since the start something happened that never should; see `billing/README.md`."""
        with self._state:
            return dict(self._alarms)

    def _catch_up(self, read: Callable[[int], list[StoredEvent]]) -> None:
        """Fold all that stands. Every page is read before the books are locked: requests never wait for a disk."""
        while rows := read(self._books.seq):
            self._fold(rows)

    def _catch_up_as_writer(self, log: Log) -> None:
        """Fold all that stands; what an earlier writer tried has ended, for good or not, since the log is ours."""
        self._catch_up(log.read)
        self._decided()

    def _decided(self) -> None:
        """The books have every price that was written; `_writing` is held."""
        with self._state:
            self._undecided_us = None

    def _fold(self, rows: Sequence[StoredEvent]) -> None:
        with self._state:
            for row in rows:
                fact = self._books.apply(row)
                match fact:
                    case UsageRated(event_id=event_id) | UsageUnrated(event=UsageEvent(event_id=event_id)):
                        self._holds.release(event_id)  # recorded before it was settled here
                if isinstance(fact, UsageRated) and self._gateway and fact.gateway == self._gateway:
                    self._quotas.recorded(fact)
            self._fit_anew()

    def _fit_anew(self) -> None:
        """What is left to some tenants is another sum than was leased of; what runs counts in it. `_state` is held."""
        tenants = self._books.ledger.unleased
        if tenants:
            self._holds.attach(tenants, self._quotas.applying)
            self._books.ledger.attach(tenants, self._quotas.applying)
            self._quotas.unfit(tenants)
            tenants.clear()

    def _command(
        self,
        name: str,
        idempotency: Idempotency | None,
        kind: type[T],
        decide: Callable[[int], tuple[list[NewEvent], T]],
    ) -> tuple[T, bool]:
        """Decide on the state that stands, append, fold: the result, and whether it is new.

        A replay of a key gives the first result again; the key of another command or payload is refused.
        `decide` gets the time.
        """
        _check_idempotency(idempotency)
        with self._writing:
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)
                if idempotency is not None:
                    key = _stored_key(idempotency)
                    if row := log.find([key]).get(key):
                        return _replayed(row, name, idempotency, kind), False
                events, result = decide(self._clock())
                if idempotency is not None and events:
                    events = [_signed(events[0], name, idempotency, result), *events[1:]]
                actor = ACTOR.get() or (idempotency.actor if idempotency is not None else SYSTEM)
                rows = log.append(events, actor=actor, time_us=self._clock())
            self._fold(rows)
            self._decided()
        return result, True

    def _first_result(self, name: str, idempotency: Idempotency | None, kind: type[T]) -> T | None:
        """The result of an earlier command under this key, for commands that do work before they decide."""
        _check_idempotency(idempotency)
        if idempotency is None or (row := self._store.find(_stored_key(idempotency))) is None:
            return None
        return _replayed(row, name, idempotency, kind)


def _check_idempotency(idempotency: Idempotency | None) -> None:
    if idempotency is not None:
        faults = Faults()
        faults.text("idempotency_key", idempotency.key, 255)
        faults.raise_if_any()


def _stored_key(idempotency: Idempotency) -> str:
    return f"command:{idempotency.key}"


def _stored_hash(name: str, idempotency: Idempotency) -> str:
    return f"{name}:{idempotency.payload_hash}"


def _signed(event: NewEvent, name: str, idempotency: Idempotency, result: object) -> NewEvent:
    return msgspec.structs.replace(
        event,
        key=_stored_key(idempotency),
        payload_hash=_stored_hash(name, idempotency),
        result=msgspec.json.encode(result).decode(),
    )


def _replayed(row: StoredEvent, name: str, idempotency: Idempotency, kind: type[T]) -> T:
    if row.payload_hash != _stored_hash(name, idempotency) or row.result is None:
        raise IdempotencyConflict("this idempotency key was used before, for another request")
    return msgspec.json.decode(row.result, type=kind)


def page(items: Sequence[T], id_of: Callable[[T], str], limit: int, after: str | None) -> list[T]:
    """At most `limit` items behind the one whose id is `after`. Raises `Invalid`."""
    if not 1 <= limit <= PAGE_MAX:
        raise Invalid([("limit", f"must lie between 1 and {PAGE_MAX}")])
    if after is None:
        return list(items[:limit])
    behind = itertools.dropwhile(lambda item: id_of(item) != after, items)
    if next(behind, None) is None:
        raise Invalid([("after", "is not an id of this list")])
    return list(itertools.islice(behind, limit))
