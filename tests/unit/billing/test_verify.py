"""The verifier: it holds what was invoiced rightly, whatever the prices, and finds every field that was changed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from billing.offers import ClassOffer, TierOffer
from billing.periods import period_at
from billing.signer import Signer
from billing.terms import Tax, TaxMode, TaxRate
from billing.tiers import PriceModel
from billing.verify import Event, Lines, canonical, read_events, read_lines, verify
from metering.events import UsageEvent
from metering.receipts import encode_receipt, leaf_bytes, receipt_of

FOREVER = 2**62
STEPS = (TierOffer(price="10000", up_to=100), TierOffer(price="4000"))
OFFERS = (
    ClassOffer(price="7000"),
    ClassOffer(model=PriceModel.GRADUATED, tiers=STEPS),
    ClassOffer(model=PriceModel.VOLUME, tiers=STEPS, allowance=10),
    ClassOffer(model=PriceModel.PACKAGE, price="0.5", package_size=30),
    ClassOffer(price="9000", allowance=40),
    ClassOffer(price="3000", minimum="2.50"),
)
EACH = (
    ClassOffer(price="0.007"),
    ClassOffer(model=PriceModel.GRADUATED, tiers=(TierOffer(price="0.2", up_to=5), TierOffer(price="0.1"))),
    ClassOffer(model=PriceModel.PACKAGE, price="0.5", package_size=4, allowance=3),
    ClassOffer(price="0.001", minimum="1"),
)


class Case:
    """The files that a tenant has of one invoice."""

    def __init__(self, house: Any, invoice_id: str) -> None:
        billing = house.billing
        invoice = billing.invoice(invoice_id)
        self.events: list[UsageEvent] = list(billing.invoice_events(invoice, house.shelf))
        leaves = billing.invoice_leaves(invoice, house.shelf)
        signed: Any = None
        if invoice.signed is not None:
            head = json.loads(invoice.signed.head.statement())
            signed = {"head": head, "signature": invoice.signed.signature}
        self.invoice: dict[str, Any] = {
            "document": billing.invoice_document(invoice_id),
            "content_hash": invoice.content_hash,
            "signed": signed,
            "leaves": [[event_id, leaf.hex()] for event_id, leaf in leaves],
        }
        self.lines = [json.loads(leaf_bytes(event)) for event in self.events]
        self.receipts = [json.loads(encode_receipt(receipt_of(event))) for event in self.events]
        self.keys = {
            "keys": [
                {
                    "kid": key.key_id,
                    "x": key.public_key,
                    "published_us": key.published_us,
                    "retired_us": key.retired_us,
                }
                for key in billing.signing_keys()
            ]
        }

    def findings(self, folder: Path) -> list[tuple[str, str, str]]:
        report = verify(self.invoice, self.read(folder), self.receipts, self.keys)
        return [(one.check, one.event_id, one.line_id) for one in report.findings]

    def read(self, folder: Path) -> list[Event]:
        file = folder / "events.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return read_events(file)


def final(house: Any, span: tuple[int, int]) -> str:
    house.clock.now_us = max(house.clock.now_us, span[1])
    made = house.billing.draft_invoice("acme", *span, usage=house.shelf, watermark_us=FOREVER)
    return str(house.billing.finalize_invoice(made.id).id)


def offer(house: Any, rng: random.Random, **more: Any) -> None:
    classes = {name: rng.choice(OFFERS) for name in ("prompt", "cached", "completion", "reasoning", "cache_write")}
    classes |= {name: rng.choice(EACH) for name in ("request", "tool_call", "image", "compute_second")}
    house.billing.set_price(model="*", effective_at_us=0, currency="usd", per_million={}, classes=classes, **more)


def used(house: Any, rng: random.Random, *, late: bool = False) -> UsageEvent:
    cached, reasoning = rng.randrange(20), rng.randrange(20)
    counts = {
        "prompt": cached + rng.randrange(60),
        "cached": cached,
        "completion": reasoning + rng.randrange(60),
        "reasoning_tokens": reasoning,
        "images": rng.randrange(3),
        "tool_calls": rng.randrange(3),
        "compute_us": rng.randrange(10**6),
    }
    if rng.random() < 0.1:
        counts = dict.fromkeys(counts, 0)
    model = rng.choice(["base", "pirate"])
    counts |= {"model": model, "adapter": "pirate" if model == "pirate" else ""}
    counts |= {"endpoint": rng.choice(["chat.completions", "completions"])}
    event: UsageEvent = house.event(**counts) if late else house.use(**counts)
    return event


def history(house: Any, seed: int) -> Iterator[str]:
    """Three months of a tenant with everything that a line can come of; their invoices."""
    rng = random.Random(seed)
    offer(house, rng, tenant="acme")
    if seed % 2:
        offer(house, rng, tenant="acme", endpoint="completions")
    if seed % 3:
        house.billing.give_discount("acme", name="Ten", percent="10", from_us=0)
        house.billing.give_discount("acme", name="Off", amount="1.25", from_us=0, token_class="completion")
        house.billing.set_tax("acme", Tax(mode=TaxMode.FIXED, rates=(TaxRate(name="VAT", percent="19"),)))
    if seed % 4 == 1:
        house.billing.set_commitment("acme", "40.00", from_us=0)
    for _ in range(3):
        period = period_at(house.clock.now_us)
        late = [used(house, rng, late=True) for _ in range(rng.randrange(3))]
        for number in range(12):
            used(house, rng)
            if number == 6:
                offer(house, rng, tenant="acme")
        yield final(house, (period.start_us, period.end_us))
        for event in late:
            house.shelf.kept.append(event)
            house.billing.record([event])


@pytest.mark.parametrize("seed", range(8))
def test_what_was_invoiced_holds_whatever_the_prices(house: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for invoice_id in history(house, seed):
        case = Case(house, invoice_id)
        rng.shuffle(case.lines)
        rng.shuffle(case.receipts)
        report = verify(case.invoice, case.read(tmp_path), case.receipts, case.keys)
        assert report.findings == []
        assert len(report.proven) == 4
        tiered = any(line["tiers"] for line in case.invoice["document"]["lines"])
        assert any("tiers" in one for one in report.not_proven) == tiered
        assert not any("adapters" in one for one in report.not_proven)


def mutations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every single field of a JSON value, with something else for it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from mutations(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from mutations(inner, (*path, number))
        if value:
            yield path, value[:-1]
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int):
        yield path, value + 1
    elif value is None:
        yield path, 1
    else:
        yield path, value[:-1] + ("x" if value[-1:] != "x" else "y")


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    made = copy.deepcopy(value)
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = other
    return made


@pytest.mark.parametrize("seed", [5])
def test_every_field_that_is_changed_is_found(house: Any, tmp_path: Path, seed: int) -> None:
    *_, last = history(house, seed)
    case = Case(house, last)
    events = case.read(tmp_path)
    assert case.findings(tmp_path) == []
    passed = []
    for path, other in random.Random(seed).sample(list(mutations(case.invoice)), 120):
        invoice = changed(case.invoice, path, other)
        if not verify(invoice, events, case.receipts, case.keys).findings:
            passed.append(("invoice", path))
    for number, line in enumerate(case.lines[:1]):
        for path, other in mutations(line):
            if path == ("event_id",):
                continue  # an event that is missing, and one that is added: below
            forged = [*case.lines[:number], changed(line, path, other), *case.lines[number + 1 :]]
            (tmp_path / "forged.jsonl").write_text("\n".join(map(json.dumps, forged)))
            try:
                report = verify(case.invoice, read_events(tmp_path / "forged.jsonl"), case.receipts, case.keys)
            except Exception as error:
                raise AssertionError(path) from error
            if ("event changed", line["event_id"]) not in {(one.check, one.event_id) for one in report.findings}:
                passed.append(("event", path))
    for number, receipt in enumerate(case.receipts[:2]):
        for path, other in mutations(receipt):
            forged = [*case.receipts[:number], changed(receipt, path, other)]
            if not verify(case.invoice, events, forged, case.keys).findings:
                passed.append(("receipt", path))
    assert passed == []


def test_it_names_the_first_event_that_is_missing_doubled_changed_or_added(house: Any, tmp_path: Path) -> None:
    invoice_id = next(history(house, 0))
    honest = Case(house, invoice_id)
    ids = [event.event_id for event in honest.events]

    def first(lines: list[Any]) -> tuple[str, str]:
        case = copy.copy(honest)
        case.lines = lines
        check, event_id, _ = case.findings(tmp_path)[0]
        return check, event_id

    lines = honest.lines
    assert first([*lines[:3], *lines[4:6], *lines[7:]]) == ("event missing", ids[3])
    assert first([*lines, lines[8], lines[5]]) == ("event doubled", ids[5])
    edited = [*lines[:7], lines[7] | {"completion_tokens": 10**6}, *lines[8:]]
    assert first(edited) == ("event changed", ids[7])
    assert first([*lines, lines[4] | {"event_id": "strange"}]) == ("event added", "strange")
    assert honest.findings(tmp_path) == []


def test_without_the_leaves_it_still_finds_that_something_is_wrong(house: Any, tmp_path: Path) -> None:
    case = Case(house, next(history(house, 0)))
    case.invoice["leaves"] = None
    assert case.findings(tmp_path) == []
    dropped = case.lines.pop(4)["event_id"]
    checks = [check for check, _, _ in case.findings(tmp_path)]
    assert "number of events" in checks
    assert "root" in checks
    assert ("receipt without its event", dropped, "") in case.findings(tmp_path)


def test_a_forgery_that_is_whole_needs_the_sellers_key(house: Any, tmp_path: Path) -> None:
    """A cheaper price, with lines, hash and root to match, under a key of the forger's own."""
    house.set_price("base", prompt="900000", completion="1", tenant="acme")
    house.use(prompt=1_000_000)
    period = period_at(house.clock.now_us)
    case = Case(house, final(house, (period.start_us, period.end_us)))
    other = Signer(tmp_path / "forger.key", "forger").key()
    head = case.invoice["signed"]["head"] | {"key_id": other.id}
    statement = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    case.invoice["signed"] = {"head": head, "signature": other.sign(statement)}
    assert [check for check, _, _ in case.findings(tmp_path)] == ["signature"]
    key = {"kid": other.id, "x": other.public_key, "published_us": 0, "retired_us": None}
    unchecked = verify(case.invoice, case.read(tmp_path), None, None)
    assert unchecked.findings == []
    assert any("no trusted keys" in one for one in unchecked.not_proven)
    case.keys["keys"].append(key | {"kid": case.keys["keys"][0]["kid"]})
    assert [check for check, _, _ in case.findings(tmp_path)] == ["signature"]


