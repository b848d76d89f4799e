"""Billing meters, their events and summaries (https://docs.stripe.com/api/billing/meter-event)."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from tests.doubles.stripe.errors import refused
from tests.doubles.stripe.forms import EXPAND, PAGE, Param, choice, group, integer, metadata, text
from tests.doubles.stripe.state import Object, Params, Route, State, page

OLDEST_S = 35 * 86400
NEWEST_S = 300
UNIQUE_S = 24 * 3600


def create(state: State, params: Params) -> Object:
    if any(m["event_name"] == params["event_name"] and m["status"] == "active" for m in state.all("meter")):
        raise refused(f"There is already an active meter with event name {params['event_name']}", param="event_name")
    now = state.clock.now()
    meter: Object = {
        "id": state.mint("mtr"),
        "object": "billing.meter",
        "created": now,
        "customer_mapping": params.get(
            "customer_mapping", {"event_payload_key": "stripe_customer_id", "type": "by_id"}
        ),
        "default_aggregation": params["default_aggregation"],
        "display_name": params["display_name"],
        "event_name": params["event_name"],
        "event_time_window": params.get("event_time_window"),
        "livemode": False,
        "status": "active",
        "status_transitions": {"deactivated_at": None},
        "updated": now,
        "value_settings": params.get("value_settings", {"event_payload_key": "value"}),
    }
    return state.add("meter", meter, event="billing.meter.created")


def _switch(status: str, event: str) -> Callable[..., Object]:
    def handle(state: State, params: Params, ident: str) -> Object:
        meter = state.get("meter", ident)
        if meter["status"] == status:
            raise refused(f"The meter is already {status}")
        now = state.clock.now()
        meter.update(status=status, updated=now)
        meter["status_transitions"]["deactivated_at"] = now if status == "inactive" else None
        state.touch(meter, event)
        return meter

    return handle


def retrieve(state: State, params: Params, ident: str) -> Object:
    return state.get("meter", ident)


def list_all(state: State, params: Params) -> Object:
    found = [meter for meter in state.all("meter") if params.get("status") in (None, meter["status"])]
    return page(found, params, "/v1/billing/meters")


def record(state: State, params: Params) -> Object:
    """One event. A second one with its identifier is a 400, which says that the first was delivered."""
    now = state.clock.now()
    meter = next((m for m in state.all("meter") if m["event_name"] == params["event_name"]), None)
    if meter is None or meter["status"] != "active":
        raise refused(
            f"No active meter found for event name {params['event_name']}", code="no_meter", param="event_name"
        )
    at = params.get("timestamp", now)
    if at < now - OLDEST_S:
        raise refused("The timestamp is older than 35 days", code="timestamp_too_far_in_past", param="timestamp")
    if at > now + NEWEST_S:
        raise refused("The timestamp is over 5 minutes in the future", code="timestamp_in_future", param="timestamp")
    _payload_fits(meter, params["payload"])
    ident = params.get("identifier") or state.mint("mtrevt")
    known = state.objects.get("meter_event", {}).get(ident)
    if known is not None and now - known["created"] < UNIQUE_S:
        raise refused(f"An event already exists with identifier {ident}.", param="identifier")
    event: Object = {
        "object": "billing.meter_event",
        "created": now,
        "event_name": params["event_name"],
        "identifier": ident,
        "livemode": False,
        "payload": params["payload"],
        "timestamp": at,
    }
    state.objects.setdefault("meter_event", {})[ident] = event
    state.objects.setdefault("metered", {})[state.mint("fact")] = {**event, "meter": meter["id"]}
    return event


def _payload_fits(meter: Object, payload: Object) -> None:
    for key in (meter["customer_mapping"]["event_payload_key"], meter["value_settings"]["event_payload_key"]):
        if not payload.get(key):
            raise refused(f"The payload lacks {key}", code="parameter_missing", param=f"payload[{key}]")
    value_key = meter["value_settings"]["event_payload_key"]
    if not re.fullmatch(r"-?\d{1,15}(\.\d{1,12})?", payload[value_key]):
        raise refused(
            f"Invalid value: {payload[value_key]}",
            code="meter_event_invalid_value",
            param=f"payload[{value_key}]",
        )


def adjust(state: State, params: Params) -> Object:
    """Cancels an event received within the last 24 hours."""
    ident = params["cancel"]["identifier"]
    event = state.get("meter_event", ident, "cancel[identifier]", status=400)
    if state.clock.now() - event["created"] >= UNIQUE_S:
        raise refused("The event is older than 24 hours", param="cancel[identifier]")
    facts = state.objects["metered"]
    for fact in [name for name, thing in facts.items() if thing["identifier"] == ident]:
        del facts[fact]
    return {
        "object": "billing.meter_event_adjustment",
        "cancel": {"identifier": ident},
        "event_name": params["event_name"],
        "livemode": False,
        "status": "complete",
        "type": "cancel",
    }


def summaries(state: State, params: Params, ident: str) -> Object:
    meter = state.get("meter", ident)
    width = {"hour": 3600, "day": 86400, None: 60}[params.get("value_grouping_window")]
    start, end = params["start_time"], params["end_time"]
    if start % width or end % width or end <= start:
        raise refused("start_time and end_time must be aligned and in order", param="start_time")
    step = width if "value_grouping_window" in params else end - start
    key = meter["customer_mapping"]["event_payload_key"]
    facts = [
        fact for fact in state.all("metered") if fact["meter"] == ident and fact["payload"][key] == params["customer"]
    ]
    found = []
    for begin in range(start, end, step):
        part = [fact for fact in facts if begin <= fact["timestamp"] < begin + step]
        if part or "value_grouping_window" not in params:
            found.append(_summary(meter, part, begin, begin + step))
    return page(found, params, f"/v1/billing/meters/{ident}/event_summaries")


def _summary(meter: Object, facts: list[Object], start: int, end: int) -> Object:
    values = [Decimal(fact["payload"][meter["value_settings"]["event_payload_key"]]) for fact in facts]
    formula = meter["default_aggregation"]["formula"]
    total = Decimal(len(values)) if formula == "count" else sum(values, Decimal(0))
    if formula == "last":
        total = values[-1] if values else Decimal(0)
    return {
        "id": f"mtrusg_{meter['id']}_{start}",
        "object": "billing.meter_event_summary",
        "aggregated_value": float(total),  # as Stripe answers: a JSON number
        "end_time": end,
        "livemode": False,
        "meter": meter["id"],
        "start_time": start,
    }


_KEY = {"event_payload_key": Param(text(100), required=True)}
_CREATE = {
    "display_name": Param(text(250), required=True),
    "event_name": Param(text(100), required=True),
    "default_aggregation": Param(
        group({"formula": Param(choice("sum", "count", "last"), required=True)}), required=True
    ),
    "customer_mapping": Param(group({**_KEY, "type": Param(choice("by_id"), required=True)})),
    "value_settings": Param(group(_KEY)),
    "event_time_window": Param(choice("hour", "day")),
    **EXPAND,
}
_EVENT = {
    "event_name": Param(text(100), required=True),
    "payload": Param(metadata, required=True),
    "identifier": Param(text(100)),
    "timestamp": Param(integer(0)),
    **EXPAND,
}
_ADJUST = {
    "event_name": Param(text(100), required=True),
    "type": Param(choice("cancel"), required=True),
    "cancel": Param(group({"identifier": Param(text(100), required=True)}), required=True),
    **EXPAND,
}
_SUMMARIES = {
    **PAGE,
    "customer": Param(text(), required=True),
    "start_time": Param(integer(0), required=True),
    "end_time": Param(integer(0), required=True),
    "value_grouping_window": Param(choice("hour", "day")),
}

ROUTES = [
    Route("POST", "/v1/billing/meters", create, _CREATE),
    Route("GET", "/v1/billing/meters", list_all, {**PAGE, "status": Param(choice("active", "inactive"))}),
    Route("GET", "/v1/billing/meters/([^/]+)", retrieve, EXPAND),
    Route("POST", "/v1/billing/meters/([^/]+)/deactivate", _switch("inactive", "billing.meter.deactivated"), EXPAND),
    Route("POST", "/v1/billing/meters/([^/]+)/reactivate", _switch("active", "billing.meter.reactivated"), EXPAND),
    Route("GET", "/v1/billing/meters/([^/]+)/event_summaries", summaries, _SUMMARIES),
    Route("POST", "/v1/billing/meter_events", record, _EVENT),
    Route("POST", "/v1/billing/meter_event_adjustments", adjust, _ADJUST),
]
