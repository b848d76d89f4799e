"""Whatever is sent, the answer is OpenAI's envelope with the field's name, and nothing is changed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fixtures.server import RunningGateway

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": []}, "messages", "invalid_type"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_type"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "name": "bob"}]},
        "messages[0].name",
        "unsupported_parameter",
    ),
    (CHAT, {"messages": MESSAGES, "temprature": 1}, "temprature", "unknown_parameter"),
    (CHAT, {"messages": MESSAGES, "temperature": "1"}, "temperature", "invalid_type"),
    (CHAT, {"messages": MESSAGES, "temperature": 2.1}, "temperature", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "n": 0}, "n", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "n": 17}, "n", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "n": True}, "n", "invalid_type"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 10**6}, "messages", "context_length_exceeded"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "top_k": -2}, "top_k", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "top_k": 2**31}, "top_k", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "top_k": 2**70}, "top_k", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "seed": 2**70}, "seed", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "stop": [""]}, "stop", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, "stop", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [999]}, "stop_token_ids", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"999": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "bad_words": [" "]}, "bad_words", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "bad_words": "no"}, "bad_words", "invalid_type"),
    (CHAT, {"messages": MESSAGES, "bad_words": ["x"] * 65}, "bad_words", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    (TEXT, {"prompt": "x", "allowed_token_ids": [999]}, "allowed_token_ids", "invalid_value"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    (TEXT, {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    (TEXT, {"prompt": ["x" * 100] * 16, "prompt_logprobs": 20}, "prompt_logprobs", "invalid_value"),
    (TEXT, {"prompt": ["x" * 100] * 16, "echo": True, "logprobs": 20}, "logprobs", "invalid_value"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    (
        CHAT,
        {"messages": MESSAGES, "response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
    ),
    (CHAT, {"messages": MESSAGES, "store": True}, "store", "unsupported_parameter"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    (CHAT, {"messages": MESSAGES, "metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "metadata": {"k" * 65: ""}}, "metadata", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
    (CHAT, {"messages": MESSAGES, "user": "u" * 257}, "user", "invalid_type"),
    (TEXT, {"prompt": ""}, "prompt", "invalid_value"),
    (TEXT, {"prompt": []}, "prompt", "invalid_type"),
    (TEXT, {"prompt": ["a", 1]}, "prompt", "invalid_type"),
    (TEXT, {"prompt": [[]]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [1, 257]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [-1]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": ["x"] * 33}, "prompt", "invalid_value"),
    (TEXT, {"prompt": "x" * 5000}, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of", "unsupported_parameter"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs", "invalid_value"),
    (TEXT, {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo", "unsupported_parameter"),
    ("/tokenize", {}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "invalid_value"),
    ("/detokenize", {"tokens": [300]}, "tokens", "invalid_value"),
]


def check_envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"].startswith("req_")
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    gateway = RunningGateway(tmp_path_factory.mktemp("gateway"), max_body_bytes=100_000)
    gateway.start()
    yield gateway
    assert gateway.events() == []  # not one of these requests left a trace
    gateway.idle()
    gateway.stop()


@pytest.fixture(scope="module")
def key(running: RunningGateway) -> str:
    return running.tenant(limits={"requests_per_minute": 10_000, "tokens_per_minute": 10**9})


def test_every_bad_field_is_named(running: RunningGateway, key: str) -> None:
    with running.http(key) as client:
        for path, body, param, code in BAD:
            error = check_envelope(client.post(path, json=body), 400)
            assert (error["param"], error["code"]) == (param, code), (path, body, error)
            assert error["type"] == "invalid_request_error"
            assert param.split("[")[0].split(".")[0] in error["message"] or code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body", [b"", b"[", b"[]", b"null", b"\xff", b'{"messages":[{"role":"user","content":"\\ud800"}]}']
)
def test_not_json(running: RunningGateway, key: str, body: bytes) -> None:
    with running.http(key) as client:
        check_envelope(client.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)


def test_deeply_nested(running: RunningGateway, key: str) -> None:
    body = b'{"messages":[],"tools":' + b"[" * 40_000 + b"]" * 40_000 + b"}"
    with running.http(key) as client:
        check_envelope(client.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)


def test_statuses_of_the_edge(running: RunningGateway, key: str) -> None:
    with running.http(key) as client:
        assert check_envelope(client.get("/nothing"), 404)["code"] == "not_found"
        assert check_envelope(client.get(CHAT), 405)["code"] == "method_not_allowed"
        assert check_envelope(client.post(TEXT, json={"prompt": "x" * 200_000}), 413)["code"] == "request_too_large"
        text = client.post(CHAT, content="x", headers={"content-type": "text/plain"})
        assert check_envelope(text, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic abc", "Bearer mh-wrong", "Bearer " + "x" * 5000])
def test_unauthorized(running: RunningGateway, key: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        response = httpx.post(f"{running.url}{path}", json={"prompt": "x"}, headers=headers)
        assert check_envelope(response, 401)["code"] == "invalid_api_key"
    assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 401


def test_revoked_and_suspended(running: RunningGateway) -> None:
    secret = running.tenant("gone")
    running.billing.revoke_key(running.billing.keys("gone")[0].id)
    with running.http(secret) as client:
        check_envelope(client.post(TEXT, json={"prompt": "x"}), 401)


def test_unknown_model_and_another_tenants_look_the_same(running: RunningGateway, key: str) -> None:
    running.billing.create_tenant(id="other", name="other")
    running.billing.add_adapter("other", name="secret", path="/x", id="id-1", digest="d", base_model="fake")
    with running.http(key) as client:
        theirs = check_envelope(client.post(TEXT, json={"prompt": "x", "model": "secret"}), 404)
        nobodys = check_envelope(client.post(TEXT, json={"prompt": "x", "model": "nobody"}), 404)
        assert theirs["code"] == nobodys["code"] == "model_not_found"
        assert theirs["message"].replace("secret", "?") == nobodys["message"].replace("nobody", "?")
        assert check_envelope(client.get("/v1/models/secret"), 404) == theirs


def test_neutral_values_of_what_is_not_served_are_taken(make_gateway: Any) -> None:
    gateway = make_gateway()
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "stop": None,
        "n": None,
        "logit_bias": None,
        "top_k": -1,
        "service_tier": "auto",
    }
    echoed = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    with gateway.http(gateway.tenant()) as client:
        body = {"messages": [*MESSAGES, echoed], "max_tokens": 1, **neutral}
        assert client.post(CHAT, json=body).status_code == 200
