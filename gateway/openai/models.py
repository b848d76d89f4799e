"""`GET /v1/models` and `/v1/models/{id}`: the base model and the tenant's own adapters, nobody else's."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from billing.accounts import AdapterRecord
from gateway.errors import ModelNotFound
from gateway.openai.edge import Edge


@get("/v1/models", tags=["OpenAI"])
async def list_models(request: Request[Any, Any, Any], edge: NamedDependency[Edge]) -> dict[str, Any]:
    """Every name this key may ask for as `model`."""
    principal = edge.principal(request)
    adapters = edge.billing.adapters(principal.tenant.id)  # all of them: a tenant has no more than one list holds
    return {"object": "list", "data": [_base(edge), *(_adapter(edge, record) for record in adapters)]}


@get("/v1/models/{model_id:path}", tags=["OpenAI"])
async def get_model(
    request: Request[Any, Any, Any], edge: NamedDependency[Edge], model_id: FromPath[str]
) -> dict[str, Any]:
    """One name this key may ask for as `model`."""
    principal = edge.principal(request)
    wanted = str(model_id).removeprefix("/")
    if not wanted:
        raise ModelNotFound(wanted)
    _, record = edge.billing.resolve_model(principal.tenant.id, wanted)
    return _base(edge) if record is None else _adapter(edge, record)


def _base(edge: Edge) -> dict[str, Any]:
    name = edge.engine.info.name
    return _entry(edge, name, created_s=edge.started_s, root=name, parent=None)


def _adapter(edge: Edge, record: AdapterRecord) -> dict[str, Any]:
    base = edge.engine.info.name
    return _entry(edge, record.name, created_s=record.created_us // 1_000_000, root=base, parent=base)


def _entry(edge: Edge, name: str, *, created_s: int, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "meterhouse",
        "root": root,
        "parent": parent,
        "max_model_len": edge.engine.info.max_model_len,
    }
