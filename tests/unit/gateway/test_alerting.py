"""Alerts to a real receiver that checks every signature: once in the outbox, at the receiver at least once."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from billing.alerts import RETRIES_S, AlertKind, Alerts, AlertState, alert_id
from billing.books import new_event
from billing.duties import Duties, DutyLost
from billing.errors import Conflict, NotFound
from billing.ledger import QuotaExhausted
from billing.service import Billing
from billing.store import EventStore
from gateway.alerting import RETRY_AFTER_MAX_S, Delivery, signer
from gateway.rounds import Round
from migrations.runner import migrate_ledger

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


class Receiver:
    """An operator's endpoint: verifies with the official library and answers what it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, Any]] = []  # id and message, verified
        self.asked = 0
        self.answers: list[tuple[int, dict[str, str]]] = []  # for the next calls; then 204
        self.drip_s = 0.0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.asked += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                message = Webhook(SECRET).verify(body, dict(self.headers.items()))
                receiver.taken.append((self.headers["webhook-id"], message))
                status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
                if receiver.drip_s:
                    self._drip()
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def _drip(self) -> None:
                """A head that never ends."""
                try:
                    for _ in range(200):
                        self.wfile.write(b"HTTP/1.1 200 OK\r\nx-a: ")
                        self.wfile.flush()
                        time.sleep(receiver.drip_s)
                except OSError:
                    pass

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Desk:
    """An outbox on a ledger, its delivery, and a clock moved by hand that begins now: signatures have their time."""

    def __init__(self, url: str, receiver: Receiver) -> None:
        migrate_ledger(url)
        self.store = EventStore(url)
        self.billing = Billing(self.store, base_model="base")
        self.receiver = receiver
        self.us = time.time_ns() // 1000
        self.alerts = Alerts(self.store, sends=True)
        self.delivery = self.deliverer()

    def deliverer(self, url: str = "", **more: Any) -> Delivery:
        return Delivery(
            self.store,
            self.alerts,
            url or self.receiver.url,
            SECRET,
            **{"holder": "gw0", "clock_us": lambda: self.us, "timeout_s": 5.0, **more},
        )

    def tell(self, cause: str = "c", **data: Any) -> bool:
        return self.alerts.tell(AlertKind.EXPORT_FAILED, cause, data, self.us)

    def follow(self, holder: str = "gw0") -> int:
        return self.alerts.follow(holder, self.us, self.billing.suspended_tenants)

    def state(self, cause: str = "c") -> tuple[str, int]:
        found = self.alerts.find(alert_id(cause))
        return found.state, found.attempts


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def desk(tmp_path: Path, receiver: Receiver) -> Iterator[Desk]:
    made = Desk(f"sqlite:///{tmp_path}/ledger.sqlite3", receiver)
    yield made
    made.billing.close()


def test_an_alert_arrives_signed_and_once(desk: Desk) -> None:
    assert [desk.tell(invoice="inv-1"), desk.tell(invoice="inv-1")] == [True, False]
    assert [desk.delivery.run(), desk.delivery.run()] == [1, 0]
    ((id, message),) = desk.receiver.taken
    assert id == alert_id("c")
    assert (message["type"], message["data"]) == ("export.failed", {"invoice": "inv-1"})
    assert message["timestamp"].endswith("Z")
    assert desk.state() == (AlertState.DELIVERED, 1)


def test_two_who_tell_the_same_at_once_end_with_one(ledger_url: str, receiver: Receiver) -> None:
    """The second waits, or finds it, and neither ends with an error; on both databases."""
    desk = Desk(ledger_url, receiver)
    other = Alerts(EventStore(ledger_url), sends=True)
    begin = threading.Barrier(2)

    def tell(alerts: Alerts, found: list[bool]) -> None:
        begin.wait()
        found += [alerts.tell(AlertKind.EXPORT_FAILED, f"c{number}", {}, desk.us) for number in range(20)]

    found: list[list[bool]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(tell, (desk.alerts, other), found))
    other._store.close()
    desk.billing.close()
    assert [sum(pair) for pair in zip(*found, strict=True)] == [1] * 20


def test_the_signature_is_of_the_bytes_that_are_sent(desk: Desk) -> None:
    """The receiver verified with the right secret above; another secret, or another byte, is refused."""
    desk.tell(reason="naïve ☂ \u2028 “quoted”")
    desk.delivery.run()
    alert = desk.alerts.list()[0]
    headers = desk.delivery._headers(alert)
    Webhook(SECRET).verify(alert.body, headers)
    for body, secret in ((alert.body + " ", SECRET), (alert.body, "whsec_" + base64.b64encode(b"x" * 32).decode())):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, headers)
    assert desk.receiver.taken[0][1]["data"]["reason"] == "naïve ☂ \u2028 “quoted”"


