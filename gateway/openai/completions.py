"""`POST /v1/completions` (https://platform.openai.com/docs/api-reference/completions/create)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from litestar import Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from gateway.admission import Admitted, Ask
from gateway.errors import BadRequest
from gateway.openai.edge import Edge, Prepare
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
    if asked.echo and asked.logprobs is not None:
        raise BadRequest("echo: not supported together with logprobs.", param="echo", code="unsupported_parameter")

    async def prepare(model: str) -> tuple[Ask, Callable[[Admitted], Renderer]]:
        prompts = [await _tokens(edge, prompt) for prompt in texts_or_ids]
        room = edge.room(max(map(len, prompts)), "prompt")
        sampling = sampling_params(
            asked,
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if asked.max_tokens is None else asked.max_tokens,
            logprobs=asked.logprobs,
            vocab_size=edge.engine.info.vocab_size,
        )
        ask = Ask(
            endpoint=ENDPOINT,
            prompts=prompts,
            sampling=sampling,
            n=n,
            stream=bool(asked.stream),
            user=asked.user or "",
            metadata=asked.metadata or {},
            cache_salt=asked.cache_salt or "",
        )
        echo = [await _text(edge, prompt) for prompt in texts_or_ids] if asked.echo else None
        return ask, lambda admitted: Renderer(
            TextDialect(edge.tokenizer, echo, n),
            request_id=admitted.live.id,
            model=model,
            created_s=admitted.live.record.ts_us // 1_000_000,
            choices=n * len(prompts),
            n=n,
            stream=ask.stream,
            include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        )

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
        raise BadRequest(
            "prompt: must be a string, a list of strings, token ids, or a list of token ids, and not be empty.",
            param="prompt",
            code="invalid_type",
        )
    if len(prompt) > most:
        raise BadRequest(f"prompt: at most {most} prompts in one request.", param="prompt", code="invalid_value")
    return prompt


async def _tokens(edge: Edge, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        ids = await edge.text_tokens(prompt)
    else:
        ids = prompt
        edge.check_ids(ids, "prompt")
    if not ids:
        raise BadRequest("prompt: must not be empty.", param="prompt", code="invalid_value")
    return ids


async def _text(edge: Edge, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else await edge.text_of(prompt)
