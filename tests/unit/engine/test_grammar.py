"""Guides, the grammars made of them, and their masks, over a vocabulary whose bits can be told apart."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from engine import grammar
from engine.fake import FakeTokenizer
from engine.grammar import Compiler, Masks, Matcher, Vocabulary, source_of
from engine.rows import DeviceRows, HostRows, Scratch
from engine.types import GUIDE_CHARACTERS_MAX, GUIDE_CHOICES_MAX, GrammarRejected, Guide, SamplingParams

EOS = (256, 258)
# Each byte, an end, a pair, another end, a special token without text, and padding up to a model's vocabulary.
WORDS = [*(bytes([byte]) for byte in range(256)), b"", b"ab", b"", b"", *[b""] * 40]
VOCABULARY = Vocabulary(WORDS, EOS)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


@pytest.fixture(scope="module")
def masks() -> Masks:
    return Masks(len(WORDS), EOS)


def allowed(masks: Masks, matcher: Matcher) -> set[int]:
    bits = np.unpackbits(masks.fill([matcher])[0], bitorder="little")
    assert not bits[len(WORDS) :].any()
    return set(np.flatnonzero(bits).tolist())


def matcher_of(compiler: Compiler, kind: str, value: Any = "") -> Matcher:
    return compiler.compile(source_of(Guide(kind, value))).matcher()


def takes(compiler: Compiler, masks: Masks, guide: Guide, text: str) -> bool:
    """Whether the text, byte by byte, is allowed and may end there."""
    matcher = compiler.compile(source_of(guide)).matcher()
    for byte in text.encode():
        if byte not in allowed(masks, matcher):
            return False
        matcher.accept(byte)
    return matcher.ended or EOS[0] in allowed(masks, matcher)


# ---- guides ----


@pytest.mark.parametrize(
    ("guide", "fault"),
    [
        (Guide("yaml", "x"), "kind must be one of"),
        (Guide("regex", ""), "must not be empty"),
        (Guide("regex", ("a",)), "needs a list"),
        (Guide("choice", "a"), "needs a list"),
        (Guide("choice", ()), "must not be empty"),
        (Guide("choice", ("a", "")), "must not be empty"),
        (Guide("choice", ("a",) * (GUIDE_CHOICES_MAX + 1)), "choices"),
        (Guide("grammar", "x" * (GUIDE_CHARACTERS_MAX + 1)), "characters"),
        (Guide("choice", ("x" * GUIDE_CHARACTERS_MAX, "y")), "characters"),
        (Guide("regex", "\ud800"), "surrogates"),
    ],
)
def test_a_guide_that_cannot_be_looked_at_is_a_fault_of_the_parameters(guide: Guide, fault: str) -> None:
    [(field, reason)] = SamplingParams(guided=guide).validate()
    assert field == "guided"
    assert fault in reason


def test_a_guide_of_every_kind_passes() -> None:
    for guide in (
        Guide("json_object"),
        Guide("json_schema", "{}"),
        Guide("regex", "é"),
        Guide("choice", ("a", "é")),
        Guide("grammar", "start: /a/"),
    ):
        assert SamplingParams(guided=guide).validate() == []


def test_allowed_tokens_and_a_grammar_do_not_go_together() -> None:
    faults = SamplingParams(guided=Guide("regex", "a"), allowed_token_ids=(1,)).validate(300)
    assert faults == [("guided", "cannot go together with allowed_token_ids")]


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[]", "an object, true or false"),
        ("json_schema", '{"a":' * 10_000 + "1" + "}" * 10_000, "too deeply"),
        ("json_schema", json.dumps({"type": "string", "not": {"const": "x"}}), "not"),
        ("json_schema", json.dumps({"$ref": "http://127.0.0.1:9/x"}), "127.0.0.1"),
        ("json_schema", json.dumps({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        ("regex", "(a", "unclosed"),
        ("regex", r"(?=a)a", "look-around"),
        ("grammar", "start: nobody", "nobody"),
        ("grammar", "root ::= nobody", "nobody"),
        ("grammar", "root ::= " + "(" * 5000, "too deeply"),
        ("grammar", "start: <[256]>", "numbers"),
        ("grammar", "start: <|im_end|>", "special token"),
        ("grammar", '%llguidance {"no_forcing": false}\nstart: "a"', "options"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_sentence(
    compiler: Compiler, kind: str, value: str, reason: str
) -> None:
    with pytest.raises(GrammarRejected, match=reason) as caught:
        compiler.compile(source_of(Guide(kind, value)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


# ---- masks ----


def test_only_tokens_whose_bytes_can_go_on_are_allowed(compiler: Compiler, masks: Masks) -> None:
    matcher = matcher_of(compiler, "regex", "ab?[0-9]")
    assert allowed(masks, matcher) == {ord("a"), 257}
    matcher.accept(257)
    assert allowed(masks, matcher) == set(b"0123456789")
    assert not matcher.ended
    matcher.accept(ord("7"))
    assert matcher.ended
    assert allowed(masks, matcher) == set(EOS)


def test_the_end_is_allowed_only_where_the_text_may_end(compiler: Compiler, masks: Masks) -> None:
    matcher = matcher_of(compiler, "regex", "a{2,3}")
    for expected in ({ord("a")}, {ord("a")}, {ord("a"), *EOS}):
        assert allowed(masks, matcher) == expected
        matcher.accept(ord("a"))
    assert matcher.ended


def test_special_and_padding_tokens_are_never_allowed(compiler: Compiler, masks: Masks) -> None:
    """Not even by a grammar that spells them: a text that looks like one is made of other tokens."""
    matcher = matcher_of(compiler, "regex", r"(?s:.*)")
    assert allowed(masks, matcher) <= {*range(256), 257, *EOS}
    tokenizer = FakeTokenizer()
    assert Vocabulary.of(tokenizer).words[256] == b""
    assert takes(compiler, masks, Guide("choice", ("<|im_end|>", "<end>")), "<|im_end|>")


def test_text_stays_utf8(compiler: Compiler, masks: Masks) -> None:
    matcher = matcher_of(compiler, "regex", ".+")
    matcher.accept(0xC3) if 0xC3 in allowed(masks, matcher) else pytest.fail("no two-byte character may begin")
    assert allowed(masks, matcher) == set(range(0x80, 0xC0))


def test_choices_are_places_of_their_own(compiler: Compiler, masks: Masks) -> None:
    made = compiler.compile(source_of(Guide("choice", ("ax", "by"))))
    one, other = made.matcher(), made.matcher()
    assert allowed(masks, one) == allowed(masks, other) == set(b"ab")
    one.accept(ord("a"))
    other.accept(ord("b"))
    bits = np.unpackbits(masks.fill([other, one, other]), axis=1, bitorder="little")
    assert [set(np.flatnonzero(row).tolist()) for row in bits] == [{ord("y")}, {ord("x")}, {ord("y")}]


def test_a_step_done_again_gives_the_same_mask(compiler: Compiler, masks: Masks) -> None:
    matcher = matcher_of(compiler, "regex", "[xyz]+")
    assert allowed(masks, matcher) == allowed(masks, matcher) == set(b"xyz")


# ---- what each kind means ----


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"n":1}', True),
        ('{\n  "n": 1\n}', True),
        ('{ "n": 1 }', True),
        ('{  "n":1}', False),  # no more than one blank
        (' {"n":1}', False),
        ('{"n":1,"m":2}', False),
        ("{}", False),
    ],
)
def test_json_is_written_tightly(compiler: Compiler, masks: Masks, text: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    closed = {**schema, "additionalProperties": False, "x-guidance": {"lenient": True, "whitespace_pattern": "x+"}}
    assert takes(compiler, masks, Guide("json_schema", json.dumps(closed)), text) is fits


@pytest.mark.parametrize(("schema", "text", "fits"), [("true", "[1]", True), ("{}", '"x"', True), ("true", "x", False)])
def test_schemas_that_allow_everything(compiler: Compiler, masks: Masks, schema: str, text: str, fits: bool) -> None:
    assert takes(compiler, masks, Guide("json_schema", schema), text) is fits


def test_a_json_object_is_an_object(compiler: Compiler, masks: Masks) -> None:
    assert takes(compiler, masks, Guide("json_object"), '{"a": [null, {"b": "é"}]}')
    assert not takes(compiler, masks, Guide("json_object"), "[]")


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("a|bc", "bc", True),
        ("a|bc", "ac", False),
        ("^abc$", "abc", True),
        (r"\d", "7", True),
        (r"\d", "٧", False),
        (r"\w", "é", False),
        (r"a/b\n", "a/b\n", True),
        ("a\nb", "a\nb", True),
        ('"[^"]*"', '"é"', True),
        (r"[^\d]", "x", True),
    ],
)
def test_a_regex_is_matched_in_full_and_its_classes_are_ascii(
    compiler: Compiler, masks: Masks, pattern: str, text: str, fits: bool
) -> None:
    assert takes(compiler, masks, Guide("regex", pattern), text) is fits


@pytest.mark.parametrize(
    "text", ["a", "a.*|b", 'qu"ote\\', "new\nline", "/slash/", "日本 🙂", "\x00\x7f", "[x]{2}", "$&"]
)
def test_a_choice_is_taken_letter_by_letter(compiler: Compiler, masks: Masks, text: str) -> None:
    guide = Guide("choice", ("something else", text))
    assert takes(compiler, masks, guide, text)
    assert not takes(compiler, masks, guide, text + "a")


@pytest.mark.parametrize(
    "rules",
    [
        'start: "[" word ("," word)* "]"\nword: /[a-z]+/ | "\\u00e9"',
        'root ::= "[" word ("," word)* "]" # a comment\nword ::= [\\x61-z]+ | "\\u00e9"\n',
    ],
)
def test_both_dialects_of_grammars(compiler: Compiler, masks: Masks, rules: str) -> None:
    guide = Guide("grammar", rules)
    assert takes(compiler, masks, guide, "[ab,é,c]")
    assert not takes(compiler, masks, guide, "[ab,]")


# ---- ends that are none ----


def test_a_place_where_nothing_can_follow_is_stuck(compiler: Compiler, masks: Masks) -> None:
    """A vocabulary without the letter that has to come."""
    poor = Compiler(Vocabulary([b"" if word == b"q" else word for word in WORDS], EOS))
    matcher = poor.compile(source_of(Guide("regex", "aq"))).matcher()
    assert allowed(masks, matcher) == {ord("a")}
    matcher.accept(ord("a"))
    assert allowed(masks, matcher) == set(EOS)
    assert matcher.stuck == "the grammar allows no token here"
    assert not matcher.ended


def test_a_token_that_was_not_allowed_is_noticed(compiler: Compiler, masks: Masks) -> None:
    matcher = matcher_of(compiler, "regex", "abc")
    allowed(masks, matcher)
    matcher.accept(ord("x"))
    assert matcher.stuck is not None
    assert allowed(masks, matcher) == set(EOS)


def test_a_grammar_that_takes_too_long_is_ended(
    compiler: Compiler, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "CREDIT_S", 0.0)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0)
    matcher = matcher_of(compiler, "regex", "a*")
    assert allowed(masks, matcher) == set(EOS)
    assert matcher.stuck == "the grammar takes too long to follow"


def test_an_ambiguous_grammar_is_ended_when_its_time_is_spent(
    compiler: Compiler, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps grow longer and longer."""
    monkeypatch.setattr(grammar, "CREDIT_S", 0.02)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0)
    matcher = matcher_of(compiler, "grammar", 'start: s\ns: s s | "a" | "b" | s "c" s | ')
    for _ in range(200):
        if matcher.stuck is not None:
            break
        allowed(masks, matcher)
        matcher.accept(ord("a"))
    assert matcher.stuck is not None


