"""Who may use the admin API: the bearer of an admin key, as far as its role goes, and no tenant.

The bootstrap key (setting or key file) is an owner. A named key is an owner, may change what has to do with money, or
only reads. What is not named here is for owners: a new route is closed to the others until somebody opens it.

Who calls stands in `ACTOR` from here on, so that every event that follows says who it was. A command of a known admin
that is refused, here or by what it asked for, is an event too; a caller with no valid key is not, or anybody could grow
the ledger.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request, Response
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from billing.admins import CommandRefused, Role
from billing.service import Billing
from billing.service.shell import ACTOR
from gateway import paths
from gateway.admin.refusals import Refusals
from gateway.auth import MAX_KEY_LENGTH, bearer
from gateway.errors import ErrorBody, Forbidden, Unauthorized, api_error, handle

Connection = ASGIConnection[Any, Any, Any, Any]
BOOTSTRAP = "admin"  # the actor of the bootstrap key
READS = frozenset({"GET", "HEAD", "OPTIONS"})
READING_POSTS = frozenset({"/prices/simulation"})
"""What is asked for with a body and changes nothing: for every role, and no command to be noted when it is refused."""

REASON_MAX = 300

MONEY = re.compile(
    r"/(prices|invoices|usage|alerts|meters|stripe|margin|credits|grants|budgets|discounts|credit-notes)(/.*)?"
    r"|/tenants/[^/]+/(credits|grants|budgets|top-up|invoices|discounts|commitment|tax|suspend|reactivate)(/.*)?"
)
"""What the role `billing` may change: paths behind the admin API's own."""


def admin_guard(admin_key: str, billing: Billing) -> Callable[[Connection, BaseRouteHandler], Awaitable[None]]:
    """A litestar guard: `Unauthorized` without an admin key, `Forbidden` with a tenant's or for a role's limits."""
    expected = hashlib.sha256(admin_key.encode()).digest()

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:  # on a thread `ACTOR` would be set for nobody
        ACTOR.set("")
        given = bearer(connection)
        # Hashes of equal length are compared, so that the time it takes tells neither the key nor its length.
        if hmac.compare_digest(hashlib.sha256(given.encode()).digest(), expected):
            ACTOR.set(BOOTSTRAP)
            return
        key = billing.admin_by_secret(given) if len(given) <= MAX_KEY_LENGTH else None
        if key is None and len(given) <= MAX_KEY_LENGTH and billing.key_holder(given) is not None:
            raise Forbidden("A tenant's key cannot use the admin API.")
        if key is None:
            raise Unauthorized("The admin key is not valid.", headers={"www-authenticate": "Bearer"})
        ACTOR.set(key.actor)
        path = connection.url.path.removeprefix(paths.ADMIN)
        if not may(key.role, str(connection.scope.get("method", "")), path):
            raise Forbidden(f"The role of this admin key, {key.role}, does not allow this.")

    return guard


def reads(method: str, path: str) -> bool:
    """Whether a call changes nothing; `path` is behind the admin API's own."""
    return method in READS or (method == "POST" and path in READING_POSTS)


def may(role: Role, method: str, path: str) -> bool:
    """Whether a role may make a call; `path` is behind the admin API's own."""
    if role is Role.OWNER or reads(method, path):
        return True
    return role is Role.BILLING and MONEY.fullmatch(path) is not None and ".." not in path


def noting(
    billing: Billing, spawn: Callable[[Any], object]
) -> Callable[[Request[Any, Any, Any], Exception], Response[ErrorBody]]:
    """An exception handler that answers as every other, and writes down what a known admin was refused."""
    refusals = Refusals(time.monotonic)

    def refused(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
        if reads(request.method, request.url.path.removeprefix(paths.ADMIN)) or not (actor := ACTOR.get()):
            return handle(request, error)
        omitted = refusals.noted(actor)
        if omitted is not None:
            answer = api_error(error)
            before = f" (and {omitted} more before it)" if omitted else ""
            note = CommandRefused(
                method=request.method,
                path=request.url.path[:REASON_MAX],
                status=answer.status,
                code=answer.code or "",
                reason=answer.message[: REASON_MAX - len(before)] + before,
            )
            spawn(asyncio.to_thread(billing.note_refused, note))  # with this context, so under the same actor
        return handle(request, error)

    return refused
