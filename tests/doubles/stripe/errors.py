"""Stripe's error envelope (https://docs.stripe.com/api/errors)."""

from __future__ import annotations

from typing import Any


class StripeFault(Exception):
    """An answer that is an error. `executed` says whether the endpoint had begun: only then is it cached by key."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        executed: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.executed = executed
        self.error = {"type": type, "message": message, "code": code, "param": param}

    def body(self) -> dict[str, Any]:
        error = {name: value for name, value in self.error.items() if value is not None}
        if code := self.error["code"]:
            error["doc_url"] = f"https://stripe.com/docs/error-codes/{code.replace('_', '-')}"
        return {"error": error}


def refused(message: str, *, code: str | None = None, param: str | None = None) -> StripeFault:
    """400 from inside an endpoint: the request was well formed and the state forbids it. Cached by key."""
    return StripeFault(400, message, code=code, param=param, executed=True)


def invalid(message: str, *, code: str, param: str) -> StripeFault:
    """400 from validation, before the endpoint began. Not cached."""
    return StripeFault(400, message, code=code, param=param)


def missing(kind: str, ident: str, param: str = "id", *, status: int = 404) -> StripeFault:
    return StripeFault(status, f"No such {kind}: '{ident}'", code="resource_missing", param=param, executed=True)
