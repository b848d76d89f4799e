"""Hundreds of requests of every kind against a server with little of everything: nothing of them is left.

A short form of `benchmarks/soak.py` on the tiny model, with its load and its judgements.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.tokens import Tokenizer
from tests.fixtures.server import ADMIN_KEY, serve

WARMUP, REQUESTS, CONCURRENCY = 150, 350, 24
CONTEXT = 512
GROWTH_MAX_BYTES = 12 << 20  # both processes breathe by a few megabytes; 50 kB a request would be seen


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import loras
        import mixture
        import processes
        import soak
    finally:
        sys.path.remove(folder)
    return {"loras": loras, "mixture": mixture, "processes": processes, "soak": soak}


@pytest.fixture(scope="module")
def adapters(modules: dict[str, ModuleType], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, config = tmp_path_factory.mktemp("adapters"), ModelConfig.from_folder(tiny_model)
    names = dict.fromkeys(name for names in modules["soak"].TENANTS.values() for name in names)
    return {
        name: modules["loras"].write(folder / name, config, rank=2 << number % 3, seed=number)
        for number, name in enumerate(names)
    }


@pytest.mark.slow
def test_nothing_is_left_of_hundreds_of_mixed_requests(
    modules: dict[str, ModuleType], adapters: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    soak, tokenizer = modules["soak"], Tokenizer(tiny_model)
    little: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 16, "adapter_slots": 2}
    limits = {"adapter_cache_bytes": 1 << 16, "request_timeout_s": 1.5, "queue_timeout_s": 1.0}

    def mixture(base: str) -> Any:
        asked: dict[str, Any] = {"prompt_max": 300, "context": CONTEXT, "cut_s": 0.1, "seed": 1}
        return modules["mixture"].Mixture(tokenizer, model=base, adapters=soak.TENANTS, poor=soak.POOR, **asked)

    with serve(tmp_path / "data", model=tiny_model, threads=1, **little, **limits) as server:
        subject = soak.Subject(server.url, ADMIN_KEY, server.process.pid)
        try:
            crowd, checks = soak.soak(
                subject, mixture, adapters, warmup=WARMUP, requests=REQUESTS, concurrency=CONCURRENCY
            )
            seen = subject.metrics()
        finally:
            subject.close()
    memory_alone = {check.name for check in soak.flat(crowd.samples)}
    assert [check for check in checks if not check.holds and check.name not in memory_alone] == []
    watched = [sample for sample in crowd.samples if sample.requests > WARMUP]
    for which in ("engine", "gateway"):
        sizes = [getattr(sample, which).rss_bytes for sample in watched]
        assert modules["processes"].Course(sizes).growth * sizes[0] < GROWTH_MAX_BYTES, (which, sizes)
    assert crowd.done == WARMUP + REQUESTS + 1
    assert crowd.ends["ok"] > REQUESTS / 5
    assert {"cut", "insufficient_quota", "model_not_found", "context_length_exceeded"} <= crowd.ends.keys()
    for name in ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "meterhouse_adapter_evictions_total"):
        assert seen[name] > 0, f"{name}: the load is too gentle to show anything"
