"""What can go wrong, as a client sees it.

    ApiError                     status  type                    code
    ├── BadRequest               400     invalid_request_error   (by field)
    ├── Unauthorized             401     invalid_request_error   invalid_api_key
    ├── InsufficientQuota        402     insufficient_quota      insufficient_quota
    ├── Forbidden                403     invalid_request_error   forbidden (or tenant_suspended)
    ├── NotFound                 404     invalid_request_error   not_found
    │   └── ModelNotFound        404     invalid_request_error   model_not_found
    ├── MethodNotAllowed         405     invalid_request_error   method_not_allowed
    ├── RequestTimeout           408     invalid_request_error   request_timeout
    ├── Conflict                 409     invalid_request_error   conflict
    ├── BodyTooLarge             413     invalid_request_error   request_too_large
    ├── UnsupportedMediaType     415     invalid_request_error   unsupported_media_type
    ├── RateLimited              429     requests | tokens       rate_limit_exceeded
    ├── HeadTooLarge             431     invalid_request_error   headers_too_large
    ├── InternalError            500     server_error            internal_error
    ├── BadGateway               502     server_error            payment_provider_error
    ├── Unavailable              503     server_error            unavailable
    └── DeadlineExceeded         504     server_error            deadline_exceeded

`api_error` is the sole map from the errors of the other rooms (and of litestar and msgspec) to this tree, and
`envelope` the sole writer of OpenAI's `{"error": {"message", "type", "param", "code"}}`
(https://platform.openai.com/docs/guides/error-codes). A text that was not written for clients never reaches one:
what is not known here is a 500 with a fixed sentence, and its cause goes to the log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from billing import errors as billing
from billing.money import MoneyError
from engine import types as engine
from gateway.ids import exchange_id
from metering import errors as metering
from metering import spool

log = structlog.get_logger(__name__)


class ApiError(Exception):
    """An answer that is an error. `headers` go out with it; `param` is the field at fault."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.headers = dict(headers or {})


class BadRequest(ApiError):
    """The request is malformed, or asks for what is not served; `param` names the field."""

    status, type = 400, "invalid_request_error"


def invalid(field: str, reason: str, *, code: str = "invalid_value") -> BadRequest:
    """The `BadRequest` for one field: its text is the field's name and the reason."""
    return BadRequest(f"{field}: {reason}.", param=field, code=code)


