"""A budget is hard to the token, limits take nothing from who is refused, and nothing is left held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI, RateLimitError

from billing.budgets import BudgetPeriod, BudgetScope
from billing.money import cost, format_amount, parse_amount, parse_price
from engine.fake import FakeEngine
from tests.fixtures.server import PRICE, ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
COMPLETION = parse_price(PRICE["completion"])
PROMPT = parse_price(PRICE["prompt"])


def ask(gateway: RunningGateway, key: str, **body: Any) -> httpx.Response:
    with gateway.http(key) as client:
        return client.post("/v1/completions", json={"ignore_eos": True, **body})


def funded(gateway: RunningGateway, name: str, femto: int) -> str:
    return gateway.tenant(name, credit=format_amount(femto))


def test_refused_at_the_door(gateway: RunningGateway) -> None:
    key = gateway.tenant(credit=None)
    response = ask(gateway, key, prompt="abc")
    assert response.status_code == 402
    assert response.json()["error"]["code"] == "insufficient_quota"
    assert gateway.events() == []
    gateway.idle()
    with pytest.raises(APIStatusError) as caught:
        OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0).completions.create(model="fake", prompt="x")
    assert caught.value.status_code == 402


def test_no_price_is_never_free(gateway: RunningGateway) -> None:
    gateway.billing.create_tenant(id="poor", name="poor")
    secret = gateway.billing.create_key("poor", "k")[1]
    response = ask(gateway, secret or "", prompt="abc")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_price")
    assert gateway.events() == []


@pytest.mark.parametrize("stream", [False, True])
def test_ends_at_the_exact_token(gateway: RunningGateway, stream: bool) -> None:
    prompt, tokens = "abcdef", 137
    key = funded(gateway, "t", cost(len(prompt), PROMPT) + cost(tokens, COMPLETION) + COMPLETION - 1)
    response = ask(gateway, key, prompt=prompt, max_tokens=1000, stream=stream)
    assert response.status_code == 200
    if not stream:
        choice = response.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "insufficient_quota")
        assert response.json()["usage"]["completion_tokens"] == tokens
    else:
        assert '"finish_reason":"length","stop_reason":"insufficient_quota"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    (event,) = gateway.events()
    assert (event.completion_tokens, event.finish_reason, event.outcome) == (tokens, "quota", "finished")
    assert gateway.billing.balance("t").available_femto == COMPLETION - 1
    gateway.idle()


def test_a_budget_is_named_at_the_door_and_ends_a_stream_at_the_exact_token(gateway: RunningGateway) -> None:
    key = gateway.tenant()
    gateway.billing.set_budget(
        "acme",
        name="Today",
        scope=BudgetScope.TENANT,
        period=BudgetPeriod.DAY,
        amount=format_amount(cost(6, PROMPT) + cost(137, COMPLETION) + COMPLETION - 1),
        currency="usd",
    )
    choice = ask(gateway, key, prompt="abcdef", max_tokens=1000).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "insufficient_quota")
    assert gateway.events()[0].completion_tokens == 137
    refused = ask(gateway, key, prompt="abcdef")
    assert (refused.status_code, refused.json()["error"]["code"]) == (402, "insufficient_quota")
    assert refused.json()["error"]["message"] == "The budget 'Today' does not cover this request."
    gateway.idle()


def test_a_keys_and_an_adapters_budget_stop_nobody_else(gateway: RunningGateway) -> None:
    key = gateway.tenant()
    poor, secret = gateway.billing.create_key("acme", "poor")
    gateway.billing.set_budget(
        "acme",
        name="poor key",
        scope=BudgetScope.KEY,
        subject=poor.id,
        period=BudgetPeriod.MONTH,
        amount="0",
        currency="usd",
    )
    assert secret is not None
    assert ask(gateway, secret, prompt="abc").status_code == 402
    assert ask(gateway, key, prompt="abc").status_code == 200
    gateway.idle()


def test_hundred_at_once_on_money_for_three(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.001))
    prompt, tokens = "abcd", 100
    one = cost(len(prompt), PROMPT) + cost(tokens, COMPLETION)
    key = funded(gateway, "t", 3 * one + COMPLETION // 2)
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda i: ask(gateway, key, prompt=prompt, max_tokens=tokens), range(100)))
    gateway.idle()
    assert {answer.status_code for answer in answers} <= {200, 402}
    balance = gateway.billing.balance("t")
    assert 0 <= balance.available_femto < cost(1, COMPLETION)
    assert balance.held_femto == 0
    events = gateway.events()
    assert len(events) == sum(answer.status_code == 200 for answer in answers)
    charged = sum(
        cost(e.prompt_tokens - e.cached_tokens, PROMPT)
        + cost(e.cached_tokens, parse_price(PRICE["cached"]))
        + cost(e.completion_tokens, COMPLETION)
        for e in events
    )
    assert charged == balance.charged_femto <= 3 * one + COMPLETION // 2


def test_money_that_another_request_leaves_is_used(make_gateway: MakeGateway) -> None:
    """One request holds money it does not need; the one that ran out before waits for it and goes on."""

    def reply(request: Any, index: int) -> list[int]:
        return [65] * (70 if request.prompt[0] == ord("s") else 10_000)

    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.004, reply=reply))
    # "short" ends by itself after 70 of the tokens it holds money for; "greedy" takes all there is.
    key = funded(gateway, "t", 2 * cost(6, PROMPT) + cost(400, COMPLETION))
    answers: dict[str, httpx.Response] = {}

    def run(name: str, **body: Any) -> None:
        answers[name] = ask(gateway, key, prompt=name, max_tokens=1000, **body)

    threads = [
        threading.Thread(target=run, args=("greedy",)),
        threading.Thread(target=run, args=("short!",), kwargs={"ignore_eos": False}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gateway.idle()
    assert answers["short!"].json()["choices"][0]["finish_reason"] == "stop"
    assert answers["greedy"].json()["choices"][0]["stop_reason"] == "insufficient_quota"
    assert 0 <= gateway.billing.balance("t").available_femto < cost(1, COMPLETION)


def test_batched_prompts_share_one_purse(gateway: RunningGateway) -> None:
    prompts = ["aaaa", "bbbb", "cccc"]
    key = funded(gateway, "t", cost(12, PROMPT) + cost(100, COMPLETION))
    response = ask(gateway, key, prompt=prompts, max_tokens=200, n=2)
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == 12
    assert usage["completion_tokens"] == 100
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(6))
    (event,) = gateway.events()
    assert (event.prompt_tokens, event.completion_tokens, event.finish_reason) == (12, 100, "quota")
    assert gateway.billing.balance("t").available_femto == 0
    gateway.idle()


def test_cached_prompt_is_charged_at_its_own_price(gateway: RunningGateway) -> None:
    key = gateway.tenant()
    prompt = "p" * 100
    first, second = (ask(gateway, key, prompt=prompt, max_tokens=1).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached == 96
    expected = cost(100, PROMPT) + cost(4, PROMPT) + cost(96, parse_price(PRICE["cached"])) + 2 * cost(1, COMPLETION)
    assert gateway.billing.balance("acme").charged_femto == expected


def test_requests_per_minute(gateway: RunningGateway) -> None:
    key = gateway.tenant(limits={"requests_per_minute": 2})
    first = ask(gateway, key, prompt="a")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert ask(gateway, key, prompt="a", max_tokens=0).status_code == 400  # refused: takes no allowance
    assert ask(gateway, key, prompt="a").status_code == 200
    third = ask(gateway, key, prompt="a")
    assert third.status_code == 429
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(third.headers["retry-after"]) <= 31
    assert len(gateway.events()) == 2
    with pytest.raises(RateLimitError):
        OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0).completions.create(model="fake", prompt="x")
    gateway.idle()


def test_tokens_per_minute(gateway: RunningGateway) -> None:
    key = gateway.tenant(limits={"tokens_per_minute": 100})
    assert ask(gateway, key, prompt="a" * 101).status_code == 429  # could never pass
    assert ask(gateway, key, prompt="a" * 30, max_tokens=10).status_code == 200
    answer = ask(gateway, key, prompt="a" * 30, max_tokens=10)
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) in (20, 21)
    refused = ask(gateway, key, prompt="a" * 30, max_tokens=10)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")


def test_concurrent(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.01))
    key = gateway.tenant(limits={"concurrent": 1})
    running = threading.Thread(target=ask, args=(gateway, key), kwargs={"prompt": "a", "max_tokens": 50})
    running.start()
    while not gateway.engine.submitted:
        time.sleep(0.01)
    assert ask(gateway, key, prompt="b").status_code == 429
    running.join()
    assert ask(gateway, key, prompt="b").status_code == 200
    gateway.idle()


def test_two_hundred_cancelled_leave_nothing(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=FakeEngine(ByteTokenizer(), 0.005))
    key = gateway.tenant(credit="1000.00")

    def cancel(_: int) -> None:
        with gateway.http(key) as client, pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/completions",
                json={"prompt": "abc", "max_tokens": 3000, "ignore_eos": True},
                timeout=httpx.Timeout(20, read=0.05),
            )

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(cancel, range(200)))
    gateway.idle(30)
    assert gateway.billing.balance("acme").held_femto == 0
    stats = gateway.engine.stats
    assert (stats.running, stats.waiting) == (0, 0)
    submitted = len(gateway.engine.submitted)
    assert len(gateway.events()) == submitted > 0


def test_billed_is_never_above_the_grant(make_gateway: MakeGateway) -> None:
    """Many tenants' worth of odd amounts: the charge never exceeds what was granted, whatever is asked for."""
    gateway = make_gateway()
    for number, femto in enumerate((COMPLETION, 7 * COMPLETION + 3, 64 * COMPLETION, 65 * COMPLETION + PROMPT)):
        key = funded(gateway, f"t{number}", femto)
        response = ask(gateway, key, prompt="a", max_tokens=500, n=3)
        balance = gateway.billing.balance(f"t{number}")
        assert balance.charged_femto <= femto
        assert response.status_code == (200 if femto >= PROMPT + COMPLETION else 402)
        if response.status_code == 200:
            assert balance.available_femto < COMPLETION
    gateway.idle()
    assert parse_amount("1") == 10**15
