"""`meterhouse bench` as it is typed: over sockets against gateways with the fake engine, and on the tiny model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.fake import FakeEngine
from gateway.bench import commands, record
from gateway.cli import main
from tests.fixtures.server import ByteTokenizer, RunningGateway, free_port

MakeGateway = Callable[..., RunningGateway]


def bench(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def serve(gateway: RunningGateway, key: str, *arguments: Any, code: int = 0) -> Result:
    shape = ("--input-len", 40, "--output-len", 6, "--ignore-eos", "--requests", 6, "--repeats", 2)
    where = ("serve", "--url", f"{gateway.url}/v1", "--api-key", key)
    return bench(*where, *shape, *arguments, code=code)


def test_a_server_is_measured_and_its_record_measured_again(gateway: RunningGateway, tmp_path: Path) -> None:
    key = gateway.tenant()
    times, saved = tmp_path / "times.jsonl", tmp_path / "bench.json"
    objectives = ("--goodput", "ttft:60000", "tpot:60000")
    result = serve(
        *(gateway, key, "--model", "fake", "--record", times, "--save", saved),
        *(*objectives, "--concurrency", 3, "--show"),
    )
    answer = json.loads(saved.read_text())  # the gateway, in this process, logs on standard output
    assert "repeat 2:" in result.stderr
    assert "one answer:" in result.stderr
    summary = answer["summary"]
    assert (summary["ok"], summary["failed"], summary["output_tokens"], summary["no_usage"]) == (6, 0, 36, 0)
    assert summary["good_share"] == 1.0
    assert summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p50"]
    assert f"{summary['output_tok_per_s']:.1f}" in result.stdout
    assert "goodput (ttft:60000 tpot:60000)" in result.stdout
    assert answer["options"]["input_len"] == "40"
    assert key not in times.read_text() + saved.read_text()

    events = gateway.wait_events(14)  # two for warming up
    assert len({event.event_id for event in events}) == 14
    assert sum(event.completion_tokens for event in events) == 14 * 6
    prompts = Counter(answer.prompt for answer in record.load(times).answers)
    assert prompts <= Counter(event.prompt_tokens for event in events)

    again = json.loads(bench("report", times, *objectives, "--output", "json").stdout)
    assert again == answer
    table = bench("report", times).stdout
    assert f"{summary['output_tok_per_s']:.1f}" in table
    assert "goodput" not in table


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_server_counts_the_tokens_that_were_asked_for(
    endpoint: str, gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_tokenizer", lambda _: ByteTokenizer())  # no folder holds the fake engine's
    times = tmp_path / "times.jsonl"
    serve(
        *(gateway, gateway.tenant(), "--model", "fake", "--endpoint", endpoint, "--input-len", "170,300"),
        *("--tokenizer", "fake", "--prefix-len", 100, "--record", times, "--repeats", 1, "--concurrency", 1),
    )
    answers = record.load(times).of(0)
    assert [answer.prompt for answer in answers] == [170, 300] * 3
    assert all(answer.cached >= 96 for answer in answers)  # the prefix in whole blocks: warming up had computed it


def test_failures_are_counted_shown_and_the_exit_code(gateway: RunningGateway) -> None:
    rich, poor = gateway.tenant("rich", limits={"concurrent": 1}), gateway.tenant("poor", credit=None)
    some = serve(gateway, rich, "--model", "fake", "--concurrency", 6, "--warmup", 0)
    assert "http 429" in some.stdout
    refused = serve(gateway, poor, "--model", "fake", "--warmup", 0, code=1)
    assert "12 × http 402" in refused.stdout
    assert "12 of 12 requests failed" in refused.stdout
    assert "every request failed" in refused.stderr
    unknown = serve(gateway, rich, "--model", "nobody", "--warmup", 0, code=1)
    assert "12 × http 404" in unknown.stdout
    nowhere = bench(*("serve", "--url", f"http://127.0.0.1:{free_port()}/v1", "--model", "m", "--requests", 2), code=1)
    assert "6 × connection refused" in nowhere.stdout


def test_a_stream_that_breaks_is_a_failure(make_gateway: MakeGateway) -> None:
    engine = FakeEngine(ByteTokenizer(), 0.01)
    gateway = make_gateway(engine=engine)
    key = gateway.tenant()

    def kill_at_work() -> None:
        if len(engine.submitted) == 4:
            gateway.loop.call_later(0.1, engine.kill)  # of the 0.6 s that each takes
        else:
            gateway.loop.call_later(0.01, kill_at_work)

    gateway.loop.call_soon_threadsafe(kill_at_work)
    result = serve(
        *(gateway, key, "--model", "fake", "--output-len", 60, "--requests", 4, "--repeats", 1, "--warmup", 0),
        *("--concurrency", 4),
        code=1,
    )
    assert "stream error" in result.stdout


def test_poisson_arrivals_many_models_and_bodies(gateway: RunningGateway, tmp_path: Path) -> None:
    key = gateway.tenant()
    bodies, times = tmp_path / "bodies.jsonl", tmp_path / "times.jsonl"
    bodies.write_text('{"seed": 1}\n\n{"seed": 2, "temperature": 0.5}\n')
    serve(
        *(gateway, key, "--model", "fake", "--request-rate", 200, "--bodies", bodies, "--record", times),
        *("--extra-body", '{"top_p": 0.9}', "--seed", 5, "--warmup", 0, "--repeats", 1),
    )
    starts = [answer.start_s for answer in record.load(times).of(0)]
    assert starts == sorted(starts)
    assert starts[-1] > 0
    sampled = [request.sampling for request in gateway.engine.submitted]
    assert sorted((one.seed, one.temperature) for one in sampled) == [(1, 0.0)] * 3 + [(2, 0.5)] * 3
    assert {one.top_p for one in sampled} == {0.9}
    assert {one.min_tokens for one in sampled} == {6}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--input-len", "0"), "no range of at least one token"),
        (("--request-rate", "0"), "no rate"),
        (("--request-rate", "nan"), "no rate"),
        (("--goodput", "ttft"), "not ttft:MS"),
        (("--extra-body", "[]"), "not a JSON object"),
        (("--extra-body", "{"), "Expecting property name"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: tuple[str, str], reason: str) -> None:
    assert reason in bench("serve", "--model", "m", *arguments, code=2).stderr


def test_what_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    assert "not an http://" in bench("serve", "--model", "m", "--url", "localhost", code=1).stderr
    assert "cannot be read" in bench("serve", "--model", "m", "--dataset", tmp_path / "no.json", code=1).stderr
    assert "cannot be read" in bench("report", tmp_path / "no.jsonl", code=1).stderr
    assert "There is no model folder" in bench("throughput", "--model", tmp_path / "no", code=1).stderr
    assert "No such file" in bench("serve", "--model", "m", "--bodies", tmp_path / "no.jsonl", code=1).stderr


# --- the model alone -----------------------------------------------------------------------------


@pytest.fixture
def engine_options(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it for what it starts; here it is to go again
    yield ("--model", tiny_model, "--threads", 1, "--dtype", "float32", "--kv-cache-bytes", 4 << 20)
    torch.set_num_threads(threads)


def test_throughput_of_the_model_alone(engine_options: tuple[Any, ...], tmp_path: Path) -> None:
    saved = tmp_path / "out.json"
    result = bench(
        *("throughput", *engine_options, "--requests", 12, "--input-len", "40-60", "--output-len", 5),
        *("--prefix-len", 32, "--repeats", 2, "--warmup", 1, "--save", saved),
    )
    answer = json.loads(saved.read_text())
    summary = answer["summary"]
    assert (summary["prompts"], summary["output_tokens"], len(answer["repeats"])) == (12, 60, 2)
    assert summary["cached_tokens"] >= 12 * 16  # the prefix, in whole blocks, after it was computed once
    assert summary["output_tok_per_s"] == pytest.approx(60 / summary["seconds"], rel=0.5)
    assert f"{summary['output_tok_per_s']:.1f}" in result.stdout


def test_latency_of_a_batch(engine_options: tuple[Any, ...]) -> None:
    result = bench(
        *("latency", *engine_options, "--batch-size", 2, "--input-len", 20, "--output-len", 4),
        *("--iterations", 3, "--warmup", 1, "--output", "json"),
    )
    summary = json.loads(result.stdout)["summary"]
    assert (summary["batch_size"], summary["output_len"], summary["iterations"]) == (2, 4, 3)
    for name in ("first_token_ms", "per_token_ms", "batch_ms"):
        assert 0 < summary[name]["p50"] <= summary[name]["p99"] <= summary[name]["max"]
    assert summary["first_token_ms"]["p50"] < summary["batch_ms"]["max"]
