"""Bodies that no person writes: the answer is a 400 of a bounded size."""

from __future__ import annotations

import pytest

from tests.unit.admin.conftest import World

PATHS = ["/tenants", "/prices", "/invoices", "/tenants/acme/credits", "/tenants/acme/keys", "/tenants/acme/adapters"]
DEEP = 100_000


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("raw", [b"[" * DEEP + b"]" * DEEP, b'{"name":' + b"[" * DEEP + b"]" * DEEP + b"}"])
async def test_a_body_that_is_nested_deeply(world: World, path: str, raw: bytes) -> None:
    answer = await world.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"


async def test_the_answer_to_many_faults_is_short(world: World) -> None:
    answer = await world.client.post("/tenants", json={f"{n}-{'x' * 10_000}": n for n in range(200)})
    assert answer.status_code == 400
    assert len(answer.content) < 10_000
    assert "and 181 more" in answer.json()["error"]["message"]  # `name` is missing as well
