"""Events and their signed delivery to a URL: on demand, at least once, in any order.

The signature is Stripe's scheme v1: HMAC-SHA256 over `timestamp.body`, in `Stripe-Signature`
(https://docs.stripe.com/webhooks#verify-manually).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import urllib.error
import urllib.request
from collections.abc import Sequence

from tests.doubles.stripe.errors import missing
from tests.doubles.stripe.forms import CREATED, EXPAND, PAGE, Param, text
from tests.doubles.stripe.state import Object, Params, Route, State, created_within, page


def signature(body: bytes, secret: str, timestamp: int) -> str:
    mac = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"t={timestamp},v1={mac.hexdigest()}"


def deliver(
    events: Sequence[Object],
    url: str,
    secret: str,
    *,
    timestamp: int,
    repeat: int = 1,
    shuffle: random.Random | None = None,
    timeout_s: float = 10.0,
) -> list[int]:
    """POST every event `repeat` times, in the order of `shuffle`. The HTTP status of each delivery."""
    queue = list(events) * repeat
    if shuffle is not None:
        shuffle.shuffle(queue)
    statuses = []
    for event in queue:
        body = json.dumps(event, indent=2).encode()
        headers = {"Content-Type": "application/json", "Stripe-Signature": signature(body, secret, timestamp)}
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                statuses.append(answer.status)
        except urllib.error.HTTPError as refusal:
            statuses.append(refusal.code)
            refusal.close()
    return statuses


def list_all(state: State, params: Params) -> Object:
    found = [
        event for event in state.events if params.get("type") in (None, event["type"]) and created_within(event, params)
    ]
    return page(found, params, "/v1/events")


def retrieve(state: State, params: Params, ident: str) -> Object:
    known = {event["id"]: event for event in state.events}
    if ident not in known:
        raise missing("event", ident)
    return known[ident]


ROUTES = [
    Route("GET", "/v1/events", list_all, {**PAGE, "created": CREATED, "type": Param(text())}),
    Route("GET", "/v1/events/([^/]+)", retrieve, EXPAND),
]