class Unauthorized(ApiError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class InsufficientQuota(ApiError):
    """The balance cannot cover the prompt and one token."""

    status, type, code = 402, "insufficient_quota", "insufficient_quota"


class Forbidden(ApiError):
    status, type, code = 403, "invalid_request_error", "forbidden"


class NotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """Unknown, or another tenant's: the body is the same."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        shown = model if len(model) <= 200 else model[:200] + "…"
        super().__init__(f"The model {shown!r} does not exist or you do not have access to it.", param="model")


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestTimeout(ApiError):
    """The client did not send its body in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class Conflict(ApiError):
    status, type, code = 409, "invalid_request_error", "conflict"


class BodyTooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMediaType(ApiError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class RateLimited(ApiError):
    """A limit of the tenant; `type` says which (`requests` or `tokens`), `retry-after` when to come back."""

    status, type, code = 429, "requests", "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str, headers: Mapping[str, str]) -> None:
        super().__init__(message, headers=headers)
        self.type = limit


class HeadTooLarge(ApiError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class InternalError(ApiError):
    status, type, code = 500, "server_error", "internal_error"


class BadGateway(ApiError):
    """The payment provider refused or did not answer."""

    status, type, code = 502, "server_error", "payment_provider_error"


class Unavailable(ApiError):
    """Not now; `retry-after` says when to try again."""

    status, type, code = 503, "server_error", "unavailable"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, code=code, headers={"retry-after": str(retry_after_s)})


class DeadlineExceeded(ApiError):
    """The request took longer than the server lets one take. Its tokens are billed: a blind retry pays again."""

    status, type, code = 504, "server_error", "deadline_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


# --- the map -------------------------------------------------------------------------------------

_UNKNOWN = "The server failed to handle the request; its log has the cause under the request id."


def api_error(error: BaseException) -> ApiError:
    """The answer to give for any exception; a text that was not written for clients is replaced."""
    if isinstance(error, ApiError):
        return error
    for kinds, convert in _MAP:
        if isinstance(error, kinds):
            return convert(error)
    return InternalError(_UNKNOWN)


def _invalid(error: billing.Invalid) -> ApiError:
    return BadRequest(str(error), param=error.field, code="invalid_value")


_LEFT_EARLY = "client disconnected prematurely"  # litestar's word for it, in an error that is otherwise a plain 500


def _http(error: Any) -> ApiError:
    """litestar's own errors: routing, method, body size, parameters."""
    if isinstance(error, ValidationException):
        return _parameters(error)
    if error.detail == _LEFT_EARLY:
        return BadRequest("The client left before its request had arrived.", code="client_disconnected")
    kinds: dict[int, tuple[type[ApiError], str]] = {
        401: (Unauthorized, "Authentication is needed."),
        403: (Forbidden, "This is not allowed."),
        404: (NotFound, "There is nothing at this URL."),
        405: (MethodNotAllowed, "This URL does not support that method."),
        413: (BodyTooLarge, "The request body is larger than this server takes."),
        415: (UnsupportedMediaType, "The body must be JSON, with content-type application/json."),
    }
    if error.status_code in kinds:
        kind, text = kinds[error.status_code]
        return kind(text, headers=error.headers)
    if 400 <= error.status_code < 500:
        return BadRequest("The request is malformed.", headers=error.headers)
    return InternalError(_UNKNOWN)


def _parameters(error: ValidationException) -> ApiError:
    faults = [fault for fault in error.extra if isinstance(fault, dict)] if isinstance(error.extra, list) else []
    if not faults:
        return BadRequest("The request has a parameter or body that is not valid.", code="invalid_value")
    first = faults[0]
    return _from_msgspec_text(str(first.get("message", "not valid")), str(first.get("key", "")))


_AT = re.compile(r"^(?P<reason>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?P<fault>contains unknown|missing required) field `(?P<field>[^`]*)`$")


def _from_msgspec(error: Any) -> ApiError:
    return _from_msgspec_text(str(error))


def _from_msgspec_text(text: str, prefix: str = "") -> ApiError:
    """msgspec's one sentence (``Expected `int`, got `str` - at `$.n` ``) → the field's name and the reason."""
    match = _AT.match(text)
    reason, path = (match["reason"], match["path"] or "") if match else (text, "")
    path = path.removeprefix("key in ").removeprefix("$").removeprefix(".")
    field = _FIELD.match(reason)
    if field is None:
        param = ".".join(part for part in (prefix, path) if part) or None
        return BadRequest(f"{param}: {reason}" if param else reason, param=param, code="invalid_type")
    param = ".".join(part for part in (prefix, path, field["field"]) if part)
    if field["fault"] == "missing required":
        return BadRequest(f"Missing required parameter: {param!r}.", param=param, code="missing_required_parameter")
    return BadRequest(f"Unknown parameter: {param!r}.", param=param, code="unknown_parameter")


def _text(kind: type[ApiError], code: str | None = None) -> Callable[[Any], ApiError]:
    """Keep the domain error's own sentence, which its room wrote for clients."""
    return lambda error: kind(str(error), code=code)


_MAP: tuple[tuple[Any, Callable[[Any], ApiError]], ...] = (
    (billing.UnknownModel, lambda error: ModelNotFound(error.id)),
    (billing.InsufficientCredits, _text(InsufficientQuota)),
    (billing.TenantSuspended, _text(Forbidden, "tenant_suspended")),
    (billing.NoPrice, lambda _: Unavailable("No price is set for this model, so it is not sold.", code="no_price")),
    (billing.StripeNotConfigured, _text(Conflict, "stripe_not_configured")),
    (billing.IdempotencyConflict, _text(Conflict, "idempotency_conflict")),
    (billing.PeriodNotClosed, _text(Conflict, "period_not_closed")),
    (billing.PeriodOverlaps, _text(Conflict, "period_overlaps")),
    (billing.NotFound, _text(NotFound)),
    (billing.Invalid, _invalid),
    (billing.Conflict, _text(Conflict)),
    (billing.ExportError, _text(BadGateway)),
    (billing.LedgerUnavailable, lambda _: Unavailable("The ledger cannot be used now.", code="no_ledger")),
    (billing.BillingError, _text(BadRequest)),
    (MoneyError, _text(BadRequest, "invalid_value")),
    (spool.SpoolError, lambda _: Unavailable("Usage cannot be recorded now, so nothing is served.", code="no_spool")),
    (metering.StoreUnavailable, lambda _: Unavailable("The usage store cannot be reached now.", code="no_store")),
    (engine.PromptTooLong, _text(BadRequest, "context_length_exceeded")),
    (engine.EngineBusy, lambda _: Unavailable("The queue is full; try again shortly.", code="overloaded")),
    (engine.AdapterUnknown, lambda _: Unavailable("The adapter is not loaded now.", code="adapter_unavailable")),
    (engine.AdapterLost, _text(Unavailable, "adapter_unavailable")),
    (engine.AdapterRejected, _text(BadRequest, "adapter_rejected")),
    (engine.GrammarRejected, _text(BadRequest, "grammar_rejected")),
    (engine.EngineUnavailable, lambda _: Unavailable("The engine is not up; try again.", code="engine_unavailable")),
    (engine.EngineError, lambda _: InternalError("The engine could not go on with this request.")),
    (msgspec.ValidationError, _from_msgspec),
    (msgspec.DecodeError, lambda _: BadRequest("The body is not valid JSON.", code="invalid_json")),
    (HTTPException, _http),
)


# --- the envelope --------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong: for people, by kind, at which field, and by a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body."""

    error: ErrorDetail


def envelope(error: ApiError) -> ErrorBody:
    """The body of an answer, or the frame of a stream, that tells an error."""
    return ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code))


def handle(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    """litestar's exception handler for everything."""
    answer = api_error(error)
    if answer.status >= 500:
        _tell(request, error, answer)
    return Response(envelope(answer), status_code=answer.status, headers=answer.headers, media_type="application/json")


def _tell(request: Request[Any, Any, Any], error: Exception, answer: ApiError) -> None:
    """To the log: a refusal that a server is made to give (no price, a full queue, a store that is away) in one line,
    what only a bug or damage explains with its traceback."""
    cause = error if not isinstance(error, ApiError) else error.__cause__
    known = {
        "request_id": exchange_id(request.scope),
        "status": answer.status,
        "code": answer.code,
        "path": request.url.path,
    }
    if isinstance(answer, InternalError) or isinstance(cause, billing.LedgerCorrupt):
        log.error("request_failed", **known, exc_info=cause)
    else:
        log.warning("request_refused", **known, reason=str(cause or error))
