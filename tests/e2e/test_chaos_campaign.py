"""The crash campaign, bounded: `make chaos` plays it at length."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign

KILLS = 12


@pytest.mark.timeout(240)
def test_kills_of_gateway_engine_and_clickhouse_lose_nothing_and_double_nothing(
    clickhouse_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = asyncio.run(Campaign(tmp_path, clickhouse_library, seed=20251130, kills=KILLS).run())
    with capsys.disabled():
        sys.stdout.write(f"\n{tally}\n")
    assert tally.kills >= KILLS
    assert tally.engine_kills > 0
    assert tally.clickhouse_kills > 0
    assert tally.known > 20
    assert tally.clean
