"""The gateways on this ledger: how far each has stored its usage; taking over or giving up one that is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from litestar import Router, delete, get, put
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from billing.errors import Conflict
from billing.gateways import GatewayRow
from gateway.admin.acts import begin
from gateway.admin.paging import Page
from gateway.admin.state import Admin, AdminState
from gateway.admin.times import format_time
from gateway.adopt import adopt


class GatewayView(msgspec.Struct, kw_only=True):
    """A gateway that holds, or may hold, usage that is not stored yet; none that stopped with everything stored."""

    id: str
    alive: Annotated[bool, Meta(description="seen in the last 15 seconds")]
    this: Annotated[bool, Meta(description="the one that answers")]
    stored_until: Annotated[str, Meta(description="all its usage that began before is stored: no invoice is cut past")]
    seen_at: str
    started_at: str


def show_gateway(row: GatewayRow, admin: AdminState) -> GatewayView:
    return GatewayView(
        id=row.id,
        alive=row.alive(admin.clock_us()),
        this=row.folder == admin.folder,
        stored_until=format_time(row.watermark_us),
        seen_at=format_time(row.seen_us),
        started_at=format_time(row.started_us),
    )


@get("/gateways", sync_to_thread=True)
def list_gateways(admin: Admin) -> Page[GatewayView]:
    """List the gateways on this ledger; there are few, on one page."""
    return Page(data=[show_gateway(row, admin) for row in admin.gateways.all()])


class GatewayAdopt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where what the gateway left lies."""

    path: Annotated[str, Meta(min_length=1, max_length=4096, description="its data folder, on this server")]


class AdoptedView(msgspec.Struct, kw_only=True):
    """What was taken over."""

    gateway: str
    settled: Annotated[int, Meta(description="requests that were running when it died")]
    delivered: Annotated[int, Meta(description="settled requests that the usage store did not have")]


@put("/gateways/{gateway_id:str}/adoption")
async def adopt_gateway(gateway_id: FromPath[str], data: JSONBody[GatewayAdopt], admin: Admin) -> AdoptedView:
    """Settle and deliver what a gateway that is gone left in its data folder, and take it off the list. 409 while a
    server runs on the folder.

    May be repeated: nothing is settled or counted twice.
    """
    await asyncio.to_thread(begin, admin, "gateway.adopt", gateway_id)
    adopted = await admin.read(
        adopt,
        gateway_id,
        Path(data.path),
        gateways=admin.gateways,
        billing=admin.billing,
        usage=admin.usage,
        clock_us=admin.clock_us,
    )
    return AdoptedView(gateway=adopted.gateway, settled=adopted.settled, delivered=adopted.delivered)


@delete("/gateways/{gateway_id:str}", sync_to_thread=True)
def remove_gateway(gateway_id: FromPath[str], admin: Admin) -> None:
    """Give up a gateway whose data folder is lost, so that invoices no longer wait for it. 409 while it is alive.

    Usage that its folder holds and that is delivered after all will be late, on the next invoice.
    """
    if any(row.id == gateway_id and row.folder == admin.folder for row in admin.gateways.all()):
        raise Conflict("this is the gateway that answers: it removes itself when it stops with everything stored")
    begin(admin, "gateway.remove", gateway_id)
    admin.gateways.remove(gateway_id, admin.clock_us())


router = Router("/", route_handlers=[list_gateways, adopt_gateway, remove_gateway], tags=["gateways"])
