"""Who may use the admin API: the bearer of the admin key, and no tenant."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from billing.service import Billing
from gateway.auth import bearer
from gateway.errors import Forbidden, Unauthorized

Connection = ASGIConnection[Any, Any, Any, Any]


def admin_guard(admin_key: str, billing: Billing) -> Callable[[Connection, BaseRouteHandler], None]:
    """A litestar guard: `Unauthorized` without the admin key, `Forbidden` with a tenant's."""
    expected = hashlib.sha256(admin_key.encode()).digest()

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        given = bearer(connection)
        # Hashes of equal length are compared, so that the time it takes tells neither the key nor its length.
        if hmac.compare_digest(hashlib.sha256(given.encode()).digest(), expected):
            return
        if billing.authenticate(given) is not None:
            raise Forbidden("A tenant's key cannot use the admin API.")
        raise Unauthorized("The admin key is not valid.", headers={"www-authenticate": "Bearer"})

    return guard
