"""What is asked: prompts with the number of tokens each may have for an answer, and the bodies that carry them.

Knows: the kinds of workload and the fields of `/v1`. Does not know: when anything is sent (`arrivals`) or to whom.
Lengths, their order and the choice of models hang on the seed alone. The words hang on a nonce too, which stands at the
beginning of each question, so that no prefix cache answers from an earlier run; a shared prefix is always the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from gateway.bench.filler import Filler, TextTokenizer
from gateway.bench.lengths import Lengths
from gateway.bench.sharegpt import Exchange

CHARACTERS_PER_TOKEN = 4  # of English, where nothing can count
ANSWER_TOKENS_MAX = 1024  # of a dataset's answers, as in vLLM's benchmark
PROMPT_TOKENS_MAX = 1024


class ChatTokenizer(TextTokenizer, Protocol):
    """What is needed of `engine.tokens.Tokenizer`."""

    def apply_chat(self, messages: list[dict[str, Any]]) -> list[int]: ...


class Prompt(msgspec.Struct, frozen=True):
    """One question, under a system prompt or none."""

    system: str
    user: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]

    @property
    def text(self) -> str:
        """Both as one text, for plain completions."""
        return f"{self.system}\n\n{self.user}" if self.system else self.user


class Prompts(Protocol):
    """A workload's prompts. `exact`: a prompt has as many tokens as was asked for, template and all."""

    exact: bool

    def prompt(self, index: int, nonce: str) -> Prompt: ...


class Synthetic:
    """Words up to given lengths in tokens; `prefix` tokens of them are the same system prompt in every request.

    A length is the whole prompt's, as the server counts it: with `chat` the template's tokens belong to it.
    """

    def __init__(
        self,
        *,
        input_len: Lengths,
        output_len: Lengths,
        prefix: int = 0,
        chat: bool = True,
        tokenizer: ChatTokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self.exact = tokenizer is not None
        self._input, self._output = input_len, output_len
        self._chat = chat
        self._tokenizer = tokenizer
        self._seed = seed
        self._filler = Filler(tokenizer)
        self._system = self._shared(prefix) if prefix else ""

    def prompt(self, index: int, nonce: str) -> Prompt:
        """Request `index`. Raises `FillError` when its length cannot be had."""
        lengths = random.Random(f"{self._seed} {index}")
        tokens, max_tokens = self._input.pick(index, lengths), self._output.pick(index, lengths)
        words = random.Random(f"{self._seed} {index} {nonce}")
        head = f"[{nonce}-{index}]" if nonce else ""
        count = self._count(self._system)
        if count is None:
            tokens -= len(self._system.split())
        return Prompt(self._system, self._filler.text(tokens, words, head=head, count=count), max_tokens)

    def _shared(self, tokens: int) -> str:
        encode = None if self._tokenizer is None else self._tokenizer.encode
        count = None if encode is None else lambda text: len(encode(text))
        return self._filler.text(tokens, random.Random(f"{self._seed} shared"), count=count)

    def _count(self, system: str) -> Callable[[str], int] | None:
        """How many tokens a prompt with that question has."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        if self._chat:
            return lambda user: len(tokenizer.apply_chat(Prompt(system, user, 1).messages))
        return lambda user: len(tokenizer.encode(Prompt(system, user, 1).text))


class ShareGpt:
    """Questions of a dataset in an order that the seed shuffles, again from the start when they are used up.

    The answer asked for is as long as the dataset's, unless `output_len` says otherwise. With a tokenizer, exchanges
    under 4 tokens or over vLLM's limits are left out.
    """

    exact = False

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        *,
        output_len: Lengths | None = None,
        tokenizer: TextTokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self._output = output_len
        self._seed = seed
        encode = None if tokenizer is None else tokenizer.encode
        self._count: Callable[[str], int] = (
            (lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)) if encode is None else (lambda text: len(encode(text)))
        )
        fitting = [exchange for exchange in exchanges if self._fits(exchange)]
        self._exchanges = random.Random(seed).sample(fitting, len(fitting))
        if not fitting:
            raise ValueError("no exchange of the dataset has between 4 and 1024 tokens on both sides")

    def prompt(self, index: int, nonce: str) -> Prompt:
        exchange = self._exchanges[index % len(self._exchanges)]
        if self._output is None:
            max_tokens = self._count(exchange.answer)
        else:
            max_tokens = self._output.pick(index, random.Random(f"{self._seed} {index}"))
        return Prompt("", f"[{nonce}-{index}] {exchange.question}" if nonce else exchange.question, max_tokens)

    def _fits(self, exchange: Exchange) -> bool:
        return 4 <= self._count(exchange.question) <= PROMPT_TOKENS_MAX and (
            4 <= self._count(exchange.answer) <= ANSWER_TOKENS_MAX
        )


class Bodies(msgspec.Struct, kw_only=True):
    """How a prompt becomes a request's body.

    `models` and `extras` (objects merged into the body) are walked in turn; with `zipf` a requests' place in both is
    drawn, the k-th being asked for as often as k^-zipf says.
    """

    models: Sequence[str]
    endpoint: str = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: dict[str, Any] = {}
    extras: Sequence[dict[str, Any]] = ()
    zipf: float | None = None
    seed: int = 0

    def body(self, prompt: Prompt, index: int) -> tuple[str, bytes]:
        """(the model's name, the body) of request `index`."""
        place = self._place(index)
        model = self.models[place % len(self.models)]
        fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": prompt.max_tokens,
            "temperature": self.temperature,
        }
        fields |= {"messages": prompt.messages} if self.endpoint == "chat" else {"prompt": prompt.text}
        if self.ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": prompt.max_tokens}
        fields |= self.extra
        if self.extras:
            fields |= self.extras[place % len(self.extras)]
        return model, msgspec.json.encode(fields)

    def _place(self, index: int) -> int:
        if self.zipf is None:
            return index
        places = range(max(len(self.models), len(self.extras)))
        weights = [(place + 1) ** -self.zipf for place in places]
        return random.Random(f"{self.seed} model {index}").choices(places, weights)[0]
