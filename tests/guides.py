"""Seeded guides of every kind, each with a judge of its texts that knows nothing of the grammar library.

JSON is judged by `jsonschema`, a regex by `re`, a choice by itself, a grammar by a function that reads its language.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from engine.types import Guide

Judge = Callable[[str], bool]
Case = tuple[Guide, Judge]

_WORDS = (
    "alpha",
    "Beta",
    "x y",
    "naïve",
    'quo"te',
    "back\\slash",
    "東京",
    "a/b",
    "🙂",
    "tab\there",
    "end",
    "{}",
    "[0]",
)
_NAMES = ("id", "name", "user name", "größe", "n", "list", "ok", "$ref", "a.b", "x-guidance")


def cases(count: int, seed: int) -> list[Case]:
    """Two of five are JSON schemas, the others regexes, choices and grammars."""
    rng = random.Random(seed)
    makers = (json_schema, regex, json_schema, choice, grammar)
    return [makers[number % len(makers)](rng) for number in range(count)]


# ---- JSON ----


def json_schema(rng: random.Random) -> Case:
    schema = _object(rng, 2) if rng.random() < 0.6 else _schema(rng, 2)
    if rng.random() < 0.15:
        schema = {**_linked(rng), "$defs": {"leaf": _schema(rng, 0), "list": _list_of("list")}}
    return Guide("json_schema", json.dumps(schema, ensure_ascii=rng.random() < 0.5)), judge_of(schema)


def judge_of(schema: Any) -> Judge:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)

    def judge(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    return judge


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _integer, _number, _enum, _constant, lambda _: {"type": "boolean"}, lambda _: {"type": "null"})
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(leaves)(rng)
    return rng.choice((_object, _array, _tuple, _any_of, _all_of))(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.9:
        made["additionalProperties"] = False
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    """Two objects in one, or two bounds of one number."""
    if rng.random() < 0.5:
        return {"allOf": [{"type": "integer", "minimum": rng.randint(0, 5)}, {"maximum": rng.randint(5, 50)}]}
    first, second = ({"type": "object", "properties": {name: _schema(rng, depth)}, "required": [name]} for name in "pq")
    return {"allOf": [first, second], "maxProperties": 2}


def _linked(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "list": {"$ref": "#/$defs/list"}},
        "required": ["leaf"] if rng.random() < 0.5 else ["list", "leaf"],
        "additionalProperties": False,
    }


def _list_of(name: str) -> dict[str, Any]:
    """A linked list: a schema that refers to itself."""
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": f"#/$defs/{name}"}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "null"}, node]}


def _string(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 3)
    kinds: tuple[dict[str, Any], ...] = (
        {"minLength": least, "maxLength": least + rng.randint(0, 6)},
        {
            "pattern": rng.choice(
                (r"^[A-Z]{2}-\d{2,4}$", "^(red|green|blue)$", r"^\w{1,6}( \w{1,6})?$", "^[^a-z]{2,4}$")
            )
        },
        {"format": rng.choice(("date", "uuid", "ipv4", "email"))},
    )
    return {"type": "string", **rng.choice(kinds)}


def _integer(rng: random.Random) -> dict[str, Any]:
    least = rng.choice((-(10**9), -17, 0, 1, 250, 10**15))
    made = {"type": "integer", "minimum": least, "maximum": least + rng.choice((0, 3, 99, 12345))}
    if rng.random() < 0.2:
        return {"type": "integer", "exclusiveMinimum": 0, "maximum": 5000, "multipleOf": rng.choice((2, 7, 25))}
    return made


def _number(rng: random.Random) -> dict[str, Any]:
    least = rng.choice((-2.5, 0, 0.25, 99.9))
    return {"type": "number", "minimum": least, "maximum": least + rng.choice((0.5, 10, 1000.125))}


def _enum(rng: random.Random) -> dict[str, Any]:
    values = [1, 2.5, None, True, {"a": [1]}, [], *_WORDS]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _constant(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice([0, -1.5, "", {"k": {"é": [None]}}, *_WORDS])}


# ---- the others ----


def regex(rng: random.Random) -> Case:
    pieces = (
        r"\d{2,4}",
        r"\w{1,5}",
        r"[^a-z\s]{1,3}",
        "(yes|no|maybe)",
        r"(?:ab|c){1,3}?x",
        r"[a-f0-9]{4}",
        r"\$\d{1,3}\.\d{2}",
        "é?",
        "/{1,3}",
        "[а-я]{2,4}",
        r"\x41",
        '"[^"\\n]{0,5}"',
    )
    pattern = r"[ ,\-]".join(rng.choice(pieces) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.3:
        pattern = f"({pattern}|{rng.choice(pieces)})"
    compiled = re.compile(pattern, re.ASCII)
    return Guide("regex", pattern), lambda text: compiled.fullmatch(text) is not None


def choice(rng: random.Random) -> Case:
    texts = tuple({" ".join(rng.choices(_WORDS, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 8))})
    return Guide("choice", texts), lambda text: text in texts


def grammar(rng: random.Random) -> Case:
    return rng.choice((_sums, _brackets, _query, _sums_gbnf, _list_gbnf))(rng)


def _is_sum(text: str, digits: int) -> bool:
    """`sum: term (("+" | "-") term)~0..2`, a term being up to `digits` digits or a sum in parentheses."""

    def term(at: int) -> int:
        if text[at : at + 1] == "(":
            at = whole(at + 1)
            return at + 1 if text[at : at + 1] == ")" else len(text) + 1
        found = re.compile(rf"[0-9]{{1,{digits}}}").match(text, at)
        return found.end() if found else len(text) + 1

    def whole(at: int) -> int:
        at = term(at)
        for _ in range(2):
            if text[at : at + 1] in ("+", "-"):
                at = term(at + 1)
        return at

    return whole(0) == len(text)


def _sums(rng: random.Random) -> Case:
    digits = rng.randint(1, 3)
    text = f"""
        // sums in parentheses
        start: term (("+" | "-") term)~0..2
        term: NUMBER | "(" start ")"
        NUMBER: /[0-9]{{1,{digits}}}/
    """
    return Guide("grammar", text), lambda said: _is_sum(said, digits)


def _sums_gbnf(rng: random.Random) -> Case:
    digits = rng.randint(1, 3)
    text = f"""
