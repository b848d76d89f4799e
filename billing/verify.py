"""Verifies an invoice without asking its seller: events, prices, lines, rounding, total, tree and signature.

    python verify.py invoice.json events.jsonl [receipts.jsonl] [--keys keys.json] [--json]

`invoice.json` is what `GET /v1/invoices/ID?leaves=true` gives, `events.jsonl` is `GET /v1/usage/events?invoice=ID`,
`receipts.jsonl` has the receipts that clients were given, one a line, and `keys.json` is what
`GET /.well-known/meterhouse-signing-keys.json` gave when it was trusted. Exit code 0: everything holds; 1: something
does not, and it is named; 2: a file cannot be read.

This file stands alone: it needs Python's standard library and the package `cryptography`, and nothing of Meterhouse.
It computes everything anew from the events, so it shares no code with what it verifies.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

JSON = dict[str, Any]
Group = tuple[int, tuple[str, str, str], str]
"""Start of the period, slot of the price book, class: units that share tiers."""

FEMTO_PER_NANO = 10**6
FEMTO = 10**15
PER = {"image": 1, "audio_second": 1000, "tool_call": 1, "request": 1, "compute_second": 10**6, "adapter_month": 1}
TOKENS_PER = 10**6
SHORTEST_US = 27 * 86_400 * 10**6  # no month is shorter, wherever clocks jump
DIGITS = {"jpy": 0, "krw": 0, "clp": 0, "vnd": 0, "kwd": 3, "bhd": 3, "jod": 3, "omr": 3, "tnd": 3}
LISTED = ("usage", "minimum", "adapter")
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
EMPTY_LINE: JSON = {
    **{"adapter": "", "allowance": 0, "base": "0", "booked": "0", "endpoint": "", "late_of": "", "minimum": ""},
    **{"model": "", "package_size": 0, "position": 0, "price_id": "", "price_model": "flat", "quantity": 0},
    **{"tiers": [], "token_class": None, "total": 0, "unit_price_nano": 0},
}
UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


class Unreadable(Exception):
    """A file that is not what it should be; the text says which and why."""


class Finding(NamedTuple):
    """Something that does not hold."""

    check: str
    message: str
    event_id: str = ""
    line_id: str = ""


class Event(NamedTuple):
    """One line of the events' file, with its leaf."""

    ts_us: int
    event_id: str
    leaf: bytes
    fields: JSON


class Report:
    """What was found."""

    def __init__(self, invoice_id: str) -> None:
        self.invoice_id = invoice_id
        self.findings: list[Finding] = []
        self.proven: list[str] = []
        self.not_proven: list[str] = []

    def wrong(self, check: str, message: str, *, event_id: str = "", line_id: str = "") -> None:
        self.findings.append(Finding(check, message, event_id, line_id))

    def plain(self) -> JSON:
        return {
            "invoice": self.invoice_id,
            "ok": not self.findings,
            "findings": [finding._asdict() for finding in self.findings],
            "proven": self.proven,
            "not_proven": self.not_proven,
        }

    def text(self) -> str:
        """For people."""
        verdict = "holds" if not self.findings else "does NOT hold"
        lines = [f"Invoice {self.invoice_id} {verdict}."]
        lines += [f"  WRONG  {finding.check}: {finding.message}" for finding in self.findings]
        lines += [f"  proven  {one}" for one in self.proven]
        lines += [f"  not proven  {one}" for one in self.not_proven]
        return "\n".join(lines) + "\n"


# -- files -----------------------------------------------------------------------------------------------------------


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no whole number")


def _object(pairs: list[tuple[str, Any]]) -> JSON:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


_decode = json.JSONDecoder(object_pairs_hook=_object, parse_float=_refuse, parse_constant=_refuse).decode


