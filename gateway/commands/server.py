"""The commands `meterhouse serve` and `meterhouse migrate`, and the admin API opened where no server runs.

The only file that imports the program's composition, and late: it takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gateway import settings as settings_module
from gateway.client import CallFailed
from gateway.flags import settings_flags
from gateway.settings import Settings


@contextmanager
def open_here(settings: Settings) -> Iterator[Any]:
    """The admin app on the data folder, without an engine. The whole program hangs on it, so it is imported late."""
    from engine.logs import configure_logging
    from gateway import lifecycle

    # Standard output is the answer's, standard error has one sentence; who debugs gets the log there too.
    configure_logging("debug" if settings.log_level == "debug" else "critical", settings.log_format)
    try:
        with lifecycle.open_admin(settings) as app:
            yield app
    except lifecycle.StartError as error:
        raise CallFailed(str(error)) from None


@click.command()
@settings_flags()
def serve(config: Path | None, **flags: str | None) -> None:
    """Start a server, until SIGINT or SIGTERM."""
    from gateway import lifecycle

    try:
        lifecycle.serve(settings_module.load(flags, config=config))
    except lifecycle.StartError as error:
        raise CallFailed(str(error)) from None


@click.command()
@settings_flags("data_dir", "clickhouse_url", "clickhouse_cluster", "clickhouse_replicated", "ledger_url")
def migrate(config: Path | None, **flags: str | None) -> None:
    """Bring the data to this version's schema.

    `serve` and every other command do it by themselves; the data folder may not be in use.
    """
    with open_here(settings_module.load(flags, config=config)):
        pass  # opening is what migrates
    click.echo("The usage store and the ledger are up to date.")
