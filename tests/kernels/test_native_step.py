"""The native step against the layer plan in plain torch: the same random batches through both, logit for logit."""

from __future__ import annotations

import platform
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.adapters import PROJECTIONS, Adapter, shapes
from engine.kvcache import KvCache
from engine.lora import LoraStore
from engine.models.batch import Batch
from engine.models.config import LayerPlan, ModelConfig, RopeConfig
from engine.models.llama import Llama
from engine.models.native import NativeLlama, unsupported
from engine.models.store import WeightStore, plan_of
from engine.types import AdapterUnknown
from kernels.dispatch import REFERENCE
from kernels.native import NativeError, build, default_cache_dir, library, load
from kernels.native_matmul import Pool
from kernels.native_step import PARTS

CPU = torch.device("cpu")
BLOCKS = 400


@pytest.fixture(scope="module")
def pool() -> Pool:
    loaded = library()
    if loaded is None:
        pytest.skip("there is no native library on this machine")
    return Pool(loaded, 2)


@pytest.fixture(scope="module")
def plain_pool() -> Pool:
    """The library as a machine with AVX2 and no more would have it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this machine knows no AVX2")
    try:
        return Pool(load(build(default_cache_dir(), extra_flags=("-march=x86-64-v3",))), 2)
    except NativeError as error:
        pytest.skip(f"nothing can be compiled on this machine: {error}")


def model(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "name": "tiny",
        "family": "llama",
        "hidden": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 80,
        "vocab": 97,
        "eps": 1e-5,
        "rope": RopeConfig(theta=1e4),
        "max_position": 4096,
        "plan": (LayerPlan(), LayerPlan()),
    }
    return ModelConfig(**(fields | changes))


def weights(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random, and not so small that a layer makes no difference."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for parts, columns in plan_of(config).values():
        for name, rows in parts.items():
            shape = (rows,) if columns is None else (rows, columns)
            made[name] = torch.randn(shape, generator=generator) * (0.2 if columns is None else columns**-0.5)
            if name.endswith("norm.weight"):
                made[name] += 1.0
    return made


def adapters(config: ModelConfig, ranks: dict[str, int], *, seed: int = 5) -> dict[str, Adapter]:
    """Each changes a part of the projections, in a part of the layers."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, rank in ranks.items():
        pairs = {}
        for layer in range(config.layers):
            for projection, (inputs, outputs) in shapes(config).items():
                if draw.random() < 0.7:
                    a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                    pairs[layer, projection] = (a, torch.randn(outputs, rank, generator=generator) * rank**-0.5)
        made[name] = Adapter(name, rank, PROJECTIONS, pairs)
    return made


@dataclass
class Lane:
    """A sequence on its way through the batches."""

    tokens: list[int]
    user: str | None = None
    computed: int = 0
    table: list[int] = field(default_factory=list)


def batches(lanes: list[Lane], block_size: int, *, seed: int = 0, rows: int = 60) -> Iterator[Batch]:
    """All tokens of all lanes in steps of odd sizes, over blocks in no order; logits of random rows are wanted."""
    draw = random.Random(seed)
    free = list(range(BLOCKS))
    draw.shuffle(free)
    while any(lane.computed < len(lane.tokens) for lane in lanes):
        batch = Batch()
        chosen = [lane for lane in lanes if lane.computed < len(lane.tokens) and draw.random() < 0.8]
        for lane in sorted(chosen, key=lambda lane: lane.user or ""):
            left = len(lane.tokens) - lane.computed
            count = 1 if left <= 4 or draw.random() < 0.3 else draw.randint(1, min(left, rows))
            end = lane.computed + count
            while len(lane.table) * block_size < end:
                lane.table.append(free.pop())
            batch.add(lane.tokens[lane.computed : end], lane.computed, list(lane.table), lane.user)
            lane.computed = end
        batch.wanted = [row for row in range(len(batch.tokens)) if draw.random() < 0.5]
        if batch.tokens:
            yield batch


