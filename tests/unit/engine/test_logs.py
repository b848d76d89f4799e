"""Whoever logs, and by which library: one form, one level, and no words of strangers below a warning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, sys, structlog
from engine.logs import configure_logging
configure_logging(sys.argv[1], sys.argv[2])
logging.getLogger("httpx").setLevel("WARNING")
structlog.get_logger("gateway.x").info("told", count=2)
for name in ("metering.spool", "uvicorn.error", "httpx"):
    logging.getLogger(name).debug("debug of %s", name)
    logging.getLogger(name).info("info of %s", name)
    logging.getLogger(name).warning("warning of %s", name)
try:
    password = "hunter2"
    raise ValueError("broken")
except ValueError:
    logging.getLogger("billing.store").exception("failed")
"""


def logged(level: str, form: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, level, form], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def events(level: str) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in logged(level, "json")]
    assert all(line["timestamp"].endswith("Z") for line in lines)
    return [(line["level"], line["event"]) for line in lines]


def test_every_line_is_json_with_what_there_is_to_know() -> None:
    lines = [json.loads(line) for line in logged("info", "json")]
    assert lines[0] | {"timestamp": ""} == {"event": "told", "level": "info", "count": 2, "timestamp": ""}
    assert (lines[1]["logger"], lines[1]["event"]) == ("metering.spool", "info of metering.spool")
    assert "ValueError: broken" in lines[-1]["exception"]


def test_the_level_is_the_rooms_and_libraries_are_quiet() -> None:
    warnings = [("warning", f"warning of {name}") for name in ("metering.spool", "uvicorn.error", "httpx")]
    ours, chatty, foreign = warnings
    failed = ("error", "failed")
    assert events("warning") == [*warnings, failed]
    assert events("info") == [("info", "told"), ("info", "info of metering.spool"), *warnings, failed]
    assert events("debug") == [
        ("info", "told"),
        *((level, f"{level} of metering.spool") for level in ("debug", "info")),
        ours,
        *((level, f"{level} of uvicorn.error") for level in ("debug", "info")),
        chatty,
        foreign,
        failed,
    ]
    assert events("critical") == []  # also of a library that set its own level


def test_a_person_reads_lines_and_no_values_of_variables() -> None:
    text = "\n".join(logged("info", "console"))
    assert "info of metering.spool" in text
    assert "ValueError: broken" in text
    assert text.count("hunter2") == 0


def test_a_file_gets_no_colours() -> None:
    assert "\x1b" not in "\n".join(logged("info", "console"))
