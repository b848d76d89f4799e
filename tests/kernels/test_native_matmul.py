"""The native matrix product: every form against torch in float32, AMX by way of its emulation."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels import native
from kernels.native_matmul import Arena, Epilogue, Format, Packed, Pool, declare, multiply, multiply_in_turn

ROWS = (1, 2, 3, 7, 8, 17, 32, 64, 257)
SHAPES = ((96, 128), (70, 90), (34, 17), (2, 1), (16, 64), (130, 200))
TOLERANCE = {Format.f32: 1e-6, Format.bf16: 4e-3, Format.int8: 1e-2, Format.int4: 8e-2}
"""The relative error of a product with random numbers."""

LEFT_BY_ROUNDING = {Format.f32: 1e-6, Format.bf16: 4e-3, Format.int8: 8e-3, Format.int4: 8e-3}
"""The same beside the weights as they were packed: what rounding the activations costs."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The product alone, with every form that can run here and AMX emulated; from the cache where it is there."""
    sources = tmp_path_factory.mktemp("cpu")
    for path in native.SOURCES.iterdir():
        if path.suffix == ".h" or path.name.startswith(("matmul", "pool")):
            shutil.copy(path, sources)
    try:
        built = native.build(native.default_cache_dir(), sources=sources, extra_flags=["-DMETERHOUSE_EMULATED_AMX"])
    except native.NativeError as error:
        pytest.skip(f"nothing can be compiled on this machine: {error}")
    return declare(native.load(built))


@pytest.fixture(params=native.FORMS.values())
def pool(request: pytest.FixtureRequest, emulated: ctypes.CDLL) -> Iterator[Pool]:
    """Two threads that use one form beside the generic one."""
    bit = next(bit for bit, name in native.FORMS.items() if name == request.param)
    if not emulated.meterhouse_available_forms() & bit:
        pytest.skip("this processor lacks the instructions")
    emulated.meterhouse_use_forms(bit | 1)
    yield Pool(emulated, 2)
    emulated.meterhouse_use_forms(sum(native.FORMS))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def as_packed(pool: Pool, packed: Packed) -> Tensor:
    """The weight that was packed, as it was rounded: the generic form's product with the identity."""
    pool.library.meterhouse_use_forms(1)
    out = torch.empty(packed.inputs, packed.outputs)
    multiply(pool, [packed.job(torch.eye(packed.inputs), out)])
    return out.T.contiguous()


def test_all_forms_are_at_hand(emulated: ctypes.CDLL) -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    wanted = {"generic", "amx"} | ({"avx512"} if "avx512_bf16" in flags and "avx512_vnni" in flags else set())
    available = emulated.meterhouse_available_forms()
    assert {name for bit, name in native.FORMS.items() if available & bit} == wanted


@pytest.mark.parametrize("format", Format)
def test_products_of_every_shape_and_number_of_rows(pool: Pool, format: Format) -> None:
    for outputs, inputs in SHAPES:
        weight = random(outputs, inputs)
        for gated in (False, True):
            packed = Packed(pool, weight, format, gated=gated)
            for rows in ROWS:
                x = random(rows, inputs, seed=rows)
                out = torch.empty(rows, outputs)
                multiply(pool, [packed.job(x, out)])
                # one output of two codes, or one row, can be further off than the many are
                slack = 1 if min(outputs, inputs) > 60 and rows > 2 else 2.5
                assert error(out, x @ weight.T) < TOLERANCE[format] * slack, (outputs, inputs, gated, rows)


@pytest.mark.parametrize("format", Format)
def test_forms_agree_on_the_weights_as_they_were_packed(pool: Pool, format: Format) -> None:
    forms = pool.library.meterhouse_available_forms
    weight, x = random(120, 288), random(50, 288, seed=1)
    packed = Packed(pool, weight, format)
    rounded = as_packed(pool, packed)
    pool.library.meterhouse_use_forms(forms())
    out = torch.empty(50, 120)
    multiply(pool, [packed.job(x, out)])
    assert error(out, x @ rounded.T) < LEFT_BY_ROUNDING[format]


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_what_becomes_of_a_product(pool: Pool, format: Format, rows: int) -> None:
    """All epilogues, with bias, strided, and nothing written beside the results."""
    weight, x = random(84, 100), random(rows, 120, seed=2)[:, 3:103]
    bias = random(84, seed=3)
    packed = Packed(pool, weight, format, gated=True)
    y = torch.empty(rows, 84)
    multiply(pool, [packed.job(x, y)])
    assert error(y, x @ weight.T) < 2 * TOLERANCE[format]
    y += bias
    gate, up = y.chunk(2, dim=1)
    for epilogue, wanted in (
        (Epilogue.store, y),
        (Epilogue.add, y + 7.0),
        (Epilogue.swiglu, silu(gate) * up),
    ):
        whole = torch.full((rows + 2, wanted.shape[1] + 5), 7.0)
        out = whole[1:-1, 2:-3]
        multiply(pool, [packed.job(x, out, epilogue, bias=bias)])
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
        assert bool((whole[[0, -1]] == 7.0).all())
        assert bool((whole[:, :2] == 7.0).all() and (whole[:, -3:] == 7.0).all())


def test_swiglu_of_extreme_gates(pool: Pool) -> None:
    weight = torch.tensor([[1.0], [2.0]])  # gate = x, up = 2 x
    x = torch.tensor([[-1e30], [-200.0], [-88.0], [-1.0], [0.0], [1.0], [200.0], [1e15]])
    out = torch.empty(8, 1)
    multiply(pool, [Packed(pool, weight, Format.f32, gated=True).job(x, out, Epilogue.swiglu)])
    torch.testing.assert_close(out, silu(x) * 2 * x, rtol=1e-5, atol=1e-30)


