"""What a tenant sees of an event, and the receipt for it: bytes that never change."""

from __future__ import annotations

import hashlib
import json

import msgspec

from metering.events import Outcome, UsageEvent
from metering.receipts import encode_receipt, leaf_bytes, leaf_of, receipt_of

EVENT = UsageEvent(
    event_id="0190a",
    ts_us=1_790_000_000_000_000,
    settled_us=1_790_000_000_500_000,
    tenant="acme",
    key_id="k",
    model="ft:é",
    base_model="base",
    endpoint="chat.completions",
    gateway="g-7",
    outcome=Outcome.FINISHED,
    finish_reason="stop",
    prompt_tokens=10,
    cached_tokens=4,
    completion_tokens=5,
    user="jane@example.com",
    metadata={"ticket": "17"},
)
BYTES = (
    '{"adapter":"","audio_ms":0,"base_model":"base","cache_write_tokens":0,"cached_tokens":4,"completion_tokens":5,'
    '"compute_us":0,"endpoint":"chat.completions","estimated":false,"event_id":"0190a","finish_reason":"stop",'
    '"images":0,"key_id":"k","model":"ft:é","n":1,"outcome":"finished","prompt_tokens":10,"reasoning_tokens":0,'
    '"stream":false,"tenant":"acme","tool_calls":0,"ts_us":1790000000000000,"v":1}'
)


def test_the_bytes_of_a_leaf_are_fixed_and_any_json_library_makes_them() -> None:
    assert leaf_bytes(EVENT).decode() == BYTES
    plain = json.loads(BYTES)
    assert json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False) == BYTES
    assert leaf_of(EVENT) == hashlib.sha256(b"\0" + BYTES.encode()).digest()


def test_an_event_of_an_older_version_has_the_same_view() -> None:
    assert {leaf_bytes(msgspec.structs.replace(EVENT, v=version)) for version in (1, 2, 3)} == {BYTES.encode()}


def test_what_may_be_erased_or_is_the_houses_own_is_not_in_it() -> None:
    erased = msgspec.structs.replace(EVENT, user="", metadata={}, gateway="x", queue_us=5, kv_block_us=7, duration_us=9)
    assert leaf_of(erased) == leaf_of(EVENT)
    assert leaf_of(msgspec.structs.replace(EVENT, completion_tokens=6)) != leaf_of(EVENT)


def test_a_receipt_is_one_line_of_ascii() -> None:
    line = encode_receipt(receipt_of(EVENT))
    assert line.isascii()
    assert b"\n" not in line
    assert json.loads(line) == {
        **{"event_id": "0190a", "leaf": leaf_of(EVENT).hex()},
        **{"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5, "reasoning_tokens": 0},
    }
