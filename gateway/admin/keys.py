"""API keys of a tenant: the secret is shown once and kept only as a hash."""

from __future__ import annotations

import msgspec
from litestar import Router, delete, get, post
from litestar.params import FromPath, JSONBody

from billing.accounts import Key
from gateway.admin.fields import Text
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class KeyCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new key for a tenant; `name` is for people."""

    name: Text


class KeyView(msgspec.Struct, kw_only=True):
    """A key without its secret; `prefix` is enough of it to recognise it."""

    id: str
    tenant: str
    name: str
    prefix: str
    created_at: str
    revoked_at: str | None


class KeyCreated(KeyView, kw_only=True):
    """The one answer that carries the secret; a repeated call with the same Idempotency-Key has null."""

    key: str | None


def _shown(key: Key) -> dict[str, str | None]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "prefix": key.prefix,
        "created_at": format_time(key.created_us),
        "revoked_at": format_time(key.revoked_us) if key.revoked_us is not None else None,
    }


def show_key(key: Key) -> KeyView:
    return msgspec.convert(_shown(key), KeyView)


@post("/tenants/{tenant_id:str}/keys", sync_to_thread=True)
def create_key(tenant_id: FromPath[str], data: JSONBody[KeyCreate], admin: Admin, idempotency: Once) -> KeyCreated:
    """Create a key."""
    key, secret = admin.billing.create_key(tenant_id, data.name, idempotency=idempotency)
    return msgspec.convert({**_shown(key), "key": secret}, KeyCreated)


@get("/tenants/{tenant_id:str}/keys", sync_to_thread=True)
def list_keys(
    tenant_id: FromPath[str], admin: Admin, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> Page[KeyView]:
    """List a tenant's keys, revoked ones too."""
    found = admin.billing.keys(tenant_id, limit=limit + 1, after=after)
    return page(found, limit, show_key, lambda key: key.id)


@delete("/keys/{key_id:str}", sync_to_thread=True)
def revoke_key(key_id: FromPath[str], admin: Admin) -> None:
    """Revoke a key: requests that run end as they would, new ones are refused at once."""
    admin.billing.revoke_key(key_id)


router = Router("/", route_handlers=[create_key, list_keys, revoke_key], tags=["keys"])
