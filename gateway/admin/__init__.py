"""The admin API: everything under `/admin/v1`, one file a resource.

Knows: routes, bodies, who may call. Does not know: how anything is decided (billing), counted (metering) or
served (engine). `admin_router(state)` is what the composition root mounts; it closes the state at shutdown.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, Router
from litestar.di import Provide

from gateway import paths
from gateway.admin import (
    adapters,
    archives,
    backups,
    budgets,
    credit_notes,
    credits,
    dunning,
    gateways,
    invoices,
    keys,
    prices,
    reconcile,
    rollups,
    suspensions,
    tenants,
    unrated,
    usage,
)
from gateway.admin.alerts import router as alerts_router
from gateway.admin.audit import router as audit_router
from gateway.admin.body import check_body
from gateway.admin.due import router as due_router
from gateway.admin.guard import admin_guard, noting
from gateway.admin.idempotency import provide_idempotency
from gateway.admin.margin import router as margin_router
from gateway.admin.meters import router as meters_router
from gateway.admin.query import check_query
from gateway.admin.replay import router as replay_router
from gateway.admin.signing import router as signing_router
from gateway.admin.simulation import router as simulation_router
from gateway.admin.state import AdminState
from gateway.admin.statements import router as statements_router
from gateway.admin.terms import router as terms_router

ADMIN_SCHEME = "adminKey"  # what OpenAPI calls the bearer key of these routes

__all__ = ["ADMIN_SCHEME", "AdminState", "admin_router"]


async def check_request(request: Request[Any, Any, Any]) -> None:
    """A `before_request` hook: what litestar would let pass is refused."""
    check_query(request)
    await check_body(request)


def admin_router(state: AdminState) -> Router:
    """All admin routes over `state`, behind the admin key."""

    def provide_admin() -> AdminState:
        return state

    return Router(
        paths.ADMIN,
        route_handlers=[
            tenants.router,
            suspensions.router,
            keys.router,
            adapters.router,
            prices.router,
            simulation_router,
            credits.router,
            terms_router,
            budgets.router,
            usage.router,
            unrated.router,
            due_router,
            invoices.router,
            credit_notes.router,
            dunning.router,
            statements_router,
            reconcile.router,
            rollups.router,
            archives.router,
            backups.router,
            gateways.router,
            audit_router,
            alerts_router,
            margin_router,
            meters_router,
            signing_router,
            replay_router,
        ],
        dependencies={
            "admin": Provide(provide_admin, sync_to_thread=False),
            "idempotency": Provide(provide_idempotency),
        },
        guards=[admin_guard(state.admin_key, state.billing)],
        exception_handlers={Exception: noting(state.billing, state.spawn)},
        before_request=check_request,
        security=[{ADMIN_SCHEME: []}],
    )
