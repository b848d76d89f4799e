"""A house with one tenant and one price, and events to settle in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from billing.service import Billing
from billing.signer import Signer
from billing.store import EventStore
from metering.events import Outcome, UsageEvent

START_US = 1_790_000_000_000_000
HOUR_US = 3_600_000_000


class Clock:
    """Moves by hand, and by one microsecond whenever it is read."""

    def __init__(self, now_us: int = START_US) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        self.now_us += 1
        return self.now_us


class Shelf:
    """A usage store in a list; `metering.clickhouse.UsageStore` has the same methods."""

    def __init__(self, events: Iterable[UsageEvent] = ()) -> None:
        self.kept = list(events)
        self.second: list[UsageEvent] = []  # later contents of the same ids: kept, and not counted

    def events(
        self,
        tenant: str | None,
        start_us: int,
        end_us: int,
        *,
        settled_from_us: int | None = None,
        settled_to_us: int | None = None,
    ) -> Iterator[UsageEvent]:
        for event in sorted(self.kept, key=lambda event: (event.ts_us, event.event_id)):
            if (
                tenant in (None, event.tenant)
                and start_us <= event.ts_us < end_us
                and (settled_from_us is None or settled_from_us <= event.settled_us)
                and (settled_to_us is None or event.settled_us < settled_to_us)
            ):
                yield event

    def conflicts(self, start_us: int, end_us: int) -> list[str]:
        return [event.event_id for event in self.second if start_us <= event.ts_us < end_us]


class House:
    """Billing over a store, restarted at will."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.clock = Clock()
        self.elapsed_s = 1000.0  # what no step of the clock moves
        self.numbers = itertools.count(1)
        self.opened: list[Billing] = []
        self.billing = self.open()
        self.shelf = Shelf()

    def open(self) -> Billing:
        """Another process on the same ledger."""
        signer = Signer(self.folder / "signing.key", "house")
        billing = Billing(
            EventStore(self.url),
            base_model="base",
            clock=self.clock,
            price_lead_us=0,
            elapsed=lambda: self.elapsed_s,
            signer=signer,
        )
        self.opened.append(billing)
        return billing

    def restart(self) -> Billing:
        """What memory had is gone."""
        self.billing.close()
        self.billing = self.open()
        return self.billing

    def set_price(
        self, model: str = "*", prompt: str = "1", cached: str = "0.1", completion: str = "2", **more: Any
    ) -> str:
        defaults: dict[str, Any] = {"effective_at_us": 0, "currency": "usd"}
        per_million = {"prompt": prompt, "cached": cached, "completion": completion}
        return self.billing.set_price(model=model, per_million=per_million, **{**defaults, **more}).id

    def event(self, prompt: int = 10, cached: int = 0, completion: int = 5, **more: Any) -> UsageEvent:
        """A settled request that began now."""
        number = next(self.numbers)
        ts_us = more.pop("ts_us", None) or self.clock()
        defaults: dict[str, Any] = {
            "event_id": f"e{number:06d}",
            "ts_us": ts_us,
            "settled_us": self.clock(),
            "tenant": "acme",
            "key_id": "k",
            "model": "base",
            "base_model": "base",
            "endpoint": "chat.completions",
            "gateway": "g",
            "outcome": Outcome.FINISHED,
        }
        counts = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}
        return UsageEvent(**{**defaults, **counts, **more})

    def use(self, *args: Any, **more: Any) -> UsageEvent:
        """An event that is on the shelf and in the ledger."""
        event = self.event(*args, **more)
        self.shelf.kept.append(event)
        self.billing.record([event])
        return event


@pytest.fixture
def open_house(tmp_path: Path) -> Iterator[Callable[[str], House]]:
    houses: list[House] = []

    def make(url: str) -> House:
        house = House(url, tmp_path / "house")
        houses.append(house)
        house.billing.create_tenant(id="acme", name="Acme")
        house.set_price()
        return house

    yield make
    for house in houses:
        for billing in house.opened:
            billing.close()


@pytest.fixture
def house(open_house: Callable[[str], House], sqlite_ledger_url: str) -> House:
    """Tenant "acme" in usd, price 1 / 0.1 / 2 a million for every model, no credit."""
    return open_house(sqlite_ledger_url)


@pytest.fixture
def either_house(open_house: Callable[[str], House], ledger_url: str) -> House:
    """The same, on SQLite and on PostgreSQL in turn."""
    return open_house(ledger_url)
