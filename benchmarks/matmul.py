"""The native matrix product beside torch's: every product of a model's step, in each format, one table.

    python benchmarks/matmul.py [--model default] [--rows 1 8 32 512] [--threads 2]

One repeat runs the products of all layers and the head in turn, each on its own weights, so they come from memory as
in a step; the head multiplies at most 64 rows, as in a step. torch's row is `linear` in bfloat16 with weights that
oneDNN has packed once. Times are minima over the repeats; with one thread they are the processor's time, which a busy
neighbour disturbs less. GB/s counts the packed weights, GFLOP/s two operations for a weight and row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from engine.weights import resolve_model
from kernels import native
from kernels.memory import Arena
from kernels.native_matmul import (
    CJob,
    Epilogue,
    Format,
    Packed,
    Pool,
    multiply_in_turn,
    packed_bytes,
)

Shape = tuple[int, int, bool]
"""Outputs, inputs, and whether it is gate and up."""


def shapes(model: Path) -> tuple[list[Shape], Shape, int]:
    """The matrices of a layer, the head, and the number of layers."""
    config = AutoConfig.from_pretrained(model)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    qkv = (heads + 2 * config.num_key_value_heads) * head_dim
    layer = [
        (qkv, hidden, False),
        (hidden, heads * head_dim, False),
        (2 * config.intermediate_size, hidden, True),
        (hidden, config.intermediate_size, False),
    ]
    return layer, (config.vocab_size, hidden, False), config.num_hidden_layers


def best_ms(run: Callable[[], None], budget_s: float) -> float:
    """The least time of one run, in milliseconds, over at least three: of one thread the processor's time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or spent < budget_s:
        began = clock()
        run()
        took = clock() - began
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best * 1e3


HEAD_ROWS = 64


def head_rows(rows: int, index: int, count: int) -> int:
    """The rows of product `index` of `count`, the last of which is the head."""
    return min(rows, HEAD_ROWS) if index == count - 1 else rows


def native_run(pool: Pool, weights: list[Packed], rows: int) -> Callable[[], None]:
    """All products in turn; gate and up with their SwiGLU."""
    inputs: dict[int, Tensor] = {weight.inputs: torch.randn(rows, weight.inputs) for weight in weights}
    outputs: dict[int, Tensor] = {}
    jobs: list[CJob] = []
    for index, weight in enumerate(weights):
        epilogue = Epilogue.swiglu if weight.gated else Epilogue.store
        width = weight.outputs // 2 if weight.gated else weight.outputs
        out = outputs.setdefault(width, torch.empty(rows, width))
        its_rows = head_rows(rows, index, len(weights))
        jobs.append(weight.job(inputs[weight.inputs][:its_rows], out[:its_rows], epilogue))

    def run() -> None:
        multiply_in_turn(pool, jobs)

    run.keep = (inputs, outputs)  # type: ignore[attr-defined]  # jobs hold addresses only
    return run


def torch_run(weights: list[Tensor], rows: int) -> Callable[[], None]:
    """The same products by oneDNN, bfloat16 in and out."""
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]).bfloat16() for weight in weights}
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    pairs = [
        (inputs[weight.shape[1]][: head_rows(rows, index, len(weights))], its)
        for index, (weight, its) in enumerate(zip(weights, packed, strict=True))
    ]

    def run() -> None:
        for x, weight in pairs:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--formats", nargs="+", default=[format.name for format in Format])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each number")
    parser.add_argument("--library", type=Path, help="a library built by hand")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    library = native.load(asked.library) if asked.library else native.library()
    if library is None:
        raise SystemExit("there is no native library here")
    layer, head, layers = shapes(resolve_model(asked.model, native.default_cache_dir()))
    every = [shape for _ in range(layers) for shape in layer] + [head]
    sizes = [outputs * inputs for outputs, inputs, _ in every]
    numbers = sum(sizes)
    pool = Pool(library, asked.threads)
    torch.manual_seed(0)
    plain = [torch.randn(outputs, inputs).div_(inputs**0.5).bfloat16() for outputs, inputs, _ in every]
    print(f"{numbers / 1e6:.0f}M weights in {len(every)} products, {asked.threads} threads; ms (GB/s, GFLOP/s)")
    print("| rows | torch bf16 | " + " | ".join(asked.formats) + " |")
    print("|---" * (len(asked.formats) + 2) + "|")

    def cell(ms: float, rows: int, size: int) -> str:
        products = sum(its * head_rows(rows, index, len(sizes)) for index, its in enumerate(sizes))
        return f"{ms:.2f} ({size / ms / 1e6:.1f}, {2e-6 * products / ms:.0f})"

    weights = {}
    for name in asked.formats:
        format = Format[name]
        size = sum(packed_bytes(library, format, o, i, gated=g) + 64 for o, i, g in every)
        arena = Arena(size)
        weights[name] = [
            Packed(pool, weight, format, gated=gated, arena=arena)
            for weight, (_, _, gated) in zip(plain, every, strict=True)
        ]
    for rows in asked.rows:
        cells = [cell(best_ms(torch_run(plain, rows), asked.budget), rows, 2 * numbers)]
        for name in asked.formats:
            size = sum(weight.data.numel() for weight in weights[name])
            cells.append(cell(best_ms(native_run(pool, weights[name], rows), asked.budget), rows, size))
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
