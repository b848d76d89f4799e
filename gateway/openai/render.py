"""The engine's updates as the JSON and the frames that OpenAI's clients read.

Knows: the two dialects (`ChatDialect`, `TextDialect`), chunks and whole bodies, log-probabilities, usage. Does not
know: where updates come from or bytes go to. Frames are built from parts that are encoded once per request; what
changes in each is a text, an index and at most a finish reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine.types import ChoiceDelta, Finish, TokenCounts, TokenLogprob, Update
from gateway.sse import DONE

_encode = msgspec.json.Encoder().encode
_CHUNK_END = b"}\n\n"

INSUFFICIENT_QUOTA = "insufficient_quota"
PromptLogprobs = list[TokenLogprob | None]
_FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.QUOTA: "length"}


class Pieces(Protocol):
    """What a renderer asks of the tokenizer."""

    def piece(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Choice:
    """One choice of the answer, as far as it has come."""

    __slots__ = ("finish", "index", "logprobs", "offset", "prompt", "started", "stop_reason", "text")

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt: PromptLogprobs = []  # its prompt's, where they were asked for
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None
        self.started = False
        self.offset = 0  # characters of the pieces so far, for completions' text_offset


class Dialect(Protocol):
    """How an endpoint words its answer."""

    object: str
    chunk_object: str
    id_prefix: str

    def opening(self, choice: Choice) -> bytes | None:
        """The fields of the chunk that precedes a choice's first; None: there is none."""
        ...

    def delta(self, text: str) -> bytes:
        """The fields of a chunk that carry text."""
        ...

    def closing(self) -> bytes:
        """The fields of a chunk that carries no text, only the finish reason."""
        ...

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole choice."""
        ...

    def prompt(self, prompts: Sequence[PromptLogprobs]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The log-probabilities of each choice's prompt, where vLLM has them: fields of the body, and of choices."""
        ...

    def logprobs(self, entries: Sequence[TokenLogprob], choice: Choice) -> dict[str, Any]: ...


def prompt_json(found: PromptLogprobs, tokenizer: Pieces) -> list[dict[str, Any] | None]:
    """vLLM's list: for each token of the prompt, it and the most likely ones by id; null for the first."""
    listed: list[dict[str, Any] | None] = []
    for entry in found:
        if entry is None:
            listed.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
        listed.append(
            {
                str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.piece(token)}
                for token, logprob, rank in ranked
            }
        )
    return listed


