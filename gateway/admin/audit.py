"""Admin keys, and the audit: who did what, who was refused what."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Router, delete, get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from billing.admins import AdminKey, Role
from billing.audit import Entry
from billing.errors import Invalid
from gateway.admin.body import refuse
from gateway.admin.fields import Text, time_fault
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time, parse_time

FOREVER_US = 2**62


class AdminKeyCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key of the admin API for one person or program."""

    name: Text
    role: Role


class AdminKeyView(msgspec.Struct, kw_only=True):
    """An admin key. `key`, the secret, is shown when it is made and never again."""

    id: str
    name: str
    role: str
    prefix: str
    created_at: str
    revoked_at: str | None
    key: str | None = None


class EntryView(msgspec.Struct, kw_only=True):
    """One decision, as the ledger has it."""

    event: Annotated[int, Meta(description="its number in the ledger")]
    at: str
    actor: Annotated[
        str, Meta(description="admin: the bootstrap key; admin:<id>: a named one; else a part of the system")
    ]
    actor_name: str | None
    type: str
    idempotency_key: str | None
    detail: dict[str, Any]


def _show_key(key: AdminKey, secret: str | None = None) -> AdminKeyView:
    return AdminKeyView(
        id=key.id,
        name=key.name,
        role=key.role,
        prefix=key.prefix,
        created_at=format_time(key.created_us),
        revoked_at=None if key.revoked_us is None else format_time(key.revoked_us),
        key=secret,
    )


@post("/admin-keys", sync_to_thread=True)
def create_admin_key(data: JSONBody[AdminKeyCreate], admin: Admin, idempotency: Once) -> AdminKeyView:
    """Make an admin key; its secret is in this answer and nowhere else."""
    return _show_key(*admin.billing.create_admin_key(data.name, data.role, idempotency=idempotency))


@get("/admin-keys", sync_to_thread=True)
def list_admin_keys(admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[AdminKeyView]:
    """List admin keys, revoked ones too."""
    return page(admin.billing.admin_keys(limit=limit + 1, after=after), limit, _show_key, lambda key: key.id)


@delete("/admin-keys/{key_id:str}", sync_to_thread=True)
def revoke_admin_key(key_id: FromPath[str], admin: Admin) -> None:
    """Revoke an admin key: it opens nothing from now on."""
    admin.billing.revoke_admin_key(key_id)


@get("/audit", sync_to_thread=True)
def list_audit(
    admin: Admin,
    actor: Annotated[str | None, QueryParameter(description="Only of this actor.", max_length=200)] = None,
    kind: Annotated[
        str | None, QueryParameter(description="Only events of this type, or as invoice.* of these.", max_length=100)
    ] = None,
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Page[EntryView]:
    """List who did what, the newest first: all that was decided, refused commands too. Charges are not in it."""
    refuse([fault for field, text in (("start", start), ("end", end)) if text for fault in time_fault(field, text)])
    names = {key.actor: key.name for key in admin.billing.admin_keys(limit=10_000)}
    found = admin.audit.entries(
        actor=actor,
        type=kind,
        from_us=parse_time(start) if start else 0,
        to_us=parse_time(end) if end else FOREVER_US,
        before=_number(after),
        limit=limit + 1,
    )
    return page(found, limit, lambda entry: _show_entry(entry, names), lambda entry: str(entry.seq))


def _number(after: str | None) -> int | None:
    if after is None:
        return None
    if not (after.isascii() and after.isdigit() and len(after) < 19):
        raise Invalid([("after", "is not the `next` of a page")])
    return int(after)


def _show_entry(entry: Entry, names: dict[str, str]) -> EntryView:
    return EntryView(
        event=entry.seq,
        at=format_time(entry.time_us),
        actor=entry.actor,
        actor_name=names.get(entry.actor),
        type=entry.type,
        idempotency_key=entry.key,
        detail=entry.payload,
    )


router = Router("/", route_handlers=[create_admin_key, list_admin_keys, revoke_admin_key, list_audit], tags=["audit"])
