"""The Triton forms: against the references in Triton's interpreter (or on the GPU), and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import kv_write, lora, paged_attention, rms_norm, silu_mul

HERE = Path(__file__).parent
TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), ("ptx", "cubin")),
    "sm_80": (GPUTarget("cuda", 80, 32), ("ptx", "cubin")),
    "gfx942": (GPUTarget("hip", "gfx942", 64), ("amdgcn", "hsaco")),
}


def test_forms_equal_the_references() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET once, when it is imported."""
    environment = {**os.environ, "METERHOUSE_TEST_FORM": "triton", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "forms.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


# Parameters of each kernel as the forms pass them: a type ("*x" is a pointer to the tensor dtype) or a constant.
KERNELS: dict[str, tuple[Any, dict[str, str | int | bool]]] = {
    "rms_norm": (
        rms_norm.kernel,
        {"normed": "*x", "total": "*x", "x": "*x", "residual": "*x", "weight": "*x", "eps": "fp32"}
        | {"SIZE": 576, "HAS_RESIDUAL": True, "BLOCK": 1024},
    ),
    "silu_mul": (silu_mul.kernel, {"out": "*x", "gate_up": "*x", "SIZE": 1536, "BLOCK": 1024}),
    "kv_write": (
        kv_write.kernel,
        {"qkv": "*x", "rotary": "*fp32", "slots": "*i64", "cache": "*x"}
        | {"HEADS": 9, "KV_HEADS": 3, "SIZE": 64, "HAS_ROTARY": True, "BLOCK": 32},
    ),
    "paged_attention decode": (
        paged_attention.kernel,
        {"out": "*x", "query": "*x", "cache": "*x", "tables": "*i32", "tiles": "*i32", "scale": "fp32"}
        | {
            "query_stride": "i32",
            "table_stride": "i32",
            "KV_HEADS": 3,
            "SHARED": 3,
            "SIZE": 64,
            "BLOCK_SIZE": 16,
            "WINDOW": 0,
        }
        | {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 64},
    ),
    "paged_attention prefill, window": (
        paged_attention.kernel,
        {"out": "*x", "query": "*x", "cache": "*x", "tables": "*i32", "tiles": "*i32", "scale": "fp32"}
        | {
            "query_stride": "i32",
            "table_stride": "i32",
            "KV_HEADS": 8,
            "SHARED": 4,
            "SIZE": 128,
            "BLOCK_SIZE": 16,
            "WINDOW": 4096,
        }
        | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 128},
    ),
    "lora shrink": (
        lora.shrink_kernel,
        {"shrunk": "*x", "x": "*x", "shrink": "*x", "tiles": "*i32", "rows": "i32", "ranks": "i32"}
        | {"INPUTS": 576, "BLOCK_M": 16, "BLOCK_R": 16, "BLOCK_K": 64},
    ),
    "lora expand": (
        lora.expand_kernel,
        {"y": "*x", "shrunk": "*x", "expand": "*x", "tiles": "*i32", "y_stride": "i32", "column": "i32"}
        | {"OUTPUTS": 192, "BLOCK_M": 16, "BLOCK_R": 16, "BLOCK_N": 64},
    ),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_ahead_of_time(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled here and now, not found
    kernel, parameters = KERNELS[name]
    signature = {
        key: value.replace("*x", "*bf16") if isinstance(value, str) else "constexpr"
        for key, value in parameters.items()
    }
    assert list(signature) == kernel.arg_names
    constants = {key: value for key, value in parameters.items() if not isinstance(value, str)}
    machine, forms = TARGETS[target]
    compiled = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants), target=machine)
    text, binary = (compiled.asm[form] for form in forms)
    assert target in text
    assert len(binary) > 500
