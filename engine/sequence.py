"""A sequence is one choice of one request; a group is the request with all its choices.

Knows: the tokens, how many of them are computed, where they lie in the cache, and what was done so far
(the counts of the request). Does not know: who is scheduled when (`scheduler`), what a block holds
(`blocks`), text, torch, or time.

The life of a sequence: `WAITING` → `RUNNING` → `FINISHED`. Out of blocks it goes back to `WAITING`
(preempted: it keeps its tokens and computes them again); a waiting one whose request is paused at its
ceiling is `PARKED` until the ceiling is raised. Choices after the first are `UNBORN` until the first has
computed the prompt, and then take its blocks.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from engine.types import (
    Cost,
    EngineError,
    Finish,
    ModelInfo,
    PromptTooLong,
    Request,
    SamplingParams,
    TokenCounts,
    TokenLogprob,
)

if TYPE_CHECKING:
    from engine.fairness import Tenant
    from engine.grammar import Matcher


WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0


class Status(Enum):
    UNBORN = auto()
    WAITING = auto()
    RUNNING = auto()
    PARKED = auto()
    FINISHED = auto()


class Sequence:
    """One choice. `tokens` is the prompt and then what was sampled, append-only.

    `block_table[i]` is the physical block of tokens `[i * block_size, (i + 1) * block_size)`, and
    `num_computed` counts the tokens whose keys and values are in those blocks.
    """

    __slots__ = (
        "adapter_id",
        "block_keys",
        "block_table",
        "finish",
        "group",
        "high_water",
        "index",
        "matcher",
        "num_computed",
        "num_prompt",
        "num_published",
        "request",
        "status",
        "tokens",
    )

    def __init__(self, group: SequenceGroup, index: int) -> None:
        request = group.request
        self.group = group
        self.request = request
        self.index = index
        self.tokens: list[int] = list(request.prompt)
        self.num_prompt = len(request.prompt)
        self.num_computed = 0
        self.block_table: list[int] = []
        self.adapter_id: str | None = request.adapter.id if request.adapter else None
        self.status = Status.WAITING if index == 0 else Status.UNBORN
        self.finish: Finish | None = None
        self.matcher: Matcher | None = None  # its place in its grammar
        self.block_keys: list[bytes] = []  # cache keys of the full blocks of `tokens`, as far as anyone asked
        self.num_published = 0  # blocks of the table that were offered to the cache
        # Tokens below this mark were computed or reused once already: computing one again is at our cost.
        self.high_water = 0 if index == 0 else self.num_prompt

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_tokens(self) -> list[int]:
        """The sampled tokens (a copy)."""
        return self.tokens[self.num_prompt :]

    @property
    def needs_prompt_logits(self) -> bool:
        """The prompt's log-probabilities are asked for and not all known: it has to be computed, not reused."""
        found = self.group.prompt_logprobs
        return self.index == 0 and found is not None and len(found) < self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def order(self) -> tuple[int, int]:
        """First come first: smaller is older."""
        return self.group.arrival, self.index


class SequenceGroup:
    """One request in the engine: its choices, its ceiling and its counts, which only ever grow."""

    __slots__ = (
        "arrival",
        "arrived_us",
        "backlog",
        "blocks",
        "blocks_since_us",
        "cache_root",
        "cached",
        "ceiling",
        "ceiling_final",
        "completion",
        "compute_us",
        "kv_block_us",
        "num_open",
        "preemptions",
        "prompt",
        "prompt_logprobs",
        "queue_us",
        "recomputed",
        "request",
        "sequences",
        "started",
        "tenant",
    )

    tenant: Tenant  # set when it is queued

    def __init__(self, request: Request, *, arrival: int, cache_root: bytes, arrived_us: int = 0) -> None:
        self.request = request
        self.arrival = arrival  # counts up; the order of admission and the reverse order of preemption
        self.arrived_us = arrived_us
        self.queue_us: int | None = None  # set when its first token is computed
        self.cache_root = cache_root
        self.ceiling = request.token_ceiling
        self.ceiling_final = request.ceiling_final
        self.started = False  # a token of it was scheduled
        self.prompt = 0
        self.cached = 0
        self.completion = 0
        self.recomputed = 0
        self.backlog = 0  # prompt tokens neither planned nor found in the cache yet, while it is queued or runs
        self.num_open = request.n  # choices that have not ended
        # Those of the prompt's tokens, as far as they are computed; None: not asked for, or told.
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing stands before the first token
        # What it cost, whoever pays: see `types.Cost`.
        self.compute_us = 0
        self.kv_block_us = 0  # up to `blocks_since_us`, since when its choices hold `blocks` in their tables
        self.blocks = 0
        self.blocks_since_us = 0
        self.preemptions = 0
        self.sequences = [Sequence(self, index) for index in range(request.n)]

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt, cached=self.cached, completion=self.completion, recomputed=self.recomputed
        )

    def take_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """The log-probabilities of the prompt's tokens, once, when all are there."""
        found = self.prompt_logprobs
        if found is None or len(found) < len(self.request.prompt):
            return None
        self.prompt_logprobs = None
        return found

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish is None]

    @property
    def allowance(self) -> int | None:
        """Completion tokens that may still be sampled; None: no ceiling."""
        return None if self.ceiling is None else max(0, self.ceiling - self.completion)

    @property
    def at_ceiling(self) -> bool:
        return self.ceiling is not None and self.completion >= self.ceiling

    @property
    def cost(self) -> Cost:
        """As it stands; whole once every choice has ended."""
        return Cost(self.compute_us, self.kv_block_us, self.queue_us or 0, self.preemptions, self.recomputed)

    @property
    def finish(self) -> Finish:
        """Why the request as a whole ended, once every choice has: the least regular of its choices."""
        ends = {sequence.finish for sequence in self.sequences}
        gravest_first = (Finish.ERROR, Finish.EXPIRED, Finish.ABORT, Finish.QUOTA, Finish.LENGTH)
        return next((finish for finish in gravest_first if finish in ends), Finish.STOP)


def check_request(request: Request, info: ModelInfo) -> None:
    """Raise an `EngineError` when this model can never serve this request. Pure; both ends of the pipe call it."""
    needed = len(request.prompt) + request.sampling.max_tokens
    if not request.prompt:
        raise EngineError("the prompt is empty")
    if needed > info.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(request.prompt)} tokens and {request.sampling.max_tokens} more are asked for, "
            f"but the model's context holds {info.max_model_len}"
        )
    if min(request.prompt) < 0 or max(request.prompt) >= info.vocab_size:
        raise EngineError("the prompt has a token id outside the vocabulary")
    if request.n < 1:
        raise EngineError("n: must be at least 1")
    if request.token_ceiling is not None and request.token_ceiling < 1:
        raise EngineError("token_ceiling: must be at least 1")
    if not WEIGHT_MIN <= request.weight <= WEIGHT_MAX:
        raise EngineError(f"weight: must lie between {WEIGHT_MIN} and {WEIGHT_MAX}")
    if request.queue_timeout_ms is not None and request.queue_timeout_ms < 1:
        raise EngineError("queue_timeout_ms: must be at least 1")
    if request.public_cache and not request.cache_salt:
        raise EngineError("public_cache: only a cache_salt can be public")
    faults = request.sampling.validate(info.vocab_size)
    if faults:
        raise EngineError("; ".join(f"{field}: {reason}" for field, reason in faults))
