"""Which values a field may have, for the text of a fault: msgspec tells the one that was given and none that would do.

Knows: how msgspec words a fault, and its view of types. Does not know: requests, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

_FAULT = re.compile(r"(?P<reason>Invalid enum value [^`]*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")


def with_choices(text: str, kind: Any) -> str:
    """msgspec's sentence on a value for the type `kind`, with all values that the field at fault takes, if few do."""
    fault = _FAULT.fullmatch(text)
    if fault is None:
        return text
    types = [inspect.type_info(kind)]
    for step in _STEP.finditer(fault["path"] or ""):
        types = [inner for outer in types for inner in _step(outer, step["field"])]
    choices = [str(value) for found in types for variant in _variants(found) for value in _values(variant)]
    return text.replace(fault["reason"], f"{fault['reason']}; known are {', '.join(choices)}", 1) if choices else text


def _variants(found: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(found, inspect.Metadata):
        yield from _variants(found.type)
    elif isinstance(found, inspect.UnionType):
        for variant in found.types:
            yield from _variants(variant)
    else:
        yield found


def _step(outer: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """What lies one step into a type: a struct's field, or with None any item."""
    for variant in _variants(outer):
        if isinstance(variant, inspect.StructType) and field is not None:
            yield from (inner.type for inner in variant.fields if inner.encode_name == field)
        elif isinstance(variant, inspect.ListType) and field is None:
            yield variant.item_type
        elif isinstance(variant, inspect.DictType):
            yield variant.value_type


def _values(found: inspect.Type) -> list[Any]:
    if isinstance(found, inspect.EnumType):
        return [member.value for member in found.cls]
    return sorted(found.values) if isinstance(found, inspect.LiteralType) else []
