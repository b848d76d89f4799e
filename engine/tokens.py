"""Text to token ids and back, the chat template, and text that arrives token by token.

Knows: a model folder's tokenizer.json and chat template. Does not know: torch or transformers, whose
tokenizers import takes seconds; the `tokenizers` library and a Jinja sandbox give the same results, and a test
holds them against transformers'. Used by the gateway and by the engine process.

A token is bytes here. A text is the UTF-8 decoding of its tokens' bytes joined, with U+FFFD for what is not UTF-8,
so the text of a stream and the text of the whole are equal whatever the model writes.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.modelcache import WeightsError
from engine.models.config import end_tokens
from engine.types import PromptTooLong, SamplingParams

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder. Safe to share between threads.

    `vocab_size` is the model's (every id below it can be computed with), `eos_token_ids` are those that end a text.
    Raises `WeightsError` when the folder's files cannot be used.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def __init__(self, folder: Path) -> None:
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        model = _read_json(folder / "config.json")
        try:
            self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise WeightsError(f"The tokenizer.json in {folder} is missing or damaged.") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = _special_tokens(folder, config)
        self._register_special_tokens()
        self._to_bytes, self._strips_first_space = _decoding(self._backend, folder)
        self._known = self._backend.get_vocab_size(with_added_tokens=True)
        self.vocab_size = int(model.get("vocab_size") or self._known)
        self.eos_token_ids = self._eos_token_ids(end_tokens(model, _read_json(folder / "generation_config.json")))
        self._templates = _chat_templates(folder, config)
        self._bytes: dict[int, bytes] = {}
        self._longest_token = max(len(self._to_bytes(text)) for text in self._backend.get_vocab())

    def _register_special_tokens(self) -> None:
        """As transformers: what the configuration names is special, even if tokenizer.json forgot to say so."""
        named = set(self.special_tokens.values())
        held = self._backend.get_added_tokens_decoder().values()
        missing = named - {token.content for token in held if token.special}
        self._backend.add_special_tokens(
            [AddedToken(text, special=True) for text in sorted(missing) if self._backend.token_to_id(text) is not None]
        )
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def _eos_token_ids(self, declared: Iterable[int]) -> tuple[int, ...]:
        """What the model declares; the tokenizer's own always belongs to them."""
        ids = set(declared)
        own = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return tuple(sorted(ids if own is None else ids | {own}))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised, as transformers does.

        With `max_tokens` the work is bounded: a text that cannot fit, because no token is longer than the
        vocabulary's longest, is refused before it is tokenized. Raises `PromptTooLong`, or `ValueError` for text
        that is not Unicode (lone surrogates).
        """
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise PromptTooLong(f"The prompt is longer than {max_tokens} tokens.")
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("the text holds a lone surrogate and is not valid Unicode") from error
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(f"The prompt has {len(ids)} tokens; at most {max_tokens} are possible.")
        if self._known > self.vocab_size and any(token >= self.vocab_size for token in ids):
            raise ValueError("the text holds a token that the model does not know")
        return list(ids)

    def bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Words that shall not be said as token ids, with vLLM's reading of them.

        A word stands for itself at the beginning of a text, and for itself behind a space where that is another first
        token and no more of them. Raises `ValueError` for text that is not Unicode or has no tokens.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            plain, spaced = (tuple(self.encode(lead + word.lstrip(), add_special_tokens=False)) for lead in ("", " "))
            if not plain:
                raise ValueError("a word without any token")
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(found)

    def apply_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format; see `render_chat` and `encode`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the text that is tokenized. Raises `ValueError` with a text for the client.

        A content made of text parts is joined by newlines; `variables` are the template's own (`enable_thinking`).
        """
        if not messages:
            raise ValueError("at least one message is needed")
        source = self._templates.get("tool_use") if tools else None
        source = source or self._templates.get("default")
        if source is None:
            raise ValueError("the model has no chat template")
        plain = [_plain_message(message) for message in messages]
        known = {**self.special_tokens, **variables}
        try:
            return _compile(source).render(
                messages=plain, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **known
            )
        except Exception as error:  # the template is the model's and the data the client's: any fault is of the two
            raise ValueError(f"the chat template cannot render these messages: {error}") from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole output, as transformers decodes it, without its space clean-up; unknown ids are empty."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        if self._strips_first_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode("utf-8", "replace")

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text of their own: ends, turns, padding."""
        return self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters; empty for an id it does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            text = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            found = b"" if text is None else self._to_bytes(text)
            if text is not None:  # unknown ids are not remembered: anyone may send any number of them
                self._bytes[token_id] = found
        return found

    def piece(self, token_id: int) -> str:
        """One token as text for logprobs, U+FFFD for part of a character; special tokens are shown."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class Detokenizer:
    """Turns one choice's tokens into text that is safe to send: no half characters, no part of a stop string.

    `push` is amortised O(1) per character. The pieces and the final `flush` join to `Tokenizer.decode` of all tokens
    (a SentencePiece model's first space is kept here: the text goes on from the prompt). A token that ended the choice
    and shall not be seen is not pushed.

    Of several stop strings the one that is complete first ends the text; of those complete at one character the
    longest. So the result does not depend on how text falls into tokens. Before `min_tokens` none ends it.
    """

    __slots__ = (
        "_held",
        "_include",
        "_matched",
        "_min_tokens",
        "_pushed",
        "_skipped",
        "_state",
        "_stops",
        "_tokenizer",
        "_utf8",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special_ids if params.skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = _stop_automaton(params.stop) if params.stop else None
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._pushed = 0
        self._state = 0  # of the automaton, after all text so far
        self._held = ""  # the end of the text, which a stop string may begin with
        self._matched: str | None = None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Text that became safe to send, and the stop string that ended the choice, if one did."""
        self._pushed += 1
        if token_id in self._skipped:
            return "", self._matched
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._stops is None:
            return text, None
        return self._scan(text)

    def flush(self) -> str:
        """What was held back, when the choice ended for another reason than a stop string."""
        if self._matched is not None:
            return ""
        held, self._held = self._held, ""
        return held + self._utf8.decode(b"", True)

    def _scan(self, text: str) -> tuple[str, str | None]:
        assert self._stops is not None  # push asks only then
        if self._matched is not None:
            return "", self._matched
        may_stop = self._pushed >= self._min_tokens
        for position, character in enumerate(text):
            self._state = self._stops.step(self._state, character)
            length = self._stops.match_length[self._state]
            if length and may_stop:
                whole = self._held + text[: position + 1]
                self._matched = whole[-length:]
                self._held = ""
                return whole if self._include else whole[:-length], self._matched
        whole = self._held + text
        safe = len(whole) - self._stops.depth[self._state]
        self._held = whole[safe:]
        return whole[:safe], None


class _StopAutomaton:
    """Aho and Corasick's automaton (CACM 18, 1975) over the stop strings; a state is the longest suffix of the text
    that begins a stop string, so its depth is how much must be held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match_length = [0]  # of the longest stop string that ends here; 0: none does
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = self._next[state][character]
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        queue = list(self._next[0].values())
        for state in queue:  # grows while it is read: breadth first
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                queue.append(child)
            if not self.match_length[state]:
                self.match_length[state] = self.match_length[self._fail[state]]


@lru_cache(maxsize=256)
def _stop_automaton(stops: tuple[str, ...]) -> _StopAutomaton:
    return _StopAutomaton(stops)


# ---- what is in a folder ----


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} does not hold a JSON object.")
    return value


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": text, …} as chat templates see them; an entry is a text or {"content": text}."""
    found: dict[str, str] = {}
    for name, value in {**_read_json(folder / "special_tokens_map.json"), **config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name in _SPECIAL_NAMES and isinstance(text, str):
            found[name] = text
    return found


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name ("default", "tool_use"); a .jinja file comes before tokenizer_config.json."""
    declared = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(declared, str):
        found["default"] = declared
    elif isinstance(declared, list):
        found = {str(entry.get("name")): str(entry.get("template")) for entry in declared if isinstance(entry, dict)}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return found | {name: path.read_text() for name, path in files.items() if path.is_file()}


def _decoding(backend: Backend, folder: Path) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text in the vocabulary becomes bytes, and whether decoding drops a first space."""
    decoder: dict[str, Any] = {"type": "none"}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes, False
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece_bytes, bool(kinds & {"Strip", "Metaspace"})
    raise WeightsError(
        f"The tokenizer in {folder} decodes in a way that is not supported ({', '.join(sorted(kinds))})."
    )


def _byte_level_bytes(token: str) -> bytes:
    """GPT-2's byte-level alphabet; a token with any other character stands for its own text."""
    table = _byte_level_table()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    """SentencePiece: <0xE2> is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """Character → byte: printable Latin-1 stands for itself, the other bytes are moved to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + offset): byte for offset, byte in enumerate(moved)}


# ---- chat templates ----


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no nulls, and text parts joined to one text."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError("only text parts can be in a message's content")
        plain["content"] = "\n".join(str(part.get("text", "")) for part in content)
    return plain


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    """The sandbox, filters and globals that transformers gives a template (`utils/chat_template_utils.py`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
