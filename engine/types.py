"""The words the rooms share about a request's life in the engine.

Knows: what a request is, what a step reports, how a request can end. Does not know: torch, tenants'
money, HTTP. Every struct here crosses the process border between gateway and engine as msgpack, so
fields are plain and the layout is part of the protocol of `engine.process`.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import chain

import msgspec


class EngineError(Exception):
    """Root of what the engine tells its callers; the text may be shown to a client."""


class EngineBusy(EngineError):
    """The admission queue is at its limit; nothing was computed."""


class EngineUnavailable(EngineError):
    """No engine process is up to take the request, or it died under it."""


class PromptTooLong(EngineError):
    """Prompt and the tokens asked for do not fit `max_model_len` or the KV cache."""


class AdapterRejected(EngineError):
    """The adapter cannot be served; the text names the reason and never a path."""


class AdapterLost(EngineError):
    """The request's adapter could not be brought in again: its files are gone or others, or there is no memory."""


class AdapterUnknown(EngineError):
    """The request names an adapter that is not loaded."""


class GrammarRejected(EngineError):
    """The request's grammar cannot be followed: it is malformed, asks for what is not supported, or is too large."""


class Finish(StrEnum):
    """Why a choice (or a whole request) ended."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or max_model_len
    QUOTA = "quota"  # the token ceiling, made final by the gateway: the money ended
    ABORT = "abort"  # the gateway asked for it (client gone, deadline, shutdown)
    EXPIRED = "expired"  # it waited in the queue for longer than it may; nothing was computed
    ERROR = "error"  # this request alone could not go on


GUIDE_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
GUIDE_CHARACTERS_MAX = 1 << 17
GUIDE_CHOICES_MAX = 4096


class Guide(msgspec.Struct, frozen=True):
    """What a completion must be, as a whole.

    `json_schema`: JSON that the schema in `value` (2020-12) allows. `json_object`: any JSON object; no value.
    `regex`: matched in full; no look-around and no back references; \\d, \\w and \\s are ASCII's. `choice`: one of the
    texts in `value`. `grammar`: derived from the EBNF in `value`, in Lark's dialect from `start`, or in llama.cpp's
    (GBNF: `root ::= …`).
    """

    kind: str
    value: str | tuple[str, ...] = ""

    def faults(self) -> list[str]:
        """Why it cannot even be looked at; a grammar that is compiled in vain is a `GrammarRejected` later."""
        if self.kind not in GUIDE_KINDS:
            return [f"kind must be one of {', '.join(GUIDE_KINDS)}"]
        value = self.value
        if isinstance(value, str) == (self.kind == "choice"):
            return ["a choice needs a list of texts, every other kind one text"]
        texts = (value,) if isinstance(value, str) else value
        checks = [
            (self.kind == "json_object" or (texts and all(texts)), "must not be empty"),
            (len(texts) <= GUIDE_CHOICES_MAX, f"at most {GUIDE_CHOICES_MAX} choices"),
            (sum(map(len, texts)) <= GUIDE_CHARACTERS_MAX, f"at most {GUIDE_CHARACTERS_MAX} characters"),
            (not any(map(_has_surrogate, texts)), "must be Unicode, without lone surrogates"),
        ]
        return [reason for holds, reason in checks if not holds]


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Defaults are OpenAI's; `validate` collects every fault."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None  # None: none; k: those of the prompt's tokens and the k most likely at each
    bad_words: tuple[str, ...] = ()  # may not be completed; the core adds them to the ids below
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is sampled
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # the last of each is forbidden behind its others
    guided: Guide | None = None  # the completion is one of its texts; ends with them, whatever `ignore_eos` says

    def validate(self, vocab_size: int | None = None) -> list[tuple[str, str]]:
        """All faults as (field, reason); empty when the parameters can be served."""
        checks = [
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must lie between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "must be 0 (off) or positive, below 2^31"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must lie between 0 and 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "must be above 0 and at most 10"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must lie between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must lie between -2 and 2"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "must fit 64 bits"),
            (
                "stop",
                len(self.stop) <= 16 and all(0 < len(s) <= 256 for s in self.stop),
                "at most 16 non-empty strings of at most 256 characters",
            ),
            ("stop_token_ids", len(self.stop_token_ids) <= 64, "at most 64 ids"),
            ("logit_bias", len(self.logit_bias) <= 1024, "at most 1024 entries"),
            (
                "logit_bias",
                all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()),
                "values must lie between -100 and 100",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "must lie between 0 and 20"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
                "must lie between 0 and 20",
            ),
            (
                "bad_words",
                len(self.bad_words) <= 64 and all(word.strip() and len(word) <= 128 for word in self.bad_words),
                "at most 64 strings of at most 128 characters, not empty and not only spaces",
            ),
            (
                "bad_words_token_ids",
                len(self.bad_words_token_ids) <= 256 and all(0 < len(w) <= 128 for w in self.bad_words_token_ids),
                "at most 256 lists of 1 to 128 ids",
            ),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or 0 < len(self.allowed_token_ids) <= 16384,
                "at least 1 and at most 16384 ids",
            ),
        ]
        faults = [(field, reason) for field, holds, reason in checks if not holds]
        if self.guided is not None:
            faults += [("guided", reason) for reason in self.guided.faults()]
            if self.allowed_token_ids is not None:
                faults.append(("guided", "cannot go together with allowed_token_ids"))
        if vocab_size is not None:
            faults += [
                (field, "names a token id outside the vocabulary")
                for field, ids in (
                    ("logit_bias", self.logit_bias),
                    ("stop_token_ids", self.stop_token_ids),
                    ("allowed_token_ids", self.allowed_token_ids or ()),
                    ("bad_words_token_ids", chain.from_iterable(self.bad_words_token_ids)),
                )
                if any(not 0 <= token < vocab_size for token in ids)
            ]
        return faults


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one adapter. A new load of the same name is a new `id`, so nothing is shared by name."""

    id: str  # uuid of this load
    name: str  # for messages only
    path: str  # folder with adapter_config.json and adapter_model.safetensors
    digest: str = ""  # sha256 hex of the content; what the prefix cache is keyed by
    pinned: bool = False  # brought in at once, and never let go for another


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine found in an adapter's folder."""

    id: str
    digest: str
    rank: int
    targets: tuple[str, ...]
    nbytes: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: a prompt, how to sample it, `n` choices, and the tokens it may not exceed."""

    id: str  # UUIDv7 text, minted once at the gateway's door; also the usage event's id
    prompt: list[int]
    sampling: SamplingParams
    n: int = 1
    adapter: AdapterRef | None = None
    tenant: str = ""  # who shares the cache with whom (and adapter content and salt), and the engine's time fairly
    cache_salt: str = ""
    token_ceiling: int | None = None  # completion tokens over all choices; None: no ceiling
    ceiling_final: bool = False  # False: at the ceiling the request pauses until it is raised or made final
    weight: float = 1.0  # of its tenant: the share of the engine that it gets while others want it too
    queue_timeout_ms: int | None = None  # not begun by then: ended with `Finish.EXPIRED`; None: the engine's own limit
    public_cache: bool = False  # the operator made `cache_salt` public: its blocks are shared between tenants


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """What was done for one request so far; cumulative, the sole source of usage, metrics and bill.

    `cached <= prompt`, `reasoning <= completion`. With n > 1 prompt and cached are counted once.
    `recomputed` (after preemption) and `rejected` (drafts) are ours to pay and never billed.
    """

    prompt: int = 0  # prompt tokens computed or reused so far
    cached: int = 0  # of these, reused from the prefix cache
    completion: int = 0  # tokens sampled, over all choices
    reasoning: int = 0  # of these, reasoning
    recomputed: int = 0
    rejected: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its log-probability and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0  # 1: it was the most likely; told of prompt tokens only


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one choice. `text` is what can no longer be part of a stop string."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that matched


class Cost(msgspec.Struct, frozen=True, array_like=True):
    """What one request took of the engine, whoever pays for it. Times in microseconds.

    `compute_us` is its part of each step's time by the tokens that it had in it, to the microsecond: the sum over all
    requests is `EngineStats.busy_us_total`. `kv_block_us` adds up, for each of its choices, the blocks in its table
    times the time that they were there; a block that several share counts for each of them in full, so that what a
    request is said to hold does not depend on its neighbours, and the sum may exceed what the pool has.
    """

    compute_us: int = 0
    kv_block_us: int = 0
    queue_us: int = 0  # from its arrival to its first step, or to its end where it had none
    preemptions: int = 0  # of its choices
    recomputed: int = 0  # tokens, as in its counts


class Update(msgspec.Struct, frozen=True, array_like=True):
    """All that one step did for one request. `finished` is true in exactly one, its last."""

    request_id: str
    counts: TokenCounts
    deltas: list[ChoiceDelta]
    finished: bool = False
    finish: Finish | None = None  # set with `finished`; of the request as a whole
    error: str | None = None  # set with Finish.ERROR
    queue_us: int = 0  # time in the waiting queue before the first computed token
    paused: bool = False  # the token ceiling is reached and not final: the gateway must answer
    # One for each token of the prompt, None for the first: in one update, with the first token's or before.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    rejected: bool = False  # with Finish.ERROR: the request itself is to blame (a `GrammarRejected`)
    cost: Cost | None = None  # with `finished`
    adapter_lost: bool = False  # with Finish.ERROR: its adapter cannot be brought in any more (an `AdapterLost`)


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges, and counters that grow from the start of this engine process (a restart begins at 0)."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    preemptions_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens looked up, first admission only
    prefix_hits_total: int = 0  # of these, found
    steps_total: int = 0
    busy_us_total: int = 0
    adapters_loaded: int = 0  # known to the engine
    adapters_resident: int = 0  # of these, in a slot on the device
    adapter_loads_total: int = 0  # times one came into a slot
    adapter_evictions_total: int = 0  # times one left it for another
    adapter_reads_total: int = 0  # times one was read from disk
    ended_compute_us_total: int = 0  # Σ `Cost.compute_us` that was told; with what is open, `busy_us_total`


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The one message an engine step sends for all its streams."""

    step: int
    updates: list[Update]
    stats: EngineStats


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine process is built. Sizes in tokens, blocks and bytes as named."""

    model: str  # folder with config.json, tokenizer and safetensors
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None  # None: the model's own
    max_waiting: int = 1024
    kv_cache_bytes: int | None = None  # None: memory_utilization decides
    memory_utilization: float = 0.3  # of the memory free at start
    max_adapters: int = 4096  # that may be known at once; what is neither resident nor kept is on disk
    max_lora_rank: int = 64
    threads: int | None = None  # None: as many as there are cores to run on
    native: str = "auto"  # auto | on | off: the native CPU step; auto: where it can be had
    quantization: str = "none"  # none | int8 | int4: bits of the weights, on the native CPU step only
    adapter_slots: int = 32  # adapters resident on the device, so the most that one step computes with
    adapter_cache_bytes: int = 1 << 30  # of adapters kept in the host's memory, resident or not
    cache_dir: str | None = None  # of the native library once built; None: METERHOUSE_CACHE_DIR or its default
    queue_timeout_s: float | None = None  # a request that has not begun by then ends with `Finish.EXPIRED`; None: never


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves, told once it is up."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
