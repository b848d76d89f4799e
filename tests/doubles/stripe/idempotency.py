"""Idempotency keys (https://docs.stripe.com/api/idempotent_requests).

The first answer given after the endpoint began is kept for 24 hours, an error too; the same key with other
parameters is refused, and so is a key whose first request is still running. What validation refused is not kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.doubles.stripe.clock import Clock
from tests.doubles.stripe.errors import StripeFault

KEPT_S = 24 * 3600


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]
    request_id: str


class _Entry(NamedTuple):
    call: tuple[str, str, str]  # method, path, canonical parameters
    at: int
    answer: Answer | None  # None: still running


def other_parameters(key: str) -> StripeFault:
    """What a key gets that was used for something else."""
    return StripeFault(
        400,
        f"Keys for idempotent requests can only be used with the same parameters they were first used with. "
        f"Try using a key other than '{key}' if you meant to execute a different request.",
        type="idempotency_error",
    )


class Keys:
    """Not thread-safe: the server's one lock guards it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def begin(self, key: str, call: tuple[str, str, str]) -> Answer | None:
        """The kept answer, or None and the key is now in use. Raises `StripeFault`."""
        if len(key) > 255:
            raise StripeFault(400, "Idempotency keys are up to 255 characters long")
        entry = self._entries.get(key)
        if entry is None or self._clock.now() - entry.at >= KEPT_S:
            self._entries[key] = _Entry(call, self._clock.now(), None)
            return None
        if entry.call != call:
            raise other_parameters(key)
        if entry.answer is None:
            raise StripeFault(
                409,
                f"There is currently another in-progress request using this Idempotent Key: {key}",
                type="idempotency_error",
                code="idempotency_key_in_use",
            )
        return entry.answer

    def keep(self, key: str, answer: Answer) -> None:
        self._entries[key] = self._entries[key]._replace(answer=answer)

    def drop(self, key: str) -> None:
        """The endpoint never began: the key is as if unused."""
        self._entries.pop(key, None)
