"""`POST /tokenize` and `/detokenize`, in vLLM's shapes. A chat's count is its billed `prompt_tokens`.

They reach no engine and cost nothing, but pass the tenant's limits: tokenizing is work.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, post
from litestar.di import NamedDependency

from gateway.errors import invalid
from gateway.openai.edge import Edge
from gateway.openai.schema import DetokenizeRequest, TokenizeRequest, decode


@post("/tokenize", status_code=200, tags=["OpenAI"])
async def tokenize(request: Request[Any, Any, Any], edge: NamedDependency[Edge]) -> dict[str, Any]:
    """The tokens of a text or a chat."""
    principal = edge.principal(request)
    asked = decode(TokenizeRequest, await edge.body(request))
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    door = edge.admission.enter(principal, asked.model)
    try:
        tokens = await _tokens(edge, asked)
    finally:
        door.lease.close(0)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": edge.engine.info.max_model_len, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [edge.tokenizer.piece(token) for token in tokens]
    return answer


async def _tokens(edge: Edge, asked: TokenizeRequest) -> list[int]:
    if asked.messages is None:
        special = True if asked.add_special_tokens is None else asked.add_special_tokens
        return await edge.text_tokens(asked.prompt or "", add_special_tokens=special)
    if asked.add_special_tokens:
        raise invalid(
            "add_special_tokens", "not supported for messages; the template has them", code="unsupported_parameter"
        )
    prompt = True if asked.add_generation_prompt is None else asked.add_generation_prompt
    return await edge.chat_tokens([message.plain() for message in asked.messages], add_generation_prompt=prompt)


@post("/detokenize", status_code=200, tags=["OpenAI"])
async def detokenize(request: Request[Any, Any, Any], edge: NamedDependency[Edge]) -> dict[str, Any]:
    """The text of tokens, special ones shown."""
    principal = edge.principal(request)
    asked = decode(DetokenizeRequest, await edge.body(request))
    edge.check_ids(asked.tokens, "tokens")
    edge.admission.enter(principal, asked.model).lease.close(0)
    return {"prompt": await edge.text_of(asked.tokens)}
