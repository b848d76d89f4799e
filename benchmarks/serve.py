"""Servers side by side over HTTP: ours as it ships, and any peer, through the same client with the same prompts.

    python benchmarks/serve.py --setting bf16 --setting int8 --out runs.jsonl \
        --peer 'name=vllm,url=http://127.0.0.1:8101/v1,model=smol,start=vllm serve MODEL --port 8101'
    python benchmarks/serve.py --together --workload short --peer …
    python benchmarks/serve.py --growth --out growth.jsonl
    python benchmarks/serve.py --tables runs.jsonl          # what was measured before, printed again

One server runs at a time; `--together` starts all and asks one after the other in each repeat, the others stopped
(SIGSTOP), so that what changes in the machine meanwhile meets all alike. Prompts are words of exact length that no
prefix cache holds, an answer has exactly 64 tokens, a figure is the median of the repeats. Every measurement is
appended to `--out` as it is made, so a long run may be taken in parts: the tables are made of the whole file, each
figure of its latest measurement.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import loras
import msgspec
from floor import Floor, bandwidth, weight_bytes
from rich.console import Console
from servers import Absent, Peer, Server, meterhouse, peer

from engine.models.config import ModelConfig
from engine.tokens import Tokenizer
from engine.weights import resolve_model
from gateway.bench import serve
from gateway.bench.client import Target
from gateway.bench.lengths import Lengths
from gateway.bench.statistics import Statistics, medians, of_record
from gateway.bench.workload import Bodies, Synthetic
from gateway.server import raise_file_limit
from kernels.native import default_cache_dir

OUTPUT_TOKENS = 64
WORKLOADS = {"short": "59", "mixed": "59,229,829", "lora": "59"}
"""Tokens of the prompts, the chat template's among them (some 30 for the default model)."""

SETTINGS = {"bf16": [], "int8": ["--quantization=int8"], "int4": ["--quantization=int4"]}
BITS = {"bf16": 16, "int8": 8, "int4": 4}

GROWTH_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
GROWTH_CONTEXT = (128, 512, 1024, 2048, 4096)
GROWTH_ADAPTERS = (0, 1, 4, 8, 16, 32)


class Row(msgspec.Struct, kw_only=True):
    """One measurement."""

    server: str
    ours: bool
    workload: str
    concurrency: int
    measured: Statistics
    load_before: float  # of the machine, a core
    first_token_s: float | None = None  # from the server's start to the first token of its first answer
    bandwidth: float | None = None  # bytes/s of reading memory just before, at concurrency 1


@dataclass(frozen=True)
class Contender:
    """A server that is to be compared: how to start it, given a log, and with which workloads."""

    name: str
    start: Callable[[Path], AbstractContextManager[Server]]
    workloads: Sequence[str]
    ours: bool

    def models(self, server: Server, workload: str) -> Sequence[str]:
        return server.adapters if self.ours and workload == "lora" else server.models


