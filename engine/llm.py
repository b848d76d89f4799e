"""The offline door: a model in this process, prompts in, completions out, no server.

    from engine.llm import LLM, SamplingParams

    with LLM("default") as llm:
        for completion in llm.generate(["The sea is", "A pump is"], SamplingParams(max_tokens=32)):
            print(completion.text)

Knows: `EngineCore` and a whole batch of prompts. Does not know: tenants, bills, sockets. What it counts is
what the server would have counted.
"""

from __future__ import annotations

import gc
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from engine.core import EngineCore, build
from engine.modelcache import WeightsError
from engine.terminal import Bar, Interrupt, Stages, on_terminal
from engine.types import (
    AdapterInfo,
    AdapterRef,
    ChoiceDelta,
    EngineConfig,
    EngineError,
    EngineUnavailable,
    Finish,
    Guide,
    Request,
    SamplingParams,
    TokenCounts,
    TokenLogprob,
    Update,
)
from engine.weights import resolve_model
from kernels.native import default_cache_dir

__all__ = [
    "LLM",
    "AdapterRef",
    "Choice",
    "Completion",
    "Finish",
    "Guide",
    "SamplingParams",
    "TokenCounts",
    "TokenLogprob",
]

Prompt = str | list[int]
Messages = list[dict[str, Any]]
T = TypeVar("T")


class Choice(msgspec.Struct):
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []  # empty unless asked for
    finish: Finish | None = None
    stop_reason: int | str | None = None


class Completion(msgspec.Struct):
    """A prompt, its choices, and the tokens that were spent on them. Times are from the call's begin."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    counts: TokenCounts = TokenCounts()
    error: str | None = None  # set where this prompt alone could not be computed
    first_token_s: float | None = None
    finished_s: float = 0.0
    prompt_logprobs: list[TokenLogprob | None] | None = None  # where asked for: one a token, None for the first

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class LLM:
    """A model to be asked from Python.

    `model` is what `meterhouse serve --model` takes: "default", a folder, a .gguf file or a hub name. `options` are
    the fields of `EngineConfig` (`dtype`, `max_num_seqs`, `kv_cache_bytes`, …). `progress` shows the start's stages and
    a bar for each batch: None on a terminal only, True also in a notebook. Several may live in one process, each
    with memory of its own (`threads` alone is the process's); one is for one thread at a time. Raises an
    `EngineError` with the reason when the model cannot be served.
    """

    def __init__(
        self,
        model: str | Path = "default",
        *,
        cache_dir: str | Path | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> None:
        self._progress = progress
        options.setdefault("max_waiting", sys.maxsize)  # a batch is as long as it is
        cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        try:
            folder = resolve_model(str(model), cache, progress=Stages(self._shown(None)))
        except WeightsError as error:
            raise EngineUnavailable(str(error)) from error
        config = EngineConfig(model=str(folder), cache_dir=str(cache), **options)
        core = build(config)
        self._engine: EngineCore | None = core
        self._open_max = 2 * config.max_num_seqs  # what computes, and as much again that waits to
        self.tokenizer = core.tokenizer
        self.info = core.info

    def load_adapter(self, path: str | Path, name: str = "adapter") -> AdapterRef:
        """Load a PEFT folder, to be passed to `generate` and `chat`. Raises `AdapterRejected`."""
        ref = AdapterRef(id=str(uuid.uuid4()), name=name, path=str(path))
        info: AdapterInfo = self._core.load_adapter(ref)
        return msgspec.structs.replace(ref, digest=info.digest)

    def unload_adapter(self, adapter: AdapterRef) -> None:
        self._core.unload_adapter(adapter.id)
        self._core.take_unloaded()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: AdapterRef | Sequence[AdapterRef | None] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completions in the order of `prompts` (text or token ids), computed together.

        `params` and `adapter` are one for all or one for each; in `params` lists do for tuples, one text for a list of
        one, and a schema may be a dict. Raises an `EngineError` (or `ValueError` for what is
        no text) when one of the prompts cannot be served; then nothing is computed. Only what shows later, such as a
        grammar that cannot be compiled, is its own completion's `error`. Ctrl-C ends the batch between two steps and
        leaves the model ready for the next.
        """
        core = self._core
        asked = _prompts(prompts)
        call = uuid.uuid4().hex  # ids are new in each call: what has no seed is drawn by them
        requests = [
            Request(id=f"{call}-{number}", prompt=self._ids(prompt), sampling=sampling, n=n, adapter=ref)
            for number, (prompt, sampling, ref) in enumerate(
                zip(
                    asked,
                    _sampling(params or SamplingParams(), len(asked)),
                    _adapters(adapter, len(asked)),
                    strict=True,
                )
            )
        ]
        for request in requests:
            core.check(request)
        return self._run(core, requests, self._shown(progress))

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        adapter: AdapterRef | None = None,
        progress: bool | None = None,
        **template: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: AdapterRef | Sequence[AdapterRef | None] | None = None,
        progress: bool | None = None,
        **template: Any,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: AdapterRef | Sequence[AdapterRef | None] | None = None,
        progress: bool | None = None,
        **template: Any,
    ) -> Completion | list[Completion]:
        """The model's answer to a conversation, or its answers to a list of them, in the model's own chat format.

        `template` goes to the chat template: `tools`, `enable_thinking`, `add_generation_prompt`, … For the rest see
        `generate`; messages that the template cannot render are a `ValueError`.
        """
        single = not messages or isinstance(messages[0], dict)
        conversations: Sequence[Any] = [messages] if single else messages
        for conversation in conversations:
            if not all(isinstance(message, dict) for message in conversation):
                raise TypeError("a conversation is a list of messages, each a dict with role and content")
        prompts = [self.tokenizer.apply_chat(conversation, **template) for conversation in conversations]
        completions = self.generate(prompts, params, n=n, adapter=adapter, progress=progress)
        return completions[0] if single else completions

    def close(self) -> None:
        """Give back the model's memory. Closing twice is no error; asking a closed one is."""
        self._engine = None
        gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _core(self) -> EngineCore:
        if self._engine is None:
            raise EngineUnavailable("this LLM was closed")
        return self._engine

    def _shown(self, asked: bool | None) -> bool:
        wanted = self._progress if asked is None else asked
        return on_terminal() if wanted is None else wanted

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _run(self, core: EngineCore, requests: list[Request], shown: bool) -> list[Completion]:
        """Compute checked requests. The core sees them in waves: what waits here costs its scheduler nothing."""
        began = time.perf_counter()
        completions = {
            request.id: Completion(request.prompt, [Choice(index) for index in range(request.n)])
            for request in requests
        }
        waiting, opened = deque(requests), 0
        try:
            with Interrupt() as interrupt, Bar(len(requests), shown) as bar:
                while waiting or opened:
                    interrupt.check()
                    while waiting and opened < self._open_max:
                        core.add(waiting[0])
                        waiting.popleft()
                        opened += 1
                    updates = _step(core)
                    now_s = time.perf_counter() - began
                    for update in updates:
                        _add(completions[update.request_id], update, now_s)
                    ended = sum(update.finished for update in updates)
                    opened -= ended
                    bar.add(prompts=ended, tokens=sum(len(d.token_ids) for u in updates for d in u.deltas))
        except BaseException:  # an interrupt too: the next call must find nothing of this one
            for request in requests[: len(requests) - len(waiting)]:
                core.abort(request.id)
            core.step()  # takes the reports of the aborted
            raise
        return list(completions.values())


