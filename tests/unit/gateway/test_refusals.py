"""What the log says of an answer that is an error of the server: a refusal in one line, a bug with its traceback."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from litestar import Litestar, Request, get
from litestar.testing import TestClient
from structlog.testing import capture_logs

from billing.errors import LedgerCorrupt, LedgerUnavailable, NoPrice
from engine.types import EngineBusy, EngineUnavailable
from gateway.errors import Unavailable, handle
from metering.errors import StoreUnavailable
from metering.spool import SpoolFull


def answered(error: Exception) -> tuple[int, Any, list[MutableMapping[str, Any]]]:
    """(status, code, what was logged) of a route that raises `error`."""

    @get("/")
    async def fails(request: Request[Any, Any, Any]) -> None:
        raise error

    app = Litestar([fails], exception_handlers={Exception: handle}, openapi_config=None, logging_config=None)
    with capture_logs() as logged, TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/")
    return answer.status_code, answer.json()["error"]["code"], logged


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoPrice("acme", "base"), "no_price"),
        (SpoolFull("full"), "no_spool"),
        (EngineBusy("full"), "overloaded"),
        (EngineUnavailable("down"), "engine_unavailable"),
        (Unavailable("The server is shutting down.", code="shutting_down"), "shutting_down"),
        (StoreUnavailable("away"), "no_store"),
        (LedgerUnavailable("away"), "no_ledger"),
    ],
)
def test_a_refusal_is_one_line(error: Exception, code: str) -> None:
    status, answered_code, (line,) = answered(error)
    assert (status, answered_code) == (503, code)
    assert (line["event"], line["log_level"], line["code"]) == ("request_refused", "warning", code)
    assert line["reason"] == str(error)
    assert "exc_info" not in line


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), LedgerCorrupt(7, "another hash")])
def test_a_bug_and_damage_keep_their_traceback(error: Exception) -> None:
    _, _, (line,) = answered(error)
    assert (line["event"], line["log_level"]) == ("request_failed", "error")
    assert line["exc_info"] is error
