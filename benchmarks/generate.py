"""Output tokens per second of our engine beside transformers' `generate`: one machine, one run, one table.

    python benchmarks/generate.py [--model default] [--dtype bfloat16]

The engine runs as in the server: in its own process, one stream a request, greedy, exactly 64 output tokens each.
transformers gets the same prompts as one batch. The floor is what reading the weights once a step costs at the
memory bandwidth measured here: no engine that reads them from memory is faster at concurrency 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

from floor import floor

from engine.process import EngineProcess
from engine.tokens import Tokenizer
from engine.types import EngineConfig, Request, SamplingParams
from engine.weights import resolve_model
from kernels.native import default_cache_dir

CONCURRENCY = (1, 8, 32)
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 59  # what a short chat question takes with the default template


def prompts(tokenizer: Tokenizer, count: int, salt: str) -> list[list[int]]:
    """`count` prompts of one length, each different from its first token on: the prefix cache must not help."""
    text = "Tell me, in a few plain sentences, how the tides follow the moon and why two floods come a day. "
    made = []
    for number in range(count):
        ids = tokenizer.encode(f"{salt} {number}: " + text * 4)
        made.append(ids[:PROMPT_TOKENS])
    return made


async def engine_speed(model: Path, dtype: str, repeats: int) -> dict[int, float]:
    """Median output tokens/s at each concurrency, from the first submit to the last token."""
    tokenizer = Tokenizer(model)
    engine = EngineProcess(EngineConfig(model=str(model), dtype=dtype, max_num_seqs=max(CONCURRENCY)))
    await engine.start()
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

    async def one(request_id: str, prompt: list[int]) -> int:
        completion = 0
        async for update in engine.submit(Request(id=request_id, prompt=prompt, sampling=sampling)):
            completion = update.counts.completion
        return completion

    async def round_of(count: int, name: str) -> float:
        asked = prompts(tokenizer, count, name)
        began = time.perf_counter()
        counts = await asyncio.gather(*(one(f"{name}-{index}", prompt) for index, prompt in enumerate(asked)))
        seconds = time.perf_counter() - began
        if counts != [OUTPUT_TOKENS] * count:
            raise RuntimeError(f"the engine gave {counts} tokens instead of {OUTPUT_TOKENS} each")
        return count * OUTPUT_TOKENS / seconds

    try:
        await round_of(max(CONCURRENCY), "warm up")
        return {
            count: statistics.median([await round_of(count, f"run {count} {turn}") for turn in range(repeats)])
            for count in CONCURRENCY
        }
    finally:
        await engine.stop()


def transformers_speed(model: Path, dtype: str, repeats: int) -> dict[int, float]:
    """The same prompts and lengths through `generate`, one batch at each concurrency."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(model)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def round_of(count: int, name: str) -> float:
        ids = torch.tensor(prompts(tokenizer, count, name))
        began = time.perf_counter()
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=OUTPUT_TOKENS,
            max_new_tokens=OUTPUT_TOKENS,
        )
        seconds = time.perf_counter() - began
        if out.shape[1] != ids.shape[1] + OUTPUT_TOKENS:
            raise RuntimeError(f"transformers gave {out.shape[1] - ids.shape[1]} tokens instead of {OUTPUT_TOKENS}")
        return count * OUTPUT_TOKENS / seconds

    with torch.inference_mode():
        round_of(1, "warm up")
        return {
            count: statistics.median(round_of(count, f"run {count} {turn}") for turn in range(repeats))
            for count in CONCURRENCY
        }


def busy() -> float:
    """The machine's load per core, to tell a quiet run from another."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="default, a local folder or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=3, help="each number is the median of so many runs")
    asked = parser.parse_args()
    cache = default_cache_dir()
    model = resolve_model(asked.model, cache)
    load = busy()
    least = floor(model, 32 if asked.dtype == "float32" else 16)
    ours = asyncio.run(engine_speed(model, asked.dtype, asked.repeats))
    theirs = transformers_speed(model, asked.dtype, asked.repeats)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"\n{model.name}, {asked.dtype}, {os.cpu_count()} CPUs, {threads} threads (load before: {load:.2f} a CPU)")
    print(f"{PROMPT_TOKENS}-token prompts, {OUTPUT_TOKENS} output tokens, median of {asked.repeats}\n")
    print(f"{'output tok/s at concurrency':32}" + "".join(f"{count:>10}" for count in CONCURRENCY))
    print(f"{'Meterhouse engine':32}" + "".join(f"{ours[count]:>10.1f}" for count in CONCURRENCY))
    print(f"{'transformers generate':32}" + "".join(f"{theirs[count]:>10.1f}" for count in CONCURRENCY))
    print(f"{'ratio':32}" + "".join(f"{ours[count] / theirs[count]:>10.2f}" for count in CONCURRENCY))
    print(f"\nfloor: {least}")


if __name__ == "__main__":
    main()