def test_a_receipt_of_another_month_says_nothing_about_this_one(house: Any, tmp_path: Path) -> None:
    case = Case(house, next(history(house, 0)))
    elsewhere = case.receipts[0] | {"event_id": "0190a000-0000-7000-8000-000000000000"}
    report = verify(case.invoice, case.read(tmp_path), [*case.receipts, elsewhere], case.keys)
    assert report.findings == []
    assert any("1 receipts" in one for one in report.not_proven)


def test_an_invoice_with_nothing_on_it_holds(house: Any, tmp_path: Path) -> None:
    period = period_at(house.clock.now_us)
    assert Case(house, final(house, (period.start_us, period.end_us))).findings(tmp_path) == []


def test_adapters_and_what_is_put_off_hold(house: Any, tmp_path: Path) -> None:
    house.billing.add_adapter("acme", name="pirate", path="/x", id="a1", digest="d", base_model="base")
    house.billing.set_price(
        model="*",
        effective_at_us=0,
        currency="usd",
        per_million={"prompt": "0", "cached": "0"},
        classes={
            "completion": ClassOffer(
                model=PriceModel.VOLUME, tiers=(TierOffer(price="9000000", up_to=99), TierOffer(price="1"))
            ),
            "adapter_month": ClassOffer(price="7"),
        },
    )
    period = period_at(house.clock.now_us)
    house.use(completion=90)
    late = house.event(completion=60)
    first = Case(house, final(house, (period.start_us, period.end_us)))
    assert first.findings(tmp_path) == []
    assert "adapter" in {line["kind"] for line in first.invoice["document"]["lines"]}
    house.shelf.kept.append(late)
    house.billing.record([late])
    for _ in range(2):
        period = period_at(house.clock.now_us)
        house.use(completion=10)
        case = Case(house, final(house, (period.start_us, period.end_us)))
        assert case.findings(tmp_path) == []
        assert "carry" in {line["kind"] for line in case.invoice["document"]["lines"]}