class ChatDialect:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, tokenizer: Pieces) -> None:
        self._tokenizer = tokenizer

    def opening(self, choice: Choice) -> bytes | None:
        return b'"delta":{"role":"assistant","content":""}'

    def delta(self, text: str) -> bytes:
        return b'"delta":{"content":' + _encode(text) + b"}"

    def closing(self) -> bytes:
        return b'"delta":{}'

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "".join(choice.text), "refusal": None}}

    def prompt(self, prompts: Sequence[PromptLogprobs]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return {"prompt_logprobs": prompt_json(prompts[0], self._tokenizer)}, []

    def logprobs(self, entries: Sequence[TokenLogprob], choice: Choice) -> dict[str, Any]:
        content = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._tokenizer
        return {"token": token.piece(token_id), "logprob": _finite(logprob), "bytes": list(token.token_bytes(token_id))}


class TextDialect:
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self,
        tokenizer: Pieces,
        echo: Sequence[str] | None = None,
        n: int = 1,
        scored: tuple[Sequence[int], int] | None = None,
    ) -> None:
        """`echo`: the text of each prompt, to be repeated before its `n` choices.

        `scored`: the first token of each prompt and a number; then the log-probabilities of prompts stand before those
        of their choices, with that many of the most likely tokens.
        """
        self._tokenizer = tokenizer
        self._echo = echo
        self._n = n
        self._scored = scored

    def opening(self, choice: Choice) -> bytes | None:
        return None if self._echo is None else self.delta(self._prompt_of(choice))

    def _prompt_of(self, choice: Choice) -> str:
        return "" if self._echo is None else self._echo[choice.index // self._n]

    def delta(self, text: str) -> bytes:
        return b'"text":' + _encode(text)

    def closing(self) -> bytes:
        return b'"text":""'

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": self._prompt_of(choice) + "".join(choice.text)}

    def prompt(self, prompts: Sequence[PromptLogprobs]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return {}, [{"prompt_logprobs": prompt_json(found, self._tokenizer)} for found in prompts]

    def logprobs(self, entries: Sequence[TokenLogprob], choice: Choice) -> dict[str, Any]:
        if self._scored is not None:
            return self._listed([*self._prompt_entries(choice, *self._scored), *entries], choice)
        return self._listed(entries, choice)

    def _prompt_entries(self, choice: Choice, firsts: Sequence[int], count: int) -> list[TokenLogprob]:
        """As if they were a choice's; nothing is said of how likely the first is (NaN)."""
        entries = [TokenLogprob(firsts[choice.index // self._n], math.nan)]
        entries += [TokenLogprob(e.token_id, e.logprob, e.top[:count]) for e in choice.prompt if e is not None]
        return entries

    def _listed(self, entries: Sequence[TokenLogprob], choice: Choice) -> dict[str, Any]:
        pieces = [self._tokenizer.piece(entry.token_id) for entry in entries]
        offsets = []
        for piece in pieces:
            offsets.append(choice.offset)
            choice.offset += len(piece)
        return {
            "tokens": pieces,
            "token_logprobs": [None if math.isnan(entry.logprob) else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                None
                if math.isnan(entry.logprob)
                else {self._tokenizer.piece(token): _finite(logprob) for token, logprob in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 is what OpenAI sends for a token out of reach."""
    return max(logprob, -9999.0)


class Renderer:
    """Turns one request's updates into its answer. Choices are numbered prompt by prompt: `prompt * n + choice`."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        request_id: str,
        model: str,
        created_s: int,
        choices: int,
        n: int,
        stream: bool,
        include_usage: bool,
        include_receipt: bool = False,  # in the chunk with the usage, which a stream has then
        prompt_logprobs: bool = False,  # in fields of their own
    ) -> None:
        self._dialect = dialect
        self._stream = stream
        self._tells_usage = include_usage or include_receipt
        self._tells_receipt = include_receipt
        self._n = n
        self._choices = [Choice(index) for index in range(choices)]
        self._tells_prompts = prompt_logprobs
        identity = {"id": dialect.id_prefix + request_id, "object": "", "created": created_s, "model": model}
        self._whole = {**identity, "object": dialect.object}
        self._head = _encode({**identity, "object": dialect.chunk_object})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def update(self, part: int, update: Update) -> list[bytes]:
        """Take what a step did for one prompt; the frames that say it, if this is a stream."""
        frames: list[bytes] = []
        if update.prompt_logprobs is not None:
            for choice in self._choices[part * self._n : (part + 1) * self._n]:
                choice.prompt = update.prompt_logprobs
        for delta in update.deltas:
            choice = self._choices[part * self._n + delta.index]
            if delta.finish is not None:
                choice.finish = delta.finish
                choice.stop_reason = INSUFFICIENT_QUOTA if delta.finish is Finish.QUOTA else delta.stop_reason
            if self._stream:
                self._chunks(choice, delta, frames)
            else:
                choice.text.append(delta.text)
                choice.logprobs += delta.logprobs or ()
        return frames

    def _chunks(self, choice: Choice, delta: ChoiceDelta, frames: list[bytes]) -> None:
        if not choice.started:
            choice.started = True
            opening = self._dialect.opening(choice)
            if opening is not None:
                frames.append(self._chunk(choice, opening))
        reason = _FINISH.get(delta.finish) if delta.finish is not None else None
        if not (delta.text or delta.logprobs or reason):
            return
        fields = self._dialect.delta(delta.text) if delta.text or delta.logprobs else self._dialect.closing()
        logprobs = self._dialect.logprobs(delta.logprobs, choice) if delta.logprobs else None
        frames.append(self._chunk(choice, fields, logprobs, reason, choice.stop_reason if reason else None))

    def _chunk(
        self,
        choice: Choice,
        fields: bytes,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        return b"".join(
            (
                b"data: ",
                self._head,
                b'{"index":%d,' % choice.index,
                fields,
                b',"logprobs":',
                _encode(logprobs) if logprobs else b"null",
                b',"finish_reason":',
                _encode(reason),
                b',"stop_reason":' + _encode(stop_reason) if reason else b"",
                b"}",
                self._tail,
            )
        )

    @property
    def takes_long(self) -> bool:
        """Whether the end has thousands of log-probabilities to word: not for the event loop."""
        return sum(len(choice.prompt) for choice in self._choices) > 256

    def ending(self, counts: TokenCounts) -> list[bytes]:
        """What may leave once the request is settled: the usage chunk and `[DONE]`, or the whole body."""
        if not self._stream:
            return [_encode(self._whole_body(counts))]
        if not self._tells_usage:
            return [DONE]
        usage = b'],"usage":' + _encode(counts_json(counts)) + _CHUNK_END
        return [b"data: " + self._head + usage, DONE]

    def receipted(self, ending: list[bytes], receipt: bytes) -> list[bytes]:
        """What `ending` gave, with the receipt beside the usage where a stream was asked for it."""
        if not (self._stream and self._tells_receipt):
            return ending
        usage, *done = ending
        return [usage.removesuffix(_CHUNK_END) + b',"receipt":' + receipt + _CHUNK_END, *done]

    def _whole_body(self, counts: TokenCounts) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in self._choices]
        body = {**self._whole, "choices": choices, "usage": counts_json(counts)}
        if self._tells_prompts:
            of_body, of_choices = self._dialect.prompt([choice.prompt for choice in self._choices])
            body |= of_body
            for choice, fields in zip(choices, of_choices, strict=False):
                choice |= fields
        return body

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            **self._dialect.whole(choice),
            "logprobs": self._dialect.logprobs(choice.logprobs, choice) if choice.logprobs else None,
            "finish_reason": _FINISH.get(choice.finish) if choice.finish is not None else None,
            "stop_reason": choice.stop_reason,
        }


def counts_json(counts: TokenCounts) -> dict[str, object]:
    """OpenAI's `usage` object: both details always, so that a zero is a zero and never 'missing'."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }
