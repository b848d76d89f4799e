"""What one tenant feels of another, in wall time: a flood of requests, and a prompt of 4,000 tokens.

    python benchmarks/fairness.py

The promise is that neither costs others more than one step of the engine does at its token budget. So that step is
measured first; beside it stand the first token of a small request alone and behind a flood, and the gaps between the
tokens of running streams alone and while a long prompt is computed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from statistics import median

from servers import Ours, prepare, running

from engine.tokens import Tokenizer
from engine.weights import resolve_model
from gateway.bench import client
from gateway.bench.client import Target
from gateway.bench.lengths import Lengths
from gateway.bench.record import Answer
from gateway.bench.statistics import percentile, times_ms
from gateway.bench.workload import Bodies, Synthetic
from gateway.server import raise_file_limit
from kernels.native import default_cache_dir

BUDGET = 512  # tokens of a step, said to the server
SMALL, LONG = 59, 4000
FLOOD = 200
PROBES = 9
STREAMS, STREAM_TOKENS = 8, 240


class Tenant:
    """Asks for one tenant."""

    def __init__(self, ours: Ours, tokenizer: Tokenizer, name: str) -> None:
        self._model, key = prepare(ours, {}, tenant=name)
        self._target = Target.parse(f"{ours.url}/v1", api_key=key)
        self._tokenizer = tokenizer
        self._name = name
        self._asked = 0

    async def ask(self, prompt_tokens: int, output_tokens: int, *, prefix: int = 0) -> Answer:
        """One request; no cache helps it but with its first `prefix` tokens. Raises `RuntimeError` where it fails."""
        self._asked += 1
        prompts = Synthetic(
            input_len=Lengths.parse(str(prompt_tokens)),
            output_len=Lengths.parse(str(output_tokens)),
            prefix=prefix,
            tokenizer=self._tokenizer,
        )
        bodies = Bodies(models=[self._model], endpoint="chat", ignore_eos=True)
        model, body = bodies.body(prompts.prompt(self._asked, f"{self._name}{self._asked}"), self._asked)
        reply = await client.ask(self._target, self._target.request("chat", body))
        answer, _ = client.read(reply, repeat=0, index=self._asked, model=model, zero=0.0)
        if answer.error:
            raise RuntimeError(f"{answer.error}: {answer.detail}")
        return answer


def ttft_ms(answers: Sequence[Answer]) -> list[float]:
    return [times_ms(answer)["ttft"] for answer in answers]


async def one_by_one(asked: Sequence[Awaitable[Answer]], pause_s: float = 0.0) -> list[Answer]:
    answers = []
    for each in asked:
        answers.append(await each)
        await asyncio.sleep(pause_s)
    return answers


async def behind_a_flood(flooder: Tenant, other: Tenant) -> tuple[list[float], int]:
    """First tokens of the other's small requests, ms, and how many of the flood were unanswered at the last of them."""
    flood = [asyncio.create_task(flooder.ask(SMALL, 64)) for _ in range(FLOOD)]
    await asyncio.sleep(1.0)
    answers = await one_by_one([other.ask(SMALL, 4) for _ in range(PROBES)], pause_s=0.2)
    left = sum(not task.done() for task in flood)
    await asyncio.gather(*flood)
    return ttft_ms(answers), left


async def gaps_ms(streaming: Tenant, other: Tenant | None) -> list[float]:
    """Between the tokens of running streams while the other's long prompt is computed, or for a second without it."""
    streams = [asyncio.create_task(streaming.ask(SMALL, STREAM_TOKENS)) for _ in range(STREAMS)]
    await asyncio.sleep(0.8)
    began = time.perf_counter()
    if other is None:
        await asyncio.sleep(1.0)
    else:
        await other.ask(LONG, 1)
    ended = time.perf_counter()
    answers = await asyncio.gather(*streams)
    return [
        (after - before) * 1e3
        for answer in answers
        for before, after in zip(answer.text_s, answer.text_s[1:], strict=False)
        if began <= after <= ended
    ]


async def measure(ours: Ours, tokenizer: Tokenizer) -> None:
    one, two = (Tenant(ours, tokenizer, name) for name in ("one", "two"))
    await one_by_one([one.ask(SMALL, 8) for _ in range(3)])
    step = median(ttft_ms(await one_by_one([one.ask(BUDGET, 1) for _ in range(5)])))
    deep = [one.ask(LONG, 1, prefix=LONG - BUDGET) for _ in range(4)]  # the first one computes what the others share
    last = median(ttft_ms(await one_by_one(deep))[1:])
    print(
        f"a step at its budget of {BUDGET} tokens, with all around it: {step:.0f} ms, {last:.0f} ms at the end of "
        f"{LONG} (attention grows with what lies before)"
    )
    alone = median(ttft_ms(await one_by_one([two.ask(SMALL, 4) for _ in range(PROBES)])))
    behind, left = await behind_a_flood(one, two)
    print(
        f"first token of {SMALL} tokens: alone {alone:.0f} ms, behind a flood of {FLOOD} requests "
        f"{median(behind):.0f} ms (most {max(behind):.0f}; {left} of the flood unanswered at the end), "
        f"{(median(behind) - alone) / step:.2f} steps more"
    )
    for name, other in (("alone", None), (f"while {LONG} tokens are computed", two)):
        gaps = sorted(await gaps_ms(one, other))
        p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
        print(f"gaps of {STREAMS} streams {name}: p50 {p50:.1f} ms, p99 {p99:.1f}, {p99 / last:.2f} of the last step")


def main() -> None:
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--max-num-batched-tokens={BUDGET}"]
        with running(flags, Path(folder) / "log") as ours:
            asyncio.run(measure(ours, Tokenizer(resolve_model("default", default_cache_dir()))))


if __name__ == "__main__":
    main()
