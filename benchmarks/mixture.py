"""Requests of every kind, drawn at random: what a soak asks, and which ends of each are right.

Knows: the fields of /v1, prompts of one token and of many, prefixes that many have in common, what is refused. Does not
know: how requests are sent, and when.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from engine.tokens import Tokenizer
from gateway.bench.filler import WORDS

CHAT, COMPLETIONS = "chat", "completions"

OK, CUT = "ok", "cut"
LATE = frozenset({OK, "queue_timeout", "deadline_exceeded"})
"""How a request may end that asks for nothing wrong: a busy server may not come to it in time."""

SWAPPED = frozenset({"model_not_found", "adapter_unavailable"})
"""How one may end, too, whose adapter is taken away and brought back meanwhile."""

STOPS = (".", "\n", " the", "and", "you are", "?")
BAD_WORDS = ("the", "very", "never", "first of all")
OUTPUT_TOKENS = (8, 24)
TEXT_ROOM = 64
"""Tokens of a chat's template, and of words that a text has more of than were asked for."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: who asks what, and how it may end. An end is a name: ok, cut, or the code of an error."""

    label: str
    tenant: str
    endpoint: str
    body: dict[str, Any]
    ends: frozenset[str]
    cut_after_s: float | None = None  # the client goes away then, if it has no answer yet


