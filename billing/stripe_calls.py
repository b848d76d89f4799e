"""One call of Stripe's API: its key, its retries, its errors in billing's words, and how a thing is made exactly once.

Knows: idempotency keys, rate limits, which errors mean "again later" and which "a person must look". Does not know:
what is made. With `stripe`, `meters` and `webhooks` the only modules that import the `stripe` package.

https://docs.stripe.com/api/idempotent_requests, https://docs.stripe.com/api/errors
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import stripe

from billing.errors import ExportError, StripeNotConfigured

MAX_KEYS = 32  # spent keys that one thing may leave behind within the 24 hours Stripe keeps them
MAX_FAILURES = 3  # answers 500 to one thing within one export
RATE_LIMIT_TRIES = 6
BACKOFF_S = 0.5
BACKOFF_MAX_S = 16.0
TIMEOUT_S = 30.0

T = TypeVar("T")
Made = TypeVar("Made", bound=stripe.StripeObject)


class StripeUnavailable(ExportError):
    """Stripe did not answer, or not for sure; the same export can be begun again and goes on where it was."""


class StripeRefused(ExportError):
    """Stripe does not accept what we sent; the text is Stripe's own."""


class StripeCalls:
    """Calls with one API key.

    `api_base` is another address of the API (a double in tests). `sleep` waits out rate limits. Raises
    `StripeNotConfigured` from every call when there is no key.
    """

    def __init__(
        self,
        api_key: str | None,
        api_base: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        http_client: stripe.HTTPClient | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._api_key = api_key
        self._api_base = api_base
        self._http_client = http_client or stripe.RequestsClient(timeout=timeout_s)
        self._sleep = sleep
        self._clock_s = clock_s
        self._client: stripe.StripeClient | None = None

    @property
    def configured(self) -> bool:
        """Whether there is a key."""
        return self._api_key is not None

    @property
    def live(self) -> bool | None:
        """Whether the key is of Stripe's live mode; None without a key, and for one that does not say."""
        words = (self._api_key or "").split("_")
        return words[1] == "live" if len(words) > 2 and words[1] in ("live", "test") else None

    def call(self, work: Callable[[stripe.V1Services], T]) -> T:
        """One call by whoever knows what it asks for. Raises `ExportError`."""
        api = self._api()
        return self._call(lambda: work(api))

    def _api(self) -> stripe.V1Services:
        if not self._api_key:
            raise StripeNotConfigured(
                "there is no Stripe key: set STRIPE_API_KEY (or stripe_api_key in meterhouse.toml) to export invoices, "
                "and to void those whose export has begun"
            )
        if self._client is None:
            self._client = stripe.StripeClient(
                self._api_key,
                base_addresses={"api": self._api_base} if self._api_base else None,
                max_network_retries=2,
                http_client=self._http_client,
            )
        return self._client.v1

    def _retrieve(self, invoice_id: str) -> stripe.Invoice | None:
        """The invoice as it is now; None when Stripe has none of this id."""
        return self._there(lambda: self._api().invoices.retrieve(invoice_id))

    def _there(self, retrieve: Callable[[], Made]) -> Made | None:
        """What is asked for by its id; None when Stripe has none of this id (any more)."""
        try:
            found = self._call(retrieve)
        except StripeRefused as refused:
            if isinstance(refused.__cause__, stripe.InvalidRequestError) and refused.__cause__.http_status == 404:
                return None
            raise
        return None if getattr(found, "deleted", None) else found

    def _make(
        self,
        what: str,
        key: str,
        find: Callable[[], Made | None],
        create: Callable[[str], Made],
        again: Callable[[Made], Made | None] | None = None,
    ) -> Made:
        """Make a thing that was looked for and not found.

        Whenever a key is spent, `find` looks again before the next one is used. A replayed answer tells of a thing
        that may be gone since: `again` says what it is now (without it, `find` does).
        """
        failures = 0
        for attempt in range(MAX_KEYS):
            try:
                made = self._call(partial(create, f"{key}-{attempt}"), keyed=True)
            except _KeySpent as spent:
                failures += not spent.replayed
                if failures >= MAX_FAILURES:
                    raise StripeUnavailable(f"Stripe failed on every attempt at this {what}; try again") from spent
                found = find()
            else:
                answer = made.last_response
                if not _replayed(answer.headers if answer else None):
                    return made
                found = again(made) if again else find()
            if found is not None:
                return found
        raise StripeUnavailable(f"too many attempts at this {what} failed within a day; try again tomorrow")

    def _call(self, call: Callable[[], T], *, keyed: bool = False) -> T:
        """One call, its rate limits waited out, its errors in billing's words; with a key also `_KeySpent`."""
        for attempt in range(RATE_LIMIT_TRIES):
            try:
                return call()
            except stripe.RateLimitError as limited:
                if attempt + 1 == RATE_LIMIT_TRIES:
                    raise StripeUnavailable("Stripe's rate limit did not let us through; try again later") from limited
                self._sleep(_wait_s(attempt))
            except stripe.StripeError as error:
                _translate(error, keyed)
        raise AssertionError("the last attempt returns or raises")


class _KeySpent(Exception):
    """The key will only ever give this error (again); the request behind it is over."""

    def __init__(self, replayed: bool) -> None:
        self.replayed = replayed


def _translate(error: stripe.StripeError, keyed: bool) -> NoReturn:
    """Raise what an error of the SDK means for an export."""
    message = error.user_message or type(error).__name__
    if keyed and (isinstance(error, stripe.IdempotencyError) or _replayed(error.headers)):
        raise _KeySpent(replayed=True) from error
    if isinstance(error, stripe.AuthenticationError | stripe.PermissionError):
        raise StripeRefused(f"Stripe does not accept the key: {message}") from error
    if isinstance(error, stripe.APIConnectionError):
        raise StripeUnavailable("Stripe could not be reached; this can be begun again") from error
    body: Any = error.json_body
    if keyed and error.http_status == 500 and isinstance(body, dict) and "error" in body:
        raise _KeySpent(replayed=False) from error
    status = error.http_status or 0
    if status < 400 or status >= 500 or status == 409:  # below 400: an answer that could not be read
        raise StripeUnavailable(f"Stripe answered {status}; this can be begun again") from error
    if "combine currencies" in message:
        raise StripeRefused(
            f"the Stripe customer is in use with another currency than this invoice's. Stripe says: {message}"
        ) from error
    raise StripeRefused(f"Stripe refused: {message}") from error


def _wait_s(attempt: int) -> float:
    """Seconds before the next try: doubling, with jitter, bounded."""
    doubled: float = BACKOFF_S * 2**attempt
    return min(doubled, BACKOFF_MAX_S) * random.uniform(0.5, 1.0)


def _replayed(headers: Mapping[str, str] | None) -> bool:
    return (headers or {}).get("idempotent-replayed") == "true"
