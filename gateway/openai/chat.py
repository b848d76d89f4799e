"""`POST /v1/chat/completions` (https://platform.openai.com/docs/api-reference/chat/create)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar import Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from gateway.admission import Admitted, Ask
from gateway.errors import invalid
from gateway.openai.edge import Edge, Prepare, asked_of, worded
from gateway.openai.render import ChatDialect, Renderer
from gateway.openai.schema import ChatRequest, check_common, decode, sampling_params

ENDPOINT = "chat.completions"


@post("/v1/chat/completions", status_code=200, tags=["OpenAI"])
async def chat_completions(request: Request[Any, Any, Any], edge: NamedDependency[Edge]) -> ASGIApp:
    """A chat's next message, streamed or whole."""
    return await edge.generate(request, lambda body: decode(ChatRequest, body), lambda asked: _preparer(edge, asked))


def _preparer(edge: Edge, asked: ChatRequest) -> Prepare:
    n = check_common(asked, max_n=edge.settings.max_n)
    logprobs = _logprobs(asked)

    async def prepare(model: str) -> tuple[Ask, Callable[[Admitted], Renderer]]:
        prompt = await edge.chat_tokens([message.plain() for message in asked.messages])
        room = edge.room(len(prompt), "messages")
        wanted = _max_tokens(asked)
        sampling = sampling_params(
            asked,
            max_tokens=room if wanted is None else wanted,
            logprobs=logprobs,
            vocab_size=edge.engine.info.vocab_size,
        )
        ask = asked_of(asked, endpoint=ENDPOINT, prompts=[prompt], sampling=sampling, n=n)
        return ask, worded(asked, ask, model, ChatDialect(edge.tokenizer))

    return prepare


def _max_tokens(asked: ChatRequest) -> int | None:
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "differs from max_completion_tokens")
    if new is not None and new < 1:
        raise invalid("max_completion_tokens", "must be at least 1")
    return old if new is None else new


def _logprobs(asked: ChatRequest) -> int | None:
    if not asked.logprobs:
        if asked.top_logprobs:
            raise invalid("top_logprobs", "only allowed when logprobs is true")
        return None
    top = asked.top_logprobs or 0
    if not 0 <= top <= 20:
        raise invalid("top_logprobs", "must lie between 0 and 20")
    return top
