"""Archived months of usage events: which there are, archiving one, checking one."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

import msgspec
from litestar import Router, get, put
from litestar.params import FromPath
from msgspec import Meta

from billing.errors import Conflict
from gateway.admin.acts import begin
from gateway.admin.body import Fault, refuse
from gateway.admin.paging import Page
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time
from gateway.admin.watermark import watermark
from gateway.errors import NotFound
from metering.archive import Manifest, month_us, shown
from metering.errors import MeteringError

_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])", re.ASCII)


class ArchiveView(msgspec.Struct, kw_only=True):
    """A month in the archive. `dropped`: the usage store has of it only what came later."""

    month: str
    events: Annotated[int, Meta(description="those that stand")]
    second_contents: int
    files: int
    nbytes: int
    dropped: bool


class CheckView(msgspec.Struct, kw_only=True):
    """Whether the files of a month are, to the last event, what was archived; if not, why."""

    month: str
    ok: bool
    events: int
    fault: str | None


def _month_faults(text: str) -> list[Fault]:
    if _MONTH.fullmatch(text) and int(text[:4]) >= 1970:
        return []
    return [("month", "must be a month such as 2026-11")]


def _month(text: str) -> int:
    return int(text.replace("-", ""))


def _show(manifest: Manifest, *, dropped: bool) -> ArchiveView:
    return ArchiveView(
        month=shown(manifest.month),
        events=manifest.standing,
        second_contents=manifest.rows - manifest.standing,
        files=len(manifest.parts),
        nbytes=manifest.nbytes,
        dropped=dropped,
    )


def _list(admin: AdminState) -> list[ArchiveView]:
    dropped = {noted.month for noted in admin.usage.archived() if noted.dropped}
    archive = admin.retention.archive
    return [_show(archive.manifest(month), dropped=month in dropped) for month in archive.months()]


@get("/archives")
async def list_archives(admin: Admin) -> Page[ArchiveView]:
    """List the months in the archive, oldest first; they are on one page."""
    return Page(data=await admin.read(_list, admin))


@put("/archives/{month:str}")
async def put_archive(month: FromPath[str], admin: Admin) -> ArchiveView:
    """Archive a month and drop from the usage store what is archived; safe to repeat.

    409 while its usage may still be on its way.
    """
    refuse(_month_faults(month))
    if admin.usage.cluster:
        raise Conflict("months are not archived on a cluster")
    number = _month(month)
    stored = await watermark(admin)
    if month_us(number)[1] > stored.us:
        raise Conflict(
            f"usage of this month may still be on its way: all that began before {format_time(stored.us)} is stored"
        )
    await asyncio.to_thread(begin, admin, "archive.make", month)
    manifest = await admin.read(admin.retention.run, number)
    return _show(manifest, dropped=bool(manifest.parts))


@get("/archives/{month:str}/check")
async def check_archive(month: FromPath[str], admin: Admin) -> CheckView:
    """Read every byte and every event of a month in the archive."""
    refuse(_month_faults(month))
    number = _month(month)
    if number not in await admin.read(admin.retention.archive.months):
        raise NotFound("There is no such month in the archive.", param="month")
    try:
        manifest = await admin.read(admin.retention.archive.check, number)
    except MeteringError as error:
        return CheckView(month=month, ok=False, events=0, fault=str(error))
    return CheckView(month=month, ok=True, events=manifest.standing, fault=None)


router = Router("/", route_handlers=[list_archives, put_archive, check_archive], tags=["usage"])
