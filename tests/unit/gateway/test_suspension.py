"""The door of a suspended tenant, as the official SDK meets it."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.fixtures.server import RunningGateway


def test_a_suspended_tenant_gets_403_and_what_runs_goes_on(gateway: RunningGateway) -> None:
    secret = gateway.tenant("acme")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=0) as client:
        stream = client.completions.create(
            model="fake", prompt="hello", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(stream)
        gateway.billing.suspend_tenant("acme", "Abuse.")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            client.completions.create(model="fake", prompt="hello")
        assert (refused.value.code, refused.value.type) == ("tenant_suspended", "invalid_request_error")
        assert "/v1/billing/balance" in refused.value.message
        with pytest.raises(openai.PermissionDeniedError):
            client.models.list()
        last = [first, *stream][-1]
        assert last.choices[0].finish_reason == "length", "what was let in runs to its end"
        assert gateway.billing.holds_open() == 0
        gateway.billing.reactivate_tenant("acme", "Sorry.")
        assert client.completions.create(model="fake", prompt="hello", max_tokens=2).usage is not None
    refused_so_far = gateway.billing.balance("acme")
    assert refused_so_far.held_femto == 0


def test_suspended_while_its_body_is_on_its_way(gateway: RunningGateway) -> None:
    """The key was good when the head arrived; the door looks again when the money is committed."""
    secret = gateway.tenant("acme")
    before = gateway.engine.info

    def body() -> object:
        yield b'{"model": "fake", '
        gateway.billing.suspend_tenant("acme", "Abuse.")
        yield b'"prompt": "hello"}'

    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/completions", content=body(), headers=headers)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_suspended")
    assert gateway.billing.holds_open() == 0
    assert gateway.engine.info == before
