"""What a guided choice may say next, as bits over the vocabulary.

Knows: `llguidance` (a grammar compiled for a vocabulary, a place in it, its mask). Does not know: who asks, where
grammars are compiled (`grammarstore`) or tried out (`grammartrial`), what a score is.

A mask has a bit for each token whose bytes can go on from here, and the end-of-sequence bits where the text may end.
Special tokens and the ids that pad a model's vocabulary stand for no bytes here, so no grammar can ask for them. Any
tokens that spell an allowed text are allowed, not only those that the tokenizer would choose: the model chooses well
without, and to force them the library would tokenize all that is forced anew at every step (70 ms for 60 kB).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt

from engine.types import GrammarRejected, Guide

if TYPE_CHECKING:
    from engine.tokens import Tokenizer

CREDIT_S = 0.5
TOKEN_S = 0.002
"""Time that a choice's grammar may take from the step loop: once, and for each token. A usual one takes 20 µs."""

TOGETHER_MIN = 8
SLOW_S = 0.005
TIMED_STEPS = 64
"""So many masks are filled by two threads; after a step in which that was slow, so many steps go without."""

WHITESPACE = r"( |\n {0,16})"
"""Between JSON's marks: nothing, one space, or a line's end and an indentation. A small model left free writes blanks
until its tokens are spent."""

