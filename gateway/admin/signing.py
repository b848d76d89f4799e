"""The keys that sign invoices: listed, and rotated. The private halves never leave their gateway."""

from __future__ import annotations

import msgspec
from litestar import Router, get, post

from billing.signing import PublicKey
from gateway.admin.idempotency import Once
from gateway.admin.paging import Page
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class SigningKeyView(msgspec.Struct, kw_only=True):
    """A public key; `this` says that the gateway that answers has the private half, `retired_at` that it signs no
    more."""

    key_id: str
    public_key: str
    this: bool
    published_at: str
    retired_at: str | None


def _show(key: PublicKey, admin: Admin) -> SigningKeyView:
    return SigningKeyView(
        key_id=key.key_id,
        public_key=key.public_key,
        this=key.holder == admin.folder,
        published_at=format_time(key.published_us),
        retired_at=None if key.retired_us is None else format_time(key.retired_us),
    )


@get("/signing-keys", sync_to_thread=True)
def list_signing_keys(admin: Admin) -> Page[SigningKeyView]:
    """List every key that ever signed an invoice, of all gateways."""
    return Page(data=[_show(key, admin) for key in admin.billing.signing_keys()])


@post("/signing-keys", sync_to_thread=True)
def rotate_signing_key(admin: Admin, idempotency: Once) -> SigningKeyView:
    """Let a new key take the place of this gateway's; the old one stays published. Safe to repeat after a failure.

    409 where the key is given by the setting signing_key_file: there another file is the rotation.
    """
    return _show(admin.billing.rotate_signing_key(idempotency=idempotency), admin)


router = Router("/", route_handlers=[list_signing_keys, rotate_signing_key], tags=["signing keys"])
