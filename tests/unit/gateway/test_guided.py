"""What a client reads when the engine cannot follow its request's grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.fake import FakeEngine
from engine.types import Finish, Update
from tests.fixtures.server import ByteTokenizer, RunningGateway

MakeGateway = Callable[..., RunningGateway]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "ignore_eos": True}


class Rejecting(FakeEngine):
    """Finds out about a request's grammar after `after` tokens."""

    def __init__(self, after: int) -> None:
        super().__init__(ByteTokenizer())
        self._after = after

    def _advance(self, job: Any) -> Update | None:
        if job.group.completion < self._after:
            return super()._advance(job)
        deltas = self._end(job, [], Finish.ERROR)
        error = "the grammar takes too long to follow"
        counts, cost = job.group.counts, self._told(job.group)
        return Update(
            job.group.request.id,
            counts,
            deltas,
            finished=True,
            finish=Finish.ERROR,
            error=error,
            rejected=True,
            cost=cost,
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_grammar_is_a_400_with_the_reason_and_costs_nothing(make_gateway: MakeGateway, stream: bool) -> None:
    gateway = make_gateway(engine=Rejecting(after=0))
    with gateway.http(gateway.tenant()) as client:
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("grammar_rejected", "invalid_request_error")
    assert "takes too long" in error["message"]
    (event,) = gateway.wait_events(1)
    assert (event.outcome, event.prompt_tokens, event.completion_tokens) == ("error", 0, 0)


def test_a_grammar_that_fails_on_the_way_ends_the_stream_with_the_reason(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(engine=Rejecting(after=3))
    with gateway.http(gateway.tenant()) as client:
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    frames = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert frames[-1]["error"]["code"] == "grammar_rejected"
    (event,) = gateway.wait_events(1)
    assert (event.outcome, event.completion_tokens) == ("error", 3)
