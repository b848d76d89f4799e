"""Alerts on their way to the operator's webhook: signed, bounded in time and bytes, to the named URL and no other.

Knows: HTTP, the Standard Webhooks signature, which answers mean "again". Does not know: what is an alert and when it is
tried again (`billing.alerts`). No redirect is followed: the operator named where alerts go, and an answer does not name
another place. Only the head of an answer is read, and all of it within `TIMEOUT_S`.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import httpx
import structlog
from standardwebhooks import Webhook

from billing.alerts import Alert, Alerts
from billing.duties import Duties
from billing.store import EventStore

log = structlog.get_logger(__name__)

TIMEOUT_S = 15.0
RETRY_AFTER_MAX_S = 3600
DUTY = "alert_delivery"
LEASE_US = 120_000_000


class Delivery:
    """Sends what is due. `run` may be called by several gateways and killed anywhere; an alert may come twice."""

    def __init__(
        self,
        store: EventStore,
        alerts: Alerts,
        url: str,
        secret: str,
        *,
        holder: str,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        timeout_s: float = TIMEOUT_S,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raises `ValueError` for a secret that is none."""
        self._alerts = alerts
        self._duties = Duties(store)
        self._url = url
        self._signer = signer(secret)
        self._holder = holder
        self._clock_us = clock_us
        self._timeout_s = timeout_s
        self._stopping = stopping

    def run(self) -> int:
        """Try everything that is due, once: how many arrived."""
        now_us = self._clock_us()
        duty = self._duties.take(DUTY, self._holder, now_us, LEASE_US)
        if duty is None:
            return 0
        arrived = 0
        for alert in self._alerts.due(now_us):
            arrived += self._try(alert)
            if self._stopping() or self._clock_us() - now_us > LEASE_US // 2:
                break  # the rest is due as before
        self._duties.leave(duty)
        return arrived

    def _try(self, alert: Alert) -> bool:
        status, retry_after_s, error = asyncio.run(self._send(alert))
        now_us = self._clock_us()
        if 200 <= status < 300:
            self._alerts.delivered(alert, now_us)
            return True
        state = self._alerts.failed(alert, error, now_us, wait_us=retry_after_s * 1_000_000, gone=status == 410)
        log.warning("alert_not_delivered", id=alert.id, kind=alert.kind, reason=error, state=str(state))
        return False

    async def _send(self, alert: Alert) -> tuple[int, int, str]:
        """(status, seconds that the receiver asks to wait, what went wrong); status 0: there was no answer."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(follow_redirects=False, timeout=self._timeout_s, trust_env=False) as client,
                client.stream("POST", self._url, content=alert.body, headers=self._headers(alert)) as answer,
            ):
                wait_s = answer.headers.get("retry-after", "")
                seconds = min(int(wait_s), RETRY_AFTER_MAX_S) if wait_s.isascii() and wait_s.isdigit() else 0
                return answer.status_code, seconds, f"the receiver answered {answer.status_code}"
        except TimeoutError:
            return 0, 0, f"no answer within {self._timeout_s:g} s"
        except Exception as error:  # whatever a transport makes of the operator's URL, the alert outlives it
            return 0, 0, f"the receiver could not be reached ({type(error).__name__})"

    def _headers(self, alert: Alert) -> dict[str, str]:
        """A retry has the id of the first try, its own time and so its own signature."""
        now = datetime.fromtimestamp(self._clock_us() // 1_000_000, UTC)
        return {
            "content-type": "application/json",
            "user-agent": "Meterhouse",
            "webhook-id": alert.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": self._signer.sign(alert.id, now, alert.body),
        }


def signer(secret: str) -> Webhook:
    """Raises `ValueError` for a secret that is not `whsec_` and base64 of at least 24 bytes."""
    try:
        made = Webhook(secret)
    except Exception as error:  # the library raises its own, binascii's and RuntimeError
        raise ValueError("alert_secret must be whsec_ and base64") from error
    if len(secret.removeprefix("whsec_")) < 32:
        raise ValueError("alert_secret must be whsec_ and base64 of at least 24 bytes")
    return made
