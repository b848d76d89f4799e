"""What all `/v1` handlers share: reading a body, tokenizing it, and the way from a body to a running generation.

Knows: the order auth → body → idempotency → door → task. Does not know the fields of any endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import structlog
from litestar import Request
from litestar.types import ASGIApp

from billing.service import Billing
from engine.client import Engine
from engine.types import PromptTooLong, SamplingParams
from gateway.admission import Admission, Admitted, Ask
from gateway.auth import Principal, authenticate
from gateway.capture import Capture
from gateway.errors import BadRequest, RequestTimeout, UnsupportedMediaType, api_error, invalid
from gateway.idempotency import HEADER, REPLAYED, Claim, Idempotency
from gateway.openai.generation import Generation
from gateway.openai.render import Dialect, Renderer
from gateway.openai.schema import Sampling
from gateway.settings import Settings
from gateway.sse import Answer, Reply
from gateway.telemetry import Telemetry
from metering.events import Outcome

log = structlog.get_logger(__name__)

BODY_TIMEOUT_S = 60.0
PROMPT_LOGPROBS_MAX = 1 << 15  # two megabytes of an answer
INLINE_CHARACTERS = 8192
"""Longer texts (and more tokens) are worked on by another thread: a long prompt must not stop everybody's stream."""

R = TypeVar("R")