# sums in parentheses
root ::= term (("+" | "-") term){{0,2}}
term ::= [0-9]{{1,{digits}}} | "(" root ")"
"""
    return Guide("grammar", text), lambda said: _is_sum(said, digits)


def _brackets(rng: random.Random) -> Case:
    """Two kinds of brackets, nested and none empty but the innermost."""
    core = rng.choice(("x", "yes", "é"))
    text = f'start: "(" start ")" | "[" start "]" | "{core}"'

    def judge(said: str) -> bool:
        while said and said[0] + said[-1] in ("()", "[]"):
            said = said[1:-1]
        return said == core

    return Guide("grammar", text), judge


def _query(rng: random.Random) -> Case:
    table = rng.choice(("users", "orders"))
    text = f"""
        start: "SELECT " columns " FROM {table}" (" WHERE " NAME " = " value)? ";"
        columns: NAME (", " NAME)~0..2
        value: NUMBER | "'" NAME "'"
        NAME: /[a-z]/ /[a-z_]{{0,7}}/
        NUMBER: "-"? ("0".."9")~1..4
    """
    name = "[a-z][a-z_]{0,7}"
    value = f"(-?[0-9]{{1,4}}|'{name}')"
    pattern = re.compile(f"SELECT {name}(, {name}){{0,2}} FROM {table}( WHERE {name} = {value})?;")
    return Guide("grammar", text), lambda said: pattern.fullmatch(said) is not None


def _list_gbnf(rng: random.Random) -> Case:
    mark = rng.choice((", ", " | ", "; "))
    text = f'root ::= "[" item ("{mark}" item){{1,3}} "]"\nitem ::= [a-zA-Z]{{1,6}} | "\\"" [^"\\n]{{0,4}} "\\""'
    item = '([a-zA-Z]{1,6}|"[^"\n]{0,4}")'
    pattern = re.compile(rf"\[{item}({re.escape(mark)}{item}){{1,3}}\]")
    return Guide("grammar", text), lambda said: pattern.fullmatch(said) is not None
