"""Whatever ends a request, its hold ends with it: on the balance, on every budget, in the leases. A test an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from billing.budgets import BudgetPeriod, BudgetScope
from billing.leases import LeaseTable
from billing.money import cost, format_amount, parse_price
from engine.fake import FakeEngine
from gateway.openai import render
from metering.events import Outcome
from metering.journal import JournalError
from tests.fixtures.server import PRICE, ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
BODY = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}


def engine(step_s: float = 0.005, **options: Any) -> FakeEngine:
    return FakeEngine(ByteTokenizer(), step_s, **options)


class Ending:
    """A gateway with a tenant that has a balance and a budget of its own, of its key and of its month."""

    def __init__(self, make: MakeGateway, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.patch = patch
        self.gateway = make(engine=options.pop("engine", None) or engine(), **options)
        self.key = self.gateway.tenant()
        key_id = self.gateway.billing.keys("acme")[0].id
        for scope, subject, period in (
            (BudgetScope.TENANT, "", BudgetPeriod.MONTH),
            (BudgetScope.KEY, key_id, BudgetPeriod.DAY),
        ):
            self.gateway.billing.set_budget(
                "acme", name=scope, scope=scope, subject=subject, period=period, amount="50", currency="usd"
            )

    def ask(self, timeout: float = 20.0, **more: Any) -> httpx.Response:
        with self.gateway.http(self.key) as client:
            return client.post("/v1/completions", json={**BODY, **more}, timeout=httpx.Timeout(20, read=timeout))

    def ask_and_then(self, then: Callable[[], object], **more: Any) -> None:
        """`then` happens while the request samples."""
        asking = threading.Thread(target=self.ask, kwargs=more)
        asking.start()
        while self.gateway.metric("vllm:generation_tokens_total") < 3:
            time.sleep(0.01)
        then()
        asking.join()

    def outcomes(self) -> set[str]:
        self.gateway.wait_events(1)
        self.gateway.idle(20)
        return {event.outcome.value for event in self.gateway.events()}

    def nothing_is_left(self) -> None:
        """No hold; and when what was settled is recorded, nothing is committed, and all that was leased goes back."""
        gateway = self.gateway
        gateway.idle(20)
        gateway.billing.record(gateway.events())
        quotas = gateway.billing._quotas.all()
        assert [(quota.held, quota.pending) for quota in quotas] == [(0, 0)] * len(quotas)
        assert gateway.billing.balance("acme").held_femto == 0
        assert all(state.held_femto == 0 for state in gateway.billing.budgets("acme"))
        gateway.billing.retire()
        with gateway.store.connected() as connection:
            table = LeaseTable(connection)
            assert (table.of_gateway(gateway.settings.gateway_id), table.holders()) == ({}, {})


def gives_up(ending: Ending) -> None:
    with pytest.raises(httpx.ReadTimeout):
        ending.ask(timeout=0.1)


def runs_out_of_money(ending: Ending) -> None:
    charged = ending.gateway.billing.balance("acme").charged_femto
    left = ending.gateway.billing.balance("acme").granted_femto - charged
    wanted = cost(3, parse_price(PRICE["prompt"])) + cost(70, parse_price(PRICE["completion"]))
    budget = ending.gateway.billing.budgets("acme")[0].budget
    ending.gateway.billing.change_budget(budget.id, amount=format_amount(wanted))
    assert left > wanted
    assert ending.ask().json()["choices"][0]["stop_reason"] == "insufficient_quota"


def breaks_our_own_code(ending: Ending) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    ending.patch.setattr(render.Renderer, "update", broken)
    assert ending.ask().status_code == 500


def waits_too_long(ending: Ending) -> None:
    late: list[httpx.Response] = []
    ending.ask_and_then(lambda: late.append(ending.ask()))
    assert late[0].status_code == 503


def is_shut_down(ending: Ending) -> None:
    def stop() -> None:
        ending.gateway.gateway.admission.draining = True
        ending.gateway.await_(ending.gateway.gateway.edge.drain(0.0))

    ending.ask_and_then(stop)


def loses_its_engine(ending: Ending) -> None:
    ending.ask_and_then(lambda: ending.gateway.on_loop(ending.gateway.engine.kill))


ENDS: dict[Outcome, list[tuple[Callable[[Ending], object], dict[str, Any]]]] = {
    Outcome.FINISHED: [
        (lambda ending: ending.ask(max_tokens=5), {}),
        (lambda ending: ending.ask(ignore_eos=False), {"engine": engine(eos_after=4)}),
        (lambda ending: ending.ask(prompt=["abc", "defg"], n=2, max_tokens=9), {}),
        (lambda ending: ending.ask(stream=True, max_tokens=150), {}),
        (runs_out_of_money, {}),
    ],
    Outcome.ABORT: [(gives_up, {})],
    Outcome.DEADLINE: [(lambda ending: ending.ask(), {"request_timeout_s": 0.2})],
    Outcome.EXPIRED: [(waits_too_long, {"engine": engine(max_num_seqs=1, queue_timeout_s=0.05)})],
    Outcome.ENGINE_DIED: [(loses_its_engine, {})],
    Outcome.ERROR: [(breaks_our_own_code, {})],
    Outcome.SHUTDOWN: [(is_shut_down, {})],
}
"""How a request can end that was let in, and what makes it end so. A gateway's own death is `test_overspend.py`'s."""


def test_every_end_is_here() -> None:
    assert {*ENDS, Outcome.INTERRUPTED} == set(Outcome)


@pytest.mark.parametrize(
    ("outcome", "number"), [(outcome, number) for outcome, ends in ENDS.items() for number in range(len(ends))]
)
def test_a_hold_ends_with_its_request(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, number: int
) -> None:
    end, options = ENDS[outcome][number]
    ending = Ending(make_gateway, monkeypatch, **options)
    end(ending)
    assert outcome.value in ending.outcomes()
    ending.nothing_is_left()


@pytest.mark.parametrize("where", ["journal", "engine", "body", "balance", "price"])
def test_who_is_refused_holds_nothing(make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """At each check behind or before the hold: the journal refuses, the queue is full, and so on."""
    ending = Ending(make_gateway, monkeypatch, engine=engine(max_waiting=1, max_num_seqs=1))
    gateway = ending.gateway

    def failing(*_: Any) -> Any:
        raise JournalError("no space left")

    match where:
        case "journal":
            gateway.journal.opened = failing  # type: ignore[method-assign]
            assert ending.ask().status_code == 503
        case "engine":
            gateway.engine._max_waiting = 0
            gateway.engine._max_num_seqs = 0
            assert ending.ask().status_code == 503
        case "body":
            assert ending.ask(max_tokens=10**9).status_code == 400
        case "balance":
            for state in gateway.billing.budgets("acme"):
                gateway.billing.change_budget(state.budget.id, amount="0")
            assert ending.ask().status_code == 402
        case "price":
            gateway.billing.create_tenant(id="euro", name="Euro", currency="eur")
            ending.key = str(gateway.billing.create_key("euro", "k")[1])
            assert ending.ask().status_code == 503
    assert all(event.completion_tokens == 0 for event in gateway.events())
    ending.nothing_is_left()