def test_what_fails_is_tried_again_later_and_at_last_a_dead_letter(desk: Desk) -> None:
    desk.tell()
    desk.receiver.answers = [(500, {})] * 20
    waits = []
    while desk.state()[0] == AlertState.PENDING:
        before = desk.us
        assert desk.delivery.run() == 0
        assert desk.delivery.run() == 0  # not before its time
        waits.append((desk.alerts.find(alert_id("c")).next_us - before) / 1e6)
        desk.us = max(desk.us, desk.alerts.find(alert_id("c")).next_us)
        if desk.us - time.time_ns() // 1000 > 240_000_000:  # a receiver refuses what is signed for the future
            desk.us = time.time_ns() // 1000
            desk.alerts._change(alert_id("c"), next_us=desk.us)
    assert desk.receiver.asked == len(RETRIES_S) + 1
    assert all(0.8 * due <= wait <= 1.2 * due for wait, due in zip(waits, RETRIES_S, strict=False))
    assert len({id for id, _ in desk.receiver.taken}) == 1
    assert desk.state() == (AlertState.DEAD, len(RETRIES_S) + 1)
    desk.receiver.answers = []
    desk.us = time.time_ns() // 1000
    desk.alerts.again(alert_id("c"), desk.us)  # an operator does
    assert desk.delivery.run() == 1
    assert desk.state() == (AlertState.DELIVERED, 1)


@pytest.mark.parametrize(
    ("answer", "state", "least_s"),
    [
        ((302, {"location": "http://127.0.0.1:1/"}), AlertState.PENDING, 4),
        ((410, {}), AlertState.DEAD, 0),
        ((503, {"retry-after": "120"}), AlertState.PENDING, 120),
        ((429, {"retry-after": "9" * 30}), AlertState.PENDING, RETRY_AFTER_MAX_S),
        ((429, {"retry-after": "soon"}), AlertState.PENDING, 4),
    ],
)
def test_what_an_answer_means(desk: Desk, answer: Any, state: AlertState, least_s: int) -> None:
    desk.tell()
    desk.receiver.answers = [answer]
    desk.delivery.run()
    found = desk.alerts.find(alert_id("c"))
    assert (found.state, desk.receiver.asked) == (state, 1)
    assert least_s * 1_000_000 <= found.next_us - desk.us <= (RETRY_AFTER_MAX_S + 10) * 1_000_000


def test_a_receiver_that_never_ends_its_answer_is_left_in_time(desk: Desk) -> None:
    desk.tell()
    desk.receiver.drip_s = 0.02
    began = time.monotonic()
    desk.deliverer(timeout_s=0.2).run()
    assert time.monotonic() - began < 3
    assert "within" in desk.alerts.list()[0].last_error


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "http://127.0.0.1:99999/", "http://[half/", "http://"])
def test_a_place_that_cannot_be_reached_loses_nothing(desk: Desk, url: str) -> None:
    desk.tell()
    desk.deliverer(url).run()
    found = desk.alerts.find(alert_id("c"))
    assert (found.state, found.attempts) == (AlertState.PENDING, 1)
    assert "could not be reached" in found.last_error


