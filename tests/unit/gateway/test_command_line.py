"""The command line as a newcomer meets it: its lists, its tables, and which server it speaks to."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import click
import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

from gateway import client
from gateway.cli import SECTIONS, main
from gateway.client import CallFailed, connect
from gateway.commands import base
from gateway.printing import CELL_MAX, Printer
from gateway.settings import load
from metering.lock import FileLock, held


def test_every_command_stands_under_one_heading_and_its_summary_is_cut_nowhere() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert "..." not in shown.partition("Options:")[2]
    listed = [command for commands in SECTIONS.values() for command in commands]
    assert {command.name for command in listed} == set(main.commands)
    assert len(listed) == len(main.commands)
    assert all(f"{title}:" in shown for title in SECTIONS)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["invoic"], "no command 'invoic': did you mean 'invoice'?"),
        (["credit-note", "create"], "no command 'create': there are export, issue, list, show, void"),
    ],
)
def test_who_names_a_command_that_is_not_there_is_told_which_are(typed: list[str], told: str) -> None:
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == click.UsageError.exit_code
    assert told in done.output


def test_a_reader_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(base, "connect", gone)
    done = CliRunner().invoke(main, ["tenant", "list"])
    assert (done.exit_code, done.output) == (1, "")


def test_a_table_in_a_pipe_has_every_column_whole_and_no_space_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    long = {"rows": [{"name": "VAT", "hard": True, "none": None}], "rest": "x" * 2 * CELL_MAX}
    Printer(False).show([{"actor": "admin", "type": "price.set", "detail": long}], ("actor", "type", "detail"))
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["actor", "type", "detail"]
    assert row.startswith("admin  price.set  rows=(name=VAT hard=yes none=-) rest=xxx")
    assert row.endswith("x…")
    assert all(line == line.rstrip() for line in (head, row))


def test_a_narrow_terminal_cuts_prose_and_nothing_else() -> None:
    printer, shown_on = Printer(False), io.StringIO()
    printer.console = Console(width=60, file=shown_on, force_terminal=True, color_system=None)
    printer.show([{"actor": "admin:admin-3f00", "type": "price.set", "detail": "z" * 90}], ("actor", "type", "detail"))
    shown = shown_on.getvalue()
    assert "admin:admin-3f00" in shown
    assert "price.set" in shown
    assert shown.count("z") == 90


def test_the_server_of_another_folder_is_not_taken_for_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = httpx.Response(200, json={"product": "meterhouse"})
    monkeypatch.setattr(client.httpx, "get", lambda *_, **__: live)
    settings = load({"data_dir": str(tmp_path), "admin_key": "k" * 32})

    def never(*_: object) -> object:
        raise AssertionError("a folder beside a running server is not opened")

    with pytest.raises(CallFailed, match="none runs on the data folder"), connect(settings, never, True):  # type: ignore[arg-type]
        pass
    with connect(settings, never, False):  # type: ignore[arg-type]
        pass
    with FileLock(tmp_path / "server.lock"), connect(settings, never, True):  # type: ignore[arg-type]
        assert held(tmp_path / "server.lock")
    assert not held(tmp_path / "server.lock")
    assert not held(tmp_path / "none")