class Bench:
    """Asks servers, and keeps what came of it."""

    def __init__(self, model: Path, out: Path | None, repeats: int) -> None:
        self._tokenizer = Tokenizer(model)
        self._bytes = weight_bytes(model, BITS["bf16"])
        self._out = out
        self._repeats = repeats
        self._first_token_s: dict[str, float] = {}  # by server
        self.rows: list[Row] = []
        self.absent: list[str] = []

    def each(
        self,
        name: str,
        start: Callable[[Path], AbstractContextManager[Server]],
        measure: Callable[[Server], None],
    ) -> None:
        """Start a server and measure it; one that is not there is left out, and said so."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                with start(Path(folder) / "log") as server:
                    self._greet(server)
                    measure(server)
            except Absent as error:
                self._leave_out(name, error)

    def _greet(self, server: Server) -> None:
        ready = ""
        if server.ready_s is not None:
            load = serve.Load(requests=1, concurrency=1, repeats=1, warmup=0)
            first = medians(self._ask(server, load, "59", server.models)).ttft_ms.p50
            self._first_token_s[server.name] = server.ready_s + first / 1e3
            ready = f", ready after {server.ready_s:.1f} s"
        say(f"{server.name}{ready}")

    def _leave_out(self, name: str, error: Absent) -> None:
        self.absent.append(f"{name}: {error}")
        say(f"{name} is left out: {error}")

    def together(self, contenders: Sequence[Contender], workloads: Sequence[str], concurrency: Sequence[int]) -> None:
        """Start all, then ask one after the other in each repeat of each figure."""
        with ExitStack() as stack:
            servers: list[tuple[Contender, Server]] = []
            for contender in contenders:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                try:
                    server = stack.enter_context(contender.start(Path(folder) / "log"))
                except Absent as error:
                    self._leave_out(contender.name, error)
                    continue
                self._greet(server)
                servers.append((contender, server))
            for workload in workloads:
                for count in concurrency:
                    self._in_turn(servers, workload, count)

    def _in_turn(self, servers: Sequence[tuple[Contender, Server]], workload: str, concurrency: int) -> None:
        asked = [each for each in servers if workload in each[0].workloads]
        found: dict[str, list[Statistics]] = {}
        load = _load(concurrency, repeats=1)
        before = _load_before()
        read = self._read(concurrency)
        for repeat in range(self._repeats):
            for contender, server in asked:
                if repeat == 1:
                    load = msgspec.structs.replace(load, warmup=0)
                with ExitStack() as stack:
                    for _, other in servers:
                        if other is not server:
                            stack.enter_context(other.stopped())
                    of = self._ask(server, load, WORKLOADS[workload], contender.models(server, workload))
                found.setdefault(server.name, []).extend(of)
        for contender, server in asked:
            self._keep(server, workload, concurrency, contender.ours, medians(found[server.name]), before, read)

    def measure(
        self,
        server: Server,
        workload: str,
        concurrency: int,
        *,
        ours: bool,
        input_len: str,
        models: Sequence[str] | None = None,
        prefix: int = 0,
        requests: int | None = None,
    ) -> None:
        load = _load(concurrency, repeats=self._repeats, requests=requests)
        before, read = _load_before(), self._read(concurrency)
        measured = medians(self._ask(server, load, input_len, models or server.models, prefix))
        self._keep(server, workload, concurrency, ours, measured, before, read)

    def _read(self, concurrency: int) -> float | None:
        return bandwidth(self._bytes) if concurrency == 1 else None

    def _keep(
        self,
        server: Server,
        workload: str,
        concurrency: int,
        ours: bool,
        measured: Statistics,
        before: float,
        read: float | None,
    ) -> None:
        row = Row(
            server=server.name,
            ours=ours,
            workload=workload,
            concurrency=concurrency,
            measured=measured,
            load_before=before,
            first_token_s=self._first_token_s.get(server.name),
            bandwidth=read,
        )
        self.rows.append(row)
        if self._out is not None:
            with self._out.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        failed = f", failed: {measured.errors}" if measured.failed else ""
        short = "" if measured.output_tokens == OUTPUT_TOKENS * measured.ok else ", answers of other lengths"
        say(
            f"  {server.name}: {workload:>14} × {concurrency:<3} {measured.output_tok_per_s:8.1f} tok/s, TTFT p50 "
            f"{measured.ttft_ms.p50:7.1f} ms, TPOT p50 {measured.tpot_ms.p50:6.2f} ms{failed}{short}"
        )

    def _ask(
        self, server: Server, load: serve.Load, input_len: str, models: Sequence[str], prefix: int = 0
    ) -> list[Statistics]:
        """Each repeat."""
        prompts = Synthetic(
            input_len=Lengths.parse(input_len),
            output_len=Lengths.parse(str(OUTPUT_TOKENS)),
            prefix=prefix,
            chat=server.endpoint == "chat",
            tokenizer=self._tokenizer,
        )
        bodies = Bodies(models=models, endpoint=server.endpoint, ignore_eos=server.ignore_eos, extras=server.bodies)
        target = Target.parse(server.url, api_key=server.api_key)
        return of_record(serve.Benchmark(target, prompts, bodies, load).run())


def _load(concurrency: int, *, repeats: int, requests: int | None = None) -> serve.Load:
    return serve.Load(
        requests=requests or max(6, 3 * concurrency if concurrency < 32 else 2 * concurrency),
        concurrency=concurrency,
        repeats=repeats,
        warmup=max(4, min(concurrency, 8)),
    )


def _load_before() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- what is measured ----------------------------------------------------------------------------


def compare(bench: Bench, asked: argparse.Namespace, adapters: Sequence[Path]) -> None:
    """Ours in each setting and each peer: the workloads at each concurrency."""
    contenders = _contenders(bench, asked, adapters)
    if asked.together:
        bench.together(contenders, asked.workload, asked.concurrency)
        return
    for contender in contenders:
        bench.each(contender.name, contender.start, partial(_workloads, bench, asked, contender))


def _contenders(bench: Bench, asked: argparse.Namespace, adapters: Sequence[Path]) -> list[Contender]:
    found: list[Contender] = []
    for setting in asked.setting:
        name, flags = f"Meterhouse {setting}", [*SETTINGS[setting], *asked.flag]
        starting = partial(meterhouse, name, flags, adapters, model=asked.model)
        found.append(Contender(name, starting, asked.workload, True))
    for other in asked.peer:
        workloads = [workload for workload in asked.workload if workload in other.workloads]
        found.append(Contender(other.server.name, partial(peer, other), workloads, False))
    return found


def _workloads(bench: Bench, asked: argparse.Namespace, contender: Contender, server: Server) -> None:
    for workload in contender.workloads:
        models = contender.models(server, workload)
        for concurrency in asked.concurrency:
            bench.measure(
                server, workload, concurrency, ours=contender.ours, input_len=WORKLOADS[workload], models=models
            )


def growth(bench: Bench, asked: argparse.Namespace, adapters: Sequence[Path]) -> None:
    """How the cost of ours grows with concurrency, context and adapters; what the prefix cache saves."""

    def curves(server: Server) -> None:
        for concurrency in GROWTH_CONCURRENCY:
            bench.measure(server, "concurrency", concurrency, ours=True, input_len="59")
        for context in GROWTH_CONTEXT:
            bench.measure(server, f"context {context}", 4, ours=True, input_len=str(context), requests=8)
        for count in (count for count in GROWTH_ADAPTERS if count <= len(server.adapters)):
            models = server.adapters[:count] or server.models
            bench.measure(server, f"adapters {count}", 32, ours=True, input_len="59", models=models)
        bench.measure(server, "long, cold", 1, ours=True, input_len="859", requests=6)
        bench.measure(server, "shared, warm", 1, ours=True, input_len="859", prefix=800, requests=6)

    name = "Meterhouse bf16"
    bench.each(name, partial(meterhouse, name, asked.flag, adapters, model=asked.model), curves)


# --- tables --------------------------------------------------------------------------------------


def latest(rows: Sequence[Row]) -> dict[tuple[str, str, int], Row]:
    return {(row.workload, row.server, row.concurrency): row for row in rows}


def tables(rows: Sequence[Row], model: Path) -> Iterator[str]:
    """Markdown: a table of figures for each workload with the ratios of ours to each peer, then the growth."""
    found = latest(rows)
    for workload in (workload for workload in WORKLOADS if any(row.workload == workload for row in rows)):
        mine = [row for row in found.values() if row.workload == workload]
        columns = sorted({row.concurrency for row in mine})
        yield f"\n### {workload}: prompts of {WORKLOADS[workload]} tokens, {OUTPUT_TOKENS} output tokens\n"
        yield "| output tok/s (TTFT p50, ms) at concurrency | " + " | ".join(map(str, columns)) + " |"
        yield "|---|" + "---|" * len(columns)
        for server in dict.fromkeys(row.server for row in mine):
            yield _line(server, [_figure(found.get((workload, server, count))) for count in columns])
        ours, theirs = ({row.server: None for row in mine if row.ours is which} for which in (True, False))
        for left in ours:
            for right in theirs:
                pairs = [(found.get((workload, left, c)), found.get((workload, right, c))) for c in columns]
                yield _line(f"ratio {left} / {right}", [_ratio(*pair) for pair in pairs])
    grown = [row for row in found.values() if row.workload not in WORKLOADS]
    if grown:
        yield "\n### growth\n"
        yield "| | concurrency | output tok/s | TTFT p50, ms | TPOT p50, ms | cached tokens |"
        yield "|---|---|---|---|---|---|"
        for row in grown:
            its = row.measured
            times = (f"{its.output_tok_per_s:.1f}", f"{its.ttft_ms.p50:.1f}", f"{its.tpot_ms.p50:.2f}")
            yield _line(row.workload, [str(row.concurrency), *times, f"{its.cached_tokens:g}"])
    started = {row.server: row.first_token_s for row in rows if row.first_token_s is not None}
    yield "\nfrom the start of a process to its first token: " + (
        ", ".join(f"{server} {seconds:.1f} s" for server, seconds in started.items()) or "not measured"
    )
    failed = sum(row.measured.failed for row in found.values())
    yield f"failed requests: {failed}; load a core before a measurement: {_loads(rows)}"
    for setting, bits in BITS.items():
        read = [row.bandwidth for row in rows if row.server == f"Meterhouse {setting}" and row.bandwidth is not None]
        if read:
            yield f"floor, {setting}: {Floor(weight_bytes(model, bits), median(read))} ({_range(read)} GB/s)"


def _line(title: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join([title, *cells]) + " |"


def _figure(row: Row | None) -> str:
    if row is None or not row.measured.ok:
        return "-" if row is None else f"failed: {', '.join(row.measured.errors)}"
    failed = f", {row.measured.failed} failed" if row.measured.failed else ""
    return f"{row.measured.output_tok_per_s:.1f} ({row.measured.ttft_ms.p50:.0f}{failed})"


def _ratio(left: Row | None, right: Row | None) -> str:
    if left is None or right is None or not right.measured.output_tok_per_s:
        return "-"
    return f"{left.measured.output_tok_per_s / right.measured.output_tok_per_s:.2f}"


def _range(read: Sequence[float]) -> str:
    return f"{min(read) / 1e9:.1f} to {max(read) / 1e9:.1f}"


def _loads(rows: Sequence[Row]) -> str:
    loads = [row.load_before for row in rows]
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else "none"


# --- the program ---------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="what `meterhouse serve --model` takes")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="of ours; repeated [bf16]")
    parser.add_argument("--no-ours", action="store_true", help="measure the peers alone")
    parser.add_argument("--flag", action="append", default=[], help="another flag of `meterhouse serve`, --flag=--x=y")
    parser.add_argument("--peer", action="append", default=[], type=Peer.parse, help=Peer.__doc__)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeated [all]")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 8, 32], help="1,8,32")
    parser.add_argument("--adapter", action="append", default=[], type=Path, help="folder; repeated [four random ones]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="start all servers and ask them in turn")
    parser.add_argument("--growth", action="store_true", help="how ours grows, instead of the comparison")
    parser.add_argument("--out", type=Path, help="append each measurement to this file")
    parser.add_argument("--tables", type=Path, help="print the tables of such a file, measure nothing")
    asked = parser.parse_args()
    asked.setting = [] if asked.no_ours else asked.setting or ["bf16"]
    asked.workload = asked.workload or list(WORKLOADS)
    return asked


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def load(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server that runs is ended too
    asked = parse()
    cache = default_cache_dir()
    model = resolve_model(asked.model, cache)
    console = Console(width=240, soft_wrap=True, highlight=False, markup=False)
    absent: list[str] = []
    if asked.tables is not None:
        rows = load(asked.tables)
    else:
        raise_file_limit()
        bench = Bench(model, asked.out, asked.repeats)
        with tempfile.TemporaryDirectory(prefix="meterhouse-loras-") as folder:
            adapters = asked.adapter or [
                loras.write(Path(folder) / str(seed), ModelConfig.from_folder(model), seed=seed)
                for seed in range(max(GROWTH_ADAPTERS) if asked.growth else 4)
            ]
            (growth if asked.growth else compare)(bench, asked, adapters)
        rows = load(asked.out) if asked.out is not None else bench.rows
        absent = bench.absent
    console.print(f"{model.name}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}")
    for line in tables(rows, model):
        console.print(line)
    for line in absent:
        console.print(f"left out: {line}")


if __name__ == "__main__":
    main()
