"""The commands `meterhouse backup` and `meterhouse restore`.

A backup is taken by the server that runs, or, when none does, by this process. A restore is made by this process: no
server may run on what it fills.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway import settings as settings_module
from gateway.client import AdminClient, CallFailed
from gateway.commands.base import admin
from gateway.flags import settings_flags
from gateway.printing import Printer

BACKUP = ("id", "instant", "requests", "open", "ledger_events", "files", "nbytes")
CHECKED = ("id", "gateway", "instant", "requests", "ledger_events", "files", "nbytes")
RESTORED = ("id", "requests", "settled", "ledger_events")
POLL_S = (0.05, 0.1, 0.25, 0.5, 1.0)

_TARGET = (
    *("data_dir", "ledger_url", "clickhouse_url", "clickhouse_cluster", "clickhouse_replicated"),
    *("archive_dir", "gateway_id"),
)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@admin
def backup(api: AdminClient, printer: Printer, folder: Path) -> None:
    """Back everything up into FOLDER (on the server), beside what runs; exit code 1 when something is lacking.

    Ledger, usage, spool, journal, archive, adapters and keys, of one instant, checksummed. It has secrets and
    end users' names in it.
    """
    found = api.post("/backups", body={"path": str(folder.absolute())})
    polls = iter(POLL_S)
    while found["state"] == "running":
        time.sleep(next(polls, POLL_S[-1]))
        found = api.get("/backups/{}", found["id"])
    if found["state"] == "failed":
        raise CallFailed(found["fault"])
    printer.show(found, BACKUP)
    if others := found["other_gateways"]:
        printer.say(f"Not in it: the data folders of the gateways {', '.join(others)}; back each up there.")
    if found["lacking"]:
        printer.say(
            f"{found['lacking']} requests that the ledger knows have their usage nowhere here: "
            "`meterhouse reconcile` names them."
        )
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Only read every byte of the backup and say whether it is whole.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@settings_flags(*_TARGET)
def restore(folder: Path, check: bool, as_json: bool, config: Path | None, **flags: str | None) -> None:
    """Fill an empty data folder, ledger and usage store from the backup in FOLDER, then compare all books.

    The target may be of another kind: SQLite or PostgreSQL, chDB or a ClickHouse server. Safe to repeat after a kill.
    Exit code 1 when it cannot be restored, or when the books part.
    """
    from billing.service.shell import now_us
    from gateway.admin.times import format_time  # with all that a server has: late, as in `cli`
    from gateway.backup import restore as restoring
    from gateway.backup.manifest import BackupError
    from gateway.stores import StartError

    printer = Printer(as_json)
    try:
        if check:
            backup = restoring.check(folder)
            shown: dict[str, Any] = {
                "id": backup.id,
                "gateway": backup.gateway,
                "instant": format_time(backup.instant_us),
                "requests": backup.requests,
                "ledger_events": backup.ledger.seq,
                "files": len(backup.files),
                "nbytes": backup.nbytes,
            }
            printer.show(shown, CHECKED)
            return
        _quiet()
        settings = settings_module.load(flags, config=config)
        found = restoring.restore(settings, folder, now_us, lambda line: click.echo(line, err=True))
    except (BackupError, StartError) as error:
        raise CallFailed(str(error)) from None
    printer.show(msgspec.to_builtins(found), RESTORED)
    for fault in found.faults:
        printer.say(fault)
    if found.faults:
        raise click.exceptions.Exit(1)
    printer.say("Everything agrees.")


def _quiet() -> None:
    """Standard error has the steps and one sentence of a failure; the log is for who debugs."""
    import os

    from engine.logs import configure_logging

    debug = os.environ.get("METERHOUSE_LOG_LEVEL") == "debug"
    configure_logging("debug" if debug else "critical", "auto")