def cheated(case: Case, folder: Path, lines: list[Any], **document: Any) -> list[str]:
    """What is found of an invoice that its own seller forged and signed: no key tells."""
    exact = sum((Fraction(line["exact"]) for line in lines), Fraction(0))
    totals = {"total_minor": sum(line["amount_minor"] for line in lines), "exact_total": str(exact)}
    case.invoice["document"] |= {"lines": lines, **totals, **document}
    digest = hashlib.sha256(canonical(case.invoice["document"])).hexdigest()
    case.invoice |= {"content_hash": digest, "signed": None}
    return [one.message for one in verify(case.invoice, case.read(folder), case.receipts, None).findings]


def test_events_that_no_client_was_told_of_are_named(house: Any, tmp_path: Path) -> None:
    case = Case(house, next(history(house, 0)))
    strange = case.receipts.pop(3)["event_id"]
    report = verify(case.invoice, case.read(tmp_path), case.receipts, case.keys)
    assert report.findings == []
    assert [one for one in report.not_proven if f"first {strange}" in one]


def test_terms_that_the_seller_names_and_does_not_apply_are_found(house: Any, tmp_path: Path) -> None:
    house.billing.give_discount("acme", name="Half", percent="50", from_us=0)
    house.use(prompt=10_000_000)
    period = period_at(house.clock.now_us)
    case = Case(house, final(house, (period.start_us, period.end_us)))
    assert case.findings(tmp_path) == []
    document = case.invoice["document"]
    terms = document.pop("terms")
    del document["spans"]
    forged = Lines(document, case.read(tmp_path)).expected()
    (message,) = cheated(case, tmp_path, forged, terms=terms)
    assert "its terms are not applied" in message