def test_killed_behind_the_receivers_back_it_comes_again_under_its_id(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.tell()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(desk.alerts, "delivered", die)
    with pytest.raises(KeyboardInterrupt):
        desk.delivery.run()
    monkeypatch.undo()
    desk.us += 200_000_000  # its lease is over
    assert desk.deliverer(holder="gw1").run() == 1
    assert [id for id, _ in desk.receiver.taken] == [alert_id("c")] * 2


def test_two_gateways_send_one(desk: Desk) -> None:
    desk.tell()
    duty = Duties(desk.store).take("alert_delivery", "gw1", desk.us, 10**9)
    assert duty is not None
    assert desk.delivery.run() == 0
    Duties(desk.store).leave(duty)
    assert desk.delivery.run() == 1


def test_the_log_is_followed_from_where_it_was_and_each_fact_told_once(desk: Desk) -> None:
    desk.billing.create_tenant(id="before", name="Before")
    desk.billing.update_tenant("before", status="suspended")
    assert desk.follow() == 0  # what was before the first look is no news
    desk.billing.update_tenant("before", name="Other")
    desk.billing.create_tenant(id="acme", name="Acme")
    desk.billing.update_tenant("acme", status="suspended")
    desk.billing.update_tenant("acme", name="Renamed")
    desk.billing.update_tenant("acme", status="active")
    desk.billing.update_tenant("acme", status="suspended")
    assert [desk.follow(), desk.follow("gw1")] == [2, 0]
    told = [msgspec.json.decode(alert.body) for alert in desk.alerts.list()]
    assert {one["type"] for one in told} == {"tenant.suspended"}
    assert [one["data"]["tenant"] for one in told] == ["acme", "acme"]


def test_a_suspension_with_a_reason_is_an_alert_and_so_is_the_end_of_the_last_one(desk: Desk) -> None:
    desk.billing.create_tenant(id="acme", name="Acme")
    desk.follow()
    desk.billing.suspend_tenant("acme", "Abuse.")
    desk.billing.update_tenant("acme", name="Renamed")
    desk.billing.reactivate_tenant("acme", "Sorry.")
    desk.billing.update_tenant("acme", status="suspended")
    assert desk.follow() == 3
    told = [msgspec.json.decode(alert.body) for alert in reversed(desk.alerts.list())]
    assert sorted(one["type"] for one in told) == ["tenant.reactivated", "tenant.suspended", "tenant.suspended"]
    assert [one["data"]["reason"] for one in told if "reason" in one["data"]] == ["Abuse.", "Sorry."]


def test_the_end_of_a_balance_and_that_of_a_budget_are_two_kinds(desk: Desk) -> None:
    desk.billing.create_tenant(id="acme", name="Acme")
    desk.follow()
    for quota, budget in (("balance:acme", ""), ("budget:b-1:2026-11", "pilot")):
        told_of = {"quota": quota, "tenant": "acme", "budget": budget}
        fact = QuotaExhausted(**told_of, left_femto="0", currency="usd", at_us=desk.us)
        desk.billing._command("test", None, type(None), lambda _, fact=fact: ([new_event("tenant:acme", fact)], None))
    assert desk.follow() == 2
    told = [msgspec.json.decode(alert.body) for alert in desk.alerts.list()]
    assert {(one["type"], one["data"]["budget"]) for one in told} == {
        ("balance.exhausted", ""),
        ("budget.exhausted", "pilot"),
    }


def test_a_kill_between_alert_and_position_is_no_state(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.follow()
    desk.billing.create_tenant(id="acme", name="Acme")
    desk.billing.update_tenant("acme", status="suspended")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(desk.alerts._duties, "note_in", die)
    with pytest.raises(KeyboardInterrupt):
        desk.follow()
    monkeypatch.undo()
    assert desk.alerts.list() == []
    desk.us += 100_000_000
    assert desk.follow("gw1") == 1


def test_without_a_receiver_alerts_are_kept_to_be_looked_at(desk: Desk) -> None:
    alerts = Alerts(desk.store, sends=False)
    alerts.tell(AlertKind.SPOOL_LAG, "lag", {}, desk.us)
    assert [alert.state for alert in alerts.list()] == [AlertState.KEPT]
    assert alerts.due(desk.us) == []
    with pytest.raises(Conflict):
        alerts.again(alert_id("lag"), desk.us)
    alerts.prune(desk.us + 91 * 86_400_000_000)
    assert alerts.list() == []
    with pytest.raises(NotFound):
        alerts.find(alert_id("lag"))


def test_alerts_are_paged_and_counted(desk: Desk) -> None:
    for number in range(5):
        desk.us += number % 2
        desk.tell(f"c{number}")
    found = [alert.id for alert in desk.alerts.list()]
    assert [one.id for one in desk.alerts.list(limit=2)] == found[:2]
    assert [one.id for one in desk.alerts.list(after=found[1])] == found[2:]
    assert desk.alerts.counts() == {"pending": 5, "delivered": 0, "dead": 0, "kept": 0}
    assert desk.alerts.list(AlertState.DEAD) == []


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_short", "x", "whsec_!!", "whsec_" + "é" * 40])
def test_a_secret_that_signs_nothing_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="alert_secret"):
        signer(secret)


def test_a_duty_that_was_lost_is_not_noted(desk: Desk) -> None:
    duties = Duties(desk.store)
    mine = duties.take("d", "gw0", desk.us, 10)
    assert mine is not None
    assert duties.take("d", "gw1", desk.us + 5, 10) is None
    theirs = duties.take("d", "gw1", desk.us + 20, 10)
    assert theirs is not None
    with pytest.raises(DutyLost):
        duties.note(mine, "mine", desk.us + 30)
    duties.leave(mine)  # not theirs
    assert duties.take("d", "gw0", desk.us + 25, 10) is None
    noted = duties.note(theirs, "theirs", desk.us + 30)
    assert duties.find("d") == noted


def test_a_round_that_fails_goes_on_and_stops_at_once() -> None:
    done = threading.Event()
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not now")
        done.set()

    each = Round("test", work, every_s=60.0)
    each.start()
    while each.failures_total == 0:
        time.sleep(0.001)
    each.wake()
    assert done.wait(10)
    each.stop()
    each.stop()
    assert (each.failures_total, len(tries)) == (1, 2)
