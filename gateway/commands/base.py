"""What the commands share: the admin API as their first argument, flags of a range of time, groups.

Knows: how a command reaches the admin API and how its failure becomes a sentence. Does not know: any command.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gateway import settings as settings_module
from gateway.client import CallFailed, connect
from gateway.commands.server import open_here
from gateway.flags import settings_flags
from gateway.printing import Printer
from gateway.settings import SettingsError

START = click.option("--start", help="RFC 3339 or epoch seconds.")
END = click.option("--end", help="RFC 3339 or epoch seconds, excluded. [default: now]")


class Group(click.Group):
    """Turns the failures a command may have into one sentence."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (CallFailed, SettingsError) as error:
            raise click.ClickException(str(error)) from None
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
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
        with connect(settings_module.load(flags, config=config), open_here) as api:
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


class Defaulting(click.Group):
    """A group whose `show` is meant when no command is named: `meterhouse usage --tenant acme`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *context.help_option_names):
            args = ["show", *args]
        return super().parse_args(context, args)
