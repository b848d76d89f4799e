"""What `/schema` says of the routes, and the pointer at `/` that leads to it.

litestar derives paths, parameters, the admin API's bodies and answers. What it cannot know is added here: every error
is OpenAI's envelope and not litestar's own, bodies that `/v1` reads by itself have the schema they are decoded with,
which key opens what, and names for people instead of modules and functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import get
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, OpenAPI, Reference, SecurityScheme

from gateway import paths
from gateway.admin import ADMIN_SCHEME
from gateway.errors import ErrorBody
from gateway.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.openai.usage_query import COSTS, USAGE, described

SCHEMA = "/schema"
TENANT_SCHEME = "tenantKey"  # what OpenAPI calls the bearer key of `/v1`

BODIES: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PARAMETERS = {"/v1/organization/usage/completions": described(USAGE), "/v1/organization/costs": described(COSTS)}
STREAMED = ("/v1/chat/completions", "/v1/completions")

ERRORS = {
    400: "The request is malformed, or asks for what is not served; `param` names the field.",
    401: "There is no key, or it is not valid.",
    402: "The balance does not cover the request.",
    403: "The key does not open this; `code` tells a suspended tenant (`tenant_suspended`).",
    404: "What the request names does not exist.",
    408: "The body did not arrive in time.",
    409: "It conflicts with what there is, or with an earlier use of the Idempotency-Key; `code` says with what.",
    413: "The body is larger than this server takes.",
    415: "The body is not JSON.",
    429: "A limit of the tenant is reached; `retry-after` says when to come back.",
    500: "The server failed; its log has the cause under the answer's `x-request-id`.",
    502: "The payment provider refused or did not answer.",
    503: "Not now; `code` says why (no_price, overloaded, engine_unavailable, …) and `retry-after` when to try again.",
    504: "The request took longer than the server lets one take.",
}

_REF = "#/components/schemas/"
_GENERIC = re.compile(r"(?P<outer>\w+)_(?:\w+\.)+(?P<inner>\w+)_")  # Page_gateway.admin.tenants.TenantView_
_CLAUSE = re.compile(r"[.;:](?:\s|$)")

JSON = dict[str, Any]


@get("/", tags=["Health"], sync_to_thread=False)
def pointer() -> dict[str, str]:
    """Show where the description and the two APIs of this server are."""
    return {"product": paths.PRODUCT, "schema": f"{SCHEMA}/openapi.json", "openai": "/v1", "admin": paths.ADMIN}


class Document(OpenAPI):
    """litestar's document, completed when it is written."""

    def to_schema(self) -> JSON:
        return complete(super().to_schema())


@dataclass
class Config(OpenAPIConfig):
    """litestar's settings of the document, of which it makes ours."""

    def to_openapi_schema(self) -> OpenAPI:
        made = super().to_openapi_schema()
        return Document(**{name: getattr(made, name) for name in made.__dataclass_fields__})


def api_config(version: str) -> OpenAPIConfig:
    """What an application needs to describe itself at `SCHEMA`."""
    keys: dict[str, SecurityScheme | Reference] = {
        TENANT_SCHEME: SecurityScheme(type="http", scheme="bearer", description="A tenant's API key, mh-…"),
        ADMIN_SCHEME: SecurityScheme(type="http", scheme="bearer", description="The server's admin key."),
    }
    return Config(
        title="Meterhouse",
        version=version,
        path=SCHEMA,
        render_plugins=[JsonRenderPlugin()],
        components=Components(security_schemes=keys),
        use_handler_docstrings=True,
    )


def complete(document: JSON) -> JSON:
    """The document with everything that litestar does not know. Changes nothing of what it is given."""
    done: JSON = _renamed(document)
    _, own = msgspec.json.schema_components([*BODIES.values(), ErrorBody], ref_template=_REF + "{name}")
    done["components"].setdefault("schemas", {}).update(own)
    for path, methods in done["paths"].items():
        for method, operation in methods.items():
            _describe(path, method, operation)
    return done


def _describe(path: str, method: str, operation: JSON) -> None:
    operation["summary"] = _CLAUSE.split(operation["description"], maxsplit=1)[0].replace("`", "")
    if path in BODIES:
        operation["security"] = [{TENANT_SCHEME: []}]
        operation["requestBody"] = {"required": True, "content": _json({"$ref": _REF + BODIES[path].__name__})}
    elif path in PARAMETERS:
        operation["security"] = [{ADMIN_SCHEME: []}, {TENANT_SCHEME: []}]
        operation["parameters"] = PARAMETERS[path]
    elif path.startswith("/v1/"):
        operation["security"] = [{TENANT_SCHEME: []}]
    answers = operation["responses"]
    if path in STREAMED:
        answers["200"]["content"] = _json({"type": "object"}) | {"text/event-stream": {"schema": {"type": "string"}}}
    answers.pop("400", None)  # litestar's own
    for status in sorted(_errors(path, method, operation)):
        answers.setdefault(
            str(status), {"description": ERRORS[status], "content": _json({"$ref": _REF + ErrorBody.__name__})}
        )


def _errors(path: str, method: str, operation: JSON) -> Iterator[int]:
    """The statuses, beside the good one, that an operation may answer with."""
    admin = path.startswith(paths.ADMIN)
    if operation.get("parameters") or "requestBody" in operation:
        yield 400
    if "security" in operation:
        yield from (401, 403, 503)
    if "{" in path or "requestBody" in operation or "tenant" in _parameters(operation):
        yield 404
    if "requestBody" in operation:
        yield 413
    if admin and method != "get":
        yield 409
    if path in BODIES:
        yield from (408, 415, 429)
    if path in STREAMED:
        yield from (402, 409, 504)
    if path.endswith(("/export", "/void")):
        yield 502
    yield 500


def _parameters(operation: JSON) -> set[str]:
    return {parameter["name"] for parameter in operation.get("parameters") or ()}


def _json(schema: JSON) -> JSON:
    return {"application/json": {"schema": schema}}


def _renamed(value: Any) -> Any:
    """A copy in which a generic's schema is called TenantViewPage, in its name and where it is referred to."""
    if isinstance(value, dict):
        return {_name(key): _renamed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner) for inner in value]
    if isinstance(value, str) and value.startswith(_REF):
        return _REF + _name(value.removeprefix(_REF))
    return value


def _name(key: str) -> str:
    generic = _GENERIC.fullmatch(key)
    return generic["inner"] + generic["outer"] if generic else key