_UNENDING = "the grammar allows no token here"
_NUMBERED = re.compile(r" \d+ \| ")
_COSTLY = "the grammar takes too long to follow"


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of every token of the model's vocabulary (empty: none to be said), and the tokens that end a text."""

    words: list[bytes]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        silent = tokenizer.special_ids
        words = [b"" if token in silent else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        return cls(words, tokenizer.eos_token_ids)


class Compiler:
    """Makes grammars for one vocabulary. Any thread may call it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = llguidance.LLTokenizer(
            _Words(vocabulary),  # type: ignore[arg-type]  # what the library asks of a TokenizerWrapper
            eos_token=list(vocabulary.eos_token_ids),
        )
        # For one step of one choice, a twentieth to a half of the library's own: with those a grammar of one ambiguous
        # rule took 1.6 s a step, with these 10 to 90 ms before it is ended.
        self._limits = llguidance.LLParserLimits(
            step_lexer_fuel=100_000, step_max_items=5_000, max_lexer_states=10_000, verbose_errors=False
        )

    def compile(self, source: str) -> Grammar:
        """`source` as `source_of` gives it. Raises `GrammarRejected`; holds the GIL only to begin and to end."""
        start = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if start.is_error():
            raise GrammarRejected(reason_of(start.get_error()))
        return Grammar(start)


class Grammar:
    """A compiled grammar; each choice gets a `Matcher` of its own."""

    __slots__ = ("__weakref__", "_start", "nbytes")

    def __init__(self, start: llguidance.LLMatcher) -> None:
        self._start = start
        self.nbytes = 0  # what it holds, as its trial measured it

    def matcher(self) -> Matcher:
        return Matcher(self)

    def place(self) -> llguidance.LLMatcher:
        """A new place at the grammar's start."""
        return self._start.deep_copy()


class Matcher:
    """One choice's place in its grammar. The copy that keeps it is made at the first step, not while it waits.

    `ended`: nothing may follow. `stuck`: why it cannot go on; its mask allows the end of the text from then on, so that
    something can be drawn.
    """

    __slots__ = ("_grammar", "_place", "_spent_s", "_tokens", "ended", "stuck")

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._place: llguidance.LLMatcher | None = None
        self._spent_s = 0.0
        self._tokens = 0
        self.ended = False
        self.stuck: str | None = None

    def place(self) -> llguidance.LLMatcher | None:
        """Where it is now, to have its mask filled; None: stuck."""
        if self._place is None and self.stuck is None:
            self._place = self._grammar.place()
        return self._place if self.stuck is None else None

    def fill(self, address: int, nbytes: int) -> None:
        """Write the mask to memory. A mask of a stuck one is not written."""
        began_s = time.thread_time()
        try:
            if (place := self.place()) is not None:
                place.unsafe_compute_mask_ptr(address, nbytes)
        except BaseException as error:
            self._failed(error)
        self.check()
        self._spend(began_s)

    def check(self) -> None:
        """Notice when the mask could not be filled."""
        if self.stuck is None and self._place is not None and self._place.is_error():
            self.stuck = reason_of(self._place.get_error())

    def accept(self, token_id: int) -> None:
        """Go on by one token, which the last mask allowed."""
        if self.stuck is not None or self._place is None:
            return
        began_s = time.thread_time()
        self._tokens += 1
        try:
            accepted = self._place.consume_token(token_id)
        except BaseException as error:
            self._failed(error)
        else:
            if not accepted:
                self.stuck = reason_of(self._place.get_error())
            self.ended = self.stuck is None and self._place.is_stopped()
        self._spend(began_s)

    def _failed(self, error: BaseException) -> None:
        _let_pass(error)
        self.stuck = reason_of(str(error))

    def _spend(self, began_s: float) -> None:
        self._spent_s += time.thread_time() - began_s
        if self.stuck is None and self._spent_s > CREDIT_S + TOKEN_S * self._tokens:
            self.stuck = _COSTLY


class Masks:
    """The masks of a step's guided rows, in memory that is kept from step to step.

    Many are filled by two threads, which are the library's. Who took how long is not known then: after a slow step
    each is filled and timed for itself, for a while.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._words = -(-vocab_size // 32)
        self._width = 4 * self._words
        self._make_room(1)
        self._end = np.zeros(self._words, dtype=np.uint32)
        for token in eos_token_ids:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        self._threads: llguidance.LLExecutor | None = None
        self._timed_steps = 0

    def fill(self, matchers: Collection[Matcher]) -> npt.NDArray[np.uint8]:
        """[matchers, bytes]: bit `t % 8` of byte `t // 8` is set where token t is allowed."""
        if len(self._bits) < len(matchers):
            self._make_room(len(matchers))
        if len(matchers) < TOGETHER_MIN or not self._fill_together(matchers):
            self._fill_one_by_one(matchers)
        for row, matcher in enumerate(matchers):
            if matcher.stuck is not None:
                self._bits[row] = self._end
        return self._bytes[: len(matchers)]

    def _make_room(self, rows: int) -> None:
        self._bits = np.zeros((rows, self._words), dtype=np.uint32)
        self._bytes = self._bits.view(np.uint8)
        self._address = self._bits.ctypes.data  # asked for once: that alone takes as long as a mask

    def _fill_one_by_one(self, matchers: Collection[Matcher]) -> None:
        address = self._address
        for matcher in matchers:
            matcher.fill(address, self._width)
            address += self._width

    def _fill_together(self, matchers: Collection[Matcher]) -> bool:
        """False: it is not done."""
        if self._timed_steps:
            self._timed_steps -= 1
            return False
        began_s = time.perf_counter()
        try:
            self._threads = self._threads or llguidance.LLExecutor(num_threads=2)
            places = [(place, row) for row, one in enumerate(matchers) if (place := one.place()) is not None]
            self._threads.unsafe_compute_mask_ptr(places, self._address, self._width, len(self._bits))
        except BaseException as error:
            _let_pass(error)
            return False
        for matcher in matchers:
            matcher.check()
        if time.perf_counter() - began_s > SLOW_S:
            self._timed_steps = TIMED_STEPS
        return True


def _let_pass(error: BaseException) -> None:
    """Raise what is no fault of a grammar's. A panic of the library is, and is no `Exception`."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


class _Words:
    """A vocabulary as `llguidance.LLTokenizer` wants it."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.words
        self.eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else None

    def __call__(self, text: str) -> list[int]:
        raise RuntimeError("a grammar that forces no tokens does not tokenize")


# ---- from what a request asks to the library's own notation ----


def source_of(guide: Guide) -> str:
    """The guide as a grammar of the library; raises `GrammarRejected` for what cannot be read at all.

    May take long and deep recursion for a hostile one: it is called where that does no harm (`grammartrial`).
    """
    value = guide.value
    if guide.kind == "choice":
        return _lark("start: /" + "|".join(map(_escaped, value)) + "/")
    if not isinstance(value, str):
        raise GrammarRejected("the grammar must be a text")
    if guide.kind == "json_object":
        return _json({"type": "object"})
    if guide.kind == "json_schema":
        return _json(_parsed(value))
    if guide.kind == "regex":  # \d, \w and \s are ASCII's, as in JSON Schema and unlike Python's
        return _lark("start: /" + llguidance.regex_to_lark(value, use_ascii="dws") + "/")
    return _lark(_checked_grammar(value))


def _lark(rules: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(rules + '\n%llguidance {"no_forcing": true}\n')


def _json(schema: object) -> str:
    """A schema is asked for as JSON is written here, whatever it says about that itself."""
    if isinstance(schema, dict):
        asked = {key: value for key, value in schema.items() if key != "x-guidance"}
    else:
        asked = {"allOf": [schema]}
    asked["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return _lark("start: %json " + json.dumps(asked, ensure_ascii=False))


def _parsed(schema: str) -> object:
    try:
        parsed = json.loads(schema)
    except RecursionError:
        raise GrammarRejected("the JSON schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarRejected(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise GrammarRejected("a JSON schema is an object, true or false")
    return parsed


def _escaped(text: str) -> str:
    r"""Text as a regex: what is not a letter or digit as \x{…}, which no reader of the regex can mistake."""
    return "".join(
        character if character.isascii() and character.isalnum() else rf"\x{{{ord(character):x}}}" for character in text
    )


def _checked_grammar(text: str) -> str:
    """Lark's dialect as it is, GBNF (`root ::= …`) turned into it."""
    for taken, reason in (
        ("%llguidance", "options of the grammar library cannot be set"),
        ("<[", 'tokens cannot be named by their numbers (write "<" "[" for that text)'),
    ):
        if taken in text:
            raise GrammarRejected(reason)
    if "::=" not in text:
        return text
    try:
        return llguidance.grammar_from("gbnf", _ESCAPE.sub(_unescaped, text))
    except (ValueError, RecursionError) as error:
        raise GrammarRejected(reason_of(str(error))) from None


_ESCAPE = re.compile(r"\\(?:\\|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
_MEANING = {'"', "\\", "[", "]"}  # what has a meaning in GBNF's strings or classes, and an escape in both


def _unescaped(match: re.Match[str]) -> str:
    r"""GBNF's \u00e9 as the character: the library turns it into an escape that it cannot read itself."""
    code = int(match[0][2:], 16) if len(match[0]) > 2 else 0
    if not 0x20 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000 or code == 0x7F:
        return match[0]
    return "\\" + chr(code) if chr(code) in _MEANING else chr(code)


def reason_of(text: str) -> str:
    """The library's message as one short sentence, without what only its authors can use."""
    lines: Iterable[str] = (line.strip() for line in text.replace("<non-verbose/>", "").splitlines())
    message = _NUMBERED.split(" ".join(line for line in lines if line))[0]  # without the lines of the source
    if not message or message.startswith("NoExtension"):
        return _UNENDING
    if "panic" in message or "recursion" in message:
        return "the grammar is too large, nested too deeply, or names a special token"
    return message if len(message) <= 300 else message[:299] + "…"
