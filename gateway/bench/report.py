"""How a benchmark's numbers are shown: one readable table, or JSON with every number.

Knows: titles and units. Does not know: how a number comes about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.bench.record import Record
from gateway.bench.statistics import Spread, Statistics, medians, of_record

if TYPE_CHECKING:  # loads torch
    from gateway.bench.offline import Latency, Throughput

TIMES = (
    ("ttft_ms", "time to first token, ms"),
    ("itl_ms", "between pieces of text, ms"),
    ("tpot_ms", "per output token, ms"),
    ("e2e_ms", "whole request, ms"),
)


def as_json(record: Record, slo_ms: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Options, the medians, and each repeat."""
    repeats = of_record(record, slo_ms)
    return {
        "at": record.begin.at,
        "options": record.begin.options,
        "slo_ms": dict(slo_ms or {}),
        "summary": msgspec.to_builtins(medians(repeats)),
        "repeats": [msgspec.to_builtins(repeat) for repeat in repeats],
    }


def as_table(record: Record, slo_ms: Mapping[str, float] | None = None) -> RenderableType:
    """Medians over the repeats, rates first, then how times are spread, then what failed."""
    repeats = of_record(record, slo_ms)
    whole = medians(repeats)
    parts: list[RenderableType] = [_rates(whole, len(repeats), slo_ms or {}), Text(), _spreads(whole)]
    if whole.failed:
        asked = len(record.answers)
        parts += [Text(), Text(f"{whole.failed} of {asked} requests failed:", style="bold red"), *_failures(record)]
    return Group(*parts)


def one_line(repeat: Statistics) -> str:
    """A repeat in a line, while others still run."""
    failed = f", {repeat.failed} failed" if repeat.failed else ""
    return (
        f"{repeat.output_tok_per_s:.1f} output tok/s, {repeat.requests_per_s:.2f} requests/s, "
        f"TTFT p50 {repeat.ttft_ms.p50:.1f} ms, TPOT p50 {repeat.tpot_ms.p50:.2f} ms{failed}"
    )


def plain(measured: Any) -> dict[str, Any]:
    """A struct of numbers for JSON."""
    return dict(msgspec.to_builtins(measured))


def throughput_table(whole: Throughput, repeats: int) -> RenderableType:
    rows = [
        ("prompts", f"{whole.prompts:g}, {repeats} repeat{'s' * (repeats > 1)}"),
        ("duration, s", f"{whole.seconds:.2f}"),
        ("requests/s", f"{whole.requests_per_s:.2f}"),
        ("output tok/s", f"{whole.output_tok_per_s:.1f}"),
        ("total tok/s", f"{whole.total_tok_per_s:.1f}"),
        ("prompt tokens", f"{whole.prompt_tokens:g}, {whole.cached_tokens:g} cached"),
        ("output tokens", f"{whole.output_tokens:g}"),
    ]
    spreads = [("first token after, ms", whole.first_token_ms), ("finished after, ms", whole.finished_ms)]
    return Group(_pairs(rows), Text(), _spread_table(spreads))


def latency_table(found: Latency) -> RenderableType:
    rows = [
        ("batches", f"{found.iterations} of {found.batch_size}, {found.output_len} tokens each"),
        ("output tok/s", f"{found.output_tok_per_s:.1f}"),
    ]
    spreads = [
        ("first token after, ms", found.first_token_ms),
        ("per token after it, ms", found.per_token_ms),
        ("whole batch, ms", found.batch_ms),
    ]
    return Group(_pairs(rows), Text(), _spread_table(spreads))


def _spread_table(rows: Sequence[tuple[str, Spread]]) -> Table:
    """Named spreads, a line each."""
    table = _plain("", "mean", "p50", "p90", "p95", "p99", "max")
    for title, spread in rows:
        table.add_row(title, *(f"{getattr(spread, name):.2f}" for name in Spread.__struct_fields__))
    return table


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _rates(whole: Statistics, repeats: int, slo_ms: Mapping[str, float]) -> Table:
    rows = [
        ("requests", f"{whole.ok:g} good a repeat, {repeats} repeat{'s' * (repeats > 1)}"),
        ("duration, s", f"{whole.wall_s:.2f}"),
        ("requests/s", f"{whole.requests_per_s:.2f}"),
        ("output tok/s", f"{whole.output_tok_per_s:.1f}"),
        ("total tok/s", f"{whole.total_tok_per_s:.1f}"),
        ("prompt tokens", f"{whole.prompt_tokens:g}, {whole.cached_tokens:g} cached"),
        ("output tokens", f"{whole.output_tokens:g}"),
        ("client", f"{whole.client_cpu_share:.1%} of a core, {whole.client_us_per_chunk:.1f} µs a piece of text"),
    ]
    if whole.good_share is not None:
        within = " ".join(f"{name}:{most:g}" for name, most in slo_ms.items())
        rows.append((f"goodput ({within}), requests/s", f"{whole.goodput_per_s:.2f}, {whole.good_share:.1%} of all"))
    if whole.no_usage:
        rows.append(("without usage", f"{whole.no_usage:g} (their pieces of text are counted as tokens)"))
    return _pairs(rows)


def _spreads(whole: Statistics) -> Table:
    return _spread_table([(title, getattr(whole, name)) for name, title in TIMES])


def _failures(record: Record) -> list[RenderableType]:
    """Each kind of failure with how often it came and one example."""
    examples: dict[str, str] = {}
    counts: dict[str, int] = {}
    for answer in record.answers:
        if answer.error:
            counts[answer.error] = counts.get(answer.error, 0) + 1
            examples.setdefault(answer.error, answer.detail)
    return [Text(f"  {count} × {kind}: {examples[kind]}".rstrip(": ")) for kind, count in counts.items()]


def _plain(*titles: str) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table
