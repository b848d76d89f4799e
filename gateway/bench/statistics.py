"""The numbers of a benchmark, from recorded times alone. Pure.

Knows: what each statistic is. Does not know: clocks, HTTP, how anything is shown.

- An answer is *good* when it has no error and at least one piece of text. Only good ones are counted, but for
  `failed` and `errors`, which leave nothing out.
- *output tokens* are the usage's; without usage, one for each piece of text (`no_usage` counts such answers).
- *ttft*: start to the first piece of text. *itl*: the gaps between pieces of text, of all requests together. *tpot*, of
  a request: first to last piece of text over its tokens but one, so that it holds for pieces of several tokens too; 0
  for a single token. *e2e*: start to end.
- *per second* is over the whole repeat, from before its first request to after its last.
- A percentile lies on the line between the two nearest ranks (numpy's default). Over repeats each number is the median,
  but for counts of failures, which are sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from gateway.bench.record import Answer, Record


class Spread(msgspec.Struct):
    """How values are spread, in their own unit; all 0 when there are none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ranked = sorted(values)
        if not ranked:
            return cls()
        p50, p90, p95, p99 = (percentile(ranked, rank) for rank in (50, 90, 95, 99))
        return cls(fmean(ranked), p50, p90, p95, p99, ranked[-1])


class Statistics(msgspec.Struct, kw_only=True):
    """One repeat, or the medians of several. `_s` are seconds, `_ms` milliseconds."""

    ok: float
    failed: int
    errors: dict[str, int]
    no_usage: float
    wall_s: float
    requests_per_s: float
    output_tok_per_s: float
    total_tok_per_s: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    good_share: float | None = None  # answers within the objectives, of all requests; None: no objectives
    goodput_per_s: float | None = None
    client_cpu_share: float = 0.0  # of one core
    client_us_per_chunk: float = 0.0  # CPU time the client spent on each piece of text


def percentile(ranked: Sequence[float], rank: float) -> float:
    """Of ascending values; 0 of none."""
    if not ranked:
        return 0.0
    place = (len(ranked) - 1) * rank / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def is_good(answer: Answer) -> bool:
    return not answer.error and bool(answer.text_s)


def output_tokens(answer: Answer) -> int:
    return len(answer.text_s) if answer.completion is None else answer.completion


def times_ms(answer: Answer) -> dict[str, float]:
    """ttft, tpot and e2e of a good answer."""
    tokens = output_tokens(answer)
    first, last = answer.text_s[0], answer.text_s[-1]
    return {
        "ttft": (first - answer.start_s) * 1e3,
        "tpot": (last - first) / (tokens - 1) * 1e3 if tokens > 1 else 0.0,
        "e2e": (answer.end_s - answer.start_s) * 1e3,
    }


def measure(
    answers: Sequence[Answer], wall_s: float, *, client_cpu_s: float = 0.0, slo_ms: Mapping[str, float] | None = None
) -> Statistics:
    """The statistics of one repeat. `slo_ms`: the most that each named time may be for an answer to be within."""
    good = [answer for answer in answers if is_good(answer)]
    times = [times_ms(answer) for answer in good]
    prompt = sum(answer.prompt or 0 for answer in good)
    output = sum(output_tokens(answer) for answer in good)
    pieces = sum(len(answer.text_s) for answer in answers)
    within = sum(all(of[name] <= most for name, most in (slo_ms or {}).items()) for of in times)
    return Statistics(
        ok=len(good),
        failed=len(answers) - len(good),
        errors=dict(Counter(answer.error or "no text" for answer in answers if not is_good(answer)).most_common()),
        no_usage=sum(answer.completion is None for answer in good),
        wall_s=wall_s,
        requests_per_s=len(good) / wall_s,
        output_tok_per_s=output / wall_s,
        total_tok_per_s=(prompt + output) / wall_s,
        prompt_tokens=prompt,
        cached_tokens=sum(answer.cached for answer in good),
        output_tokens=output,
        ttft_ms=Spread.of(of["ttft"] for of in times),
        itl_ms=Spread.of(
            (b - a) * 1e3 for answer in good for a, b in zip(answer.text_s, answer.text_s[1:], strict=False)
        ),
        tpot_ms=Spread.of(of["tpot"] for of in times),
        e2e_ms=Spread.of(of["e2e"] for of in times),
        good_share=within / len(answers) if slo_ms and answers else None,
        goodput_per_s=within / wall_s if slo_ms else None,
        client_cpu_share=client_cpu_s / wall_s,
        client_us_per_chunk=client_cpu_s / pieces * 1e6 if pieces else 0.0,
    )


def medians(repeats: Sequence[Statistics]) -> Statistics:
    """Each number's median over the repeats; failures are added up. Raises `ValueError` when there are none."""
    if not repeats:
        raise ValueError("there is no repeat")
    errors: Counter[str] = Counter()
    for repeat in repeats:
        errors.update(repeat.errors)
    merged = {name: _median([getattr(repeat, name) for repeat in repeats]) for name in _MEDIAN}
    return Statistics(failed=sum(repeat.failed for repeat in repeats), errors=dict(errors.most_common()), **merged)


def of_record(record: Record, slo_ms: Mapping[str, float] | None = None) -> list[Statistics]:
    """Every repeat of a record, in order."""
    return [
        measure(record.of(repeat.repeat), repeat.wall_s, client_cpu_s=repeat.client_cpu_s, slo_ms=slo_ms)
        for repeat in sorted(record.repeats, key=lambda repeat: repeat.repeat)
    ]


_MEDIAN = [name for name in Statistics.__struct_fields__ if name not in ("failed", "errors")]


def _median(values: list[Any]) -> Any:
    if isinstance(values[0], Spread):
        return Spread(*(median(getattr(value, name) for value in values) for name in Spread.__struct_fields__))
    return None if None in values else median(values)