def test_many_jobs_in_one_region(pool: Pool) -> None:
    """Products that share rows, that have many or few of them, small ones beside large ones, and empty ones."""
    x = random(300, 96)
    weights = [random(outputs, 96, seed=outputs) for outputs in (320, 16, 8, 48)]
    packed = [Packed(pool, weight, format) for weight, format in zip(weights, Format, strict=True)]
    spans = [(0, 300), (0, 300), (10, 11), (17, 40), (40, 40), (299, 300), (100, 200)]
    outs = [[torch.full((300, its.outputs), -1.0) for its in packed] for _ in spans]
    for _ in range(2):  # the second call finds the first one's buffers
        jobs = [
            its.job(x[first:last], out[first:last])
            for (first, last), mine in zip(spans, outs, strict=True)
            for its, out in zip(packed, mine, strict=True)
        ]
        multiply(pool, jobs)
    for (first, last), mine in zip(spans, outs, strict=True):
        for its, weight, out in zip(packed, weights, mine, strict=True):
            if last > first:
                assert error(out[first:last], x[first:last] @ weight.T) < 2 * TOLERANCE[its.format]
            assert bool((out[:first] == -1.0).all() and (out[last:] == -1.0).all())


def test_products_that_need_one_another(pool: Pool) -> None:
    """In turn: the second reads what the first wrote."""
    first, second, x = random(40, 30), random(50, 40), random(70, 30)
    between, out = torch.empty(70, 40), torch.empty(70, 50)
    jobs = [Packed(pool, first, Format.f32).job(x, between), Packed(pool, second, Format.f32).job(between, out)]
    multiply_in_turn(pool, jobs)
    assert error(out, x @ first.T @ second.T) < 1e-5


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("rows", [6, 100])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(pool: Pool, format: Format, rows: int, broken: float) -> None:
    packed = Packed(pool, random(64, 96), format)
    x = random(rows, 96)
    wanted, out = torch.empty(rows, 64), torch.empty(rows, 64)
    multiply(pool, [packed.job(x, wanted)])
    x[3, 50] = broken
    multiply(pool, [packed.job(x, out)])
    others = [row for row in range(rows) if row != 3]
    assert torch.equal(out[others], wanted[others])
    assert not bool(torch.isfinite(out[3]).any())


@pytest.mark.parametrize("format", Format)
def test_a_row_does_not_depend_on_its_batch(pool: Pool, format: Format) -> None:
    """To the rounding: other forms may take other numbers of rows."""
    packed, x = Packed(pool, random(64, 160), format), random(40, 160)
    together = torch.empty(40, 64)
    multiply(pool, [packed.job(x, together)])
    for row in range(40):
        alone = torch.empty(1, 64)
        multiply(pool, [packed.job(x[row : row + 1], alone)])
        assert error(alone[0], together[row]) < 2 * LEFT_BY_ROUNDING[format]


def test_rounding_keeps_what_a_format_can_hold(emulated: ctypes.CDLL) -> None:
    pool = Pool(emulated, 1)
    ints = (
        torch.arange(-127, 1).float().reshape(4, 32).repeat(5, 3) * 0.5
    )  # each group has its own scale, its own codes
    ints[:, 0::32] = -63.5  # the largest magnitude: scale 0.5 is exact
    assert torch.equal(as_packed(pool, Packed(pool, ints, Format.int8)), ints)
    codes = torch.arange(16).float().repeat(5, 4) * 0.25 - 3.0
    assert torch.equal(as_packed(pool, Packed(pool, codes, Format.int4)), codes)
    halves = random(5, 33).bfloat16()
    assert torch.equal(as_packed(pool, Packed(pool, halves, Format.bf16)), halves.float())
    assert torch.equal(as_packed(pool, Packed(pool, halves, Format.f32)), halves.float())
    for format in Format:
        assert not bool(as_packed(pool, Packed(pool, torch.zeros(3, 40), format)).any())


@pytest.mark.parametrize(("threads", "spin_us"), [(1, 40), (2, 40), (2, 0), (5, 5)])
def test_the_pool_runs_every_piece_once(emulated: ctypes.CDLL, threads: int, spin_us: int) -> None:
    assert emulated.meterhouse_pool_check(threads, spin_us, 1500, 9) == 0


def test_an_arena_gives_aligned_memory_side_by_side_and_takes_more_when_it_is_used_up() -> None:
    arena = Arena(1100)
    first, second = arena.take(100), arena.take(900)
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    assert second.data_ptr() - first.data_ptr() == 128
    first.fill_(1)
    second.fill_(2)
    assert int(first.sum()) == 100
    third = arena.take(8 << 20)
    assert third.data_ptr() % (2 << 20) == 0
    assert int(third.sum()) == 0
    with pytest.raises(MemoryError, match="no memory for"):
        arena.take(1 << 60)


def test_what_does_not_fit_is_refused(emulated: ctypes.CDLL) -> None:
    pool = Pool(emulated, 1)
    packed = Packed(pool, random(6, 8), Format.f32)
    x, out = random(3, 8), torch.empty(3, 6)
    with pytest.raises(ValueError, match="x must be float32"):
        packed.job(x.double(), out)
    with pytest.raises(ValueError, match="x must be float32"):
        packed.job(random(8, 3).T, out)
    with pytest.raises(ValueError, match="out must be float32"):
        packed.job(x, torch.empty(2, 6))
    with pytest.raises(ValueError, match="bias must be float32"):
        packed.job(x, out, bias=torch.empty(5))
    with pytest.raises(ValueError, match="needs a gated weight"):
        packed.job(x, torch.empty(3, 3), Epilogue.swiglu)
    with pytest.raises(ValueError, match="not 5 rows"):
        Packed(pool, random(5, 8), Format.f32, gated=True)
