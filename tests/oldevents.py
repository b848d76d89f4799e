"""Usage events as code of versions 1 and 2 wrote them, byte by byte: what spools, stores and ledgers hold. Frozen."""

from __future__ import annotations

FULL = (
    '{"v":1,"event_id":"0190aaaa-0000-7000-8000-000000000001","ts_us":1764000000000001,"settled_us":1764000005000002,'
    '"tenant":"acme","key_id":"k1","model":"pirate","base_model":"base","adapter":"pirate",'
    '"endpoint":"chat.completions","gateway":"g1","outcome":"abort","finish_reason":"","prompt_tokens":100,'
    '"cached_tokens":32,"completion_tokens":9007199254740993,"reasoning_tokens":3,"recomputed_tokens":16,'
    '"rejected_tokens":2,"n":2,"stream":true,"estimated":true,"user":"Zoë \\"\\\\\\t🦙",'
    '"metadata":{"b":"","team":"x","ключ":"値"},"queue_us":1234,"ttft_us":-1,"duration_us":5000001}'
).encode()
FULL_HASH = "49cac1f156613a542ec88a83fefa2af107c328cd7635c9f7baa63a0645009b3d"

SMALL = (
    b'{"v":1,"event_id":"0190aaaa-0000-7000-8000-000000000002","ts_us":1764000000000000,"settled_us":1764000001000000,'
    b'"tenant":"acme","key_id":"k1","model":"base","base_model":"base","adapter":"","endpoint":"completions",'
    b'"gateway":"g1","outcome":"interrupted","finish_reason":"","prompt_tokens":0,"cached_tokens":0,'
    b'"completion_tokens":0,"reasoning_tokens":0,"recomputed_tokens":0,"rejected_tokens":0,"n":1,"stream":false,'
    b'"estimated":false,"user":"","metadata":{},"queue_us":0,"ttft_us":0,"duration_us":0}'
)
SMALL_HASH = "eb754bff9334021fc7f1e23929056b74b6b03b51bd64535d57b02beed52e27d8"

EVENTS = {FULL: FULL_HASH, SMALL: SMALL_HASH}

SECOND = (  # of version 2
    b'{"v":2,"event_id":"0190aaaa-0000-7000-8000-000000000003","ts_us":1764000000000000,"settled_us":1764000001000000,'
    b'"tenant":"acme","key_id":"k1","model":"base","base_model":"base","adapter":"","endpoint":"completions",'
    b'"gateway":"g1","outcome":"finished","finish_reason":"stop","prompt_tokens":10,"cached_tokens":0,'
    b'"completion_tokens":5,"reasoning_tokens":0,"recomputed_tokens":3,"rejected_tokens":0,"n":1,"stream":false,'
    b'"estimated":false,"user":"","metadata":{},"queue_us":7,"ttft_us":0,"duration_us":9,"compute_us":1500,'
    b'"kv_block_us":64000,"preemptions":1}'
)
SECOND_HASH = "089fc40b5479028c6f0f1259022612ee218eef5abec48a37f313d4edfba7c30d"

UNRATED = (  # a fact of the ledger
    b'{"type":"usage.unrated","event":' + SMALL + b',"event_hash":"' + SMALL_HASH.encode() + b'","reason":"no price"}'
).decode()
