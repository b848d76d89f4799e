"""Every form of every operation against its reference. Run by test_cpu.py and, in its own process, test_triton.py."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.dispatch import CPU, REFERENCE, TRITON, Operations
from tests.kernels import cases

FORM: Operations = TRITON if os.environ.get("METERHOUSE_TEST_FORM") == "triton" else CPU
DEVICE = "cuda" if FORM is TRITON and torch.cuda.is_available() else "cpu"
# Triton's interpreter keeps bfloat16 as raw bits and cannot multiply them.
DTYPES = [torch.float32, torch.float16 if FORM is TRITON and DEVICE == "cpu" else torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few units in the last place of the dtype; float32 sums are taken in another order."""
    bounds = {torch.float32: (1e-5, 5e-6), torch.float16: (4e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2)}
    rtol, atol = bounds[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (7, 100), (0, 64)])
def test_rms_norm(rows: int, size: int, residual: bool, dtype: torch.dtype) -> None:
    x, weight = cases.numbers(rows, size, seed=1, dtype=dtype), cases.numbers(size, seed=2, dtype=dtype)
    other = cases.numbers(rows, size, seed=3, dtype=dtype) if residual else None
    expected = REFERENCE.rms_norm(x, weight, 1e-5, other)
    actual = FORM.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, other if other is None else other.to(DEVICE))
    close(actual[0], expected[0])
    assert torch.equal(actual[1].cpu(), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (5, 36), (0, 8)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = cases.numbers(rows, 2 * size, seed=1, dtype=dtype) * 4
    close(FORM.silu_mul(gate_up.to(DEVICE)), REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 20), (2, 1, 8)])
def test_rope_kv_write(heads: int, kv_heads: int, head_dim: int, rotary: bool, dtype: torch.dtype) -> None:
    tokens, blocks = 6, 5
    qkv = cases.numbers(tokens, heads + 2 * kv_heads, head_dim, seed=1, dtype=dtype)
    angles = cases.numbers(tokens, 2, head_dim, seed=2) if rotary else None
    slots = torch.tensor([3, 0, 17, 18, 19, 8])
    cache = cases.numbers(blocks, cases.BLOCK_SIZE, 2 * kv_heads, head_dim, seed=3, dtype=dtype)
    expected_qkv, expected_cache = qkv.clone(), cache.clone()
    REFERENCE.rope_kv_write(expected_qkv, angles, slots, expected_cache)
    actual_qkv, actual_cache = qkv.to(DEVICE, copy=True), cache.to(DEVICE, copy=True)
    FORM.rope_kv_write(actual_qkv, None if angles is None else angles.to(DEVICE), slots.to(DEVICE), actual_cache)
    close(actual_qkv, expected_qkv)
    close(actual_cache, expected_cache)
    untouched = [slot for slot in range(blocks * cases.BLOCK_SIZE) if slot not in slots.tolist()]
    assert torch.equal(actual_cache.cpu().flatten(0, 1)[untouched], cache.flatten(0, 1)[untouched])
    assert torch.equal(actual_qkv.cpu()[:, heads + kv_heads :], qkv[:, heads + kv_heads :])


def on_device(query: torch.Tensor) -> torch.Tensor:
    """A copy that has the same gaps between its rows."""
    moved = torch.empty_strided(query.shape, query.stride(), dtype=query.dtype, device=DEVICE)
    return moved.copy_(query)


MIXED = [(1, 37), (9, 9), (1, 1), (5, 70), (1, 64), (70, 71), (2, 5)]
BATCHES = {
    "one decode": [(1, 21)],
    "one decode, whole block": [(1, 8)],
    "like decodes": [(1, 16)] * 5,
    "unlike decodes": [(1, 5), (1, 130), (1, 6), (1, 129), (1, 1)],
    "first chunk": [(30, 30)],
    "later chunk": [(7, 45)],
    "mixed": MIXED,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_paged_attention(name: str, window: int | None, dtype: torch.dtype) -> None:
    for heads, kv_heads, head_dim, scattered in [(6, 2, 16, True), (3, 3, 24, False)]:
        query, cache, batch = cases.attention(
            BATCHES[name], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, scattered=scattered
        )
        expected = REFERENCE.paged_attention(query, cache, batch, head_dim**-0.5, window)
        assert not expected.isnan().any()
        for _ in range(2):  # the second call finds the batch prepared, as the second layer of a step does
            actual = FORM.paged_attention(on_device(query), cache.to(DEVICE), batch, head_dim**-0.5, window)
            close(actual, expected)


def test_one_batch_serves_layers_of_different_windows() -> None:
    query, cache, batch = cases.attention(MIXED, heads=6, kv_heads=2, head_dim=16, dtype=torch.float32, scattered=True)
    for window in (None, 6, None, 3):
        expected = REFERENCE.paged_attention(query, cache, batch, 0.25, window)
        close(FORM.paged_attention(on_device(query), cache.to(DEVICE), batch, 0.25, window), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows", [[(1, 0)], [(1, None), (1, 2), (1, 1), (1, 2)], [(5, 1), (20, 0), (3, None), (17, 2), (1, 1)]]
)
def test_lora(rows: list[tuple[int, int | None]], dtype: torch.dtype) -> None:
    y, x, weights, batch = cases.lora(rows, [4, 24, 1], inputs=100, outputs=[72, 20, 20], skipped=4, dtype=dtype)
    expected, actual = y.clone(), y.to(DEVICE, copy=True)
    REFERENCE.lora(expected, x, weights, batch)
    on_device = type(weights)(
        shrink=weights.shrink.to(DEVICE),
        expand=tuple(expand.to(DEVICE) for expand in weights.expand),
        columns=weights.columns,
    )
    FORM.lora(actual, x.to(DEVICE), on_device, batch)
    close(actual, expected)
    none = [row for row in range(len(y)) if not any(s.row <= row < s.row + s.rows for s in batch.segments)]
    assert torch.equal(actual.cpu()[none], y[none])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, under the interpreter
def test_lora_overflow_stays_with_its_own_rows() -> None:
    y, x, weights, batch = cases.lora(
        [(3, 0), (3, 1), (2, None)], [4, 4], inputs=32, outputs=[16], skipped=0, dtype=torch.float32
    )
    weights.shrink[:, :4] *= 1e38  # the first adapter's products are infinite
    x[3:] *= 100
    expected, actual = y.clone(), y.to(DEVICE, copy=True)
    REFERENCE.lora(expected, x, weights, batch)
    FORM.lora(actual, x.to(DEVICE), weights, batch)
    assert not actual[:3].isfinite().all()
    close(actual[3:], expected[3:])
