"""Usage that could not be charged: what it is, and charging it once there is a price."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, post
from litestar.params import QueryParameter
from msgspec import Meta

from billing.ledger import Unrated
from gateway.admin.acts import begin
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class UnratedView(msgspec.Struct, kw_only=True):
    """A request that was served and is on nobody's bill."""

    event_id: str
    tenant: str
    model: str
    started_at: str
    reason: Annotated[str, Meta(description="`no price`, which a price cures, or what is wrong with the event")]


class Rated(msgspec.Struct, kw_only=True):
    """What one call charged; 0 when nothing is left that has a price."""

    rated: int


def show_unrated(one: Unrated) -> UnratedView:
    return UnratedView(
        event_id=one.event_id,
        tenant=one.tenant,
        model=one.model,
        started_at=format_time(one.ts_us),
        reason=one.reason,
    )


@get("/usage/unrated", sync_to_thread=True)
def list_unrated(
    admin: Admin,
    tenant: Annotated[str | None, QueryParameter(description="Only this tenant's.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Page[UnratedView]:
    """List usage without a charge in the order it was recorded; the invoice of its period waits for it."""
    found = admin.billing.unrated(tenant, limit=limit + 1, after=after)
    return page(found, limit, show_unrated, lambda one: one.event_id)


@post("/usage/rate", status_code=200, sync_to_thread=True)
def rate_usage(admin: Admin, idempotency: Once) -> Rated:
    """Charge usage that has a price in today's book: one that is `effective_at` its start or before.

    Some thousands in one call; repeat it until `rated` is 0.
    """
    begin(admin, "usage.rate")  # the charges that follow are left out of the audit
    return Rated(rated=admin.billing.rate_unrated(idempotency=idempotency))


router = Router("/", route_handlers=[list_unrated, rate_usage], tags=["usage"])
