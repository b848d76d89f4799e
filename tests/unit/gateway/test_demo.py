"""What a first `make serve` prints works as printed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gateway import demo
from gateway.cli import main
from tests.fixtures.server import RunningGateway

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("executable", "folder", "shown"),
    [
        ("/srv/m/.venv/bin/python", "/srv/m", ".venv/bin/python"),
        ("/srv/m/.venv/bin/python", "/srv/other", "/srv/m/.venv/bin/python"),
        ("/srv/my models/.venv/bin/python3.11", "/", "'srv/my models/.venv/bin/python3.11'"),
    ],
)
def test_the_interpreter_is_named_as_it_can_be_called(executable: str, folder: str, shown: str) -> None:
    assert demo.python(executable, Path(folder)) == shown


def test_the_printed_command_is_one_of_the_command_line() -> None:
    (told,) = [line for line in demo._lines("http://x", "m", {"acme": "mh-1"}, []) if "A new one: " in line]
    command = told.partition("A new one: ")[2]
    known: click.Command = main
    context, arguments = click.Context(main), shlex.split(command)[1:]
    while isinstance(known, click.Group):
        _, found, arguments = known.resolve_command(context, arguments)
        assert found is not None
        known = found
    given = known.make_context(command, arguments).params
    assert (known.name, given["tenant_id"], given["name"]) == ("create", "globex", "another")


def test_the_printed_lines_work(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    key = gateway.tenant()
    text = "\n".join(demo._lines(gateway.url, "fake", {"acme": key, "globex": "mh-other"}, []))
    commands = [part.strip() for part in text.split("Try it:")[1].split("\n\n") if part.strip()]
    assert commands[1].startswith(demo.python(sys.executable, ROOT))
    if shutil.which("curl") is None:
        del commands[0]
    for command in commands:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
    assert len(gateway.wait_events(len(commands))) == len(commands)
