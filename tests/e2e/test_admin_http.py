"""The admin API of a real server: over real HTTP, described by its schema, while tenants are served."""

from __future__ import annotations

import uuid
from decimal import Decimal

import httpx
import openai
import pytest

from tests.fixtures.server import ServerProcess

PRICE = {"prompt": "1000.00", "cached": "100.00", "completion": "3000.00"}


@pytest.fixture
def tenant(real_server: ServerProcess) -> tuple[str, str]:
    """A tenant with a price and credit of its own: its id and key."""
    id = f"t-{uuid.uuid4().hex[:8]}"
    with real_server.admin() as admin:
        for path, body in (
            ("/tenants", {"id": id, "name": "T"}),
            ("/prices", {"tenant": id, "model": "*", "effective_at": 0, "currency": "usd", "per_million": PRICE}),
            (f"/tenants/{id}/credits", {"amount": "1.00", "currency": "usd", "reason": "test"}),
        ):
            admin.post(path, json=body).raise_for_status()
        return id, admin.post(f"/tenants/{id}/keys", json={"name": "k"}).raise_for_status().json()["key"]


def test_a_request_is_on_the_balance_at_once_and_then_in_usage(
    real_server: ServerProcess, tenant: tuple[str, str]
) -> None:
    id, key = tenant
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        done = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=5, extra_body={"ignore_eos": True}
        )
    assert done.usage is not None
    cost = Decimal(done.usage.prompt_tokens) / 1000 + Decimal(3 * 5) / 1000
    with real_server.admin() as admin:
        balance = admin.get(f"/tenants/{id}/balance").json()
        assert (Decimal(balance["charged"]), balance["held"]) == (cost, "0.00")
        assert Decimal(balance["available"]) == 1 - cost
        (row,) = admin.get("/usage", params={"tenant": id, "group_by": "model,endpoint,outcome"}).json()["data"]
    assert (row["model"], row["endpoint"], row["outcome"]) == (model, "chat.completions", "finished")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (done.usage.prompt_tokens, 5)
    assert Decimal(row["amount"]) == cost


def test_a_revoked_key_and_a_suspended_tenant_open_nothing(real_server: ServerProcess, tenant: tuple[str, str]) -> None:
    id, key = tenant
    with real_server.admin() as admin, httpx.Client(base_url=real_server.url) as client:
        headers = {"authorization": f"Bearer {key}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        admin.patch(f"/tenants/{id}", json={"status": "suspended"}).raise_for_status()
        assert client.get("/v1/models", headers=headers).status_code == 403
        admin.patch(f"/tenants/{id}", json={"status": "active"}).raise_for_status()
        assert client.get("/v1/models", headers=headers).status_code == 200
        (listed,) = admin.get(f"/tenants/{id}/keys").json()["data"]
        assert admin.delete(f"/keys/{listed['id']}").status_code == 204
        assert client.get("/v1/models", headers=headers).status_code == 401


def test_the_schema_is_served_and_describes_the_admin_api(real_server: ServerProcess) -> None:
    schema = httpx.get(f"{real_server.url}/schema/openapi.json", timeout=30).raise_for_status().json()
    price = schema["paths"]["/admin/v1/prices"]["post"]
    body = price["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("PriceCreate")
    fields = next(value for name, value in schema["components"]["schemas"].items() if name.endswith("PriceCreate"))
    assert set(fields["required"]) == {"model", "currency", "per_million"}
    assert "Idempotency-Key" in [parameter["name"] for parameter in price["parameters"]]
    usage = {parameter["name"] for parameter in schema["paths"]["/admin/v1/usage"]["get"]["parameters"]}
    assert usage == {"tenant", "start", "end", "bucket", "group_by", "limit", "after"}


def test_the_admin_key_is_no_tenants_key(real_server: ServerProcess) -> None:
    with real_server.admin() as admin:
        headers = dict(admin.headers)
    assert httpx.get(f"{real_server.url}/v1/models", headers=headers).status_code == 401
    assert httpx.get(f"{real_server.url}/admin/v1/tenants").status_code == 401
