"""What `/schema` says: every route for people, with the errors it really gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from gateway.admin import ADMIN_SCHEME
from gateway.apidoc import BODIES, TENANT_SCHEME
from gateway.app import create_app
from gateway.errors import ErrorBody
from gateway.settings import Settings
from tests.fixtures.server import RunningGateway

METHODS = {"get", "post", "patch", "delete", "put"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Of all routes; none of them is called."""
    nothing, admin = cast(Any, None), cast(Any, SimpleNamespace(admin_key="x", billing=None, spawn=None, webhooks=None))
    edge = cast(Any, SimpleNamespace(billing=None))
    app = create_app(Settings(), edge=edge, health=nothing, telemetry=nothing, admin=admin)
    return app.openapi_schema.to_schema()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        assert set(methods) <= METHODS
        for method, operation in methods.items():
            yield path, method, operation


def body_of(operation: dict[str, Any], status: str) -> Any:
    return operation["responses"][status]["content"]["application/json"]["schema"]


def test_every_operation_is_described_for_people(document: dict[str, Any]) -> None:
    found = list(operations(document))
    assert len(found) > 30
    for path, _, operation in found:
        assert operation["description"], path
        assert " " in operation["summary"], (path, operation["summary"])
        assert operation["description"].replace("`", "").startswith(operation["summary"])
    (made,) = (operation for path, method, operation in found if (path, method) == ("/admin/v1/tenants", "post"))
    assert made["summary"] == "Create a tenant"


def test_every_operation_has_the_error_envelope_and_no_other_error(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        errors = [status for status in operation["responses"] if status >= "400"]
        assert "500" in errors
        for status in errors:
            if (path, status) == ("/health/ready", "503"):  # for an orchestrator: {"status", "reason"}
                assert "ErrorBody" not in str(body_of(operation, status))
                continue
            assert body_of(operation, status) == {"$ref": "#/components/schemas/ErrorBody"}, (path, method, status)
        if "security" in operation:
            assert {"401", "503"} <= set(errors), path
            assert ("404" in errors) == ("{" in path or "requestBody" in operation or "'tenant'" in str(operation)), (
                path
            )
        if path.startswith("/admin/v1") and method != "get":
            assert "409" in errors, path
    assert "status_code" not in json.dumps(document)


def test_no_name_has_a_modules_path(document: dict[str, Any]) -> None:
    names = list(document["components"]["schemas"])
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", name) for name in names), names
    assert "TenantViewPage" in names
    assert "gateway." not in json.dumps(document)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names
    assert names <= set(document["components"]["schemas"])


def test_the_bodies_of_v1_are_those_that_are_decoded(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for path, kind in BODIES.items():
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert set(schemas[reference.rpartition("/")[2]]["properties"]) == set(kind.__struct_fields__)
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["ChatRequest"]["additionalProperties"] is False


def test_every_key_is_a_scheme(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    for path, _, operation in operations(document):
        wanted = [name for security in operation.get("security", []) for name in security]
        assert set(wanted) <= set(schemes)
        open_to_all = path == "/" or path.startswith(("/health/", "/metrics", "/webhooks/", "/.well-known/"))
        assert bool(wanted) != open_to_all, path
        if path.startswith("/v1/organization/"):
            assert wanted == [ADMIN_SCHEME, TENANT_SCHEME], "either opens it"
            continue
        assert (wanted == [TENANT_SCHEME]) == (not open_to_all and not path.startswith("/admin/v1")), path


def test_a_server_answers_as_it_says(gateway: RunningGateway) -> None:
    with gateway.http() as client:
        pointer = client.get("/").json()
        served = client.get(pointer["schema"]).json()
        assert served == client.get("/schema").json()
        assert "/v1/chat/completions" in served["paths"]
        refused: httpx.Response = client.get(pointer["openai"] + "/models")
    assert refused.status_code == 401
    told = msgspec.json.decode(refused.content, type=ErrorBody)
    assert told.error.code == "invalid_api_key"
    assert msgspec.to_builtins(told) == refused.json()
