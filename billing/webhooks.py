"""Stripe's webhooks: is this message Stripe's, is it new enough, and what does it say of which of our invoices.

Knows: signatures (several secrets, while one is replaced), the tolerance in both directions, the fields that are read.
Does not know: what follows (`billing.provider`), HTTP. The library refuses what is too old and takes what is signed for
the far future, which would be as good as never too old; that is refused here.

https://docs.stripe.com/webhooks#verify-official-libraries
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import stripe

from billing.errors import BillingError
from billing.provider import ProviderEvent, ProviderInvoice
from billing.service import Billing
from billing.stripe import INVOICE_KEY, StripeExporter

TOLERANCE_S = 300


class WebhookRefused(BillingError):
    """Not a message of Stripe's to us, or not one of now."""


class _Data(msgspec.Struct):
    object: dict[str, Any]


class _Event(msgspec.Struct):
    """The fields that are read of a message; Stripe adds others at any time."""

    id: str
    type: str
    created: int
    data: _Data
    object: str
    livemode: bool = False
    account: str | None = None


_decoder = msgspec.json.Decoder(_Event)


def verified(raw: bytes, signature: str, secrets: Sequence[str], now_s: float) -> _Event:
    """The message, if one of the secrets signed it within `TOLERANCE_S` of now. Raises `WebhookRefused`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise WebhookRefused("the body is not UTF-8") from None
    if not any(_signed(text, signature, secret) for secret in secrets):
        raise WebhookRefused("the signature is missing, wrong or too old")
    if _stamp(signature) > now_s + TOLERANCE_S:
        raise WebhookRefused("the signature's time is in the future")
    try:
        event = _decoder.decode(raw)
    except msgspec.MsgspecError:
        raise WebhookRefused("the body is not an event") from None
    if event.object != "event" or not 1 <= len(event.id) <= 200:
        raise WebhookRefused("the body is not an event")
    return event


def _signed(text: str, signature: str, secret: str) -> bool:
    try:
        stripe.WebhookSignature.verify_header(text, signature, secret, TOLERANCE_S)
    except stripe.SignatureVerificationError:
        return False
    except (ValueError, AttributeError):  # a header that the library cannot take apart
        return False
    return True


def _stamp(signature: str) -> int:
    """The time that was signed: the header was verified, so it is there."""
    pairs = (part.split("=", 1) for part in signature.split(","))
    return next(int(value) for name, value in pairs if name.strip() == "t")


class StripeWebhooks:
    """Takes messages for one endpoint. `secrets` are those Stripe may sign with now, at least one."""

    def __init__(
        self,
        billing: Billing,
        exporter: StripeExporter,
        secrets: Sequence[str],
        *,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._billing = billing
        self._exporter = exporter
        self._secrets = tuple(secrets)
        self._clock_s = clock_s

    def receive(self, raw: bytes, signature: str) -> str:
        """What became of it, in a word. Blocking: it may ask Stripe.

        Raises `WebhookRefused`, and when the message has to come again `TooEarly`, `ExportError` or
        `LedgerUnavailable`.
        """
        event = verified(raw, signature, self._secrets, self._clock_s())
        look = self._exporter.look if self._exporter.configured else None
        return self._billing.follow(self._read(event), look)

    def _read(self, event: _Event) -> ProviderEvent:
        told = event.data.object
        ours, snapshot = "", None
        if told.get("object") == "invoice" and isinstance(told.get("id"), str):
            ours = self._our_invoice(told)
            snapshot = _snapshot(told) if ours else None
        return ProviderEvent(
            id=event.id,
            type=event.type[:200],
            created_s=event.created,
            object_id=str(told.get("id", ""))[:200],
            invoice_id=ours,
            ignored=self._ignored(event),
            snapshot=snapshot,
        )

    def _ignored(self, event: _Event) -> str:
        if event.account is not None:
            return "of another account"
        if self._exporter.live is not None and event.livemode != self._exporter.live:
            return "of the other mode"
        return ""

    def _our_invoice(self, told: dict[str, Any]) -> str:
        """The id of ours that it is about; a copy that somebody made of it in Stripe has its metadata and is none."""
        metadata = told.get("metadata")
        id = metadata.get(INVOICE_KEY) if isinstance(metadata, dict) else None
        invoice = self._billing.find_invoice(id) if isinstance(id, str) else None
        if invoice is None or invoice.stripe_invoice_id not in (None, told["id"]):
            return ""
        return invoice.id


def _snapshot(told: dict[str, Any]) -> ProviderInvoice | None:
    status, total, attempts = told.get("status"), told.get("total"), told.get("attempt_count")
    if not isinstance(status, str) or not isinstance(total, int):
        return None
    return ProviderInvoice(
        id=told["id"], status=status, total_minor=total, attempts=attempts if isinstance(attempts, int) else 0
    )
