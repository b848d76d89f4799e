"""Flags of the settings, for the commands that take them.

Knows: every setting is a flag. Does not know: what a setting means, or which command is which.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gateway import settings

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_config = click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings file (METERHOUSE_CONFIG). [default: meterhouse.toml, if there is one]",
)


def settings_flags(*names: str) -> Decorator:
    """Flags of the named settings, or of all, and `--config`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for field in reversed(settings.fields()):
            if not names or field.name in names:
                function = _flag(field)(function)
        return _config(function)

    return decorate


def _flag(field: settings.Field) -> Decorator:
    """The flag of a setting. Its text goes on unread: the settings room checks all sources alike."""
    default = "" if field.default is None or field.type is bool else f" [default: {field.default}]"
    switch: dict[str, Any] = {"is_flag": True, "flag_value": "true"} if field.type is bool else {}
    return click.option(
        field.flag,
        field.name,
        default=None,
        metavar=None if switch else field.type.__name__.upper(),
        help=f"{field.description} ({field.variable}){default}",
        **switch,
    )
