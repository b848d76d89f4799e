"""Strict reading of query parameters: a misspelt or doubled one is a fault, not somebody else's rows.

Runs before litestar reads the same parameters, which passes unknown ones over and takes the last of a doubled one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from litestar import Request
from litestar.params import QueryParameter

from gateway.admin.body import Fault, refuse


def query_faults(given: list[str], known: set[str]) -> list[Fault]:
    """What is wrong with the names of a query string's parameters, in the order given."""
    faults: list[Fault] = []
    for name, times in Counter(given).items():
        if name not in known:
            faults.append((name, "is not a parameter of this request"))
        elif times > 1:
            faults.append((name, "is given more than once"))
    return faults


def check_query(request: Request[Any, Any, Any]) -> None:
    """Raises `BadRequest` that names every unknown and every doubled parameter."""
    parameters = request.route_handler.parsed_fn_signature.parameters
    known = {name for name, found in parameters.items() if isinstance(found.kwarg_definition, QueryParameter)}
    refuse(query_faults([name for name, _ in request.query_params.multi_items()], known))