class Pair:
    """A model both ways. The native cache is full of what is no number where nothing was written."""

    def __init__(
        self,
        pool: Pool,
        config: ModelConfig,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
        loaded: dict[str, Adapter] | None = None,
    ) -> None:
        given = weights(config)
        rounded = {name: tensor.to(dtype).to(torch.float32) for name, tensor in given.items()}
        store = WeightStore(config, rounded.items(), device=CPU, dtype=torch.float32)
        self._torch = Llama(store, operations=REFERENCE, device=CPU)
        self._torch_cache = self._cache(config, block_size, torch.float32, native=False)
        self._lora = LoraStore(config, form=REFERENCE.lora, device=CPU, dtype=torch.float32)
        store = WeightStore(config, given.items(), device=CPU, dtype=dtype)
        self.native = NativeLlama(store, pool, dtype=dtype, quantization=quantization)
        self.native_cache = self._cache(config, block_size, dtype, native=True)
        self.native_cache.fill_(float("nan"))
        self.native.attach(self.native_cache, block_size)
        for name, adapter in (loaded or {}).items():
            self._lora.add(name, adapter)
            self.native.adapter_entered(name, adapter)

    @staticmethod
    def _cache(config: ModelConfig, block_size: int, dtype: torch.dtype, *, native: bool) -> torch.Tensor:
        return KvCache(config, blocks=BLOCKS, block_size=block_size, dtype=dtype, device=CPU, native=native).tensor

    def expected(self, batch: Batch) -> torch.Tensor:
        users = list(zip(batch.users, batch.counts, strict=True))
        return self._torch.forward(batch, self._torch_cache, self._lora.step(users))

    @torch.inference_mode()
    def compare(self, lanes: list[Lane], block_size: int, tolerance: float) -> None:
        """Relative to the size of the step's logits: one row that is wrong is far beyond any tolerance here."""
        compared = 0
        for batch in batches(lanes, block_size):
            expected, found = self.expected(batch), self.native.forward(batch)
            assert found.shape == expected.shape
            assert float((found - expected).norm()) <= tolerance * float(expected.norm())
            compared += len(batch.wanted)
        assert compared > 20


def lanes(*lengths: int, users: tuple[str | None, ...] = (None,), vocab: int = 97) -> list[Lane]:
    draw = random.Random(3)
    return [
        Lane([draw.randrange(vocab) for _ in range(length)], users[index % len(users)])
        for index, length in enumerate(lengths)
    ]


QWEN3 = {"qk_norm": True, "family": "qwen3"}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "grouped heads": ({}, 16),
    "small blocks": ({}, 4),
    "odd blocks": ({}, 5),
    "large blocks": ({}, 32),
    "one query head a key head": ({"kv_heads": 4}, 16),
    "three query heads a key head": ({"heads": 9, "kv_heads": 3, "head_dim": 64}, 16),
    "many query heads a key head": ({"heads": 10, "kv_heads": 1}, 8),
    "heads of 80": ({"heads": 2, "kv_heads": 1, "head_dim": 80}, 16),
    "heads of 96": ({"heads": 2, "kv_heads": 2, "head_dim": 96}, 16),
    "heads of 128": ({"heads": 4, "kv_heads": 1, "head_dim": 128}, 16),
    "biases": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, 16),
    "tied head": ({"tie": True}, 16),
    "norms of heads": (QWEN3, 16),
    "odd sizes": ({"hidden": 50, "ffn": 67, "vocab": 101}, 16),
    "a layer without positions": ({"plan": (LayerPlan(rope=False), LayerPlan())}, 16),
    "window": ({"plan": (LayerPlan(window=33), LayerPlan(window=33))}, 16),
    "window in one layer, small blocks": ({"plan": (LayerPlan(window=7), LayerPlan())}, 4),
    "one layer": ({"layers": 1, "plan": (LayerPlan(),)}, 16),
    "stretched rope": ({"rope": RopeConfig(theta=1e4, kind="linear", factor=3.0, attention_factor=1.2)}, 16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_float32_equals_torch(name: str, pool: Pool) -> None:
    changes, block_size = SHAPES[name]
    config = model(**changes)
    Pair(pool, config, block_size=block_size).compare(lanes(1, 2, 17, 64, 150, 301), block_size, 2e-5)


@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_are_joined_from_parts(window: int | None, pool: Pool) -> None:
    config = model(layers=1, plan=(LayerPlan(window=window),), heads=3, kv_heads=1)
    Pair(pool, config).compare(lanes(2300, 129, 1100), 16, 2e-5)


@pytest.mark.parametrize("name", ["grouped heads", "small blocks", "heads of 80", "norms of heads", "window", "biases"])
def test_bfloat16_stays_close_to_its_rounded_weights(name: str, pool: Pool) -> None:
    changes, block_size = SHAPES[name]
    pair = Pair(pool, model(**changes), block_size=block_size, dtype=torch.bfloat16)
    pair.compare(lanes(1, 2, 17, 64, 150, 301), block_size, 0.03)


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("int4", 0.4)])
def test_quantised_weights_stay_close(quantization: str, tolerance: float, pool: Pool) -> None:
    pair = Pair(pool, model(hidden=128, ffn=160), dtype=torch.bfloat16, quantization=quantization)
    pair.compare(lanes(1, 17, 150), 16, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.04)])
