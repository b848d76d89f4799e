"""Who is asking: the bearer key of a request → its tenant.

Knows: the header, and the one answer to everything that is not a valid key. Does not know how keys are kept (`billing`
looks up a hash, in constant time).
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.connection import ASGIConnection

from billing.accounts import Key, Tenant
from billing.errors import TenantSuspended
from billing.service import Billing
from gateway.errors import Unauthorized

MAX_KEY_LENGTH = 256


class Principal(msgspec.Struct, frozen=True):
    """A tenant, by one of its keys."""

    tenant: Tenant
    key: Key


def bearer(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """The bearer token. Raises `Unauthorized` when there is none."""
    header = connection.headers.get("authorization", "")
    scheme, _, token = header.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized(
            "You did not provide an API key: send it as 'Authorization: Bearer mh-…'.",
            headers={"www-authenticate": "Bearer"},
        )
    return token


def authenticate(connection: ASGIConnection[Any, Any, Any, Any], billing: Billing) -> Principal:
    """The principal of a `/v1` request. Unknown, malformed and revoked keys get the same answer.

    Raises `Unauthorized`, and `TenantSuspended` for one whose tenant is suspended.
    """
    principal = key_holder(connection, billing)
    if billing.standing(principal.tenant.id).suspended:
        raise TenantSuspended
    return principal


def key_holder(connection: ASGIConnection[Any, Any, Any, Any], billing: Billing) -> Principal:
    """The same, its tenant suspended or not: for what a suspended tenant may look at. Raises `Unauthorized`."""
    token = bearer(connection)
    found = billing.key_holder(token) if len(token) <= MAX_KEY_LENGTH else None
    if found is None:
        raise Unauthorized("The API key is not valid.", headers={"www-authenticate": "Bearer"})
    key, tenant = found
    return Principal(tenant, key)
