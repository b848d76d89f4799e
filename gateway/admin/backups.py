"""Backups: taking one of this gateway and of what it shares, beside what it serves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from litestar import Router, delete, get, post
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.service.shell import new_id
from gateway.admin.acts import begin
from gateway.admin.idempotency import Once
from gateway.admin.state import Admin
from gateway.admin.times import format_time
from gateway.backup.take import Run


class BackupCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the backup is to lie: a folder that is empty or not there yet."""

    path: Annotated[str, Meta(min_length=1, max_length=4096, description="whole path of a folder, on the server")]


class BackupView(msgspec.Struct, kw_only=True):
    """A backup as far as it is. What is null is known when it is done."""

    id: str
    state: Literal["running", "done", "failed"]
    fault: Annotated[str | None, Meta(description="why it failed; nothing of it is left then")]
    instant: Annotated[str | None, Meta(description="what was durable then is in it")]
    nbytes: int | None
    files: int | None
    ledger_events: int | None
    requests: Annotated[int | None, Meta(description="usage in it, with those requests that ran")]
    open: Annotated[int | None, Meta(description="of these, requests that ran: settled as interrupted when restored")]
    lacking: Annotated[
        int | None, Meta(description="requests that the ledger knows and whose usage is neither stored nor here")
    ]
    other_gateways: Annotated[list[str] | None, Meta(description="on this ledger; their data folders are not in it")]


def show_backup(run: Run) -> BackupView:
    backup = run.backup
    return BackupView(
        id=run.id,
        state=run.state,
        fault=run.fault or None,
        instant=None if backup is None else format_time(backup.instant_us),
        nbytes=None if backup is None else backup.nbytes,
        files=None if backup is None else len(backup.files),
        ledger_events=None if backup is None else backup.ledger.seq,
        requests=None if backup is None else backup.requests,
        open=None if backup is None else backup.usage.open,
        lacking=None if backup is None else backup.lacking,
        other_gateways=None if backup is None else backup.others,
    )


@post("/backups", sync_to_thread=True)
def create_backup(data: JSONBody[BackupCreate], admin: Admin, idempotency: Once) -> BackupView:
    """Begin a backup; ask for it by its id until it is done. 409 while one is taken, and for a folder with something
    in it."""
    if idempotency is None:
        id = new_id("backup")
    else:
        id = f"backup-{hashlib.sha256(idempotency.key.encode()).hexdigest()[:24]}"
    begin(admin, "backup.take", id, idempotency=idempotency)
    return show_backup(admin.backups.start(id, Path(data.path)))


@get("/backups/{backup_id:str}", sync_to_thread=True)
def get_backup(backup_id: FromPath[str], admin: Admin) -> BackupView:
    """Show how far a backup is that this server was asked for."""
    return show_backup(admin.backups.find(backup_id))


class HoldView(msgspec.Struct, kw_only=True):
    """Whether exports are held back since a restore: invoices drafted after it for periods that began before it, credit
    notes issued after it, and usage on its way to meters."""

    held: bool
    backup: str | None
    instant: Annotated[str | None, Meta(description="what was exported after it is not known here")]
    restored_at: str | None


@get("/stripe/hold", sync_to_thread=True)
def get_hold(admin: Admin) -> HoldView:
    """Show whether exports are held back because the ledger was restored from a backup."""
    held = admin.billing.held_after_restore()
    return HoldView(
        held=held is not None,
        backup=None if held is None else held.backup_id,
        instant=None if held is None else format_time(held.instant_us),
        restored_at=None if held is None else format_time(held.at_us),
    )


@delete("/stripe/hold", sync_to_thread=True)
def delete_hold(admin: Admin) -> None:
    """Let them go: somebody has looked in Stripe for what was exported since the backup. Safe to repeat."""
    admin.billing.release_exports()


router = Router("/", route_handlers=[create_backup, get_backup, get_hold, delete_hold], tags=["backups"])
