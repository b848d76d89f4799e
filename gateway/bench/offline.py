"""Benchmarks of the model alone, through the offline door: no HTTP, no tenants, one process.

Knows: `LLM` and what to ask of it. Does not know: how its numbers are shown (`report`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from engine.llm import LLM, Completion, SamplingParams
from engine.types import EngineError
from gateway.bench.statistics import Spread
from gateway.bench.workload import Prompts


class Throughput(msgspec.Struct, kw_only=True):
    """A batch as large as it is, computed as fast as it can be. Times are from the batch's begin."""

    prompts: int
    seconds: float
    requests_per_s: float
    output_tok_per_s: float
    total_tok_per_s: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    first_token_ms: Spread
    finished_ms: Spread


class Latency(msgspec.Struct, kw_only=True):
    """One batch's times, spread over iterations."""

    batch_size: int
    output_len: int
    iterations: int
    first_token_ms: Spread  # of the batch's last prompt to get one
    per_token_ms: Spread  # of those after the first
    batch_ms: Spread
    output_tok_per_s: float  # at the median batch


def throughput(
    llm: LLM, prompts: Prompts, *, count: int, repeats: int, warmup: int, ignore_eos: bool, temperature: float
) -> list[Throughput]:
    """Every repeat. Each has prompts of its own, so that the prefix cache serves only what they share."""
    if warmup:
        _batch(llm, prompts, warmup, "w", ignore_eos, temperature)
    measured = []
    for number in range(repeats):
        began = time.perf_counter()
        completions = _batch(llm, prompts, count, str(number), ignore_eos, temperature)
        measured.append(_throughput(completions, time.perf_counter() - began))
    return measured


def latency(
    llm: LLM,
    prompts: Prompts,
    *,
    batch_size: int,
    output_len: int,
    iterations: int,
    warmup: int,
) -> Latency:
    """`iterations` batches of new prompts, each with exactly `output_len` tokens, after some that are not counted."""
    first_ms, token_ms, batch_ms = [], [], []
    for number in range(-warmup, iterations):
        done = _batch(llm, prompts, batch_size, f"i{number}", True, 0.0)
        if number < 0:
            continue
        first = max(completion.first_token_s or 0.0 for completion in done) * 1e3
        last = max(completion.finished_s for completion in done) * 1e3
        first_ms.append(first)
        batch_ms.append(last)
        token_ms.append((last - first) / max(1, output_len - 1))
    return Latency(
        batch_size=batch_size,
        output_len=output_len,
        iterations=iterations,
        first_token_ms=Spread.of(first_ms),
        per_token_ms=Spread.of(token_ms),
        batch_ms=Spread.of(batch_ms),
        output_tok_per_s=batch_size * output_len / median(batch_ms) * 1e3,
    )


def medians(repeats: Sequence[Throughput]) -> Throughput:
    """Each number's median."""

    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], Spread):
            return Spread(*(median(getattr(v, name) for v in values) for name in Spread.__struct_fields__))
        return median(values)

    return Throughput(
        **{name: middle([getattr(repeat, name) for repeat in repeats]) for name in Throughput.__struct_fields__}
    )


def _batch(
    llm: LLM, prompts: Prompts, count: int, nonce: str, ignore_eos: bool, temperature: float
) -> list[Completion]:
    asked = [prompts.prompt(index, nonce) for index in range(count)]
    params = [
        SamplingParams(
            max_tokens=prompt.max_tokens,
            min_tokens=prompt.max_tokens if ignore_eos else 0,
            ignore_eos=ignore_eos,
            temperature=temperature,
        )
        for prompt in asked
    ]
    completions = llm.generate([prompt.text for prompt in asked], params)
    for completion in completions:
        if completion.error is not None:
            raise EngineError(completion.error)  # a number over fewer than were asked for would say nothing
    return completions


def _throughput(completions: Sequence[Completion], seconds: float) -> Throughput:
    prompt = sum(completion.counts.prompt for completion in completions)
    output = sum(completion.counts.completion for completion in completions)
    return Throughput(
        prompts=len(completions),
        seconds=seconds,
        requests_per_s=len(completions) / seconds,
        output_tok_per_s=output / seconds,
        total_tok_per_s=(prompt + output) / seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(completion.counts.cached for completion in completions),
        output_tokens=output,
        first_token_ms=Spread.of((completion.first_token_s or 0.0) * 1e3 for completion in completions),
        finished_ms=Spread.of(completion.finished_s * 1e3 for completion in completions),
    )