def _step(core: EngineCore) -> list[Update]:
    while (output := core.step()) is None:
        if not (core.wait_for_adapter() or core.wait_for_grammar()):
            raise RuntimeError("the engine has open requests and does not go on")
    return output.updates


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; one text is a list of one. Raises `TypeError` on what is neither text nor token ids."""
    prompts: list[Any] = [given] if isinstance(given, str) else list(given)
    for prompt in prompts:
        if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
            continue
        raise TypeError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
    return prompts


def _each(given: T | Sequence[T], count: int, what: str) -> Iterable[T]:
    """One value for each of `count` prompts. Raises `ValueError` when a list has another length."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{what}: {len(given)} are given for {count} prompts")
    return given


def _sampling(given: SamplingParams | Sequence[SamplingParams], count: int) -> Iterable[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [_converted(given)] * count
    each: Iterable[SamplingParams] = _each(given, count, "params")
    return [_converted(params) for params in each]


def _converted(params: Any) -> SamplingParams:
    """With every field of its type. Raises `EngineError` with the field that cannot be."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params are SamplingParams, not {type(params).__name__}")
    try:
        given = msgspec.to_builtins(params)
        for field in ("stop", "bad_words"):
            if isinstance(given[field], str):
                given[field] = [given[field]]
        guided = given["guided"]
        if isinstance(guided, dict) and isinstance(guided.get("value"), dict):
            guided["value"] = msgspec.json.encode(guided["value"]).decode()
        return msgspec.convert(given, SamplingParams)
    except TypeError as error:  # what no JSON could say
        raise EngineError(f"params: {error}") from error
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise EngineError(f"{path.rstrip('`') or 'params'}: {reason}") from error


def _adapters(given: AdapterRef | Sequence[AdapterRef | None] | None, count: int) -> Iterable[AdapterRef | None]:
    refs = list(_each([given] * count if isinstance(given, str) else given, count, "adapter"))
    for ref in refs:
        if ref is not None and not isinstance(ref, AdapterRef):
            raise TypeError(f"an adapter is what load_adapter returned, not {type(ref).__name__}")
    return refs


def _add(completion: Completion, update: Update, now_s: float) -> None:
    completion.counts = update.counts
    completion.error = update.error
    if update.prompt_logprobs is not None:
        completion.prompt_logprobs = update.prompt_logprobs
    if completion.first_token_s is None and update.counts.completion:
        completion.first_token_s = now_s
    if update.finished:
        completion.finished_s = now_s
    for delta in update.deltas:
        _extend(completion.choices[delta.index], delta)


def _extend(choice: Choice, delta: ChoiceDelta) -> None:
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.logprobs += delta.logprobs or []
    if delta.finish is not None:
        choice.finish, choice.stop_reason = delta.finish, delta.stop_reason
