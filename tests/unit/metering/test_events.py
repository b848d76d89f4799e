"""Every version's bytes and hashes are for ever; what cannot be read as it is, is not read."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from metering.events import VERSION, Outcome, UsageEvent, VersionError, content_hash, decode, encode
from tests import oldevents

NEW = (
    b'{"v":3,"event_id":"0190aaaa-0000-7000-8000-000000000003","ts_us":1764000000000000,"settled_us":1764000001000000,'
    b'"tenant":"acme","key_id":"k1","model":"base","base_model":"base","adapter":"","endpoint":"completions",'
    b'"gateway":"g1","outcome":"finished","finish_reason":"stop","prompt_tokens":10,"cached_tokens":0,'
    b'"completion_tokens":5,"reasoning_tokens":0,"recomputed_tokens":3,"rejected_tokens":0,"n":1,"stream":false,'
    b'"estimated":false,"user":"","metadata":{},"queue_us":7,"ttft_us":0,"duration_us":9,"compute_us":1500,'
    b'"kv_block_us":64000,"preemptions":1,"cache_write_tokens":4,"images":2,"audio_ms":1500,"tool_calls":3}'
)


@pytest.mark.parametrize(("data", "digest"), oldevents.EVENTS.items())
def test_version_1_comes_back_to_the_same_bytes_and_hash(data: bytes, digest: str) -> None:
    event = decode(data)
    assert (event.v, event.compute_us, event.kv_block_us, event.preemptions) == (1, 0, 0, 0)
    assert event.faults() == []
    assert encode(event) == data
    assert content_hash(event) == digest == hashlib.sha256(data).hexdigest()
    assert encode(msgspec.structs.replace(event)) == data


def test_version_1_is_read_field_by_field() -> None:
    event = decode(oldevents.FULL)
    assert event.metadata == {"team": "x", "b": "", "ключ": "値"}
    assert (event.outcome, event.user, event.completion_tokens) == (Outcome.ABORT, 'Zoë "\\\t🦙', (1 << 53) + 1)
    assert (event.recomputed_tokens, event.queue_us, event.ttft_us, event.duration_us) == (16, 1234, -1, 5_000_001)


def test_version_2_comes_back_to_the_same_bytes_and_hash() -> None:
    event = decode(oldevents.SECOND)
    assert (event.v, event.compute_us, event.kv_block_us, event.preemptions) == (2, 1500, 64_000, 1)
    assert (event.cache_write_tokens, event.images, event.audio_ms, event.tool_calls) == (0, 0, 0, 0)
    assert event.faults() == []
    assert encode(event) == oldevents.SECOND
    assert content_hash(event) == oldevents.SECOND_HASH == hashlib.sha256(oldevents.SECOND).hexdigest()


def test_a_new_event_is_of_version_3_and_has_what_can_be_priced() -> None:
    event = decode(NEW)
    assert (event.v, event.compute_us, event.kv_block_us, event.preemptions) == (3, 1500, 64_000, 1)
    assert (event.cache_write_tokens, event.images, event.audio_ms, event.tool_calls) == (4, 2, 1500, 3)
    assert encode(event) == NEW
    assert content_hash(event) == hashlib.sha256(NEW).hexdigest()
    made = UsageEvent(**{name: value for name, value in msgspec.structs.asdict(event).items() if name != "v"})
    assert made.v == VERSION == 3
    assert encode(made) == NEW


@pytest.mark.parametrize("version", [4, 99, 0, -1])
def test_an_unknown_version_is_neither_read_nor_written(version: int) -> None:
    newer = NEW.replace(b'"v":3', b'"v":%d' % version).replace(b'"outcome":"finished"', b'"outcome":{"new":"shape"}')
    with pytest.raises(VersionError, match=f"version {version}: this version of Meterhouse knows 1 to 3"):
        decode(newer)
    event = msgspec.structs.replace(decode(NEW), v=version)
    assert event.faults() == [f"an event of version {version}: this version of Meterhouse knows 1 to 3"]
    for use in (encode, content_hash):
        with pytest.raises(VersionError):
            use(event)


@pytest.mark.parametrize("field", ["cache_write_tokens", "images", "audio_ms", "tool_calls"])
def test_what_version_2_cannot_say_is_not_dropped_in_silence(field: str) -> None:
    event = msgspec.structs.replace(decode(oldevents.SECOND), **{field: 5})
    assert event.faults() == [f"an event of version 2 has no {field}"]
    with pytest.raises(VersionError, match=field):
        content_hash(event)
    with pytest.raises(VersionError, match=field):
        decode(oldevents.SECOND[:-1] + f',"{field}":5}}'.encode())


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ({"cache_write_tokens": 11}, "cache writes exceed the computed prompt"),
        ({"cached_tokens": 7, "cache_write_tokens": 4}, "cache writes exceed the computed prompt"),
        ({"images": -1}, "a count is negative"),
        ({"audio_ms": -1}, "a count is negative"),
        ({"tool_calls": -1}, "a count is negative"),
    ],
)
def test_counts_that_contradict_each_other_are_told(counts: dict[str, int], fault: str) -> None:
    assert msgspec.structs.replace(decode(NEW), **counts).faults() == [fault]


@pytest.mark.parametrize("field", ["compute_us", "kv_block_us", "preemptions"])
def test_what_version_1_cannot_say_is_not_dropped_in_silence(field: str) -> None:
    event = msgspec.structs.replace(decode(oldevents.SMALL), **{field: 5})
    assert event.faults() == [f"an event of version 1 has no {field}"]
    with pytest.raises(VersionError, match=field):
        encode(event)
    with pytest.raises(VersionError, match=field):
        decode(oldevents.SMALL[:-1] + f',"{field}":5}}'.encode())


@pytest.mark.parametrize(
    "data",
    [
        oldevents.SMALL[:-1] + b',"tomorrow":1}',
        oldevents.SMALL[:-1] + b',"compute_us":0}',
        oldevents.SMALL.replace(b'"v":1', b'"v": 1'),
        oldevents.SMALL.replace(b'{"v":1,', b'{"v":1,"v":1,'),
        NEW.replace(b'"v":3,', b""),
        NEW.replace(b',"compute_us":1500', b""),
        NEW.replace(b'"n":1', b'"n":true'),
        oldevents.SMALL[:40],
        b"[]",
        b"",
    ],
)
def test_bytes_that_no_version_gave_are_not_an_event(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(data)


def test_no_measurement_keeps_an_event_from_being_billed() -> None:
    event = msgspec.structs.replace(decode(NEW), compute_us=-1, kv_block_us=-(1 << 60), preemptions=-1)
    assert event.faults() == []
    assert decode(encode(event)) == event
