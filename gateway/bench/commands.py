"""`meterhouse bench`: how fast a server is (`serve`), and the model alone (`throughput`, `latency`).

Knows: the flags and which numbers go where. Does not know: how anything is measured. What it measures with is
imported by the command that needs it, so that `meterhouse --help` does not wait for it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, RenderableType

from gateway import settings as settings_module
from gateway.bench.lengths import Lengths
from gateway.commands.base import Noun
from gateway.flags import Decorator, settings_flags
from gateway.printing import PIPE_WIDTH

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.tokens import Tokenizer
    from gateway.bench.workload import Prompts

SLO_PART = re.compile(r"(ttft|tpot|e2e|e2el):(\d+(?:\.\d+)?)")
NOT_THE_ENGINES = ("max_waiting", "queue_timeout_s")  # a batch is as long as it is, and waits as long as it must


@click.group(cls=Noun)
def bench() -> None:
    """Measure a server, or the model alone."""


# --- flags ---------------------------------------------------------------------------------------


def _parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that turns a `ValueError` into wrong use of the command."""

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _object(text: str) -> dict[str, Any]:
    parsed = json.loads(text)  # its error is a ValueError
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise ValueError(f"{text!r} is no rate: a number above 0, or inf")
    return rate


def _slo(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    """`ttft:200 tpot:50`, in one word or several → the most milliseconds of each."""
    slo: dict[str, float] = {}
    for part in re.split(r"[\s,]+", " ".join(given).strip()) if given else ():
        found = SLO_PART.fullmatch(part)
        if found is None:
            raise click.BadParameter(f"{part!r} is not ttft:MS, tpot:MS or e2e:MS")
        slo[found[1].removesuffix("l")] = float(found[2])
    return slo


class Objectives(click.Command):
    """A command that takes `--goodput ttft:200 tpot:50` unquoted, as other benchmarks do."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        after = False
        for argument in args:
            if after and SLO_PART.fullmatch(argument) and spread[-1] != "--goodput":
                spread.append("--goodput")
            after = argument == "--goodput" or (after and bool(SLO_PART.fullmatch(argument)))
            spread.append(argument)
        return super().parse_args(context, spread)


def _options(*options: Decorator) -> Decorator:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_goodput = click.option(
    "--goodput",
    "slo_ms",
    multiple=True,
    callback=_slo,
    metavar="NAME:MS …",
    help="Objectives an answer must meet to count: ttft:200 tpot:50 e2e:5000.",
)
_output = click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="What is printed."
)
_save = click.option("--save", type=click.Path(path_type=Path), help="Write the JSON to this file too.")
_shape = _options(
    click.option(
        *("--input-len", "input_len"),
        default="128",
        show_default=True,
        callback=_parsed(Lengths.parse),
        metavar="TOKENS",
        help="Of a whole prompt: 128, 100-300, or 30,200,800 in turn.",
    ),
    click.option(
        *("--output-len", "output_len"),
        callback=_parsed(Lengths.parse),
        metavar="TOKENS",
        help="Most tokens of an answer, in the same form. [default: 64; a dataset's own]",
    ),
    click.option(
        "--prefix-len", type=click.IntRange(0), default=0, help="Tokens of a system prompt that all requests share."
    ),
    click.option("--dataset", type=click.Path(path_type=Path), help="Questions from a file in ShareGPT's format."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, order and arrivals."),
)
_repeats = click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Each number is the median of so many."
)


# --- a server ------------------------------------------------------------------------------------


@bench.command("serve", cls=Objectives)
@click.option("--url", default="http://127.0.0.1:8000/v1", show_default=True, help="Up to and including /v1.")
@click.option("--model", "models", multiple=True, required=True, help="Name of a model or adapter; repeated: in turn.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Bearer key. (OPENAI_API_KEY)")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="In each repeat.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests in flight; with a rate, the most. [default: 8]")
@click.option(
    "--request-rate",
    callback=_parsed(_rate),
    metavar="PER_S",
    help="Send at random times, so many a second on average (inf: all at once), whether or not others are answered.",
)
@_shape
@click.option("--tokenizer", help="What --model of `meterhouse serve` takes; makes prompts of exact lengths.")
@click.option("--no-nonce", is_flag=True, help="Ask the same again in each repeat and run, prefix cache and all.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Send ignore_eos and min_tokens: every answer has its full length.")
@click.option("--extra-body", callback=_parsed(_object), metavar="JSON", help="Merged into every request.")
@click.option("--bodies", type=click.Path(path_type=Path), help="File of JSON objects, one a line, merged in turn.")
@click.option("--zipf", type=float, help="Ask the k-th model or body as often as k^-ZIPF says, not in turn.")
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Requests not counted.")
@_repeats
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=300.0, help="Longest silence, s.")
@_goodput
@click.option("--record", type=click.Path(path_type=Path), help="Keep all times in this file, for `bench report`.")
@click.option("--show", is_flag=True, help="Print one answer of each repeat.")
@_output
@_save
def bench_serve(
    url: str,
    models: tuple[str, ...],
    api_key: str,
    endpoint: str,
    requests: int,
    concurrency: int | None,
    request_rate: float | None,
    tokenizer: str | None,
    no_nonce: bool,
    temperature: float,
    ignore_eos: bool,
    extra_body: dict[str, Any] | None,
    bodies: Path | None,
    zipf: float | None,
    warmup: int,
    repeats: int,
    timeout: float,
    slo_ms: dict[str, float],
    record: Path | None,
    show: bool,
    output: str,
    save: Path | None,
    **shape: Any,
) -> None:
    """Measure any OpenAI-compatible server; exit code 1 when every request failed."""
    from gateway.bench import serve
    from gateway.bench.client import Target
    from gateway.bench.workload import Bodies
    from gateway.server import raise_file_limit

    with _sentences():
        target = Target.parse(url, api_key=api_key, timeout_s=timeout)
        prompts = _prompts(None if tokenizer is None else _tokenizer(tokenizer), chat=endpoint == "chat", **shape)
        benchmark = serve.Benchmark(
            target,
            prompts,
            Bodies(
                models=models,
                endpoint=endpoint,
                temperature=temperature,
                ignore_eos=ignore_eos,
                extra=extra_body or {},
                extras=_lines(bodies),
                zipf=zipf,
                seed=shape["seed"],
            ),
            serve.Load(
                requests=requests,
                concurrency=concurrency,
                rate_per_s=request_rate,
                repeats=repeats,
                warmup=warmup,
                seed=shape["seed"],
                fresh=not no_nonce,
            ),
            options=_told(),
            save=record,
            show=_shower(slo_ms, show),
        )
        raise_file_limit()
        found = benchmark.run()
    if not prompts.exact and shape["dataset"] is None:
        click.echo("Lengths are in words: --tokenizer makes them exact.", err=True)
    _report(found, slo_ms, output, save)


@bench.command("report", cls=Objectives)
@click.argument("file", type=click.Path(path_type=Path))
@_goodput
@_output
@_save
def bench_report(file: Path, slo_ms: dict[str, float], output: str, save: Path | None) -> None:
    """Compute the statistics of FILE, a record of `bench serve`, again."""
    from gateway.bench import record

    with _sentences():
        found = record.load(file)
    _report(found, slo_ms, output, save)


# --- the model alone -----------------------------------------------------------------------------


def _engine_fields() -> list[str]:
    """The settings that the engine is built with, and where its model is found."""
    from engine.types import EngineConfig

    known = {*EngineConfig.__struct_fields__, "cache_dir"} - set(NOT_THE_ENGINES)
    return [field.name for field in settings_module.fields() if field.name in known]


@bench.command("throughput")
@settings_flags(*_engine_fields())
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Prompts in a batch.")
@_shape
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--ignore-eos/--heed-eos", default=True, show_default=True, help="Let every answer have its full length.")
@click.option("--warmup", type=click.IntRange(0), default=8, show_default=True, help="Prompts not counted.")
@_repeats
@_output
@_save
def bench_throughput(
    config: Path | None,
    requests: int,
    input_len: Lengths,
    output_len: Lengths | None,
    prefix_len: int,
    dataset: Path | None,
    seed: int,
    temperature: float,
    ignore_eos: bool,
    warmup: int,
    repeats: int,
    output: str,
    save: Path | None,
    **flags: str | None,
) -> None:
    """Tokens and requests a second of one large batch, in this process."""
    from gateway.bench import offline, report

    with _sentences(), _llm(config, flags) as llm:
        prompts = _prompts(
            llm.tokenizer,
            chat=False,
            input_len=input_len,
            output_len=output_len,
            prefix_len=prefix_len,
            dataset=dataset,
            seed=seed,
        )
        measured = offline.throughput(
            llm,
            prompts,
            count=requests,
            repeats=repeats,
            warmup=warmup,
            ignore_eos=ignore_eos,
            temperature=temperature,
        )
    whole = offline.medians(measured)
    _print(
        report.throughput_table(whole, repeats),
        {"options": _told(), "summary": report.plain(whole), "repeats": [report.plain(one) for one in measured]},
        output,
        save,
    )


@bench.command("latency")
@settings_flags(*_engine_fields())
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Batches not counted.")
@click.option("--iterations", type=click.IntRange(1), default=10, show_default=True, help="Batches counted.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the words.")
@_output
@_save
def bench_latency(
    config: Path | None,
    batch_size: int,
    input_len: int,
    output_len: int,
    warmup: int,
    iterations: int,
    seed: int,
    output: str,
    save: Path | None,
    **flags: str | None,
) -> None:
    """The time of one batch and of each of its output tokens, in this process."""
    from gateway.bench import offline, report

    with _sentences(), _llm(config, flags) as llm:
        prompts = _prompts(
            llm.tokenizer,
            chat=False,
            input_len=Lengths.parse(str(input_len)),
            output_len=Lengths.parse(str(output_len)),
            prefix_len=0,
            dataset=None,
            seed=seed,
        )
        found = offline.latency(
            llm, prompts, batch_size=batch_size, output_len=output_len, iterations=iterations, warmup=warmup
        )
    _print(report.latency_table(found), {"options": _told(), "summary": report.plain(found)}, output, save)


# --- parts ---------------------------------------------------------------------------------------


@contextmanager
def _sentences() -> Iterator[None]:
    """What may fail for a reason that a person can mend, as one sentence."""
    from engine.types import EngineError
    from gateway.bench.record import RecordError

    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{error.strerror or error}: {error.filename or 'a file'}") from None
    except (EngineError, RecordError, ValueError) as error:  # FillError, DatasetError, UrlError are ValueErrors
        raise click.ClickException(str(error)) from None


@contextmanager
def _llm(config: Path | None, flags: dict[str, str | None]) -> Iterator[LLM]:
    """The model that the settings name, with the threads of a server's engine."""
    from engine.process import CHILD_ENVIRONMENT

    settings = settings_module.load(flags, config=config)
    for name, value in CHILD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read when torch is loaded, which is next
    from engine.llm import LLM

    options = {name: getattr(settings, name) for name in _engine_fields() if name not in ("model", "cache_dir")}
    with LLM(settings.model, cache_dir=settings.cache_dir, **options) as llm:
        yield llm


def _tokenizer(spec: str) -> Tokenizer:
    from engine.modelcache import WeightsError
    from engine.tokens import Tokenizer
    from engine.weights import resolve_model

    try:
        return Tokenizer(resolve_model(spec, settings_module.load().cache_dir))
    except WeightsError as error:
        raise ValueError(str(error)) from error


def _prompts(
    tokenizer: Tokenizer | None,
    *,
    chat: bool,
    input_len: Lengths,
    output_len: Lengths | None,
    prefix_len: int,
    dataset: Path | None,
    seed: int,
) -> Prompts:
    from gateway.bench import sharegpt
    from gateway.bench.workload import ShareGpt, Synthetic

    if dataset is not None:
        return ShareGpt(sharegpt.load(dataset), output_len=output_len, tokenizer=tokenizer, seed=seed)
    return Synthetic(
        input_len=input_len,
        output_len=output_len or Lengths.parse("64"),
        prefix=prefix_len,
        chat=chat,
        tokenizer=tokenizer,
        seed=seed,
    )


def _lines(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    return [_object(line) for line in path.read_text().splitlines() if line.strip()]


def _told() -> dict[str, Any]:
    """The options of the running command, for the record; no key is among them."""
    given = click.get_current_context().params
    told = {name: value for name, value in given.items() if name not in ("api_key", "record", "save", "output")}
    return {
        name: _told_length(value) if isinstance(value, Lengths) else str(value) if isinstance(value, Path) else value
        for name, value in told.items()
        if value not in (None, (), {}, False)
    }


def _told_length(lengths: Lengths) -> str:
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in lengths.parts)


def _shower(slo_ms: dict[str, float], show: bool) -> Callable[..., None]:
    """Tells standard error of each repeat as it ends."""
    from gateway.bench import report, statistics

    def shower(found: Any, repeat: Any, text: str) -> None:
        measured = statistics.measure(found.of(repeat.repeat), repeat.wall_s, slo_ms=slo_ms)
        click.echo(f"repeat {repeat.repeat + 1}: {report.one_line(measured)}", err=True)
        if show:
            click.echo(f"  one answer: {text[:300]!r}", err=True)

    return shower


def _report(found: Any, slo_ms: dict[str, float], output: str, save: Path | None) -> None:
    from gateway.bench import report
    from gateway.bench.statistics import is_good

    _print(report.as_table(found, slo_ms), report.as_json(found, slo_ms), output, save)
    if not any(is_good(answer) for answer in found.answers):
        click.echo("Error: every request failed", err=True)
        raise click.exceptions.Exit(1)


def _print(table: RenderableType, answer: dict[str, Any], output: str, save: Path | None) -> None:
    text = json.dumps(answer, indent=2)
    if save is not None:
        with _sentences():
            save.write_text(text + "\n")
    if output == "json":
        click.echo(text)
    else:
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
        console.print(table)
