"""The offline door: a model in this process, prompts in, completions out, no server.

Knows: `EngineCore` and a whole batch of prompts. Does not know: tenants, bills, sockets. What it counts is
what the server would have counted.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.core import build
from engine.types import (
    AdapterInfo,
    AdapterRef,
    ChoiceDelta,
    EngineConfig,
    EngineError,
    Finish,
    Request,
    SamplingParams,
    TokenCounts,
    TokenLogprob,
    Update,
)

Prompt = str | list[int]


class Choice(msgspec.Struct):
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []  # empty unless asked for
    finish: Finish | None = None
    stop_reason: int | str | None = None


class Completion(msgspec.Struct):
    """A prompt, its choices, and the tokens that were spent on them."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    counts: TokenCounts = TokenCounts()
    error: str | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class LLM:
    """A model to be asked from Python. `options` are the fields of `EngineConfig`.

    Raises an `EngineError` with the reason when the model cannot be served.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        options.setdefault("max_waiting", sys.maxsize)  # a batch is as long as it is
        self._core = build(EngineConfig(model=str(model), **options))
        self.tokenizer = self._core.tokenizer
        self.info = self._core.info

    def load_adapter(self, path: str | Path, name: str = "adapter") -> AdapterRef:
        """Load a PEFT folder, to be passed to `generate`. Raises `AdapterRejected`."""
        ref = AdapterRef(id=str(uuid.uuid4()), name=name, path=str(path))
        info: AdapterInfo = self._core.load_adapter(ref)
        return msgspec.structs.replace(ref, digest=info.digest)

    def unload_adapter(self, adapter: AdapterRef) -> None:
        self._core.unload_adapter(adapter.id)
        self._core.take_unloaded()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: AdapterRef | None = None,
    ) -> list[Completion]:
        """Completions in the order of `prompts` (text or token ids), computed together.

        `params` are one for all or one for each. Raises an `EngineError` when one of them cannot be served;
        then nothing is computed.
        """
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        requests = [
            Request(id=str(number), prompt=self._ids(prompt), sampling=sampling, n=n, adapter=adapter)
            for number, (prompt, sampling) in enumerate(zip(prompts, each, strict=True))
        ]
        try:
            for request in requests:
                self._core.add(request)
        except EngineError:
            self._abort(requests)
            raise
        return self._run(requests)

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> Completion:
        """The model's answer to one conversation, in the model's own chat format."""
        return self.generate([self.tokenizer.apply_chat(messages)], params)[0]

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(self, requests: list[Request]) -> list[Completion]:
        completions = {
            request.id: Completion(request.prompt, [Choice(index) for index in range(request.n)])
            for request in requests
        }
        try:
            while (output := self._core.step()) is not None:
                for update in output.updates:
                    _add(completions[update.request_id], update)
        except BaseException:  # an interrupt too: the next call must find nothing of this one
            self._abort(requests)
            raise
        return list(completions.values())

    def _abort(self, requests: list[Request]) -> None:
        for request in requests:
            self._core.abort(request.id)
        self._core.step()  # takes the reports of the aborted


def _add(completion: Completion, update: Update) -> None:
    completion.counts = update.counts
    completion.error = update.error
    for delta in update.deltas:
        _extend(completion.choices[delta.index], delta)


def _extend(choice: Choice, delta: ChoiceDelta) -> None:
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.logprobs += delta.logprobs or []
    if delta.finish is not None:
        choice.finish, choice.stop_reason = delta.finish, delta.stop_reason
