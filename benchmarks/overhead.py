"""What metering costs: the server as it ships beside the same server that keeps no account (`unmetered.py`).

    python benchmarks/overhead.py [--blocks 6] [--out runs.jsonl]
    python benchmarks/overhead.py --tables runs.jsonl           # of everything that was measured so far

Both are up at once and each is asked while the other is stopped (SIGSTOP), in blocks of with, without, without, with
(ABBA), so that what drifts in the machine meets both alike. At concurrency 32, 64 output tokens: output tok/s and TTFT.
At concurrency 1: TTFT. A block gives one ratio of tok/s and one difference of the p50s; printed are the means over the
blocks with the interval that has the true one with 95% (Student's t, on the logarithm of the ratio). The floor is no
difference at all. Runs may be taken in parts: every block is appended to `--out`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev

import msgspec
from servers import PROGRAM, Server, meterhouse

from engine.tokens import Tokenizer
from engine.weights import resolve_model
from gateway.bench import serve
from gateway.bench.client import Target
from gateway.bench.lengths import Lengths
from gateway.bench.statistics import Statistics, of_record
from gateway.bench.workload import Bodies, Synthetic
from gateway.server import raise_file_limit
from kernels.native import default_cache_dir

UNMETERED = (str(Path(__file__).with_name("unmetered.py")),)
PROMPT = "59"
ORDER = ("with", "without", "without", "with")
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided 95% points of Student's t for 1, 2, 3 … degrees of freedom; past the last one that is taken."""


class Asked(msgspec.Struct, frozen=True):
    """One kind of question."""

    name: str
    concurrency: int
    requests: int
    output_len: int


KINDS = (Asked("32 at once", 32, 64, 64), Asked("one at a time", 1, 40, 2))


class Block(msgspec.Struct, kw_only=True):
    """One ABBA of one kind, the two of each side averaged."""

    kind: str
    with_tok_per_s: float
    without_tok_per_s: float
    with_ttft_ms: float  # p50
    without_ttft_ms: float


class Interval(msgspec.Struct, frozen=True):
    """A mean, and where the true one lies with 95%."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """By Student's t; without end for a single value."""
    middle = mean(values)
    if len(values) < 2:
        return Interval(middle, -math.inf, math.inf)
    half = T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def block(servers: dict[str, Server], kind: Asked, tokenizer: Tokenizer) -> Block:
    """Ask both in the order of ABBA. Raises `SystemExit` when an answer fails or is of another length."""
    found: dict[str, list[Statistics]] = {name: [] for name in servers}
    for name in ORDER:
        with ExitStack() as stack:
            for other, server in servers.items():
                if other != name:
                    stack.enter_context(server.stopped())
            found[name].append(_ask(servers[name], kind, tokenizer))
    tok = {name: mean(one.output_tok_per_s for one in measured) for name, measured in found.items()}
    ttft = {name: mean(one.ttft_ms.p50 for one in measured) for name, measured in found.items()}
    return Block(
        kind=kind.name,
        with_tok_per_s=tok["with"],
        without_tok_per_s=tok["without"],
        with_ttft_ms=ttft["with"],
        without_ttft_ms=ttft["without"],
    )


def _ask(server: Server, kind: Asked, tokenizer: Tokenizer) -> Statistics:
    prompts = Synthetic(
        input_len=Lengths.parse(PROMPT),
        output_len=Lengths.parse(str(kind.output_len)),
        prefix=0,
        chat=True,
        tokenizer=tokenizer,
    )
    load = serve.Load(requests=kind.requests, concurrency=kind.concurrency, repeats=1, warmup=0)
    bodies = Bodies(models=server.models, endpoint=server.endpoint, ignore_eos=True, extras=())
    target = Target.parse(server.url, api_key=server.api_key)
    (measured,) = of_record(serve.Benchmark(target, prompts, bodies, load).run())
    if measured.failed or measured.output_tokens != kind.requests * kind.output_len:
        raise SystemExit(f"{server.name}: {measured.failed} failed, {measured.output_tokens} tokens")
    return measured


def measure(blocks: int, model: str) -> Iterator[Block]:
    """Start both, ask each a little first, then block after block."""
    tokenizer = Tokenizer(resolve_model(model, default_cache_dir()))
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, program in (("with", PROGRAM), ("without", UNMETERED)):
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
            started = meterhouse(name, (), (), log, model=model, program=program)
            with ExitStack() as others:
                for other in servers.values():
                    others.enter_context(other.stopped())
                servers[name] = stack.enter_context(started)
                for kind in KINDS:
                    _ask(servers[name], kind, tokenizer)
        for _ in range(blocks):
            for kind in KINDS:
                yield block(servers, kind, tokenizer)


def table(blocks: Sequence[Block]) -> Iterator[str]:
    """Markdown."""
    yield "| | blocks | tok/s with / without | cost of tok/s, % | TTFT p50 with / without, ms | cost of TTFT p50, ms |"
    yield "|---|---|---|---|---|---|"
    for kind in dict.fromkeys(one.kind for one in blocks):
        some = [one for one in blocks if one.kind == kind]
        ratio = interval([math.log(one.with_tok_per_s / one.without_tok_per_s) for one in some])
        lost = [(1 - math.exp(value)) * 100 for value in (ratio.mean, ratio.high, ratio.low)]
        later = interval([one.with_ttft_ms - one.without_ttft_ms for one in some])
        speeds, firsts = (
            (mean(getattr(one, f"with_{name}") for one in some), mean(getattr(one, f"without_{name}") for one in some))
            for name in ("tok_per_s", "ttft_ms")
        )
        cells = (
            kind,
            f"{len(some)}",
            f"{speeds[0]:.1f} / {speeds[1]:.1f}",
            f"{lost[0]:.2f} ({lost[1]:.2f} to {lost[2]:.2f})",
            f"{firsts[0]:.2f} / {firsts[1]:.2f}",
            f"{later.mean:.2f} ({later.low:.2f} to {later.high:.2f})",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--model", default="default")
    parser.add_argument("--out", type=Path, help="append every block to this file")
    parser.add_argument("--tables", type=Path, help="measure nothing: print what this file has")
    asked = parser.parse_args()
    blocks: list[Block] = []
    if asked.tables is not None:
        blocks = [msgspec.json.decode(line, type=Block) for line in asked.tables.read_bytes().splitlines()]
    else:
        raise_file_limit()
        for one in measure(asked.blocks, asked.model):
            blocks.append(one)
            print(msgspec.json.encode(one).decode(), file=sys.stderr, flush=True)
            if asked.out is not None:
                with asked.out.open("ab") as file:
                    file.write(msgspec.json.encode(one) + b"\n")
    print("\n".join(table(blocks)))


if __name__ == "__main__":
    main()