def canonical(value: Any) -> bytes:
    """UTF-8, keys sorted, no spaces: the bytes that are hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def read_object(path: Path) -> JSON:
    """A JSON object without floats. Raises `Unreadable`."""
    return _parse(path.name, _text(path))


def read_lines(path: Path) -> list[JSON]:
    """One object a line; empty lines are passed over. Raises `Unreadable`."""
    lines = _text(path).split("\n")
    return [_parse(f"{path.name}, line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None


def _parse(where: str, text: str) -> JSON:
    try:
        found = _decode(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{where}: not the JSON that is expected: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{where}: not a JSON object")
    return found


# -- the tree (RFC 6962) ----------------------------------------------------------------------------------------------


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Over leaf hashes; level by level, a node without a sibling goes up as it is."""
    level = list(leaves)
    if not level:
        return hashlib.sha256(b"").digest()
    while len(level) > 1:
        pairs = [hashlib.sha256(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def read_events(path: Path) -> list[Event]:
    """By time and id, whatever their order in the file. Raises `Unreadable`."""
    found = []
    for number, fields in enumerate(read_lines(path), start=1):
        ts_us, event_id = fields.get("ts_us"), fields.get("event_id")
        if not _whole(ts_us) or not isinstance(event_id, str):
            raise Unreadable(f"{path.name}: event number {number} has no ts_us and event_id")
        leaf = hashlib.sha256(b"\x00" + canonical(fields)).digest()
        found.append(Event(int(ts_us or 0), event_id, leaf, fields))
    return sorted(found, key=lambda event: event[:3])


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -- signature --------------------------------------------------------------------------------------------------------


def _check_head(report: Report, invoice: JSON, keys: JSON | None) -> None:
    document, signed = invoice["document"], invoice.get("signed")
    digest = hashlib.sha256(canonical(document)).hexdigest()
    if invoice.get("content_hash") != digest:
        report.wrong("content hash", f"the document's is {digest}, the file says {invoice.get('content_hash')}")
    if signed is None:
        report.not_proven.append("that the seller stands by it: the invoice is not signed")
        return
    head = signed["head"]
    said = {
        "object": "meterhouse.tree_head",
        "v": 1,
        "invoice_id": document["id"],
        "tenant": document["tenant"],
        "content_hash": digest,
        "root": document["events"]["root"],
        "tree_size": document["events"]["count"],
    }
    for name, value in said.items():
        if head.get(name) != value:
            report.wrong("signed head", f"it says {name} {head.get(name)!r}, the invoice {value!r}")
    if keys is None:
        report.not_proven.append("who signed it: no trusted keys were given (--keys)")
        return
    if fault := _signature_fault(signed, keys):
        report.wrong("signature", fault)
    else:
        report.proven.append(f"it is signed by {head['key_id']}, a key of those given")


def _signature_fault(signed: JSON, keys: JSON) -> str:
    head = signed["head"]
    key = next((one for one in keys["keys"] if one["kid"] == head["key_id"]), None)
    if key is None:
        return f"the key {head['key_id']} is none of the seller's"
    try:
        public = _from_base64(key["x"])
        if key["kid"] != f"ed25519-{hashlib.sha256(public).hexdigest()[:32]}":
            return f"the key {key['kid']} is not the one of this name"
        Ed25519PublicKey.from_public_bytes(public).verify(_from_base64(signed["signature"]), canonical(head))
    except (InvalidSignature, ValueError):
        return f"it is not one by the key {key['kid']}"
    retired = key.get("retired_us")
    if head["signed_at_us"] < key["published_us"] or (retired is not None and head["signed_at_us"] > retired):
        return f"the key {key['kid']} was not in use when it was signed"
    return ""


def _from_base64(text: str) -> bytes:
    found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != text:
        raise ValueError("another text of the same bytes")
    return found


# -- events -----------------------------------------------------------------------------------------------------------


def _check_events(report: Report, invoice: JSON, events: Sequence[Event]) -> None:
    said = invoice["document"]["events"]
    listed = invoice.get("leaves")
    fault = None
    if listed is not None:
        leaves = [(event_id, bytes.fromhex(leaf)) for event_id, leaf in listed]
        if merkle_root([leaf for _, leaf in leaves]).hex() != said["root"]:
            report.wrong("leaves", "the leaf hashes in the file are not those of the signed root")
        else:
            fault = _first_difference(leaves, events)
    fault = fault or _doubled(events)
    if fault is not None:
        report.findings.append(fault)
    if len(events) != said["count"]:
        report.wrong("number of events", f"the invoice has {said['count']}, the file {len(events)}")
    root = merkle_root([event.leaf for event in events]).hex()
    if root != said["root"]:
        named = "" if fault else ": one is missing, added or changed; `?leaves=true` on the invoice tells which"
        report.wrong("root", f"the events' is {root}, the invoice's {said['root']}{named}")
    elif fault is None and len(events) == said["count"]:
        report.proven.append(f"the {len(events)} events are those of the signed root, each once and unchanged")


def _doubled(events: Sequence[Event]) -> Finding | None:
    seen: set[str] = set()
    for event in events:
        if event.event_id in seen:
            return Finding("event doubled", f"{event.event_id} stands more than once", event.event_id)
        seen.add(event.event_id)
    return None


def _first_difference(leaves: Sequence[tuple[str, bytes]], events: Sequence[Event]) -> Finding | None:
    """The first, in the order of the tree, that is missing, doubled or changed; else one that is on it nowhere."""
    given: dict[str, list[bytes]] = defaultdict(list)
    for event in events:
        given[event.event_id].append(event.leaf)
    for number, (event_id, leaf) in enumerate(leaves, start=1):
        found = given.pop(event_id, [])
        where = f"{event_id}, number {number} of the invoice,"
        if not found:
            return Finding("event missing", f"{where} is not in the events", event_id)
        if len(found) > 1:
            return Finding("event doubled", f"{where} stands {len(found)} times in the events", event_id)
        if found[0] != leaf:
            return Finding("event changed", f"{where} is not what was invoiced", event_id)
    strange = next(iter(given), None)
    return None if strange is None else Finding("event added", f"{strange} is not on the invoice", strange)


def _check_receipts(report: Report, document: JSON, events: Sequence[Event], receipts: Sequence[JSON]) -> None:
    by_id = {event.event_id: event for event in events}
    spans = [document["period"], *document["late"]]
    elsewhere = wrong = 0
    for receipt in receipts:
        event_id = str(receipt.get("event_id"))
        event = by_id.get(event_id)
        if event is None:
            if _outside(event_id, spans):
                elsewhere += 1
                continue
            wrong += 1
            if wrong == 1:
                report.wrong("receipt without its event", f"{event_id} is not in the events", event_id=event_id)
        elif receipt.get("leaf") != event.leaf.hex() or any(receipt.get(name) != event.fields[name] for name in COUNTS):
            wrong += 1
            if wrong == 1:
                report.wrong("receipt", f"{event_id} is another event than the client was told", event_id=event_id)
    if not wrong:
        report.proven.append(f"{len(receipts) - elsewhere} receipts are those of their events")
    if elsewhere:
        report.not_proven.append(f"{elsewhere} receipts, which are of other periods")
    told = {str(receipt.get("event_id")) for receipt in receipts}
    if alone := [event for event in events if event.event_id not in told]:
        report.not_proven.append(
            f"that {len(alone)} events were asked for: no receipt given is of them, first {alone[0].event_id}"
        )


def _outside(event_id: str, spans: Iterable[JSON]) -> bool:
    """Whether the id's own time says that the event is of another period."""
    found = UUID7.fullmatch(event_id)
    if found is None:
        return False
    ms = int(found[1] + found[2], 16)
    return not any(one["start_us"] // 1000 <= ms <= one["end_us"] // 1000 for one in spans)


# -- prices -----------------------------------------------------------------------------------------------------------


class Price:
    """A version of the price book, as the document has it."""

    def __init__(self, plain: JSON, number: int) -> None:
        self.id: str = plain["id"]
        self.tenant: str | None = plain["tenant"]
        self.model: str = plain["model"]
        self.endpoint: str = plain["endpoint"]
        self.currency: str = plain["currency"]
        self.effective_us: int = plain["effective_at_us"]
        self.recorded_us: int = plain["recorded_us"]
        self.components: dict[str, JSON] = {one["token_class"]: one for one in plain["components"]}
        self.slot = (self.tenant or "", self.model, self.endpoint)
        self.rank = (max(self.effective_us, self.recorded_us), number)
        self.newest = (self.effective_us, number)


def _price_of(event: JSON, prices: Sequence[Price], currency: str) -> Price:
    """Tenant + name, tenant + *, name, base model, *; at each the endpoint's own goes first; of these the newest."""
    ts_us, model, base = event["ts_us"], event["model"], event["base_model"]
    tenant = event["tenant"]
    for owner, name in ((tenant, model), (tenant, "*"), (None, model), (None, base), (None, "*")):
        for endpoint in (event["endpoint"], ""):
            able = [
                price
                for price in prices
                if (price.tenant, price.model, price.endpoint, price.currency) == (owner, name, endpoint, currency)
                and price.effective_us <= ts_us
                and price.recorded_us <= ts_us
            ]
            if able:
                return max(able, key=lambda price: price.newest)
    raise ValueError(f"no price in the document is for event {event['event_id']}")


def _later_price_of(event: JSON, price: Price, prices: Sequence[Price], currency: str) -> Price:
    """A price that was set after the request: one that is for it, where there was none at its time."""
    own = price.tenant == event["tenant"] and price.model in (event["model"], "*")
    if (
        not (own or (price.tenant is None and price.model in (event["model"], event["base_model"], "*")))
        or price.endpoint not in ("", event["endpoint"])
        or price.currency != currency
        or price.effective_us > event["ts_us"]
    ):
        raise ValueError(f"the price {price.id} is none for event {event['event_id']}")
    try:
        standing = _price_of(event, prices, currency)
    except ValueError:
        return price
    media = [name for name, count in (("image", event["images"]), ("audio_second", event["audio_ms"])) if count]
    if all(name in standing.components for name in media):
        raise ValueError(f"event {event['event_id']} had the price {standing.id} at its time")
    return price


def _units(event: JSON, priced: JSON) -> dict[str, int]:
    """Base units of each class that has a price; what is priced apart is not counted in what it is part of."""
    worked = event["prompt_tokens"] or event["completion_tokens"] or event["images"] or event["audio_ms"]
    apart = {
        "cache_write": event["cache_write_tokens"],
        "reasoning": event["reasoning_tokens"],
        "image": event["images"],
        "audio_second": event["audio_ms"],
        "tool_call": event["tool_calls"],
        "request": 1 if worked else 0,
        "compute_second": max(0, event["compute_us"]),
    }
    found = {name: count for name, count in apart.items() if name in priced}
    found["prompt"] = event["prompt_tokens"] - event["cached_tokens"] - found.get("cache_write", 0)
    found["cached"] = event["cached_tokens"]
    found["completion"] = event["completion_tokens"] - found.get("reasoning", 0)
    return found


def _linear(component: JSON) -> bool:
    return component["model"] == "flat" and not component["allowance"] and not component["minimum"]


def _unit_femto(token_class: str, nano: int) -> int:
    return nano * FEMTO_PER_NANO // PER.get(token_class, TOKENS_PER)


def _cost(component: JSON, position: int, quantity: int) -> int:
    """What so many units cost of which `position` of the period come before."""
    allowance = int(component["allowance"])
    first, last = max(0, position - allowance), max(0, position + quantity - allowance)
    name, tiers = component["token_class"], component["tiers"]
    if component["model"] == "flat":
        return (last - first) * _unit_femto(name, tiers[0]["price_nano"])
    if component["model"] == "graduated":
        return _graduated(name, tiers, last) - _graduated(name, tiers, first)
    if component["model"] == "volume":
        tier = _tier(tiers, last)
        return (last - first) * _unit_femto(name, tier["price_nano"])
    if component["model"] == "package":
        size = component["package_size"]
        return int((-(-last // size) + (-first // size)) * tiers[0]["price_nano"] * FEMTO_PER_NANO)
    raise ValueError(f"unknown price model {component['model']!r}")


def _tier(tiers: Sequence[JSON], quantity: int) -> JSON:
    for tier in tiers:
        if tier["up_to"] is None or quantity <= tier["up_to"]:
            return tier
    raise ValueError("the last tier has an end")


def _graduated(name: str, tiers: Sequence[JSON], quantity: int) -> int:
    total = below = 0
    for tier in tiers:
        top = quantity if tier["up_to"] is None else min(quantity, tier["up_to"])
        total += max(0, top - below) * _unit_femto(name, tier["price_nano"])
        below = max(below, top)
    return total


def _amount(text: str) -> int:
    """Decimal text → femto-units."""
    scaled = Fraction(text or "0") * FEMTO
    if scaled.denominator != 1:
        raise ValueError(f"{text!r} is no exact amount")
    return scaled.numerator


def _percent(amount: Fraction, percent: str) -> Fraction:
    return amount * Fraction(percent) / 100


# -- lines ------------------------------------------------------------------------------------------------------------


class Lines:
    """The lines that the events, the prices and the earlier bookings of a document come to."""

    def __init__(self, document: JSON, events: Sequence[Event]) -> None:
        self._document = document
        self._events = events
        self._said: list[JSON] = document["lines"]
        self._period: JSON = document["period"]
        self._prices = [Price(plain, number) for number, plain in enumerate(document["prices"])]
        self._by_id = {price.id: price for price in self._prices}
        self._booked: list[JSON] = document["booked"]
        self._ends = {self._group(line): line["period_end_us"] for line in self._said if line["tiers"]}

    def expected(self) -> list[JSON]:
        """All lines, with their ids and rounded amounts."""
        linear, groups = self._sums()
        lines = [self._linear_line(key, units) for key, units in sorted(linear.items())]
        for group in sorted(groups):
            lines += self._tiered(group, groups[group])
        lines += self._minimums(lines)
        lines += self._adapters()
        for number, line in enumerate(lines, start=1):
            line["id"] = f"{self._document['id']}-{number}"
        lines += self._terms(lines)
        lines += self._carry(lines)
        return self._closed(lines)

    def _group(self, line: JSON) -> Group:
        return line["period_start_us"], self._by_id[line["price_id"]].slot, line["token_class"]

    def _late_of(self, ts_us: int) -> JSON | None:
        """The earlier invoice that an event comes too late for; None: it is of the invoice's own period."""
        if self._period["start_us"] <= ts_us < self._period["end_us"]:
            return None
        for late in self._document["late"]:
            if late["start_us"] <= ts_us < late["end_us"]:
                found: JSON = late
                return found
        raise ValueError("an event is of no period that the invoice names")

    def _sums(self) -> tuple[dict[tuple[str, ...], int], dict[Group, dict[str, Any]]]:
        linear: dict[tuple[str, ...], int] = defaultdict(int)
        groups: dict[Group, dict[str, Any]] = {}
        later, currency = self._document["priced_later"], self._document["currency"]
        counted = {one["event_id"]: one["start_us"] for one in self._document["counted"]}
        period_us = 0
        found: dict[tuple[Any, ...], list[Price]] = {}
        for event in self._events:
            fields = event.fields
            if fields["tenant"] != self._document["tenant"]:
                raise ValueError(f"event {event.event_id} is another tenant's")
            period_us = counted.get(event.event_id, period_us)
            if event.event_id in later:
                price = _later_price_of(fields, self._by_id[later[event.event_id]], self._prices, currency)
            else:
                key = fields["model"], fields["base_model"], fields["endpoint"]
                able = found.setdefault(key, [one for one in self._prices if one.model in (*key[:2], "*")])
                price = _price_of(fields, able, currency)
            late = self._late_of(event.ts_us)
            late_id = late["invoice_id"] if late else ""
            for name, units in _units(fields, price.components).items():
                if not units:
                    continue
                if _linear(price.components[name]):
                    linear[late_id, fields["model"], fields["adapter"], name, price.id] += units
                    continue
                group = groups.setdefault((period_us, price.slot, name), {"units": defaultdict(int), "late": set()})
                group["units"][price.id] += units
                group["late"].add(late_id)
        return linear, groups

    def _linear_line(self, key: tuple[str, ...], units: int) -> JSON:
        late_id, model, adapter, name, price_id = key
        span = next((one for one in self._document["late"] if one["invoice_id"] == late_id), self._period)
        price = self._by_id[price_id]
        nano = price.components[name]["tiers"][0]["price_nano"]
        return {
            **EMPTY_LINE,
            "kind": "usage",
            "model": model,
            "adapter": adapter,
            "token_class": name,
            "price_id": price_id,
            "period_start_us": span["start_us"],
            "period_end_us": span["end_us"],
            "late_of": late_id,
            "quantity": units,
            "unit_price_nano": nano,
            "endpoint": price.endpoint,
            "exact": str(units * _unit_femto(name, nano)),
        }

    def _tiered(self, group: Group, new: dict[str, Any]) -> Iterator[JSON]:
        had: dict[str, int] = defaultdict(int)
        amounts: dict[str, int] = defaultdict(int)
        for line in self._booked:
            if line["tiers"] and line["kind"] == "usage" and self._group(line) == group:
                had[line["price_id"]] += line["quantity"]
                amounts[line["price_id"]] += int(line["exact"])
        late_of = next(iter(new["late"])) if len(new["late"]) == 1 else ""
        position = 0
        for id in sorted({*new["units"], *had}, key=lambda id: self._by_id[id].rank):
            units = new["units"].get(id, 0)
            component = self._by_id[id].components[group[2]]
            total = units + had[id]
            exact = _cost(component, position, total) - amounts[id]
            if units or exact:
                yield {
                    **self._priced_line(group, self._by_id[id]),
                    "kind": "usage",
                    "late_of": late_of,
                    "quantity": units,
                    "position": position,
                    "total": total,
                    "booked": str(amounts[id]),
                    "exact": str(exact),
                }
            position += total

    def _priced_line(self, group: Group, price: Price) -> JSON:
        component = price.components[group[2]]
        return {
            **EMPTY_LINE,
            "model": price.model,
            "token_class": group[2],
            "price_id": price.id,
            "period_start_us": group[0],
            "period_end_us": self._ends[group],
            "endpoint": price.endpoint,
            "price_model": component["model"],
            **{name: component[name] for name in ("tiers", "package_size", "allowance", "minimum")},
        }

    def _minimums(self, lines: Sequence[JSON]) -> Iterator[JSON]:
        for group in sorted(self._ends):
            of_group = [line for line in [*self._booked, *lines] if line["tiers"] and self._group(line) == group]
            usage = [line for line in of_group if line["kind"] == "usage"]
            if not usage or self._ends[group] > self._period["end_us"]:
                continue
            price = max((self._by_id[line["price_id"]] for line in usage), key=lambda price: price.rank)
            base = sum(int(line["exact"]) for line in usage)
            asked = sum(int(line["exact"]) for line in of_group if line["kind"] == "minimum")
            exact = max(0, _amount(price.components[group[2]]["minimum"]) - base) - asked
            if exact:
                yield {
                    **self._priced_line(group, price),
                    "kind": "minimum",
                    "late_of": usage[-1]["late_of"],
                    "booked": str(asked),
                    "base": str(base),
                    "exact": str(exact),
                }

    def _adapters(self) -> Iterator[JSON]:
        """For how long an adapter stood is the seller's word; what that costs is not."""
        stood: dict[tuple[str, int], int] = defaultdict(int)
        for line in self._said:
            if line["kind"] == "adapter":
                price = self._by_id[line["price_id"]]
                nano = price.components["adapter_month"]["tiers"][0]["price_nano"]
                part_us = line["period_end_us"] - line["period_start_us"]
                stood[line["adapter"], line["period_start_us"]] += line["quantity"]
                if line["quantity"] <= 0 or stood[line["adapter"], line["period_start_us"]] > part_us:
                    raise ValueError(f"the adapter of line {line['id']} stood for longer than there is time")
                _check_whole(line["total"], line, self._period)
                yield {
                    **EMPTY_LINE,
                    "kind": "adapter",
                    "token_class": "adapter_month",
                    "unit_price_nano": nano,
                    "exact": str(Fraction(line["quantity"] * _unit_femto("adapter_month", nano), line["total"])),
                    **{name: line[name] for name in ("model", "adapter", "price_id", "quantity", "total")},
                    **{name: line[name] for name in ("period_start_us", "period_end_us")},
                }

    # what follows from terms

    def _terms(self, listed: Sequence[JSON]) -> Iterator[JSON]:
        spans = self._document.get("spans", [])
        self._check_own_span(spans, listed)
        by_id = {line["id"]: line for line in [*self._booked, *listed]}
        placed = [id for span in spans for id in span["new"]]
        if spans and sorted(placed) != sorted(line["id"] for line in listed):
            raise ValueError("a line is in no span, or in two")
        for span in spans:
            yield from _of_span(span, [by_id[id] for id in [*span["standing"], *span["new"]]], set(span["new"]))

    def _check_own_span(self, spans: Sequence[JSON], listed: Sequence[JSON]) -> None:
        """What is agreed for the invoice's own period is applied to its own lines."""
        terms = self._document.get("terms", {})
        own = [span for span in spans if not span["late_of"]]
        if not spans and not terms.get("discounts") and not terms.get("commitment"):
            return
        if len(own) != 1 or any(own[0][name] != self._period[name] for name in ("start_us", "end_us")):
            raise ValueError("its terms are not applied to its period")
        if any(own[0]["terms"][name] != terms.get(name, []) for name in ("discounts", "commitment")):
            raise ValueError("other terms are applied to its period than it names")
        if {line["id"] for line in listed if not line["late_of"]} - set(own[0]["new"]):
            raise ValueError("a line of its period is not under its terms")
        for part in (part for span in spans for part in span["terms"]["commitment"]):
            _check_whole(part["period_us"], {"period_start_us": part["start_us"], "period_end_us": part["end_us"]})

    def _carry(self, lines: Sequence[JSON]) -> Iterator[JSON]:
        net = sum((Fraction(line["exact"]) for line in lines), Fraction(0))
        put_off = (Fraction(line["exact"]) for line in self._booked if line["kind"] == "carry")
        carried = sum(put_off, Fraction(0))
        if exact := max(-carried, -net):
            yield {**self._bare(self._period, "carry", exact), "base": str(carried)}

    def _bare(self, span: JSON, kind: str, exact: Fraction) -> JSON:
        return _bare(span, kind, exact)

    def _closed(self, lines: list[JSON]) -> list[JSON]:
        """With ids, rounded; then each tax of their rounded sum."""
        unit = 10 ** (15 - DIGITS.get(self._document["currency"], 2))
        rounded = _largest_remainder([Fraction(line["exact"]) for line in lines], unit)
        closed = [
            {**line, "id": f"{self._document['id']}-{number}", "amount_minor": minor}
            for number, (line, minor) in enumerate(zip(lines, rounded, strict=True), start=1)
        ]
        net = sum(rounded) * unit
        tax = self._document.get("terms", {}).get("tax", {"mode": "none"})
        if net > 0 and tax["mode"] == "fixed":
            for rate in tax["rates"]:
                exact = _percent(Fraction(net), rate["percent"])
                line = _bare(self._period, "tax", exact)
                line |= {"name": rate["name"], "base": str(net), "rate": rate["percent"]}
                line |= {"id": f"{self._document['id']}-{len(closed) + 1}", "amount_minor": round(exact / unit)}
                closed.append(line)
        return closed


def _check_whole(whole_us: int, part: JSON, within: JSON | None = None) -> None:
    """A price for a billing period is for a part of it by the part's length: the whole is a month, and has the part."""
    start_us, end_us = part["period_start_us"], part["period_end_us"]
    if whole_us < max(SHORTEST_US, end_us - start_us):
        raise ValueError("a part of a billing period is taken of less than a month")
    if within is not None and not within["start_us"] <= start_us < end_us <= within["end_us"]:
        raise ValueError("a part of a billing period is not of the invoice's")


def _bare(span: JSON, kind: str, exact: Fraction) -> JSON:
    times = {"period_start_us": span["start_us"], "period_end_us": span["end_us"]}
    return {**EMPTY_LINE, **times, "kind": kind, "exact": str(exact)}


def _of_span(span: JSON, lines: Sequence[JSON], new: set[str]) -> Iterator[JSON]:
    """Discounts and the tenant's minimum of one invoice's period, less what earlier invoices have of them."""
    left: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    had: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    gone: dict[str, JSON] = {}
    for line in lines:
        if line["kind"] in LISTED:
            left[line["model"], line["token_class"]] += Fraction(line["exact"])
        elif line["id"] not in new:
            had[line["kind"], line.get("term", "")] += Fraction(line["exact"])
            if line["kind"] == "discount":
                gone[line["term"]] = line
    terms, late = span["terms"], {"late_of": span["late_of"]}
    known = [one["id"] for one in terms["discounts"]]
    forgotten = [
        {"id": id, "name": line["name"], "percent": "", "amount": "", "model": "", "token_class": ""}
        for id, line in sorted(gone.items())
        if id not in known
    ]
    for discount in [*terms["discounts"], *forgotten]:
        base, taken = _take(discount, left, Fraction(terms["share"]))
        booked = had["discount", discount["id"]]
        if exact := -taken - booked:
            extras = {
                **{"name": discount["name"], "term": discount["id"], "rate": discount["percent"]},
                **{"fixed": discount["amount"], "share": "" if terms["share"] == "1" else terms["share"]},
            }
            yield {
                **_bare(span, "discount", exact),
                **late,
                **{name: value for name, value in extras.items() if value},
                **{"model": discount["model"], "token_class": discount["token_class"] or None},
                **{"base": str(base), "booked": str(booked)},
            }
    base = sum(left.values(), Fraction(0))
    parts = terms["commitment"]
    target = sum(
        (Fraction(_amount(one["amount"]) * (one["end_us"] - one["start_us"]), one["period_us"]) for one in parts),
        Fraction(0),
    )
    booked = had["commitment", ""]
    if exact := max(Fraction(0), target - base) - booked:
        bare = {**_bare(span, "commitment", exact), **late, "base": str(base), "booked": str(booked)}
        yield {**bare, **({"parts": parts} if parts else {})}


def _take(discount: JSON, left: dict[tuple[str, str], Fraction], share: Fraction) -> tuple[Fraction, Fraction]:
    """Take a discount from what is left of each model and class: what there was, and what it took."""
    cells = [
        cell
        for cell in sorted(left)
        if left[cell] > 0 and discount["model"] in ("", cell[0]) and discount["token_class"] in ("", cell[1])
    ]
    base = sum((left[cell] for cell in cells), Fraction(0))
    most, taken = _amount(discount["amount"]) * share, Fraction(0)
    for cell in cells:
        part = _percent(left[cell], discount["percent"]) if discount["percent"] else min(left[cell], most - taken)
        left[cell] -= part
        taken += part
    return base, taken


def _largest_remainder(parts: Sequence[Fraction], unit: int) -> list[int]:
    """Rounded so that they sum to the exact sum rounded half to even; ties go to the earlier part."""
    exact = [part / unit for part in parts]
    floors = [math.floor(part) for part in exact]
    short = round(sum(exact, Fraction(0))) - sum(floors)
    for i in sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))[:short]:
        floors[i] += 1
    return floors


def _check_lines(report: Report, document: JSON, events: Sequence[Event]) -> None:
    said = document["lines"]
    try:
        expected = Lines(document, events).expected()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        report.wrong("lines", f"they cannot be computed from the events and prices: {error}")
        return
    fault = _first_wrong_line(said, expected)
    if fault is not None:
        report.findings.append(fault)
    total = sum(line["amount_minor"] for line in expected)
    exact = sum((Fraction(line["exact"]) for line in expected), Fraction(0))
    digits = DIGITS.get(document["currency"], 2)
    for name, value in (("total_minor", total), ("exact_total", str(exact))):
        if document[name] != value:
            report.wrong("total", f"the events come to {name} {value}, the invoice says {document[name]}")
    if document["rounding"] != {"digits": digits, "lines": "largest_remainder", "total": "half_even"}:
        report.wrong("rounding", "it is not the one that every invoice has")
    if fault is None and document["total_minor"] == total:
        report.proven.append(f"its {len(said)} lines and its total are what the events cost by the prices in it")
    if any(line["kind"] == "adapter" for line in said):
        report.not_proven.append("for how long adapters stood: that is the seller's word")
    if any(line["tiers"] for line in said):
        report.not_proven.append("in which periods tiers, packages and minimums count: that is the seller's word")
    if document["late"]:
        report.not_proven.append("that what is late is on no earlier invoice: compare it with those it is late for")
    if document["booked"]:
        report.not_proven.append("what earlier invoices have booked: compare it with them")
    report.not_proven.append("that these prices and terms are those agreed upon: compare them with the agreement")


def _first_wrong_line(said: Sequence[JSON], expected: Sequence[JSON]) -> Finding | None:
    for line, wanted in zip(said, expected, strict=False):
        for name in sorted({*line, *wanted}):
            if line.get(name) != wanted.get(name) or type(line.get(name)) is not type(wanted.get(name)):
                told = f"{name} is {line.get(name)!r}, the events come to {wanted.get(name)!r}"
                return Finding("line", f"{line.get('id')}: {told}", "", str(line.get("id")))
    if len(said) != len(expected):
        more = said[len(expected) :] or expected[len(said) :]
        what = "is nothing that the events come to" if len(said) > len(expected) else "is missing"
        return Finding("line", f"{more[0]['id']} {what}", "", more[0]["id"])
    return None


# -- all of it --------------------------------------------------------------------------------------------------------


def verify(
    invoice: JSON, events: Sequence[Event], receipts: Sequence[JSON] | None = None, keys: JSON | None = None
) -> Report:
    """Everything that can be checked; what cannot is said too."""
    report = Report("?")
    try:
        document = invoice["document"]
        report.invoice_id = str(document["id"])
        if (document["object"], document["version"]) != ("meterhouse.invoice", 1):
            report.wrong("document", "it is of a kind that this verifier does not know")
        _check_head(report, invoice, keys)
        _check_events(report, invoice, events)
        _check_lines(report, document, events)
        if receipts is None:
            report.not_proven.append("that no request is missing or added: no receipts of the clients were given")
        else:
            _check_receipts(report, document, events, receipts)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        report.wrong("document", f"it lacks something, or has it of another kind: {error!r}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="verify.py", description="Verify an invoice without asking its seller.")
    parser.add_argument("invoice", type=Path, help="GET /v1/invoices/ID?leaves=true")
    parser.add_argument("events", type=Path, help="GET /v1/usage/events?invoice=ID")
    parser.add_argument("receipts", type=Path, nargs="?", help="receipts that clients were given, one a line")
    parser.add_argument("--keys", type=Path, help="GET /.well-known/meterhouse-signing-keys.json, as it was trusted")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    given = parser.parse_args(arguments)
    try:
        invoice, events = read_object(given.invoice), read_events(given.events)
        receipts = None if given.receipts is None else read_lines(given.receipts)
        keys = None if given.keys is None else read_object(given.keys)
    except Unreadable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = verify(invoice, events, receipts, keys)
    sys.stdout.write(json.dumps(report.plain(), indent=2) + "\n" if given.json else report.text())
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
