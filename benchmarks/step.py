"""Milliseconds of one decode step of the model alone, without scheduler, sampling or text: native beside torch.

    python benchmarks/step.py [--model default] [--dtype bfloat16] [--quantization none] [--adapters 0] [--torch]

Every sequence holds `context` tokens in blocks that lie anywhere in the cache and computes its next one. A figure is
the least of many repeats: what the machine can do, not what else ran on it. The floor is what must be read in a step,
weights and keys and values, at the memory bandwidth measured here.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from floor import bandwidth

from engine.adapters import PROJECTIONS, Adapter, shapes
from engine.kvcache import KvCache, block_bytes
from engine.lora import LoraStore
from engine.models.batch import Batch
from engine.models.config import ModelConfig
from engine.models.llama import Llama
from engine.models.native import NativeLlama
from engine.models.store import WeightStore
from engine.weights import load_weights, resolve_model
from kernels.dispatch import operations
from kernels.native import build, default_cache_dir, load, usable_cores
from kernels.native_matmul import Pool
from kernels.native_step import PARTS

BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024, 4096)
BLOCK = 16
RANK = 16
REPEATS = 60
READ_BYTES = 512 << 20  # to tell the memory's bandwidth by
CPU = torch.device("cpu")


def least(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def decodes(model: ModelConfig, sequences: int, context: int, users: list[str | None]) -> tuple[Batch, int]:
    """A step in which every sequence computes its last token, and the blocks it takes."""
    each = -(-context // BLOCK)
    blocks = list(range(sequences * each))
    random.Random(0).shuffle(blocks)
    batch = Batch()
    for index in range(sequences):
        token = (index * 7919) % model.vocab
        user = users[index * len(users) // sequences]  # side by side, as the runner puts them
        batch.add([token], context - 1, blocks[index * each : (index + 1) * each], user)
        batch.wanted.append(index)
    return batch, len(blocks)


def random_adapters(model: ModelConfig, count: int, dtype: torch.dtype) -> dict[str, Adapter]:
    sizes = shapes(model)
    made = {}
    for number in range(count):
        weights = {
            (layer, name): (torch.randn(RANK, sizes[name][0]).to(dtype), torch.randn(sizes[name][1], RANK).to(dtype))
            for layer in range(model.layers)
            for name in PROJECTIONS
        }
        made[f"adapter {number}"] = Adapter(f"digest {number}", RANK, PROJECTIONS, weights)
    return made


def cache(model: ModelConfig, blocks: int, dtype: torch.dtype, *, native: bool) -> torch.Tensor:
    """Filled, so that every page of it is memory of its own."""
    made = KvCache(model, blocks=blocks, block_size=BLOCK, dtype=dtype, device=CPU, native=native).tensor
    return made.fill_(0.01)


@torch.inference_mode()
def main() -> None:
    arguments = parse()
    folder = resolve_model(arguments.model, default_cache_dir())
    model, dtype = ModelConfig.from_folder(folder), getattr(torch, arguments.dtype)
    adapters = random_adapters(model, arguments.adapters, dtype)
    users: list[str | None] = [*adapters] or [None]
    speed = bandwidth(READ_BYTES)
    print(
        f"{folder.name}, {arguments.dtype}, weights {arguments.quantization}, {arguments.adapters} adapters; ", end=""
    )
    print(f"{usable_cores()} cores, {speed / 1e9:.1f} GB/s; times in ms\n")
    columns = ["batch", "context", *(["torch"] if arguments.torch else []), "native", *PARTS, "python", "floor"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    store = WeightStore(model, load_weights(folder), device=CPU, dtype=dtype)
    step = NativeLlama(
        store,
        Pool(load(build(default_cache_dir())), usable_cores()),
        dtype=dtype,
        quantization=arguments.quantization,
    )
    for name, adapter in adapters.items():
        step.adapter_entered(name, adapter)
    reference = Reference(folder, model, adapters, dtype) if arguments.torch else None
    for sequences in arguments.batch:
        for context in arguments.context:
            batch, blocks = decodes(model, sequences, context, users)
            row = [str(sequences), str(context)]
            if reference is not None:
                row.append(f"{1e3 * reference.time(batch, blocks):.2f}")
            row += measure(step, model, batch, blocks, dtype)
            read = step.weight_bytes + blocks * block_bytes(model, BLOCK, dtype)
            print("| " + " | ".join([*row, f"{1e3 * read / speed:.2f}"]) + " |", flush=True)


def measure(step: NativeLlama, model: ModelConfig, batch: Batch, blocks: int, dtype: torch.dtype) -> list[str]:
    """The step, each of its parts, and what is left for Python: the least of each, in ms."""
    step.attach(cache(model, blocks, dtype, native=True), BLOCK)
    whole = least(lambda: step.forward(batch), REPEATS)
    parts, python = [float("inf")] * len(PARTS), float("inf")
    for _ in range(REPEATS):
        sums = step.part_ns = array("q", bytes(8 * len(PARTS)))
        taken = least(lambda: step.forward(batch), 1)
        parts = list(map(min, parts, sums))
        python = min(python, taken - sum(sums) / 1e9)
    return [f"{1e3 * whole:.2f}", *(f"{part / 1e6:.2f}" for part in parts), f"{1e3 * python:.2f}"]


class Reference:
    """The same steps by torch."""

    def __init__(self, folder: Path, model: ModelConfig, adapters: dict[str, Adapter], dtype: torch.dtype) -> None:
        forms = operations(CPU)
        self._model = model
        self._dtype = dtype
        self._lora = LoraStore(model, form=forms.lora, device=CPU, dtype=dtype)
        for name, adapter in adapters.items():
            self._lora.add(name, adapter)
        store = WeightStore(model, load_weights(folder), device=CPU, dtype=dtype)
        self._llama = Llama(store, operations=forms, device=CPU)

    def time(self, batch: Batch, blocks: int) -> float:
        kv = cache(self._model, blocks, self._dtype, native=False)

        def step() -> None:
            self._llama.forward(batch, kv, self._lora.step(list(zip(batch.users, batch.counts, strict=True))))

        step()
        return least(step, 5)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--adapters", type=int, default=0, help="so many, each sequence uses one of them")
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--context", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--torch", action="store_true", help="torch's own path beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