def test_adapters_of_unlike_ranks_in_one_batch(dtype: torch.dtype, tolerance: float, pool: Pool) -> None:
    config = model()
    pair = Pair(pool, config, dtype=dtype, loaded=adapters(config, {"a": 4, "b": 16, "c": 7, "d": 64}))
    pair.compare(lanes(40, 33, 90, 5, 70, 61, 20, 31, users=("a", None, "b", "c", "d", "a")), 16, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.04)])
def test_without_avx512_it_computes_the_same(dtype: torch.dtype, tolerance: float, plain_pool: Pool) -> None:
    for name in ("three query heads a key head", "small blocks", "heads of 80", "window", "norms of heads"):
        changes, block_size = SHAPES[name]
        config = model(**changes)
        pair = Pair(plain_pool, config, block_size=block_size, dtype=dtype, loaded=adapters(config, {"a": 4, "b": 9}))
        pair.compare(lanes(1, 40, 33, 301, users=(None, "a", "b")), block_size, tolerance)


@torch.inference_mode()
def test_an_adapter_that_left_is_unknown(pool: Pool) -> None:
    config = model()
    pair = Pair(pool, config, loaded=adapters(config, {"a": 4}))
    (batch, *_) = batches(lanes(9, 9, users=("a", None)), 16, seed=1)
    assert "a" in batch.users
    pair.native.forward(batch)
    pair.native.adapter_left("a")
    with pytest.raises(AdapterUnknown):
        pair.native.forward(batch)


@torch.inference_mode()
def test_a_row_is_the_same_bit_for_bit_whoever_computes_it(pool: Pool) -> None:
    """Alone or beside others, with one thread or two: only its own sequence decides what a decode gets."""
    config = model(heads=3, kv_heads=1, layers=1, plan=(LayerPlan(),))
    pairs = [Pair(pool, config), Pair(Pool(pool.library, 1), config)]
    every = lanes(400, 90, 1300)
    for batch in batches(every, 16):
        for pair in pairs:
            pair.native.forward(batch)
    for lane in every:
        while len(lane.table) * 16 < len(lane.tokens) + 1:
            lane.table.append(BLOCKS - 1 - len(lane.table))
    alone = []
    together = Batch()
    for lane in every:
        batch = Batch(wanted=[0])
        batch.add([11], len(lane.tokens), lane.table, None)
        together.add([11], len(lane.tokens), lane.table, None)
        together.wanted.append(len(together.wanted))
        alone.append(pairs[0].native.forward(batch).clone())
    for pair in pairs:
        assert torch.equal(pair.native.forward(together), torch.cat(alone))


@torch.inference_mode()
def test_numbers_that_are_not_finite_stay_in_their_rows(pool: Pool) -> None:
    config = model()
    loaded = adapters(config, {"calm": 4, "wild": 4})
    for a, b in loaded["wild"].weights.values():
        a *= 1e30
        b *= 1e30
    pair = Pair(pool, config, loaded=loaded)
    calm, base = Lane(list(range(30)), "calm"), Lane(list(range(40)), None)
    for batch in batches([calm, base, Lane(list(range(50)), "wild")], 16):
        found, expected = pair.native.forward(batch), pair.expected(batch)
        wild = [user == "wild" for user, count in zip(batch.users, batch.counts, strict=True) for _ in range(count)]
        kept = [place for place, row in enumerate(batch.wanted) if not wild[row]]
        torch.testing.assert_close(found[kept], expected[kept], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_time_is_told_by_parts(pool: Pool) -> None:
    pair = Pair(pool, model())
    (batch, *_) = batches(lanes(50, 60), 16)
    pair.native.part_ns = array("q", bytes(8 * len(PARTS)))
    pair.native.forward(batch)
    told = dict(zip(PARTS, pair.native.part_ns, strict=True))
    assert told["gemm"] > 0
    assert told["attention"] > 0
    before = list(pair.native.part_ns)
    pair.native.forward(batch)
    assert all(now >= then for now, then in zip(pair.native.part_ns, before, strict=True))


@pytest.mark.parametrize(
    ("changes", "dtype", "block_size", "words"),
    [
        ({"head_dim": 24}, torch.float32, 16, "heads of a multiple of 16"),
        ({}, torch.float16, 16, "not in float16"),
        ({}, torch.bfloat16, 5, "even number of tokens"),
    ],
)
def test_what_it_cannot_compute_is_told(
    changes: dict[str, Any], dtype: torch.dtype, block_size: int, words: str
) -> None:
    reason = unsupported(model(**changes), dtype=dtype, block_size=block_size)
    assert reason is not None
    assert words in reason
    assert unsupported(model(), dtype=torch.bfloat16, block_size=block_size * 2) is None
