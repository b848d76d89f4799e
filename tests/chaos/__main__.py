"""The command line of the campaign; see `campaign.py`. Exit code 1 when anything was lost, double or wrong."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.campaign import Campaign
from tests.doubles.clickhouse_server import install
from tests.fixtures.clickhouse import CACHE


def main() -> int:
    """Play one campaign and print its tally."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=210, help="of gateway, engine and ClickHouse together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--keep", type=Path, help="folder for everything, kept afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        tally = asyncio.run(Campaign(folder, install(CACHE), seed=options.seed, kills=options.kills).run())
    sys.stdout.write(f"seed {options.seed}, {time.monotonic() - began_s:.0f} s\n{tally}\n")
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
