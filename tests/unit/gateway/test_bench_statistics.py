"""The benchmark's statistics against their definitions, derived here a second time from the recorded times."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from gateway.bench import record, report
from gateway.bench.record import Answer, Begin, Record, RecordError, Repeat
from gateway.bench.statistics import Spread, Statistics, measure, medians, of_record, percentile


def recorded(rng: random.Random, index: int, repeat: int = 0) -> Answer:
    """A request with random times; every tenth is one token, every seventh fails, some tell no usage."""
    start = rng.uniform(0, 5)
    count = 1 if index % 10 == 0 else rng.randint(2, 40)
    text = sorted(start + rng.uniform(0.01, 3) for _ in range(count))
    tokens = 1 if count == 1 else count * rng.randint(1, 3)  # several tokens in a piece of text
    told = index % 4 != 3
    return Answer(
        repeat=repeat,
        index=index,
        model="m",
        start_s=start,
        text_s=text,
        end_s=text[-1] + rng.uniform(0, 0.1),
        prompt=rng.randint(1, 900) if told else None,
        completion=tokens if told else None,
        cached=rng.randint(0, 64) if told else 0,
        error=("http 429", "timeout", "connection lost")[index % 3] if index % 7 == 6 else "",
    )


def derived(answers: list[Answer], wall_s: float) -> dict[str, Any]:
    """The definitions that load clients for these servers agree on, written with numpy."""
    ok = [a for a in answers if not a.error and a.text_s]
    out = np.array([len(a.text_s) if a.completion is None else a.completion for a in ok])
    first, last = np.array([a.text_s[0] for a in ok]), np.array([a.text_s[-1] for a in ok])
    start, end = np.array([a.start_s for a in ok]), np.array([a.end_s for a in ok])
    return {
        "ok": len(ok),
        "failed": len(answers) - len(ok),
        "output_tok_per_s": out.sum() / wall_s,
        "total_tok_per_s": (out.sum() + sum(a.prompt or 0 for a in ok)) / wall_s,
        "requests_per_s": len(ok) / wall_s,
        "cached_tokens": sum(a.cached for a in ok),
        "ttft_ms": (first - start) * 1e3,
        "e2e_ms": (end - start) * 1e3,
        "tpot_ms": np.where(out > 1, (last - first) / np.maximum(out - 1, 1), 0.0) * 1e3,
        "itl_ms": np.concatenate([np.diff(a.text_s) for a in ok]) * 1e3,
    }


@pytest.mark.parametrize("seed", range(5))
def test_every_number_is_what_its_definition_gives(seed: int) -> None:
    rng = random.Random(seed)
    answers = [recorded(rng, index) for index in range(50 + seed)]
    got, want = measure(answers, 7.5), derived(answers, 7.5)
    assert (got.ok, got.failed, got.cached_tokens) == (want["ok"], want["failed"], want["cached_tokens"])
    for name in ("output_tok_per_s", "total_tok_per_s", "requests_per_s"):
        assert getattr(got, name) == pytest.approx(want[name], rel=1e-12)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        spread, values = getattr(got, name), want[name]
        for rank in (50, 90, 95, 99):
            assert getattr(spread, f"p{rank}") == pytest.approx(np.percentile(values, rank), rel=1e-9, abs=1e-9)
        assert spread.mean == pytest.approx(values.mean(), rel=1e-9)
        assert spread.max == pytest.approx(values.max(), rel=1e-9)


def answer(text_s: list[float], *, start_s: float = 0.0, end_s: float | None = None, **fields: Any) -> Answer:
    end = end_s if end_s is not None else (text_s[-1] if text_s else 0.0)
    return Answer(repeat=0, index=0, start_s=start_s, text_s=text_s, end_s=end, **fields)


def test_tokens_per_piece_count_by_the_usage_and_a_single_token_has_no_gap() -> None:
    packed = answer([0.1, 0.2, 0.3], completion=9, prompt=5)
    assert measure([packed], 1.0).tpot_ms.p50 == pytest.approx(200 / 8)
    assert measure([packed], 1.0).itl_ms.p50 == pytest.approx(100)
    single = measure([answer([0.5], completion=1, prompt=5)], 1.0)
    assert (single.tpot_ms, single.itl_ms, single.output_tokens) == (Spread(), Spread(), 1)
    assert single.ttft_ms.p99 == pytest.approx(500)
    untold = measure([answer([0.1, 0.2])], 1.0)
    assert (untold.output_tokens, untold.no_usage, untold.prompt_tokens) == (2, 1, 0)
    zero = measure([answer([0.1, 0.2], completion=0, prompt=0)], 1.0)
    assert (zero.output_tokens, zero.no_usage, zero.tpot_ms.p50) == (0, 0, 0.0)


def test_failures_are_counted_by_kind_and_leave_no_time_behind() -> None:
    answers = [
        answer([0.1, 0.2], completion=2),
        answer([0.1, 9.0], completion=50, prompt=99, error="stream error", detail="mid stream"),
        answer([], error="http 429"),
        answer([], error="http 429"),
        answer([]),
    ]
    got = measure(answers, 2.0)
    assert (got.ok, got.failed) == (1, 4)
    assert got.errors == {"http 429": 2, "stream error": 1, "no text": 1}
    assert (got.output_tokens, got.prompt_tokens, got.e2e_ms.max) == (2, 0, pytest.approx(200))
    nothing = measure([answer([], error="timeout")], 2.0)
    assert (nothing.output_tok_per_s, nothing.ttft_ms, nothing.client_us_per_chunk) == (0, Spread(), 0)


def test_a_percentile_lies_between_the_nearest_ranks() -> None:
    assert percentile([], 50) == 0.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([10.0, 20.0, 30.0, 40.0], 90) == pytest.approx(37.0)
    values = sorted(random.Random(1).random() for _ in range(101))
    assert [percentile(values, rank) for rank in range(101)] == values


def test_goodput_counts_what_meets_every_objective_and_a_failure_never_does() -> None:
    answers = [
        answer([0.1, 0.2], completion=2),  # ttft 100, tpot 100
        answer([0.3, 0.31], completion=2),  # ttft 300
        answer([0.1, 0.9], completion=2),  # tpot 800
        answer([0.1, 0.2], completion=2, error="timeout"),
    ]
    got = measure(answers, 2.0, slo_ms={"ttft": 200, "tpot": 150})
    assert (got.good_share, got.goodput_per_s) == (0.25, 0.5)
    assert measure(answers, 2.0, slo_ms={"e2e": 1000}).good_share == 0.75
    assert measure(answers, 2.0, slo_ms={"ttft": 100}).good_share == 0.5  # at the limit is within
    assert measure(answers, 2.0).good_share is None


def test_over_repeats_numbers_are_medians_and_failures_are_sums() -> None:
    each = [
        measure([answer([t, t + 1], completion=n), answer([], error=kind)], 2.0, slo_ms={"ttft": 1500})
        for t, n, kind in ((1.0, 10, "timeout"), (2.0, 30, "timeout"), (3.0, 20, "http 500"))
    ]
    whole = medians(each)
    assert whole.output_tokens == 20
    assert whole.ttft_ms.p50 == 2000
    assert (whole.failed, whole.errors) == (3, {"timeout": 2, "http 500": 1})
    assert whole.good_share == 0
    with pytest.raises(ValueError, match="no repeat"):
        medians([])


# --- the record ----------------------------------------------------------------------------------


def write(path: Path, repeats: int = 3) -> Record:
    rng = random.Random(3)
    answers = [recorded(rng, index, repeat) for repeat in range(repeats) for index in range(20)]
    ends = [Repeat(repeat=repeat, wall_s=5.0 + repeat, client_cpu_s=0.1) for repeat in range(repeats)]
    begin = Begin(at="2026-12-01T00:00:00Z", options={"url": "http://127.0.0.1:1/v1"})
    rng.shuffle(answers)
    record.append(path, [begin, *answers, *ends])
    return Record(begin, ends, answers)


def test_a_record_gives_the_same_statistics_again(tmp_path: Path) -> None:
    written = write(tmp_path / "times.jsonl")
    found = record.load(tmp_path / "times.jsonl")
    assert of_record(found, {"ttft": 500}) == of_record(written, {"ttft": 500})
    assert found.begin.options == written.begin.options
    assert [a.index for a in found.of(1)] == list(range(20))
    assert Counter(a.repeat for a in found.answers) == {0: 20, 1: 20, 2: 20}


def test_a_repeat_that_never_ended_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    write(path, repeats=1)
    record.append(path, [answer([1.0]), msgspec.structs.replace(answer([1.0]), repeat=1)])
    assert len(record.load(path).of(0)) == 21
    assert not record.load(path).of(1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1 does not begin"),
        ('{"line":"repeat","repeat":0,"wall_s":1}\n', "line 1 does not begin"),
        ('{"line":"bench","at":"","format":2}\n', "format 2"),
        ('{"line":"bench","at":""}\n', "no whole repeat"),
        ('{"line":"bench","at":""}\nnonsense\n', "line 2 is not a benchmark's"),
        ('{"line":"bench","at":""}\n{"line":"bench","at":""}\n', "two benchmarks"),
        ('{"line":"bench","at":""}\n' + '{"line":"repeat","repeat":0,"wall_s":1}\n' * 2, "ends one repeat twice"),
    ],
)
def test_what_is_no_record_is_refused_with_the_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "times.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError, match=reason):
        record.load(path)
    with pytest.raises(RecordError, match="cannot be read"):
        record.load(tmp_path / "nothing")


def shown(what: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_the_table_shows_rates_spreads_and_every_kind_of_failure(tmp_path: Path) -> None:
    found = write(tmp_path / "times.jsonl")
    text = shown(report.as_table(found, {"ttft": 500, "tpot": 50}))
    whole = medians(of_record(found))
    for expected in (f"{whole.output_tok_per_s:.1f}", f"{whole.ttft_ms.p99:.2f}", "goodput (ttft:500 tpot:50)"):
        assert expected in text
    assert f"{whole.failed} of 60 requests failed" in text
    for kind, count in whole.errors.items():
        assert f"{count} × {kind}" in text
    answer = report.as_json(found, {"ttft": 500})
    assert msgspec.convert(answer["summary"], Statistics) == medians(of_record(found, {"ttft": 500}))
    assert [one["wall_s"] for one in answer["repeats"]] == [5.0, 6.0, 7.0]