def test_a_price_that_is_said_to_be_of_later_and_is_not_the_requests_is_found(house: Any, tmp_path: Path) -> None:
    house.set_price("cheap", prompt="1")
    house.set_price("dear", prompt="5")
    first = house.use(prompt=10**6, completion=0, model="cheap", base_model="cheap")
    house.use(prompt=10**6, completion=0, model="dear", base_model="dear")
    period = period_at(house.clock.now_us)
    case = Case(house, final(house, (period.start_us, period.end_us)))
    assert case.findings(tmp_path) == []
    cheap, dear = case.invoice["document"]["lines"]
    forged = cheap | {name: dear[name] for name in ("price_id", "unit_price_nano", "exact", "amount_minor")}
    (message,) = cheated(case, tmp_path, [forged, dear], priced_later={first.event_id: dear["price_id"]})
    assert f"none for event {first.event_id}" in message
    forged = cheap | {"price_id": cheap["price_id"]}
    (message,) = cheated(case, tmp_path, [forged, dear], priced_later={first.event_id: cheap["price_id"]})
    assert "at its time" in message


def test_an_adapter_that_is_charged_by_a_shorter_month_is_found(house: Any, tmp_path: Path) -> None:
    classes = {name: ClassOffer(price="7") for name in ("prompt", "cached", "completion", "adapter_month")}
    house.billing.set_price(model="*", effective_at_us=0, currency="usd", per_million={}, classes=classes)
    house.billing.add_adapter("acme", name="pirate", path="/x", id="a1", digest="d", base_model="base")
    period = period_at(house.clock.now_us)
    case = Case(house, final(house, (period.start_us, period.end_us)))
    (line,) = case.invoice["document"]["lines"]
    exact = 2 * Fraction(line["exact"])
    forged = line | {"total": line["total"] // 2, "exact": str(exact), "amount_minor": round(exact / 10**13)}
    (message,) = cheated(case, tmp_path, [forged])
    assert "less than a month" in message
    often = [line | {"id": f"{line['id'][:-1]}{number}"} for number in range(1, 5)]
    (message,) = cheated(case, tmp_path, often)
    assert "longer than there is time" in message


@pytest.mark.parametrize("text", ['{"a":1.5}', '{"a":1,"a":1}', "[1]", "{", '{"a":NaN}', "[" * 100_000])
def test_a_file_that_is_no_such_file_is_told(tmp_path: Path, text: str) -> None:
    from billing.verify import Unreadable, main

    (tmp_path / "x").write_text(text)
    with pytest.raises(Unreadable):
        read_lines(tmp_path / "x")
    assert main([str(tmp_path / "x"), str(tmp_path / "nothing")]) == 2
