"""`make demo`'s story, told by itself: the real model, a real server, the Stripe double."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_holds_to_the_cent(default_model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "METERHOUSE_URL"}
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout
    for promise in (
        "usage × prices =",
        "every token stands on exactly one line",
        "rounded once",
        "Stripe holds the same",
    ):
        assert told.count(promise) == 3, told  # once a tenant
    assert "its client got 5 before it hung up" in told
    assert "reconcile finds no difference" in told
    assert "Every token is accounted for" in told
    assert default_model.name in told
