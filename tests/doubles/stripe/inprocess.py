"""The double without its sockets: the SDK's HTTP client that hands each call to it, for campaigns of many thousands.

Knows: what a reset, a silence and a kill look like from inside the SDK. A call that hangs before its effect takes
place lands right before the next one, as one that was still under way when the client gave it up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import stripe
from requests.structures import CaseInsensitiveDict

from tests.doubles.stripe.faults import Kind
from tests.doubles.stripe.server import Dropped, StripeDouble

READ_OF_ITEMS = ("id", "object", "amount", "metadata")


class InProcessClient(stripe.HTTPClient):
    """`struck` names the fault of each call, by the whole of it and its place in the order."""

    name = "in process"

    def __init__(self, double: StripeDouble, struck: Callable[[str, int], Kind | None] = lambda *_: None) -> None:
        super().__init__()
        self.calls = 0
        self._double = double
        self._struck = struck
        self._late: list[Callable[[], object]] = []

    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None, post_data: Any = None, *, _usage: Any = None
    ) -> tuple[Any, int, Mapping[str, str]]:
        while self._late:
            self._late.pop()()
        number, self.calls = self.calls, self.calls + 1
        parts = urlsplit(url)
        fault = self._struck(f"{method} {url} {post_data}", number)

        def land(kind: Kind | None) -> tuple[Any, int, Mapping[str, str]]:
            asked = f"{parts.path}?{parts.query}"
            given = CaseInsensitiveDict(headers or {})
            return self._answer(method.upper(), asked, given, post_data or "", kind)

        if fault == "hang_before":
            self._late.append(lambda: land(None))
            raise _lost("timed out")
        answer = land(fault)
        if fault == "hang_after":
            raise _lost("timed out")
        return answer

    def _answer(
        self, method: str, target: str, headers: Any, body: str, kind: Kind | None
    ) -> tuple[Any, int, Mapping[str, str]]:
        try:
            status, told, payload = self._double.answer(
                method, target, headers, body, None if kind == "hang_after" else kind
            )
        except Dropped:
            raise _lost("connection reset") from None
        return _lean(payload).decode(), status, CaseInsensitiveDict(told)

    def close(self) -> None:
        """There is nothing to close."""


def _lean(payload: bytes) -> bytes:
    """Lists of items without the fields that no export reads: the SDK takes a tenth of a millisecond for each item."""
    if not payload.startswith(b'{"object": "list"') or b'"object": "invoiceitem"' not in payload:
        return payload
    answer = json.loads(payload)
    answer["data"] = [{name: item[name] for name in READ_OF_ITEMS} for item in answer["data"]]
    return json.dumps(answer).encode()


def _lost(how: str) -> stripe.APIConnectionError:
    return stripe.APIConnectionError(f"Unexpected error communicating with Stripe: {how}", should_retry=True)
