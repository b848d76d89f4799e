"""Writes the dashboards' JSON: `python -m dashboards.build`; with `--check` only says whether it is up to date.

The JSON is kept in the repository, so that Grafana can be provisioned without Python; a test builds it again and
compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards import engine, usage
from dashboards.panels import plain

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
BOARDS = {"usage.json": usage.build, "engine.json": engine.build}


def rendered() -> dict[str, str]:
    """File name → its text."""
    return {name: json.dumps(plain(build()), indent=2, sort_keys=True) + "\n" for name, build in BOARDS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    check = parser.parse_args().check
    stale = 0
    for name, text in rendered().items():
        path = FOLDER / name
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        sys.stdout.write(f"{name} is out of date\n" if check else f"wrote {name}\n")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