# ---- masks on scores ----


@pytest.mark.parametrize("vocab", [64, 296, 301])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_mask_leaves_what_is_allowed_as_it_is(kind: str, vocab: int) -> None:
    scores = np.random.default_rng(vocab).standard_normal((4, vocab), dtype=np.float32)
    scores[1, :8] = [np.inf, -np.inf, np.nan, 1e30, -1e30, 0, 1, 2]
    bits = np.random.default_rng(1).integers(0, 256, (2, -(-vocab // 32) * 4), dtype=np.uint8)
    held = torch.from_numpy(scores.copy())
    rows = HostRows(held.numpy(), Scratch()) if kind == "host" else DeviceRows(held)
    rows.mask(np.array([3, 1]), bits)
    expected = scores.copy()
    for row, its_bits in zip((3, 1), bits, strict=True):
        unpacked = np.unpackbits(its_bits, bitorder="little")[:vocab].astype(bool)
        expected[row][~unpacked] = -np.inf
    nan = np.isnan(expected)  # of a broken row; on the host a forbidden one stays what it was
    assert np.array_equal(held.numpy()[~nan & ~np.isnan(held.numpy())], expected[~nan & ~np.isnan(held.numpy())])
    assert np.isnan(held.numpy()).sum() <= 1


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (r'root ::= "\x41\u00e9\U0001F642"', "Aé🙂"),
        (r'root ::= "a\x22b\x5cc"', 'a"b\\c'),
        (r'root ::= "\\u0041"', r"\u0041"),
        (r"root ::= [\x41-\x43\u00e9]+", "ABCé"),
        (r"root ::= [^\x5d\x5b]+", "x-y"),
        (r'root ::= "a\n\t" [\n]', "a\n\t\n"),
    ],
)
def test_escapes_of_llama_cpps_dialect(compiler: Compiler, masks: Masks, rules: str, text: str) -> None:
    assert takes(compiler, masks, Guide("grammar", rules), text)


def test_many_are_filled_together_as_each_for_itself(compiler: Compiler, masks: Masks) -> None:
    patterns = ["a+", "[0-9]{2}", "é", "x|y", ".", "(ab)+", "q?", "[^a]", "k", "lm"]
    together = [matcher_of(compiler, "regex", pattern) for pattern in patterns]
    alone = [matcher_of(compiler, "regex", pattern) for pattern in patterns]
    together[4].stuck = alone[4].stuck = "for a reason"
    for _ in range(2):
        filled = masks.fill(together).copy()
        for row, (matcher, other) in enumerate(zip(together, alone, strict=True)):
            assert np.array_equal(filled[row], masks.fill([other])[0])
            token = int(np.flatnonzero(np.unpackbits(filled[row], bitorder="little"))[0])
            if token not in EOS:
                matcher.accept(token)
                other.accept(token)
    assert [one.stuck for one in together] == [None] * 4 + ["for a reason"] + [None] * 5


def test_after_a_slow_step_each_is_timed_for_itself(
    compiler: Compiler, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "SLOW_S", 0.0)
    matchers = [matcher_of(compiler, "regex", "a*") for _ in range(grammar.TOGETHER_MIN)]
    masks.fill(matchers)
    assert all(one._spent_s == 0.0 for one in matchers)
    masks.fill(matchers)
    assert all(one._spent_s > 0.0 for one in matchers)
    monkeypatch.setattr(grammar, "CREDIT_S", 0.0)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0)
    masks.fill(matchers)
    assert {one.stuck for one in matchers} == {"the grammar takes too long to follow"}
