"""What the engine is told of a tenant's share and of salts that the operator made public."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.fixtures.server import RunningGateway


def complete(gateway: RunningGateway, key: str, salt: str | None = None) -> None:
    with gateway.http(key) as client:
        answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1, "cache_salt": salt})
    assert answer.status_code == httpx.codes.OK


def test_a_tenants_weight_goes_with_its_requests(gateway: RunningGateway) -> None:
    complete(gateway, gateway.tenant("heavy", limits={"weight": 3}))
    complete(gateway, gateway.tenant("plain"))
    assert [request.weight for request in gateway.engine.submitted] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("salt", "public"), [("house", True), ("rules", True), ("hous", False), ("", False), (None, False)]
)
def test_only_a_salt_that_the_operator_named_is_public(
    make_gateway: Callable[..., RunningGateway], salt: str | None, public: bool
) -> None:
    gateway = make_gateway(public_cache_salts="house, rules,")
    complete(gateway, gateway.tenant(), salt)
    assert [(request.cache_salt, request.public_cache) for request in gateway.engine.submitted] == [
        (salt or "", public)
    ]
