"""How the command line shows the admin API's answers: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 100_000  # what no terminal shows is cut nowhere: a program reads it line by line
PROSE = frozenset({"detail", "reason", "difference", "last_error"})  # folded where the terminal is narrow
CELL_MAX = 200  # of a nested value; --json has all of it
NUMBERS = frozenset(
    {
        *("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "quantity"),
        *("prompt", "cached", "completion", "unit_price", "exact", "amount", "exact_total", "total", "due"),
        *("available", "held", "charged", "granted"),
        *("would_be", "difference", "percent"),
    }
)


class Printer:
    """Standard output as one command uses it."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)

    def _print(self, shown: Table) -> None:
        """Onto the terminal as it is; into a pipe without the spaces that would fill each line up to the widest."""
        if self.console.is_terminal:
            self.console.print(shown)
            return
        with self.console.capture() as captured:
            self.console.print(shown)
        sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def show(self, answer: Any, columns: Sequence[str]) -> None:
        """A list of objects as a table, one object as names and values; with --json all of it."""
        if self.as_json:
            self.json(answer)
        elif isinstance(answer, list):
            self._print(table(answer, columns))
        else:
            self._print(_grid((name, _lookup(answer, name)) for name in columns))

    def json(self, answer: Any) -> None:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")

    def say(self, sentence: str) -> None:
        """A word to people; programs read the JSON and the exit code."""
        if not self.as_json:
            self.console.print(Text(sentence))


def table(rows: Iterable[dict[str, Any]], columns: Sequence[str], title: str | None = None) -> Table:
    """Rows of one kind; a column `a.b` is field `b` of field `a`."""
    shown = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        last = name.rpartition(".")[2]
        shown.add_column(
            _title(last),
            justify="right" if last in NUMBERS else "left",
            no_wrap=last not in PROSE,
            overflow="fold" if last in PROSE else "ellipsis",
        )
    for row in rows:
        shown.add_row(*(_text(_lookup(row, name)) for name in columns))
    return shown


def _grid(pairs: Iterable[tuple[str, Any]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(_title(name), style="dim"), _text(value))
    return grid


def _title(name: str) -> str:
    return "bytes" if name == "nbytes" else name.replace("_", " ")


def _lookup(row: Any, name: str) -> Any:
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _text(value: Any) -> Text:
    if value is None or value in ("", {}, []):
        return Text("-", style="dim")
    words = _words(value)
    return Text(words if len(words) <= CELL_MAX or not isinstance(value, dict | list) else words[:CELL_MAX] + "…")


def _words(value: Any) -> str:
    """A value as a person reads it; what is nested stands in brackets."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, dict):
        return " ".join(f"{key}={_nested(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return str(value)


def _nested(value: Any) -> str:
    return f"({_words(value)})" if isinstance(value, dict | list) else _words(value)
