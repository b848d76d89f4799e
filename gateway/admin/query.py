"""Strict reading of query parameters: a misspelt or doubled one is a fault, not somebody else's rows.

Runs before litestar reads the same parameters, which passes unknown ones over and takes the last of a doubled one.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

from litestar import Request
from litestar.params import QueryParameter

from gateway.admin.body import SHOWN_CHARACTERS, Fault, refuse


def query_faults(given: list[str], known: set[str]) -> list[Fault]:
    """What is wrong with the names of a query string's parameters, in the order given."""
    faults: list[Fault] = []
    for name, times in Counter(given).items():
        if name not in known:
            faults.append((name, "is not a parameter of this request"))
        elif times > 1:
            faults.append((name, "is given more than once"))
    return faults


def value_faults(given: list[tuple[str, str]], kinds: dict[str, Any]) -> list[Fault]:
    """Values that are none of a parameter's few. The other kinds of faults litestar tells as well."""
    faults: list[Fault] = []
    for name, value in given:
        kind = kinds[name]
        if isinstance(kind, type) and issubclass(kind, Enum) and value not in (known := [one.value for one in kind]):
            faults.append((name, f"{value[:SHOWN_CHARACTERS]!r} is unknown; known are {', '.join(known)}"))
    return faults


def check_query(request: Request[Any, Any, Any]) -> None:
    """Raises `BadRequest` that names every unknown and every doubled parameter, or those with a value of none."""
    parameters = request.route_handler.parsed_fn_signature.parameters
    kinds = {
        name: found.annotation
        for name, found in parameters.items()
        if isinstance(found.kwarg_definition, QueryParameter)
    }
    given = list(request.query_params.multi_items())
    refuse(query_faults([name for name, _ in given], set(kinds)))
    refuse(value_faults(given, kinds))
