"""Hostile grammars in the process that tries them: none passes, none takes more than it may, the next is served."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from engine.grammar import Vocabulary
from engine.grammartrial import Trial
from engine.types import GUIDE_CHARACTERS_MAX, GrammarRejected, Guide

# Bytes, and all pairs of lowercase letters: enough for the library to take its time.
LETTERS = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"]
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *(a + b for a in LETTERS for b in LETTERS), b""], (932,)
)
TIMEOUT_S = 1.5


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    made = Trial(VOCABULARY, timeout_s=TIMEOUT_S)
    yield made
    made.close()


def schema(value: object) -> Guide:
    return Guide("json_schema", json.dumps(value))


REFUSED = {
    "multiple of a large prime": schema({"type": "integer", "multipleOf": 99999989}),
    "two patterns at once": schema(
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 9949}]}
    ),
    "a chain of rules": Guide(
        "grammar", "\n".join(f'r{i}: "a{i}" r{i + 1} | "b"' for i in range(4000)) + '\nstart: r0\nr4000: "z"'
    ),
    "deep parentheses": Guide("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "deep schema": Guide("json_schema", '{"items":' * 9_000 + "{}" + "}" * 9_000),
    "deep grammar": Guide("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "many optional properties": schema(
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(2500)},
            "additionalProperties": False,
        }
    ),
    "objects of everything in all ways": schema(
        {"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {"const": 1}}} for x in "ab"]} for i in range(16)]}
    ),
    "a schema that is only itself": schema({"$ref": "#"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_served(trial: Trial, name: str) -> None:
    with pytest.raises(GrammarRejected) as caught:
        trial.judge(REFUSED[name])
    assert ".rs" not in str(caught.value)  # where in the library's source
    assert trial.judge(Guide("choice", ("yes", "no"))).source


@pytest.mark.parametrize(
    "guide",
    [
        Guide("regex", "(a+)+b"),
        Guide("regex", "(a|b)*a(a|b){20}"),
        Guide("regex", r"(\w{1,1000}x){1000}"),
        Guide("choice", tuple(f"choice number {number * 7919}" for number in range(4000))),
        Guide("json_schema", json.dumps({"enum": [f"value {number * 7919}" for number in range(5000)]})),
        Guide("json_schema", json.dumps({"const": "x" * (GUIDE_CHARACTERS_MAX - 100)})),
        schema({"type": "string", "minLength": 10**6, "maxLength": 10**6 + 1}),
        schema({"type": "array", "minItems": 10**6}),
        Guide("grammar", 'root ::= root "a" | "b"'),
    ],
    ids=lambda guide: f"{guide.kind}-{str(guide.value)[:20]}",
)
def test_what_only_looks_hostile_passes_and_tells_what_it_holds(trial: Trial, guide: Guide) -> None:
    verdict = trial.judge(guide)
    assert verdict.reason is None
    assert 0 < verdict.nbytes < 24 << 20


def test_a_killed_process_is_started_again_and_closed_for_good() -> None:
    trial = Trial(VOCABULARY)
    trial.judge(Guide("regex", "a"))
    first = trial._process
    assert first is not None
    first.kill()
    with pytest.raises(GrammarRejected):
        trial.judge(Guide("regex", "b"))
    assert trial.judge(Guide("regex", "b")).source
    second = trial._process
    assert second is not None
    assert second.pid != first.pid
    trial.close()
    assert second.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)
