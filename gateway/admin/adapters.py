"""Adapters of a tenant: checked by the engine, then a name its keys can ask for.

The server keeps its own copy of the two files, so what is served after a restart is what was checked, whatever
becomes of the folder it came from. A new load of a name is a new uuid: nothing of the old one is shared.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from litestar import Router, delete, get, post
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.accounts import AdapterRecord
from billing.errors import UnknownModel
from billing.service import Idempotency
from engine.adapters import CONFIG_FILE, WEIGHTS_FILE
from engine.types import AdapterInfo, AdapterRef
from gateway.admin.fields import Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time
from gateway.errors import BadRequest, Unavailable
from metering.disk import fsync

log = structlog.get_logger(__name__)

FILES = (CONFIG_FILE, WEIGHTS_FILE)
BYTES_MAX = 8 << 30  # of a file; what fits the model is the engine's to say
FREE_BYTES_MIN = 64 << 20  # left on the disk by a copy: settlements need room too

_LOAD_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

FolderText = Annotated[
    str, Meta(min_length=1, max_length=4096, description="folder on the server, in the format PEFT saves")
]


class AdapterCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter to serve under `name`; one of that name is replaced for the requests that come after."""

    name: Text
    path: FolderText


class AdapterView(msgspec.Struct, kw_only=True):
    """An adapter as it is served; `id` is new with each load, `digest` is the SHA-256 of its content."""

    id: str
    tenant: str
    name: str
    digest: str
    base_model: str
    created_at: str


def show_adapter(adapter: AdapterRecord) -> AdapterView:
    return AdapterView(
        id=adapter.id,
        tenant=adapter.tenant,
        name=adapter.name,
        digest=adapter.digest,
        base_model=adapter.base_model,
        created_at=format_time(adapter.created_us),
    )


@post("/tenants/{tenant_id:str}/adapters")
async def add_adapter(
    tenant_id: FromPath[str], data: JSONBody[AdapterCreate], admin: Admin, idempotency: Once
) -> AdapterView:
    """Check an adapter, load it and serve it to this tenant."""
    if admin.engine is None:
        raise Unavailable("An adapter is checked by the engine, and none runs here: start the server first.")
    await asyncio.to_thread(admin.billing.tenant, tenant_id)  # an unknown tenant is told before anything is loaded
    load_id = str(uuid.uuid4())
    kept = admin.adapters_dir / load_id
    record = replaced = None
    try:
        await asyncio.to_thread(_copy, data.path, kept)
        found = await admin.engine.load_adapter(AdapterRef(id=load_id, name=data.name, path=str(kept)))
        record, replaced = await asyncio.to_thread(_record, admin, tenant_id, data.name, kept, found, idempotency)
    finally:
        # Refused, or a repeated call whose first one has done it already: this load serves nobody.
        if record is None or record.id != load_id:
            await _drop(admin, load_id, kept)
    if record.id == load_id and replaced is not None:
        admin.spawn(_drop(admin, replaced.id, Path(replaced.path)))
    return show_adapter(record)


@get("/tenants/{tenant_id:str}/adapters", sync_to_thread=True)
def list_adapters(
    tenant_id: FromPath[str], admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> Page[AdapterView]:
    """List a tenant's adapters."""
    admin.billing.tenant(tenant_id)
    found = admin.billing.adapters(tenant_id, limit=limit + 1, after=after)
    return page(found, limit, show_adapter, lambda adapter: adapter.id)


@delete("/tenants/{tenant_id:str}/adapters/{name:path}")
async def remove_adapter(tenant_id: FromPath[str], name: FromPath[str], admin: Admin) -> None:
    """Take an adapter away: new requests do not find it, the answer comes when its last one has ended."""
    record = await asyncio.to_thread(admin.billing.remove_adapter, tenant_id, name.lstrip("/"))
    await asyncio.shield(admin.spawn(_drop(admin, record.id, Path(record.path))))


def _record(
    admin: AdminState,
    tenant_id: str,
    name: str,
    kept: Path,
    found: AdapterInfo,
    idempotency: Idempotency | None,
) -> tuple[AdapterRecord, AdapterRecord | None]:
    """Make the load the one that `name` means. Returns it, and the one it meant before."""
    with admin.adapters_lock:
        before = _named(admin, tenant_id, name)
        record = admin.billing.add_adapter(
            tenant_id,
            name=name,
            path=str(kept),
            id=found.id,
            digest=found.digest,
            base_model=admin.base_model,
            idempotency=idempotency,
        )
    return record, before


def _named(admin: AdminState, tenant_id: str, name: str) -> AdapterRecord | None:
    try:
        return admin.billing.resolve_model(tenant_id, name)[1]
    except UnknownModel:
        return None


def _copy(source: str, kept: Path) -> None:
    """Keep the adapter's two files in a new folder. Raises `BadRequest`, and never tells what else lies there."""
    folder = Path(source)
    try:
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise BadRequest(f"path: there is no {missing[0]} in that folder on the server", param="path")
        sizes = [(folder / name).stat().st_size for name in FILES]
    except OSError as error:
        raise BadRequest(f"path: cannot be read ({error.strerror})", param="path") from None
    if max(sizes) > BYTES_MAX:
        raise BadRequest(f"path: a file there is larger than {BYTES_MAX} bytes", param="path")
    kept.mkdir(parents=True, mode=0o700)
    if shutil.disk_usage(kept).free - sum(sizes) < FREE_BYTES_MIN:
        raise Unavailable("The server's disk has no room for a copy of this adapter.", code="disk_full")
    try:
        for name in FILES:
            shutil.copyfile(folder / name, kept / name)
            fsync(kept / name)
        fsync(kept)
        fsync(kept.parent)
    except OSError as error:
        raise BadRequest(f"path: cannot be read ({error.strerror})", param="path") from None


async def _drop(admin: AdminState, load_id: str, kept: Path) -> None:
    """Unload when the last request has ended, then delete the copy: only what is ours, never a folder given to us."""
    if admin.engine is not None:
        await admin.engine.unload_adapter(load_id)
    if kept.parent == admin.adapters_dir:
        await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)


def sweep(adapters_dir: Path, known: Collection[str]) -> None:
    """Delete copies whose load no ledger record knows: a kill stood between the copy and the record, or the deletion.

    Nothing is deleted when the ledger knows none of them: it may be another one than theirs.
    """
    copies = [path for path in adapters_dir.glob("*") if path.is_dir() and _LOAD_ID.fullmatch(path.name)]
    stray = [path for path in copies if path.name not in known]
    if not stray:
        return
    if len(stray) == len(copies):
        log.warning("adapter_copies_unknown", folder=str(adapters_dir), count=len(stray))
        return
    for path in stray:
        shutil.rmtree(path, ignore_errors=True)
    log.info("adapter_copies_swept", folder=str(adapters_dir), count=len(stray))


router = Router("/", route_handlers=[add_adapter, list_adapters, remove_adapter], tags=["adapters"])
