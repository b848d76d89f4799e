"""What the READMEs say of the settings, the rooms and the commands is what the code says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gateway.cli import main
from gateway.settings import Field, fields

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def default_text(field: Field) -> str:
    if field.default is None:
        return ""
    if field.name == "cache_dir":
        return "`~/.cache/meterhouse`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def settings_table() -> str:
    rows = [f"| `{field.name}` | {default_text(field)} | {field.description} |" for field in fields()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def test_every_setting_is_in_the_table_as_the_code_has_it() -> None:
    found = re.search(r"<!-- settings -->\n(.*)\n<!-- /settings -->", README.read_text(), re.DOTALL)
    assert found
    assert found[1] == settings_table()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def commands() -> list[str]:
    """Every `meterhouse …` line in the code blocks of the READMEs."""
    pages = [
        path
        for path in ROOT.rglob("README.md")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    lines = [line.strip() for path in pages for line in path.read_text().splitlines()]
    return [part.strip() for line in lines if line.startswith("meterhouse ") for part in line.split("&&")]


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one_of_the_command_line(command: str) -> None:
    known: click.Command = main
    context, arguments = click.Context(main), shlex.split(command, comments=True)[1:]
    while isinstance(known, click.Group):
        _, found, arguments = known.resolve_command(context, arguments)
        assert found is not None
        known = found
    known.make_context(command, arguments)  # parses, and calls nothing
