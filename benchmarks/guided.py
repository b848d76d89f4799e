"""What a grammar costs a step: the same batches with and without one, in pairs, in one run.

    python benchmarks/guided.py [--model default] [--dtype bfloat16] [--repeats 5]

Every request of a batch has a grammar of its own, or none has. Steps are decodes of one token for each request, at
temperature 1; batches with and without take turns. A step is the model, then sampling and what is done with the
tokens. All that a grammar adds is in the second part, whose median differs far less from run to run than the model's
time, so the overhead is the difference of the two medians over the least step without. The least whole steps stand
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine.core import EngineCore, build
from engine.sampler import Sampler
from engine.types import EngineConfig, Guide, Request, SamplingParams
from engine.weights import resolve_model
from kernels.native import default_cache_dir

BATCHES = (1, 8, 32)
STEPS = 48
PROMPT = "A list of people as JSON, each with a name, an age and some tags:\n"


def guide(number: int) -> Guide:
    """A schema that never lets a completion end: objects of strings, numbers and enums, each batch row its own."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20 + number},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", f"shade {number}"]}, "maxItems": 3},
            "email": {"type": "string", "pattern": r"^[a-z.]{3,12}@[a-z]{3,8}\.(com|org)$"},
        },
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    }
    return Guide("json_schema", json.dumps({"type": "array", "items": person, "minItems": 1000}))


class Timed:
    """How long each call of a method took."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds: list[float] = []
        self._inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._inner(*arguments)
            finally:
                self.seconds.append(time.perf_counter() - began)

        setattr(owner, name, timed)


class Steps:
    """Decode steps of batches: how long each took, and how long its part after the model."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._sampled, self._advanced = Timed(Sampler, "sample"), Timed(EngineCore, "_advance_all")

    def run(self, batch: int, *, guided: bool) -> tuple[list[float], list[float]]:
        core = self._core
        prompt = core.tokenizer.encode(PROMPT)
        for number in range(batch):
            asked = guide(number) if guided else None
            sampling = SamplingParams(max_tokens=STEPS + 8, seed=number, ignore_eos=True, guided=asked)
            core.add(Request(id=str(number), prompt=prompt, sampling=sampling))
        while core.grammars.held:  # so that all begin together
            core.wait_for_grammar()
        while core.scheduler.num_waiting:
            core.step()
        core.step()  # whose prompt was cut is done with it
        self._sampled.seconds.clear()
        self._advanced.seconds.clear()
        whole = []
        for _ in range(STEPS):
            began = time.perf_counter()
            output = core.step()
            whole.append(time.perf_counter() - began)
            if output is None or len(output.updates) != batch:
                raise RuntimeError("a step computed something else than one token for each request")
        after = [one + other for one, other in zip(self._sampled.seconds, self._advanced.seconds, strict=True)]
        for number in range(batch):
            core.abort(str(number))
        while core.step() is not None:
            pass
        return whole, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="default, a local folder or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=5, help="pairs of batches at each size")
    asked = parser.parse_args()
    cache = default_cache_dir()
    model = resolve_model(asked.model, cache)
    core = build(EngineConfig(model=str(model), dtype=asked.dtype, max_num_seqs=max(BATCHES), max_model_len=512))
    steps = Steps(core)
    steps.run(max(BATCHES), guided=True)  # warms up, and compiles
    print(f"{model.name}, {asked.dtype}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; ms")
    print(f"{'':>6}{'least step':>20}{'median after the model':>26}{'overhead':>10}")
    print(f"{'':>6}{'free':>11}{'guided':>9}{'free':>17}{'guided':>9}")
    for batch in BATCHES:
        times: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
        for _ in range(asked.repeats):
            for guided, (whole, after) in times.items():
                more_whole, more_after = steps.run(batch, guided=guided)
                whole += more_whole
                after += more_after
        free_s, guided_s = (min(whole) for whole, _ in times.values())
        free_after_s, guided_after_s = (statistics.median(after) for _, after in times.values())
        overhead = (guided_after_s - free_after_s) / free_s
        print(
            f"{f'B={batch}':>6}{free_s * 1e3:>11.2f}{guided_s * 1e3:>9.2f}"
            f"{free_after_s * 1e3:>17.3f}{guided_after_s * 1e3:>9.3f}{overhead:>10.1%}"
        )


if __name__ == "__main__":
    main()
