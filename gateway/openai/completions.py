"""`POST /v1/completions` (https://platform.openai.com/docs/api-reference/completions/create)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from gateway.admission import Admitted, Ask
from gateway.errors import invalid
from gateway.openai.edge import Edge, Prepare, asked_of, worded
from gateway.openai.render import Renderer, TextDialect
from gateway.openai.schema import CompletionRequest, check_common, decode, sampling_params

ENDPOINT = "completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's


@post("/v1/completions", status_code=200, tags=["OpenAI"])
async def completions(request: Request[Any, Any, Any], edge: NamedDependency[Edge]) -> ASGIApp:
    """What follows a text, or several texts, streamed or whole."""
    return await edge.generate(
        request, lambda body: decode(CompletionRequest, body), lambda asked: _preparer(edge, asked)
    )


def _preparer(edge: Edge, asked: CompletionRequest) -> Prepare:
    n = check_common(asked, max_n=edge.settings.max_n)
    texts_or_ids = _prompts(asked.prompt, edge.settings.max_prompts)
    scores_echo = bool(asked.echo) and asked.logprobs is not None
    if scores_echo and asked.stream:
        raise invalid("echo", "not supported together with logprobs in a stream", code="unsupported_parameter")

    async def prepare(model: str) -> tuple[Ask, Callable[[Admitted], Renderer]]:
        prompts = [await _tokens(edge, prompt) for prompt in texts_or_ids]
        room = edge.room(max(map(len, prompts)), "prompt")
        sampling = sampling_params(
            asked,
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if asked.max_tokens is None else asked.max_tokens,
            logprobs=asked.logprobs,
            vocab_size=edge.engine.info.vocab_size,
        )
        scored: tuple[list[int], int] | None = None
        if scores_echo and asked.logprobs is not None:
            scored = [prompt[0] for prompt in prompts], asked.logprobs
            wanted = max(asked.logprobs, asked.prompt_logprobs or 0)
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=wanted)
        ask = asked_of(asked, endpoint=ENDPOINT, prompts=prompts, sampling=sampling, n=n)
        echo = [await _text(edge, prompt) for prompt in texts_or_ids] if asked.echo else None
        return ask, worded(asked, ask, model, TextDialect(edge.tokenizer, echo, n, scored))

    return prepare


def _prompts(prompt: str | list[Any], most: int) -> Sequence[str | list[int]]:
    """The four shapes of `prompt` as a list of texts or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [prompt]
    texts = all(isinstance(item, str) for item in prompt)
    ids = all(isinstance(item, list) for item in prompt)
    if not prompt or not (texts or ids):
        raise invalid(
            "prompt",
            "must be a string, a list of strings, token ids, or a list of token ids, and not be empty",
            code="invalid_type",
        )
    if len(prompt) > most:
        raise invalid("prompt", f"at most {most} prompts in one request")
    return prompt


async def _tokens(edge: Edge, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        ids = await edge.text_tokens(prompt)
    else:
        ids = prompt
        edge.check_ids(ids, "prompt")
    if not ids:
        raise invalid("prompt", "must not be empty")
    return ids


async def _text(edge: Edge, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else await edge.text_of(prompt)
