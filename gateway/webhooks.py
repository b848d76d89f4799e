"""Stripe's messages at the door: `POST /webhooks/stripe`, behind no key but behind Stripe's signature.

Knows: HTTP. Does not know what a message means (`billing.webhooks`). An answer of 2xx tells Stripe that the message is
done with, whatever it was about; 503 asks for it again; 400 is for what Stripe did not sign, or not now.
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from billing.errors import ExportError, LedgerUnavailable
from billing.service.payments import TooEarly
from billing.webhooks import StripeWebhooks, WebhookRefused
from gateway.errors import BadRequest, BodyTooLarge, ErrorBody, NotFound, Unavailable
from gateway.telemetry import Telemetry

MAX_BYTES = 1 << 20
TOGETHER = 4  # messages that are worked on at once: each may ask Stripe
KNOWN = frozenset({"moved", "unchanged", "duplicate"})


class StripeDoor:
    """The endpoint's state. Without `webhooks` there is no such endpoint."""

    def __init__(self, webhooks: StripeWebhooks | None, telemetry: Telemetry) -> None:
        self._webhooks = webhooks
        self._telemetry = telemetry
        self._room = asyncio.Semaphore(TOGETHER)

    async def take(self, raw: bytes, signature: str) -> str:
        """What became of a message. Raises `ApiError`."""
        if self._webhooks is None:
            raise NotFound("Stripe's messages are not taken here: stripe_webhook_secret is not set.")
        if len(raw) > MAX_BYTES:
            raise BodyTooLarge(f"A message has at most {MAX_BYTES} bytes.")
        async with self._room:
            try:
                outcome = await asyncio.to_thread(self._webhooks.receive, raw, signature)
            except WebhookRefused as refused:
                self._count("refused")
                raise BadRequest(f"This is not a message of Stripe's: {refused}.", code="invalid_signature") from None
            except (TooEarly, ExportError, LedgerUnavailable) as error:
                self._count("again")
                raise Unavailable("The message cannot be taken now; send it again.", code="not_now") from error
        self._count(outcome if outcome in KNOWN else "ignored")
        return outcome

    def _count(self, outcome: str) -> None:
        self._telemetry["meterhouse_webhooks_total"].labels(outcome).inc()


ANSWERS = {
    400: ResponseSpec(ErrorBody, generate_examples=False, description="Stripe did not sign this, or not lately."),
    503: ResponseSpec(ErrorBody, generate_examples=False, description="To be sent again."),
}


@post("/webhooks/stripe", status_code=200, tags=["Webhooks"], responses=ANSWERS)
async def stripe_webhook(
    request: Request[Any, Any, Any], stripe_door: NamedDependency[StripeDoor]
) -> Response[dict[str, str]]:
    """A message of Stripe's about an invoice, signed by it."""
    outcome = await stripe_door.take(await request.body(), request.headers.get("stripe-signature", ""))
    return Response({"outcome": outcome}, status_code=200)
