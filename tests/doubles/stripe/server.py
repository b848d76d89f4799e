"""The HTTP side of the double: key, version, idempotency, faults, then the endpoint, under one lock."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import random
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.doubles.stripe import credit_notes, customers, invoices, items, meters, webhooks
from tests.doubles.stripe.clock import Clock
from tests.doubles.stripe.errors import StripeFault, missing
from tests.doubles.stripe.faults import Fault, Kind
from tests.doubles.stripe.forms import check, decode
from tests.doubles.stripe.idempotency import Answer, Keys, other_parameters
from tests.doubles.stripe.state import API_VERSION, Object, Route, State

ROUTES: list[Route] = [
    *customers.ROUTES,
    *items.ROUTES,
    *invoices.ROUTES,
    *credit_notes.ROUTES,
    *meters.ROUTES,
    *webhooks.ROUTES,
]
EXPANDABLE = {"customer": "customer", "invoice": "invoice"}
MAX_BODY = 1 << 20


class Call(NamedTuple):
    """One request as it came in."""

    method: str
    path: str
    params: dict[str, Any]
    key: str | None


class Dropped(Exception):
    """The connection is to be reset instead of answered."""


class StripeDouble:
    """The server with its state, clock, faults and log of calls. A context manager; `url` is where it listens.

    `calls` holds every request in order, `faults` those still to strike. `clock` moves the double's time.
    """

    def __init__(self, *, api_key: str = "sk_test_meterhouse", port: int = 0, webhook_secret: str = "whsec_double"):
        self.api_key = api_key
        self.webhook_secret = webhook_secret
        self.clock = Clock()
        self.state = State(self.clock)
        self.faults: list[Fault] = []
        self.calls: list[Call] = []
        self._keys = Keys(self.clock)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, name="stripe-double", daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> StripeDouble:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def drop(self) -> None:
        """Close one that was never started: it was spoken to in process."""
        self._server.server_close()

    def __enter__(self) -> StripeDouble:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def invoices(self, **fields: Any) -> list[Object]:
        """All invoices whose fields have these values, as Stripe would show them, oldest first."""
        with self._lock:
            return [
                invoice
                for invoice in self.state.all("invoice")
                if all(invoice[name] == value for name, value in fields.items())
            ]

    def items(self, invoice_id: str) -> list[Object]:
        """All items of an invoice, oldest first."""
        with self._lock:
            return invoices.items_of(self.state, invoice_id)

    def deliver(self, url: str, *, repeat: int = 1, shuffle: random.Random | None = None) -> list[int]:
        """Send every event so far to a webhook endpoint; see `webhooks.deliver`."""
        with self._lock:
            events = list(self.state.events)
        return webhooks.deliver(
            events, url, self.webhook_secret, timestamp=self.clock.now(), repeat=repeat, shuffle=shuffle
        )

    # -- one request ------------------------------------------------------------------------------------------

    def answer(
        self, method: str, target: str, headers: Any, body: str, strike: Kind | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request, struck by `strike` or by what is in `faults`.

        Raises `Dropped` when a fault resets the connection.
        """
        url = urlsplit(target)
        key = headers.get("Idempotency-Key") if method == "POST" else None
        with self._lock:
            request_id = self.state.mint("req")
        extra = {"Request-Id": request_id, "Stripe-Version": API_VERSION}
        if key:
            extra["Idempotency-Key"] = key
        try:
            self._authorized(headers)
            params = decode(body if method == "POST" else url.query)
            with self._lock:
                self.calls.append(Call(method, url.path, params, key))
                fault = next((f for f in self.faults if f.strikes(method, url.path)), None)
            fault = Fault(strike) if strike else fault
            status, shown = self._struck(fault, Call(method, url.path, params, key), request_id, extra)
        except StripeFault as refusal:
            status, shown = refusal.status, {**refusal.body()}
        if status >= 500:
            extra["Stripe-Should-Retry"] = "false" if "error" in shown else "true"
        if "bad_gateway" in shown:
            return status, extra | {"Content-Type": "text/html"}, b"<html><h1>Bad Gateway</h1></html>"
        if "error" in shown:
            shown["error"]["request_log_url"] = f"https://dashboard.stripe.com/test/logs/{request_id}"
        return status, extra | {"Content-Type": "application/json"}, json.dumps(shown).encode()

    def _authorized(self, headers: Any) -> None:
        scheme, _, given = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                given = base64.b64decode(given).decode("utf-8", "replace").partition(":")[0]
        if not given:
            raise StripeFault(401, "You did not provide an API key.")
        if given != self.api_key:
            raise StripeFault(401, f"Invalid API Key provided: {given[:7]}{'*' * 8}{given[-4:]}")
        version = headers.get("Stripe-Version", API_VERSION)
        if version != API_VERSION:
            raise StripeFault(400, f"Invalid Stripe API version: {version}")

    def _struck(
        self, fault: Fault | None, call: Call, request_id: str, extra: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        """The call with its fault, if one strikes."""
        kind = fault.kind if fault else ""
        if kind == "rate_limit":
            raise StripeFault(429, "Too many requests", code="rate_limit")
        if kind == "reset_before":
            raise Dropped
        if kind == "gateway_before":
            return 502, {"bad_gateway": True}
        if kind == "key_mismatch" and (call.key or "").startswith("meterhouse-"):
            raise other_parameters(call.key)
        status, shown = self._keyed(call, request_id, extra, fault)
        if kind == "reset_after":
            raise Dropped
        if kind in ("gateway_after", "garbled_after"):
            return 502 if kind == "gateway_after" else 200, {"bad_gateway": True}
        if fault and kind == "hang_after":
            time.sleep(fault.seconds)
        return status, shown

    def _keyed(
        self, call: Call, request_id: str, extra: dict[str, str], fault: Fault | None
    ) -> tuple[int, dict[str, Any]]:
        """The kept answer of the key, or the endpoint's own, which is then kept."""
        route, groups = self._route(call)
        canonical = (call.method, call.path, json.dumps(call.params, sort_keys=True))
        if call.key:
            with self._lock:
                kept = self._keys.begin(call.key, canonical)
            if kept is not None:
                extra |= {"Idempotent-Replayed": "true", "Original-Request": kept.request_id}
                return kept.status, json.loads(json.dumps(kept.body))
        if fault and fault.kind == "hang_before":
            time.sleep(fault.seconds)
        with self._lock:
            answer, executed = self._execute(route, groups, call, request_id, fault)
            if call.key and executed:
                self._keys.keep(call.key, answer)
            elif call.key:
                self._keys.drop(call.key)
        return answer.status, answer.body if answer.status == 200 else copy.deepcopy(answer.body)  # errors are added to

    def _route(self, call: Call) -> tuple[Route, tuple[str, ...]]:
        for route in ROUTES:
            groups = route.match(call.method, call.path)
            if groups is not None:
                return route, groups
        raise StripeFault(404, f"Unrecognized request URL ({call.method}: {call.path}).")

    def _execute(
        self, route: Route, groups: tuple[str, ...], call: Call, request_id: str, fault: Fault | None
    ) -> tuple[Answer, bool]:
        """The answer, a private copy, and whether the endpoint had begun."""
        broken = StripeFault(500, "An unknown error occurred", type="api_error", executed=True)
        try:
            params = check(route.schema, call.params)
            if fault and fault.kind == "error_before":
                raise broken
            shown = self._expanded(route.handle(self.state, params, *groups), params)
            if fault and fault.kind == "error_after":
                raise broken
        except StripeFault as refusal:
            return Answer(refusal.status, refusal.body(), request_id), refusal.executed
        return Answer(200, json.loads(json.dumps(shown)), request_id), True

    def _expanded(self, thing: Object, params: dict[str, Any]) -> Object:
        for name in params.get("expand", []):
            if name not in EXPANDABLE or not isinstance(thing.get(name), str):
                raise StripeFault(400, f"This property cannot be expanded ({name}).", param="expand")
            kind = EXPANDABLE[name]
            if thing[name] not in self.state.objects.get(kind, {}):
                raise missing(kind, thing[name])
            thing = {**thing, name: self.state.get(kind, thing[name])}
        return thing


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], double: StripeDouble) -> None:
        super().__init__(address, _Handler)
        self.double = double

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is what faults make; anything else is the double's own bug and is shown."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY:
            self.send_error(413)
            return
        body = self.rfile.read(length).decode("utf-8", "replace")
        try:
            status, headers, payload = self.server.double.answer(self.command, self.path, self.headers, body)
        except Dropped:
            linger = struct.pack("ii", 1, 0)  # close with a reset, not an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.shutdown(socket.SHUT_RD)
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: `calls` is the log."""