class Mixture:
    """Draws wishes. `adapters` are names by tenant; `poor` is a tenant whose money ends again and again."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        adapters: Mapping[str, Sequence[str]],
        poor: str,
        prompt_max: int,
        context: int,
        cut_s: float,
        seed: int,
    ) -> None:
        """`cut_s`: how long clients that go away stay, on the average."""
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._model = model
        self._adapters = adapters
        self._poor = poor
        self._prompt_max = prompt_max
        self._context = context
        self._cut_s = cut_s
        self._words_per_token = len(WORDS) / len(tokenizer.encode(" ".join(WORDS)))
        self._prefixes = [self._ids(self._length(prompt_max // 2)) for _ in range(8)]
        self._openings = [self._text(self._length(prompt_max // 2)) for _ in range(8)]
        self._drawn = 0

    def draw(self) -> Wish:
        """The next."""
        self._drawn += 1
        label = f"wish-{self._drawn}"
        chance = self._rng.random()
        if chance < 0.08:
            return self._refused(label)
        if chance < 0.09:
            return self._endless(label)
        if chance < 0.15:
            return self._moneyless(label)
        return self._ordinary(label)

    def plain(self) -> Wish:
        """One that nothing is to be said against."""
        self._drawn += 1
        label = f"wish-{self._drawn}"
        tenant = next(iter(self._adapters))
        body = {"model": self._model, "user": label, "prompt": self._ids(4), "max_tokens": 1}
        return Wish(label, tenant, COMPLETIONS, body, frozenset({OK}))

    # Kinds

    def _ordinary(self, label: str) -> Wish:
        rng = self._rng
        tenant = rng.choice(list(self._adapters))
        model, ends = self._model, LATE
        if rng.random() < 0.5:
            model, ends = rng.choice(self._adapters[tenant]), LATE | SWAPPED
        body = {
            "model": model,
            "user": label,
            "n": rng.choice((1, 1, 1, 1, 2, 3)),
            **self._outputs(),
            **self._sampling(),
        }
        endpoint = rng.choice((CHAT, COMPLETIONS))
        body |= self._chat() if endpoint == CHAT else self._completion()
        body |= self._manner(prompt_logprobs=True)
        if body.get("echo") and body.get("logprobs") is not None and body.get("stream"):
            del body["echo"]  # not served
        cut_after_s = rng.expovariate(1 / self._cut_s) if rng.random() < 0.15 else None
        return Wish(label, tenant, endpoint, body, ends if cut_after_s is None else ends | {CUT}, cut_after_s)

    def _endless(self, label: str) -> Wish:
        """It would go on for longer than the server lets it."""
        tenant = self._rng.choice(list(self._adapters))
        body = {"model": self._model, "user": label, "prompt": self._ids(4), "max_tokens": self._context - 4}
        return Wish(label, tenant, COMPLETIONS, body | {"ignore_eos": True} | self._manner(), LATE)

    def _moneyless(self, label: str) -> Wish:
        """Refused at the door, or ended where the money ends."""
        body = {"model": self._model, "user": label, **self._chat(), **self._outputs(), **self._manner()}
        return Wish(label, self._poor, CHAT, body, LATE | {"insufficient_quota"})

    def _refused(self, label: str) -> Wish:
        tenant, other = self._rng.sample(list(self._adapters), 2)
        good = {"model": self._model, "user": label, "prompt": self._ids(8), "max_tokens": 8}
        foreign = next(name for name in self._adapters[other] if name not in self._adapters[tenant])
        faults: tuple[tuple[dict[str, Any], str], ...] = (
            ({"model": "no-such-model"}, "model_not_found"),
            ({"model": foreign}, "model_not_found"),
            ({"temperature": 3.0}, "invalid_value"),
            ({"n": 0}, "invalid_value"),
            ({"max_tokens": "many"}, "invalid_type"),
            ({"seeds": 1}, "unknown_parameter"),
            ({"prompt": [1 << 30]}, "invalid_value"),
            ({"prompt": []}, "invalid_type"),
            ({"max_tokens": self._context}, "context_length_exceeded"),
            ({"prompt": self._text(self._context + TEXT_ROOM)}, "context_length_exceeded"),
            ({"bad_words": [" "]}, "invalid_value"),
            ({"best_of": 3}, "unsupported_parameter"),
        )
        fault, code = self._rng.choice(faults)
        return Wish(label, tenant, COMPLETIONS, good | fault, frozenset({code}))

    # Parts

    def _manner(self, *, prompt_logprobs: bool = False) -> dict[str, Any]:
        """Streamed or whole."""
        rng = self._rng
        if rng.random() < 0.5:
            return {"stream": True} | ({"stream_options": {"include_usage": True}} if rng.random() < 0.7 else {})
        return {"prompt_logprobs": rng.randint(0, 3)} if prompt_logprobs and rng.random() < 0.1 else {}

    def _outputs(self) -> dict[str, Any]:
        most = self._rng.randint(*OUTPUT_TOKENS)
        least = {"min_tokens": self._rng.randint(1, most)} if self._rng.random() < 0.2 else {}
        return {"max_tokens": most, "ignore_eos": self._rng.random() < 0.5, **least}

    def _sampling(self) -> dict[str, Any]:
        """Each field in one request of a few."""
        rng, vocabulary = self._rng, self._tokenizer.vocab_size
        fields: dict[str, Any] = {
            "temperature": rng.choice((0.0, 0.7, 1.3)),
            "top_p": rng.choice((0.5, 0.9, 0.99)),
            "top_k": rng.choice((1, 5, 40)),
            "min_p": 0.05,
            "seed": rng.randrange(1 << 32),
            "repetition_penalty": 1.2,
            "presence_penalty": rng.uniform(-1, 1),
            "frequency_penalty": rng.uniform(-1, 1),
            "stop": rng.sample(STOPS, 2),
            "stop_token_ids": [rng.randrange(vocabulary)],
            "bad_words": rng.sample(BAD_WORDS, 2),
            "logit_bias": {str(rng.randrange(vocabulary)): rng.uniform(-5, 5) for _ in range(8)},
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": rng.choice(("a", "b")),
        }
        chosen = {name: value for name, value in fields.items() if rng.random() < 0.2}
        if rng.random() < 0.05:
            chosen["allowed_token_ids"] = rng.sample(range(vocabulary), 200)
        return chosen

    def _chat(self) -> dict[str, Any]:
        rng = self._rng
        said = self._text(self._length(self._prompt_max))
        messages = [{"role": "user", "content": said}]
        if rng.random() < 0.4:
            messages.insert(0, {"role": "system", "content": rng.choice(self._openings)})
            messages[1]["content"] = self._text(self._length(self._prompt_max // 2))
        logprobs = {"logprobs": True, "top_logprobs": rng.randint(0, 5)} if rng.random() < 0.2 else {}
        return {"messages": messages, **logprobs}

    def _completion(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.1:
            prompt: Any = [self._ids(self._length(self._prompt_max // 3)) for _ in range(rng.randint(2, 3))]
        elif rng.random() < 0.4:
            prompt = rng.choice(self._prefixes) + self._ids(self._length(self._prompt_max // 2))
        elif rng.random() < 0.4:
            prompt = self._text(self._length(self._prompt_max))
        else:
            prompt = self._ids(self._length(self._prompt_max))
        logprobs = {"logprobs": rng.randint(0, 5)} if rng.random() < 0.2 else {}
        return {"prompt": prompt, **logprobs} | ({"echo": True} if rng.random() < 0.1 else {})

    def _length(self, most: int) -> int:
        """1 to `most`, as many between 10 and 100 as between 100 and 1,000."""
        return round(exp(self._rng.uniform(0, log(most))))

    def _ids(self, count: int) -> list[int]:
        return self._rng.choices(range(self._tokenizer.vocab_size), k=count)

    def _text(self, tokens: int) -> str:
        """Of about so many tokens."""
        return " ".join(self._rng.choices(WORDS, k=max(1, int(tokens * self._words_per_token))))
