"""What the commands share: the admin API as their first argument, flags of a range of time, groups.

Knows: how a command reaches the admin API and how its failure becomes a sentence. Does not know: any command.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gateway import settings as settings_module
from gateway.client import CallFailed, connect
from gateway.commands.server import open_here
from gateway.flags import settings_flags
from gateway.printing import Printer
from gateway.settings import SettingsError

START = click.option("--start", help="A date, RFC 3339 or epoch seconds.")
END = click.option("--end", help="A date, RFC 3339 or epoch seconds, excluded. [default: now]")

SUMMARY_MAX = 1000  # longer than any command's first sentence


class Noun(click.Group):
    """A group of commands: its list is cut nowhere, and who names one that is not there is told which are."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(self.commands[name])) for name in self.list_commands(context)])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.commands, 1)
            known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self.list_commands(context))}"
            context.fail(f"no command {args[0]!r}: {known}")
        return super().resolve_command(context, args)


def summary(command: click.Command) -> str:
    """What a list of commands says of one."""
    return command.get_short_help_str(limit=SUMMARY_MAX)


class Group(Noun):
    """The whole command line: its commands under headings; the failures one may have become one sentence."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[click.Command]] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._sections = sections or {}
        for commands in self._sections.values():
            for command in commands:
                self.add_command(command)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", summary(command)) for command in commands])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (CallFailed, SettingsError) as error:
            raise click.ClickException(str(error)) from None
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise  # click ends in silence when the reader of a pipe is gone
        except Exception as error:
            if os.environ.get("METERHOUSE_LOG_LEVEL") == "debug":
                raise
            raise click.ClickException(
                f"unexpected {type(error).__name__}: {error} (METERHOUSE_LOG_LEVEL=debug shows where)"
            ) from None


def admin(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the admin API and a printer as first arguments, and the flags that say whose API."""

    @settings_flags("host", "port", "data_dir", "admin_key")
    @click.option("--json", "as_json", is_flag=True, help="Print the API's answer as JSON.")
    @functools.wraps(function)
    def command(
        config: Path | None,
        host: str | None,
        port: str | None,
        data_dir: str | None,
        admin_key: str | None,
        as_json: bool,
        **arguments: Any,
    ) -> None:
        flags = {"host": host, "port": port, "data_dir": data_dir, "admin_key": admin_key}
        with connect(settings_module.load(flags, config=config), open_here, data_dir is not None) as api:
            function(api, Printer(as_json), **arguments)

    return command


def given(**fields: Any) -> dict[str, Any]:
    """The fields that were given a value."""
    return {name: value for name, value in fields.items() if value not in (None, {}, ())}


class Negative(click.Command):
    """A command that hears what is wrong with -3 from the ledger, and not that there is no option of that name."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.ignore_unknown_options = any(re.fullmatch(r"-[0-9.]+", argument) for argument in args)
        return super().parse_args(context, args)


class Defaulting(Noun):
    """A group whose `show` is meant when no command is named: `meterhouse usage --tenant acme`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *context.help_option_names):
            args = ["show", *args]
        return super().parse_args(context, args)
