"""The streamed cut: what it takes is what two whole lists say, in whatever order they come."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing import merkle, witnesses
from billing.accounts import Tenant
from billing.charges import rate
from billing.errors import LedgerDisagrees
from billing.invoice import Invoice, InvoiceStatus
from billing.ledger import UsageRated
from billing.positions import Positions
from billing.prices import PriceBook, PriceSet, PriceVersion, Rate
from billing.taken import Taken
from billing.tariff import Tariffs
from billing.terms import PeriodRule
from billing.witnesses import Entry, Witnesses
from metering.events import Outcome, UsageEvent, content_hash
from metering.receipts import leaf_of

TENANT = Tenant(id="t", name="T", currency="usd", timezone="UTC", created_us=0)


def event(number: int, **more: Any) -> UsageEvent:
    fields: dict[str, Any] = {
        "event_id": f"e{number:03}",
        "ts_us": 1 + number // 3,  # some at the same instant
        "settled_us": number + 5,
        "tenant": "t",
        "key_id": "k",
        "model": "m",
        "base_model": "m",
        "endpoint": "completions",
        "gateway": "g",
        "outcome": Outcome.FINISHED,
        "prompt_tokens": number,
    }
    return UsageEvent(**{**fields, **more})


def make_book() -> PriceBook:
    book = PriceBook()
    rate = Rate(price_id="p", currency="usd", prompt=7, cached=1, completion=1)
    book.apply(
        PriceSet(price=PriceVersion(id="p", tenant=None, model="*", effective_at_us=0, recorded_us=0, rate=rate))
    )
    return book


BOOK = make_book()


def charge(one: UsageEvent) -> UsageRated:
    return rate(one, content_hash(one), TENANT, Tariffs(BOOK).of("p"), Positions(), later=False).rated


fates = st.sampled_from(["both", "both", "both", "store", "ledger", "elsewhere", "changed"])


@given(st.lists(fates, max_size=40), st.randoms(), st.integers(0, 20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_two_streams_agree_on_is_what_two_lists_do(
    monkeypatch: pytest.MonkeyPatch, drawn: list[str], random: Any, ahead_us: int
) -> None:
    monkeypatch.setattr(witnesses, "AHEAD_US", ahead_us)
    stored = [event(number) for number, fate in enumerate(drawn) if fate != "ledger"]
    entries = []
    for number, fate in enumerate(drawn):
        if fate != "store":
            charged = event(number, prompt_tokens=1000) if fate == "changed" else event(number)
            entries.append(Entry(charge(charged), None, fate != "elsewhere"))
    random.shuffle(entries)
    both = Witnesses(entries)
    found = list(both.match(stored))
    assert [one for _, one in found] == [event(number) for number, fate in enumerate(drawn) if fate == "both"]
    assert all(entry.rated.event_id == one.event_id for entry, one in found)
    assert both.unknown() == [event(number) for number, fate in enumerate(drawn) if fate == "store"]
    missing = {f"e{number:03}" for number, fate in enumerate(drawn) if fate in ("ledger", "changed")}
    assert {entry.rated.event_id for entry in both.unseen()} == missing
    late = [event(number) for number, fate in enumerate(drawn) if fate == "ledger"]
    assert [one for _, one in both.match_rest([*late, event(500)])] == late
    assert both.unknown() == []


@pytest.mark.parametrize("charged", [0, 1])
def test_of_two_contents_that_are_seen_before_the_charge_the_charged_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, charged: int
) -> None:
    """A charge that was recorded long after its event, when the store has shown both contents."""
    monkeypatch.setattr(witnesses, "AHEAD_US", 0)
    contents = [event(1), event(1, prompt_tokens=1000)]
    both = Witnesses([Entry(charge(event(90)), None), Entry(charge(contents[charged]), None)])
    assert [one for _, one in both.match([*contents, event(90)])] == [contents[charged], event(90)]
    assert (both.unknown(), both.unseen()) == ([], [])


def test_little_is_kept_of_a_long_month(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witnesses, "AHEAD_US", 10)
    both = Witnesses(Entry(charge(event(number)), None) for number in range(600))
    most = 0
    for _ in both.match(event(number) for number in range(600)):
        most = max(most, len(both._charged) + len(both._uncharged))
    assert most < 40


def invoice(id: str, start_us: int, end_us: int) -> Invoice:
    return Invoice(
        id=id,
        tenant="t",
        currency="usd",
        status=InvoiceStatus.FINALIZED,
        period_start_us=start_us,
        period_end_us=end_us,
        cut_us=0,
        cut_seq=1,
        lines=(),
        total_minor=0,
        event_count=0,
        events_digest="",
        created_us=0,
    )


@given(st.sets(st.integers(0, 60)), st.integers(0, 20))
def test_the_digest_and_the_tree_are_in_the_order_of_time_and_id_whatever_came_late(
    numbers: set[int], until_us: int
) -> None:
    """Late events come after those of the period, and begin before them."""
    earlier = invoice("i", 0, until_us)
    events = [event(number) for number in sorted(numbers)]
    taken = Taken(BOOK, "usd")
    for late in (False, True):
        for one in events:
            if earlier.has(one.ts_us) is late:
                taken.add(Entry(charge(one), earlier if late else None), one, until_us)
    contents = "".join(f"{one.event_id} {content_hash(one)}\n" for one in events)
    assert taken.digest() == hashlib.sha256(contents.encode()).hexdigest()
    basis = taken.basis(PeriodRule())
    assert basis.root == merkle.root([leaf_of(one) for one in events]).hex()
    assert [one.invoice_id for one in basis.late] == (["i"] if any(earlier.has(one.ts_us) for one in events) else [])
    assert taken.count == len(events)
    assert sum(one.charged_femto for one in taken.charges()) == 7 * sum(numbers)


def test_an_event_that_is_rated_otherwise_now_is_not_taken() -> None:
    one = event(3)
    other = charge(event(4))
    with pytest.raises(LedgerDisagrees):
        Taken(BOOK, "usd").add(Entry(other, None), one, 0)