class Tokenizer(Protocol):
    """What the edge asks of `engine.tokens.Tokenizer`."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]: ...

    def apply_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, max_tokens: int | None = None
    ) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def piece(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


Prepare = Callable[[str], Awaitable[tuple[Ask, Callable[[Admitted], Renderer]]]]
"""Model name → what is asked of the engine, and how its answer will be worded."""


def asked_of(body: Sampling, *, endpoint: str, prompts: Sequence[list[int]], sampling: SamplingParams, n: int) -> Ask:
    """What both generating endpoints ask of the engine, in the same way."""
    if sampling.prompt_logprobs is not None:
        listed = sum(map(len, prompts)) * (sampling.prompt_logprobs + 1)
        if listed > PROMPT_LOGPROBS_MAX:
            field = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
            raise invalid(
                field, f"at most {PROMPT_LOGPROBS_MAX} log-probabilities of prompt tokens in one answer, not {listed}"
            )
    return Ask(
        endpoint=endpoint,
        prompts=prompts,
        sampling=sampling,
        n=n,
        stream=bool(body.stream),
        user=body.user or "",
        metadata=body.metadata or {},
        cache_salt=body.cache_salt or "",
    )


def worded(body: Sampling, ask: Ask, model: str, dialect: Dialect) -> Callable[[Admitted], Renderer]:
    """How the answer to `ask` will be worded, once it is let in."""
    return lambda admitted: Renderer(
        dialect,
        request_id=admitted.live.id,
        model=model,
        created_s=admitted.live.record.ts_us // 1_000_000,
        choices=ask.n * len(ask.prompts),
        n=ask.n,
        stream=ask.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        include_receipt=body.stream_options is not None and body.stream_options.include_receipt,
        prompt_logprobs=body.prompt_logprobs is not None,
    )


class Edge:
    """The parts behind `/v1`, and the generations that run."""

    def __init__(
        self,
        *,
        settings: Settings,
        engine: Engine,
        billing: Billing,
        tokenizer: Tokenizer,
        admission: Admission,
        capture: Capture,
        idempotency: Idempotency,
        telemetry: Telemetry,
        started_s: int,
    ) -> None:
        self.settings = settings
        self.started_s = started_s
        self.engine = engine
        self.billing = billing
        self.tokenizer = tokenizer
        self.admission = admission
        self.telemetry = telemetry
        self._capture = capture
        self._idempotency = idempotency
        self._running: dict[asyncio.Task[None], Generation] = {}

    def principal(self, request: Request[Any, Any, Any]) -> Principal:
        return authenticate(request, self.billing)

    async def body(self, request: Request[Any, Any, Any]) -> bytes:
        """The whole body. Raises 408, 413 (litestar), 415."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise UnsupportedMediaType("The body must be JSON, with content-type application/json.")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.body()
        except TimeoutError:
            raise RequestTimeout("The body did not arrive in time.") from None

    async def generate(
        self,
        request: Request[Any, Any, Any],
        decode: Callable[[bytes], Sampling],
        preparer: Callable[[Any], Prepare],
    ) -> ASGIApp:
        """A generation for a `POST`: the ASGI application that sends its answer."""
        principal = self.principal(request)
        body = await self.body(request)
        try:
            return await self._generate(request, principal, body, decode, preparer)
        except Exception as error:
            self.admission.refused(api_error(error))
            raise

    async def _generate(
        self,
        request: Request[Any, Any, Any],
        principal: Principal,
        body: bytes,
        decode: Callable[[bytes], Sampling],
        preparer: Callable[[Any], Prepare],
    ) -> ASGIApp:
        asked = decode(body)
        stream = bool(asked.stream)
        claim: Claim | None = None
        answer = Answer(stream=stream, keep=False)
        key = request.headers.get(HEADER)
        if key is not None:
            claim, earlier = await self._idempotency.claim(
                key_id=principal.key.id, key=key, path=request.url.path, body=body, stream=stream
            )
            if earlier is not None:
                return self._replay(earlier)
            assert claim is not None
            answer = claim.answer
        try:
            return await self._start(principal, asked.model, preparer(asked), answer, claim)
        except BaseException as error:
            if claim is not None:
                answer.fail(api_error(error))
                claim.release()
            raise

    async def _start(
        self, principal: Principal, model: str | None, prepare: Prepare, answer: Answer, claim: Claim | None
    ) -> ASGIApp:
        render: list[Callable[[Admitted], Renderer]] = []

        async def ask(name: str) -> Ask:
            wanted, renderer = await prepare(name)
            render.append(renderer)
            return wanted

        admitted = await self.admission.admit(principal, model, ask)
        answer.headers = admitted.lease.headers
        generation = Generation(
            admitted,
            make_renderer=render[0],
            answer=answer,
            engine=self.engine,
            capture=self._capture,
            claim=claim,
            timeout_s=self.settings.request_timeout_s,
            abort_timeout_s=self.settings.abort_timeout_s,
        )
        task = asyncio.get_running_loop().create_task(generation.run())
        self._running[task] = generation
        task.add_done_callback(self._running.pop)
        return Reply(answer, keepalive_s=self.settings.keepalive_s, on_gone=generation.client_gone)

    def _replay(self, answer: Answer) -> ASGIApp:
        kind = "replayed" if answer.done else "joined"
        self.telemetry["meterhouse_idempotent_answers_total"].labels(kind).inc()
        return Reply(answer, keepalive_s=self.settings.keepalive_s, headers={REPLAYED: "true"})

    async def drain(self, timeout_s: float) -> None:
        """Let what runs finish for so long, then end and settle the rest as `shutdown`."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        for generation in self._running.values():
            generation.cut(Outcome.SHUTDOWN)
        if self._running:
            await asyncio.wait(self._running)

    # -- tokens --------------------------------------------------------------------------------

    async def chat_tokens(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """The prompt of a chat: what is computed, billed, and counted by `/tokenize`."""
        size = sum(len(message["content"]) for message in messages)
        return await self._tokenized(
            "messages",
            size,
            lambda: self.tokenizer.apply_chat(
                messages, add_generation_prompt=add_generation_prompt, max_tokens=self.engine.info.max_model_len
            ),
        )

    async def text_tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt of a plain text."""
        return await self._tokenized(
            "prompt",
            len(text),
            lambda: self.tokenizer.encode(
                text, add_special_tokens=add_special_tokens, max_tokens=self.engine.info.max_model_len
            ),
        )

    async def text_of(self, ids: list[int]) -> str:
        """What token ids stand for, special ones shown."""

        def work() -> str:
            return self.tokenizer.decode(ids, skip_special_tokens=False)

        return work() if len(ids) <= INLINE_CHARACTERS else await asyncio.to_thread(work)

    async def _tokenized(self, param: str, size: int, work: Callable[[], list[int]]) -> list[int]:
        try:
            return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
        except PromptTooLong as error:
            raise BadRequest(str(error), param=param, code="context_length_exceeded") from None
        except ValueError as error:
            raise invalid(param, str(error)) from None

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise when a token id is none of this model's."""
        if ids and not 0 <= min(ids) <= max(ids) < self.engine.info.vocab_size:
            raise invalid(param, "has a token id outside the vocabulary")

    def room(self, prompt_tokens: int, param: str) -> int:
        """Completion tokens that fit behind a prompt. Raises when there is none."""
        context = self.engine.info.max_model_len
        if prompt_tokens >= context:
            raise BadRequest(
                f"This model's context holds {context} tokens, but the prompt has {prompt_tokens}.",
                param=param,
                code="context_length_exceeded",
            )
        return context - prompt_tokens
