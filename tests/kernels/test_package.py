"""What the package is to others: nothing that transformers takes for its own, and no need of Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_imports_beside_it() -> None:
    """transformers probes for a package called kernels; ours must answer with nothing."""
    assert (ROOT / "kernels/__init__.py").read_text() == ""
    program = "import kernels, transformers; transformers.LlamaForCausalLM; print(kernels.__file__)"
    assert python(program).strip() == str(ROOT / "kernels/__init__.py")


def test_the_cpu_forms_need_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from kernels.dispatch import CPU, operations
assert operations(torch.device("cpu")) is CPU
try:
    operations(torch.device("cuda"))
except RuntimeError as error:
    print(error)
"""
    assert "needs Triton" in python(program)
