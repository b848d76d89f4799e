"""What `/v1` takes: every field by name and type, and which of OpenAI's fields are not served.

Source: https://platform.openai.com/docs/api-reference and, for the sampling fields beyond it, vLLM's
OpenAI-compatible server. Decoding is strict: a wrong type, an unknown field, or a field that OpenAI defines and we do
not honour (unless it has the value that asks for nothing) is a `BadRequest` naming it. Nothing is ignored in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.types import SamplingParams
from gateway.choices import with_choices
from gateway.errors import BadRequest, invalid

Str = Annotated[str, Meta(max_length=256)]
_Bounded = Annotated[str, Meta(max_length=1 << 22)]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Root of the request bodies. `NEUTRAL` is for fields declared only to be refused."""


class StreamOptions(Body, kw_only=True):
    include_usage: bool = False
    include_receipt: bool = False  # ours: the last chunk has the usage and, beside it, the receipt for it
    include_obfuscation: bool = False


class Sampling(Body, kw_only=True):
    """Fields that chat and plain completions share. `null` means the default, as with OpenAI."""

    model: Str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    user: Str | None = None
    metadata: dict[str, str] | None = None
    cache_salt: Str | None = None


class TextPart(Body, kw_only=True):
    type: Literal["text"]
    text: _Bounded


class Message(Body, kw_only=True):
    """One message of a chat. The fields after `content` are what clients echo back from an answer without tools."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Bounded | list[TextPart]
    refusal: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None
    annotations: Any = None
    name: Any = None

    def plain(self) -> dict[str, str]:
        """As the chat template takes it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampling, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Declared to be refused by name.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    service_tier: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    moderation: Any = None


class CompletionRequest(Sampling, kw_only=True):
    """`POST /v1/completions`. `prompt`: text, token ids, or a list of either."""

    prompt: _Bounded | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    # Declared to be refused by name.
    best_of: Any = None
    suffix: Any = None


class TokenizeRequest(Body, kw_only=True):
    """`POST /tokenize`, vLLM's two shapes in one: `prompt`, or `messages` as a chat would have them."""

    model: Str | None = None
    prompt: _Bounded | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """`POST /detokenize`."""

    model: Str | None = None
    tokens: Annotated[list[int], Meta(max_length=1 << 20)]


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "safety_identifier": (None,),
    "prompt_cache_key": (None,),
    "prompt_cache_retention": (None,),
    "moderation": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
}
"""Field → the values that ask for nothing we lack."""

_B = TypeVar("_B", bound=Body)

_decoders: dict[type[Body], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}


def decode(kind: type[_B], body: bytes) -> _B:
    """The body as a Struct. Raises `msgspec` errors and `BadRequest`; the field is named in all of them."""
    try:
        decoded = _decoders[kind].decode(body)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(with_choices(str(error), kind)) from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from None
    for name in NEUTRAL.keys() & set(kind.__struct_fields__):
        _refuse_unless_neutral(name, getattr(decoded, name), NEUTRAL[name])
    for index, message in enumerate(getattr(decoded, "messages", None) or ()):
        for name in ("refusal", "audio", "tool_calls", "function_call", "annotations", "name"):
            _refuse_unless_neutral(f"messages[{index}].{name}", getattr(message, name), (None, []))
    return decoded  # type: ignore[no-any-return]  # the decoder of `kind` gives a `kind`


def _refuse_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    # `1 == True` in Python, and `store: 0` is not a boolean: kinds are compared as well.
    if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
        raise invalid(name, "not supported by this server", code="unsupported_parameter")


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """The engine's parameters. Raises `BadRequest` naming the first field whose value cannot be served."""
    given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's word for off
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    params = SamplingParams(
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        logprobs=logprobs,
        **given,
    )
    for field, reason in params.validate(vocab_size):
        raise invalid(field, reason)
    return params


_SHARED = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {_token_id(token): bias for token, bias in given.items()}
    except ValueError:
        raise invalid("logit_bias", "keys are token ids") from None


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(text)
    return int(text)


def check_common(body: Sampling, *, max_n: int) -> int:
    """`n`, after the checks both endpoints share: bounds of n and metadata, what needs or forbids a stream."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= max_n:
        raise invalid("n", f"must lie between 1 and {max_n}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only allowed when stream is true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "not available when stream is true")
    metadata = body.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise invalid("metadata", "at most 16 pairs, keys of at most 64 and values of at most 512 characters")
    return n
