"""Strict reading of request bodies: every fault is found and named, and nothing was changed.

Runs before litestar decodes the same bytes into the handler's struct, which stops at the first fault and
knows neither unknown fields nor a struct's own rules. A struct with rules has `faults() -> list[Fault]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin

import msgspec
from litestar import Request

from gateway.choices import with_choices
from gateway.errors import BadRequest

Fault = tuple[str, str]  # (field, reason)

SHOWN_FAULTS = 20
SHOWN_CHARACTERS = 200  # of a field's name, which may be the client's own


def body_faults(raw: bytes, kind: type[Any]) -> list[Fault]:
    """All that is wrong with `raw` as a JSON object of the struct `kind`; empty when it can be used."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return [("body", "is not valid JSON")]
    except RecursionError:
        return [("body", "is nested too deeply")]
    if not isinstance(body, dict):
        return [("body", "must be a JSON object")]
    if faults := _struct_faults("", body, kind):
        return faults
    rules = getattr(msgspec.convert(body, kind), "faults", None)
    return rules() if rules is not None else []


def _struct_faults(prefix: str, body: dict[str, Any], kind: type[Any]) -> list[Fault]:
    """What is wrong with an object's fields; of a list of objects, with the fields of each."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    faults = [(prefix + name, "is not a field of this request") for name in body if name not in fields]
    for name, field in fields.items():
        if name not in body:
            if field.required:
                faults.append((prefix + name, "is required"))
        elif fault := _type_fault(prefix + name, body[name], field.type):
            faults += _item_faults(prefix + name, body[name], field.type) or [fault]
    return faults


def _item_faults(name: str, value: Any, wanted: Any) -> list[Fault]:
    wanted = get_args(wanted)[0] if get_origin(wanted) is Annotated else wanted
    if get_origin(wanted) is not list or not isinstance(value, list):
        return []
    item = get_args(wanted)[0]
    if not (isinstance(item, type) and issubclass(item, msgspec.Struct)):
        return []
    faults: list[Fault] = []
    for number, found in enumerate(value):
        if isinstance(found, dict):
            faults += _struct_faults(f"{name}[{number}].", found, item)
        else:
            faults.append((f"{name}[{number}]", "must be a JSON object"))
    return faults


def _type_fault(name: str, value: Any, wanted: Any) -> Fault | None:
    try:
        msgspec.convert(value, wanted, strict=True)
    except msgspec.ValidationError as error:
        # msgspec words it "Expected `str`, got `int` - at `$[...]`" and "Object missing required field `x`"
        reason, _, where = with_choices(str(error), wanted).partition(" - at `$")
        return f"{name}{where.rstrip('`')}", reason[:1].lower() + reason[1:]
    return None


async def check_body(request: Request[Any, Any, Any]) -> None:
    """Raises `BadRequest` that names every fault of the body."""
    wanted = request.route_handler.parsed_data_field
    if wanted is not None:
        refuse(body_faults(await request.body(), wanted.annotation))


def refuse(faults: Sequence[Fault]) -> None:
    """Raise `BadRequest` with the faults in its text and the first field as `param`; do nothing for none."""
    if faults:
        shown = [f"{field[:SHOWN_CHARACTERS]}: {reason}" for field, reason in faults[:SHOWN_FAULTS]]
        rest = [f"and {len(faults) - len(shown)} more"] if len(faults) > len(shown) else []
        raise BadRequest("; ".join(shown + rest), param=faults[0][0][:SHOWN_CHARACTERS])
