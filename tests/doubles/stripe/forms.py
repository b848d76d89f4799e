"""Form bodies with brackets, as Stripe's v1 API takes them, and the parameters an endpoint knows.

`decode` turns `a[b][0]=c` into `{"a": {"b": ["c"]}}`; `check` types it by an endpoint's table and refuses what
the table does not list (`parameter_unknown`), as Stripe does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from tests.doubles.stripe.errors import StripeFault, invalid

Parser = Callable[[str, Any], Any]


class Param(NamedTuple):
    """How one parameter is read; `required` ones must be there and not be empty."""

    parse: Parser
    required: bool = False


Schema = Mapping[str, Param]


def decode(body: str) -> dict[str, Any]:
    """A form body or query string → nested dicts and lists of strings."""
    root: dict[str, Any] = {}
    for key, value in parse_qsl(body, keep_blank_values=True):
        name, _, rest = key.partition("[")
        path = [name, *re.findall(r"\[?([^\[\]]*)\]", rest)]
        node = root
        for part in path[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise StripeFault(400, f"Invalid parameter: {key}")
            node = child
        leaf = path[-1] or str(len(node))
        if leaf in node:
            raise StripeFault(400, f"Duplicate parameter: {key}")
        node[leaf] = value
    return {name: _listed(value) for name, value in root.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _listed(item) for name, item in value.items()}
    if inner and all(name.isdigit() for name in inner):
        return [inner[name] for name in sorted(inner, key=int)]
    return inner


def check(schema: Schema, raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Typed parameters. Raises `StripeFault` for the first one that is unknown, missing or malformed."""
    for name in raw:
        if name not in schema:
            full = _full(prefix, name)
            raise invalid(f"Received unknown parameter: {full}", code="parameter_unknown", param=full)
    typed = {}
    for name, param in schema.items():
        full = _full(prefix, name)
        if name in raw:
            if param.required and raw[name] in ("", {}, []):
                raise invalid(f"Missing required param: {full}.", code="parameter_missing", param=full)
            typed[name] = param.parse(full, raw[name])
        elif param.required:
            raise invalid(f"Missing required param: {full}.", code="parameter_missing", param=full)
    return typed


def _full(prefix: str, name: str) -> str:
    return f"{prefix}[{name}]" if prefix else name


def text(limit: int = 5000) -> Parser:
    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise invalid(f"Invalid string: {value!r}", code="parameter_invalid_string", param=name)
        if len(value) > limit:
            raise invalid(
                f"Invalid string: {name} must be at most {limit} characters",
                code="parameter_invalid_string",
                param=name,
            )
        return value

    return parse


def choice(*options: str) -> Parser:
    def parse(name: str, value: Any) -> str:
        if value not in options:
            raise invalid(
                f"Invalid {name}: must be one of {', '.join(options)}", code="parameter_invalid_string", param=name
            )
        return str(value)

    return parse


def integer(low: int | None = None, high: int | None = None) -> Parser:
    def parse(name: str, value: Any) -> int:
        if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,18}", value):
            raise invalid(f"Invalid integer: {value}", code="parameter_invalid_integer", param=name)
        number = int(value)
        if (low is not None and number < low) or (high is not None and number > high):
            raise invalid(f"This value must be between {low} and {high}", code="parameter_invalid_integer", param=name)
        return number

    return parse


def decimal(*, negative: bool = False) -> Parser:
    """At most 12 digits after the point, written out: `1e-7` is refused."""

    def parse(name: str, value: Any) -> Decimal:
        if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,20}(\.\d{1,12})?", value):
            raise invalid(
                f"Invalid decimal: {value}; must be written out, with at most 12 decimal places",
                code="parameter_invalid_integer",
                param=name,
            )
        number = Decimal(value)
        if number < 0 and not negative:
            raise invalid("This value must be greater than or equal to 0", code="parameter_invalid_integer", param=name)
        return number

    return parse


def boolean(name: str, value: Any) -> bool:
    if value not in ("true", "false"):
        raise invalid(f"Invalid boolean: {value}", code="parameter_invalid_string", param=name)
    return bool(value == "true")


def metadata(name: str, value: Any) -> dict[str, str]:
    """At most 50 keys of 40 characters, values of 500; the empty string clears."""
    if value == "":
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise invalid(f"Invalid hash: {name}", code="parameter_invalid_string", param=name)
    for key, item in value.items():
        if len(key) > 40 or len(item) > 500 or len(value) > 50:
            raise invalid(
                "Metadata takes at most 50 keys of at most 40 characters, with values of at most 500",
                code="parameter_invalid_string",
                param=f"{name}[{key}]",
            )
    return dict(value)


def group(schema: Schema) -> Parser:
    def parse(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(f"Invalid hash: {name}", code="parameter_invalid_string", param=name)
        return check(schema, value, name)

    return parse


def array(item: Parser) -> Parser:
    def parse(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise invalid(f"Invalid array: {name}", code="parameter_invalid_string", param=name)
        return [item(f"{name}[{index}]", entry) for index, entry in enumerate(value)]

    return parse


METADATA = Param(metadata)
CURRENCY = Param(text(3))
EXPAND = {"expand": Param(array(text()))}
PAGE = {
    "limit": Param(integer(1, 100)),
    "starting_after": Param(text()),
    "ending_before": Param(text()),
    **EXPAND,
}
CREATED = Param(group({bound: Param(integer()) for bound in ("gt", "gte", "lt", "lte")}))
