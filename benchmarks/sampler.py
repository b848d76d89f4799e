"""Microseconds of one sampling step, beside the floor: finding the largest logit of each row.

    python benchmarks/sampler.py [--vocab 49152] [--threads 1] [--json]

One batch is sampled over and over while every sequence grows by its token, as in decoding; the best of many steps
counts, so that neighbours on the machine do not. Logits fall off with the logarithm of the rank, as in natural text;
the rows differ from each other as a model's do: at temperature 1 the median row needs some forty tokens for 0.9 of
the probability, one in ten needs several hundred. A second table has the text side:
microseconds per token of `Detokenizer.push`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from engine.fake import FakeTokenizer
from engine.sampler import Sampler
from engine.sequence import Sequence, SequenceGroup
from engine.tokens import Detokenizer
from engine.types import Request, SamplingParams

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 500
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_p 0.99": {"temperature": 1.0, "top_p": 0.99},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top_k, top_p, penalties": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def make_logits(rows: int, vocab: int) -> torch.Tensor:
    """[rows, vocab] float32: the token of rank r has -s ln(r + 2), in an order and with an s (1.3 to 2) of each row."""
    random = np.random.default_rng(7)
    ranks = np.log(np.arange(vocab) + 2.0)
    steepness = np.linspace(1.3, 2.0, rows) if rows > 1 else np.array([1.55])
    made = np.stack([random.permutation(-s * ranks) for s in steepness])
    return torch.from_numpy(made.astype(np.float32))


def best_us(work: Callable[[], object], *, before: Callable[[], object] | None = None, seconds: float = 0.4) -> float:
    """The quickest of as many runs as fit the time; `before` each, and not counted, what makes it ready."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


def step_us(rows: int, vocab: int, fields: dict[str, Any], logits: torch.Tensor, *, replaced: int = 0) -> float:
    """One step of `rows` sequences that all ask for the same; `replaced` of them make room for new ones each step."""
    sampler = Sampler(vocab, (2,))
    random = np.random.default_rng(1)
    fresh = logits.clone()
    arrivals = count()
    said: list[int] = []
    sequences: list[Sequence] = []

    def arrive() -> Sequence:
        number = next(arrivals)
        prompt = random.integers(0, vocab, PROMPT_TOKENS).tolist()
        request = Request(id=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=1 << 20, **fields))
        return SequenceGroup(request, arrival=number, cache_root=b"").sequences[0]

    def ready() -> None:
        logits.copy_(fresh)  # a step may change them
        for sequence, token in zip(sequences, said, strict=False):
            sequence.tokens.append(token)
        del sequences[: replaced if len(sequences) == rows else 0]
        sequences.extend(arrive() for _ in range(rows - len(sequences)))

    def step() -> None:
        said[:] = [drawn.token_id for drawn in sampler.sample(logits, sequences)]

    return best_us(step, before=ready)


def push_us(params: SamplingParams, tokens: int = 4000) -> float:
    """A token of one to six characters through the detokenizer."""
    words = [b" the", b" a", b"ing", b"s", b",", b" of", b"Obs", b" tides"]
    ids = np.random.default_rng(3).integers(0, len(words), tokens).tolist()

    class Words(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return words[token_id]

    tokenizer = Words()

    def run() -> None:
        push = Detokenizer(tokenizer, params).push
        for token in ids:
            push(token)

    return best_us(run) / tokens


def measure(vocab: int) -> dict[str, Any]:
    table: dict[str, list[float]] = {}
    for rows in BATCHES:
        logits = make_logits(rows, vocab)
        floors: dict[str, Callable[[], object]] = {
            "floor: numpy's argmax": partial(np.argmax, logits.numpy(), -1),
            "torch's argmax": partial(torch.argmax, logits, -1),
        }
        for name, work in floors.items():
            table.setdefault(name, []).append(best_us(work))
        for name, fields in CASES.items():
            table.setdefault(name, []).append(step_us(rows, vocab, fields, logits))
        for name in ("greedy", "top_k, top_p, penalties"):
            fields, row = CASES[name], f"{name}; a new sequence each step"
            table.setdefault(row, []).append(step_us(rows, vocab, fields, logits, replaced=1))
    stops = ("\n\n", "Observation:", "###", "</s>")
    texts = {"no stop strings": SamplingParams(), "four stop strings": SamplingParams(stop=stops)}
    return {
        "vocab": vocab,
        "threads": torch.get_num_threads(),
        "batches": BATCHES,
        "step_us": table,
        "push_us": {name: push_us(params) for name, params in texts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = measure(arguments.vocab)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"vocabulary {found['vocab']}, {found['threads']} thread(s) of torch\n")
    print(f"| µs a step at batch | {' | '.join(map(str, BATCHES))} |\n|---|{'---|' * len(BATCHES)}")
    for name, values in found["step_us"].items():
        print(f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |")
    print("\n| detokenizer | µs a token |\n|---|---|")
    for name, value in found["push_us"].items():
        print(f"| {name} | {value:.2f} |")


if __name__ == "__main__":
    main()
