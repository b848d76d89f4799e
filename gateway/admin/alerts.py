"""The outbox of alerts: what was told, what arrived, what did not."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from litestar import Router, get, patch
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from billing.alerts import Alert, AlertState
from gateway.admin.acts import begin
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time


class AlertChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What may be changed: it is to be sent (again)."""

    state: Literal["pending"]


class AlertView(msgspec.Struct, kw_only=True):
    """One alert. `id` is the `webhook-id` of every delivery of it."""

    id: str
    kind: str
    state: Annotated[str, Meta(description="pending, delivered, dead, or kept where there is nowhere to send it")]
    created_at: str
    attempts: int
    next_attempt_at: str | None
    last_error: str | None
    message: Annotated[msgspec.Raw, Meta(description="what is sent: type, timestamp, data")]


def show_alert(alert: Alert) -> AlertView:
    return AlertView(
        id=alert.id,
        kind=alert.kind,
        state=alert.state,
        created_at=format_time(alert.created_us),
        attempts=alert.attempts,
        next_attempt_at=format_time(alert.next_us) if alert.state == AlertState.PENDING else None,
        last_error=alert.last_error or None,
        message=msgspec.Raw(alert.body.encode()),
    )


@get("/alerts", sync_to_thread=True)
def list_alerts(
    admin: Admin,
    status: Annotated[AlertState | None, QueryParameter(description="Only those in this state.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Page[AlertView]:
    """List alerts, the newest first."""
    found = admin.alerts.list(status, limit=limit + 1, after=after)
    return page(found, limit, show_alert, lambda alert: alert.id)


@patch("/alerts/{alert_id:str}", sync_to_thread=True)
def send_alert(alert_id: FromPath[str], data: JSONBody[AlertChange], admin: Admin) -> AlertView:
    """Send an alert again, under its id: a dead letter, or one that was lost behind the receiver."""
    begin(admin, "alert.send", alert_id)
    return show_alert(admin.alerts.again(alert_id, admin.clock_us()))


router = Router("/", route_handlers=[list_alerts, send_alert], tags=["alerts"])
