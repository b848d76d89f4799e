"""The composition root: the parts of a gateway, made elsewhere, put together as one Litestar application.

Knows: every room, and which part gets which. Does not know how parts are opened and closed (`lifecycle`) or what any
of them does. Only `lifecycle` and the tests call it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from litestar import Litestar, Router
from litestar.datastructures import MutableScopeHeaders
from litestar.di import Provide
from litestar.types import Message, Scope

from billing.service import Billing
from engine.client import Engine
from gateway.admin import AdminState, admin_router
from gateway.admission import Admission
from gateway.alarms import sample_books
from gateway.apidoc import api_config, pointer
from gateway.billing.keys import signing_keys
from gateway.billing.own import own_router
from gateway.billing.router import billing_router
from gateway.capture import Capture
from gateway.errors import handle
from gateway.health import Health, live, metrics, ready, sample
from gateway.idempotency import Idempotency
from gateway.ids import REQUEST_ID, exchange_id
from gateway.lender import Lender
from gateway.limits import Limits
from gateway.openai.chat import chat_completions
from gateway.openai.completions import completions
from gateway.openai.edge import Edge, Tokenizer
from gateway.openai.models import get_model, list_models
from gateway.openai.organization import organization_router
from gateway.openai.tokenize import detokenize, tokenize
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from gateway.webhooks import StripeDoor, stripe_webhook
from metering.journal import Journal
from metering.spool import Spool


class Gateway(msgspec.Struct, frozen=True):
    """The application, and the parts of it that `lifecycle` has to reach."""

    app: Litestar
    edge: Edge
    admission: Admission
    capture: Capture
    telemetry: Telemetry
    lender: Lender


def now_us() -> int:
    """The clock: microseconds since the epoch, UTC."""
    return time.time_ns() // 1000


def product_version() -> str:
    try:
        return version("meterhouse")
    except PackageNotFoundError:
        return "0"


def create_gateway(
    settings: Settings,
    *,
    engine: Engine,
    billing: Billing,
    spool: Spool,
    journal: Journal,
    tokenizer: Tokenizer,
    idempotency: Idempotency,
    admin: AdminState | None,
    clock_us: Callable[[], int] = now_us,
) -> Gateway:
    """Put the parts together. Takes the engine's step hook: every step is journalled from now on."""
    telemetry = Telemetry(engine.info.name, product_version())
    capture = Capture(spool=spool, journal=journal, billing=billing, telemetry=telemetry, clock_us=clock_us)
    engine.on_step = capture.on_step
    lender = Lender(billing)
    admission = Admission(
        settings=settings,
        engine=engine,
        billing=billing,
        spool=spool,
        capture=capture,
        limits=Limits(time.monotonic),
        telemetry=telemetry,
        lender=lender,
        clock_us=clock_us,
    )
    edge = Edge(
        settings=settings,
        engine=engine,
        billing=billing,
        tokenizer=tokenizer,
        admission=admission,
        capture=capture,
        idempotency=idempotency,
        telemetry=telemetry,
        started_s=clock_us() // 1_000_000,
    )
    health = Health(
        engine=engine,
        spool=spool,
        journal=journal,
        capture=capture,
        admission=admission,
        cache_s=settings.ready_cache_s,
    )
    telemetry.sample_with(lambda: sample(telemetry, engine, spool, journal, capture, clock_us))
    telemetry.sample_with(lambda: sample_books(telemetry, billing, spool, journal))
    app = create_app(settings, edge=edge, health=health, telemetry=telemetry, admin=admin)
    return Gateway(app, edge, admission, capture, telemetry, lender)


def create_app(
    settings: Settings,
    *,
    edge: Edge,
    health: Health,
    telemetry: Telemetry,
    admin: AdminState | None,
) -> Litestar:
    """All routes over the given parts."""
    routes: list[Any] = [
        chat_completions,
        completions,
        list_models,
        get_model,
        tokenize,
        detokenize,
        live,
        ready,
        metrics,
        pointer,
        stripe_webhook,
        signing_keys,
        own_router(edge.billing),
    ]
    return Litestar(
        route_handlers=[*routes, *(_books_routers(admin) if admin is not None else [])],
        dependencies={
            "edge": _constant(edge),
            "health": _constant(health),
            "telemetry": _constant(telemetry),
            "stripe_door": _constant(StripeDoor(admin.webhooks if admin is not None else None, telemetry)),
        },
        exception_handlers={Exception: handle},
        before_send=[_sign(telemetry)],
        request_max_body_size=settings.max_body_bytes,
        openapi_config=api_config(product_version()),
        signature_types=[Edge, Health, StripeDoor, Telemetry],
        debug=False,
        logging_config=None,
    )


def _books_routers(admin: AdminState) -> list[Router]:
    """What is asked of the books, by the operator and by tenants."""
    return [admin_router(admin), organization_router(admin), billing_router(admin)]


def create_admin_app(settings: Settings, admin: AdminState) -> Litestar:
    """The admin API alone, for a command line beside no server."""
    return Litestar(
        route_handlers=[admin_router(admin)],
        exception_handlers={Exception: handle},
        before_send=[_sign(None)],
        request_max_body_size=settings.max_body_bytes,
        openapi_config=None,
        debug=False,
        logging_config=None,
    )


def _sign(telemetry: Telemetry | None) -> Callable[[Message, Scope], Awaitable[None]]:
    """Put the exchange's id on every answer, and count it by status where somebody counts."""

    async def before_send(message: Message, scope: Scope) -> None:
        if message["type"] != "http.response.start":
            return
        MutableScopeHeaders.from_message(message)[REQUEST_ID] = exchange_id(scope)
        if telemetry is not None:
            telemetry["meterhouse_http_responses_total"].labels(str(message["status"])).inc()

    return before_send


def _constant(value: Any) -> Provide:
    return Provide(lambda: value, sync_to_thread=False)
