"""`GET /v1/usage/events`: a tenant's own events, one canonical line of JSON each (`metering/receipts.py`).

By time and id. Without `limit` all of them, streamed: pages are read as the client takes them, and nothing of the store
is held in between. With `limit` one page, and `x-next-cursor` where there are more. What was settled a moment ago may
not be stored yet; it is about a second later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter
from litestar.response import Stream

from billing.accounts import Tenant
from billing.invoice import Invoice
from gateway.admin.ranges import DAY_US, parse_range
from gateway.billing.desk import Desk
from gateway.billing.turns import begun
from gateway.errors import invalid
from metering.events import UsageEvent
from metering.paging import Cursor, Pages
from metering.receipts import leaf_bytes

MAX_DAYS = 366
MAX_LIMIT = 10_000
PAGE = 2_000
JSONL = "application/jsonl"
NEXT = "x-next-cursor"


class Events:
    """What one request asks for, page by page."""

    def __init__(self, desk: Desk, tenant: Tenant, invoice: Invoice | None, pages: Pages) -> None:
        self._desk = desk
        self._tenant = tenant
        self._invoice = invoice
        self._pages = pages

    async def all(self) -> AsyncGenerator[bytes, None]:
        """The lines, a page at a time."""
        with self._desk.turns.seat(self._tenant.id):
            while page := await self._desk.read(self._tenant, self._pages.next):
                if lines := _lines(await self._kept(page)):
                    yield lines

    async def some(self, limit: int) -> tuple[bytes, Cursor | None]:
        """The lines of the first `limit`, and where to go on if there are more."""
        found: list[UsageEvent] = []
        with self._desk.turns.seat(self._tenant.id):
            while len(found) <= limit and (page := await self._desk.read(self._tenant, self._pages.next)):
                found += await self._kept(page)
        return _lines(found[:limit]), Cursor.of(found[limit - 1]) if len(found) > limit else None

    async def _kept(self, page: list[UsageEvent]) -> list[UsageEvent]:
        if self._invoice is None:
            return page
        return await self._desk.read(self._tenant, self._desk.billing.on_invoice, self._invoice, page)


def _lines(events: Sequence[UsageEvent]) -> bytes:
    return b"".join(leaf_bytes(event) + b"\n" for event in events)


def _cursor(after: str | None) -> Cursor | None:
    try:
        return None if after is None else Cursor.parse(after)
    except ValueError:
        raise invalid("after", "is not the cursor of a page") from None


@get("/v1/usage/events", media_type=JSONL)
async def usage_events(
    request: Request[Any, Any, Any],
    desk: NamedDependency[Desk],
    start: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds; default: a day ago.")] = None,
    end: Annotated[str | None, QueryParameter(description="RFC 3339 or epoch seconds, excluded; default: now.")] = None,
    invoice: Annotated[
        str | None, QueryParameter(description="All events of this invoice, late ones too, instead of a range.")
    ] = None,
    after: Annotated[str | None, QueryParameter(description=f"The `{NEXT}` of the page before.")] = None,
    limit: Annotated[
        int | None, QueryParameter(ge=1, le=MAX_LIMIT, description="At most so many, as one page; default: all.")
    ] = None,
) -> Response[Any]:
    """Show the tenant's own requests, one line of JSON each, by time and id."""
    tenant = desk.tenant(request)
    cursor = _cursor(after)
    asked: Invoice | None = None
    if invoice is not None:
        if start is not None or end is not None:
            raise invalid("invoice", "is asked for instead of start and end")
        asked = desk.invoice(tenant, invoice)
        ranges = desk.billing.invoice_ranges(asked)
    else:
        ranges = [
            parse_range(
                start,
                end,
                default_start=lambda end_us: max(0, end_us - DAY_US),
                default_end_us=desk.now_us(),
                max_days=MAX_DAYS,
            )
        ]
    size = PAGE if limit is None or asked is not None else min(PAGE, limit + 1)
    pages = Pages(
        lambda start_us, end_us: desk.usage.events(tenant.id, start_us, end_us), ranges, size=size, after=cursor
    )
    events = Events(desk, tenant, asked, pages)
    if limit is None:
        return Stream(await begun(events.all()), media_type=JSONL)
    lines, following = await events.some(limit)
    return Response(lines, media_type=JSONL, headers={} if following is None else {NEXT: str(following)})
