"""The one door to the engine: whoever wants a token passes `Admission.admit`.

Knows: the order of the checks, and that whatever was taken is given back when a later one refuses. Does not know: HTTP
bodies, frames. The steps: the model exists for this tenant → limits → usage can be recorded → the prompt fits → a price
stands → what is leased covers it, or more is leased → the balance and every budget hold the prompt and a first
stretch of tokens → the journal has it. Only then is the engine told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from billing.accounts import AdapterRecord
from billing.checks import WEIGHT
from billing.errors import InsufficientCredits
from billing.service import Billing
from engine.client import Engine
from engine.types import AdapterRef, Request, SamplingParams
from gateway.auth import Principal
from gateway.capture import Capture, Live
from gateway.errors import ApiError, BadRequest, InsufficientQuota, Unavailable
from gateway.ids import uuid7
from gateway.lender import Lacking, Lender
from gateway.limits import Lease, Limits
from gateway.purse import Purse, Purses
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from metering.journal import JournalError, OpenedRecord
from metering.spool import Spool


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants, once its body is understood. One engine request for each prompt."""

    endpoint: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    user: str = ""
    metadata: dict[str, str] = {}
    cache_salt: str = ""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may run, and all that must be given back when it ends."""

    live: Live
    lease: Lease
    purse: Purse
    requests: list[Request]


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """What a principal resolved to at the first half of the door."""

    principal: Principal
    model: str
    adapter: AdapterRef | None
    lease: Lease


class Admission:
    """See the module. Lives on the event loop."""

    def __init__(
        self,
        *,
        settings: Settings,
        engine: Engine,
        billing: Billing,
        spool: Spool,
        capture: Capture,
        limits: Limits,
        telemetry: Telemetry,
        lender: Lender,
        clock_us: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._lender = lender
        self._public_salts = settings.public_salts
        self._engine = engine
        self._billing = billing
        self._spool = spool
        self._capture = capture
        self._limits = limits
        self._telemetry = telemetry
        self._clock_us = clock_us
        self.purses = Purses(billing, engine, lender)
        self.draining = False

    async def admit(
        self,
        principal: Principal,
        model: str | None,
        prepare: Callable[[str], Awaitable[Ask]],
    ) -> Admitted:
        """Let a request in, or raise an error with nothing kept.

        `prepare` turns the body into an `Ask` (it tokenizes, which may take a while); it runs once there is a place
        under the limits, and gets the name of the model.
        """
        door = self.enter(principal, model)
        try:
            ask = await prepare(door.model)
            await self._fund(door, ask)
            return self._open(door, ask)
        except BaseException:
            door.lease.refund()
            raise

    def enter(self, principal: Principal, model: str | None) -> Door:
        """First half: the model, the limits, and whether anything can be served now. The caller ends the lease."""
        if self.draining:
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after_s=5)
        name, record = self._billing.resolve_model(principal.tenant.id, model)
        adapter = record if record is None else adapter_ref(record)
        if self._limits.open >= self._settings.max_open_requests:
            raise Unavailable("Too many requests are in flight.", code="overloaded")
        lease = self._limits.enter(principal.tenant.id, principal.tenant.limits)
        return Door(principal=principal, model=name, adapter=adapter, lease=lease)

    async def _fund(self, door: Door, ask: Ask) -> None:
        """See that what is leased here covers the request, if the money is to be had. When it returns, nothing else ran
        since it was looked at; who is not covered is refused by the hold."""
        if not self._billing.leased:
            return
        self._check_state()
        self._check_fit(ask, max(len(prompt) for prompt in ask.prompts))
        tenant, ts_us = door.principal.tenant.id, self._clock_us()
        rate = self._billing.quote(tenant, door.model, self._engine.info.name, ts_us, ask.endpoint)

        def lacking(tokens: int) -> Lacking:
            return lambda: self._billing.lacking(
                tenant,
                rate,
                sum(len(prompt) for prompt in ask.prompts),
                tokens * len(ask.prompts),
                key_id=door.principal.key.id,
                adapter=door.adapter.name if door.adapter else "",
                ts_us=ts_us,
            )

        first = min(ask.sampling.max_tokens, self._settings.ceiling_stretch) * ask.n
        await self._lender.fund(lacking(first), lacking(1))

    def _open(self, door: Door, ask: Ask) -> Admitted:
        """Second half, without a pause in which anything could change: fit, price, hold, journal."""
        self._check_state()
        longest = max(len(prompt) for prompt in ask.prompts)
        self._check_fit(ask, longest)
        prompt_tokens = sum(len(prompt) for prompt in ask.prompts)
        total = ask.sampling.max_tokens * ask.n
        first = min(total, self._settings.ceiling_stretch * ask.n)
        door.lease.take_tokens(prompt_tokens, first * len(ask.prompts))
        tenant, ts_us = door.principal.tenant.id, self._clock_us()
        request_id = uuid7(ts_us)
        rate = self._billing.quote(tenant, door.model, self._engine.info.name, ts_us, ask.endpoint)
        try:
            hold = self._billing.open_hold(
                tenant,
                request_id,
                rate,
                prompt_tokens,
                first * len(ask.prompts),
                key_id=door.principal.key.id,
                adapter=door.adapter.name if door.adapter else "",
                ts_us=ts_us,
            )
        except InsufficientCredits as error:
            self._billing.exhausted(error.quota)
            raise
        part_ids = _part_ids(request_id, len(ask.prompts))
        try:
            if hold.covered_tokens < len(part_ids):
                raise InsufficientQuota("The balance does not cover one token for each prompt.")
            purse = Purse(
                self.purses,
                tenant=tenant,
                request_id=request_id,
                totals=dict.fromkeys(part_ids, total),
                stretch=self._settings.ceiling_stretch * ask.n,
                hold=hold,
            )
            requests = [
                self._request(part_id, prompt, ask, door, purse)
                for part_id, prompt in zip(part_ids, ask.prompts, strict=True)
            ]
            # Last, as from here on the request is settled and not taken back.
            live = self._capture.open(self._record(door, ask, request_id, ts_us, prompt_tokens), part_ids)
        except BaseException as error:
            self._billing.release(request_id)
            self.purses.forget(tenant, part_ids)
            if isinstance(error, JournalError):
                raise Unavailable("Usage cannot be recorded now, so nothing is served.", code="no_journal") from error
            raise
        return Admitted(live=live, lease=door.lease, purse=purse, requests=requests)

    def _check_state(self) -> None:
        if self.draining:
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after_s=5)
        if not self._engine.ready:
            raise Unavailable("The engine is not up; try again.", code="engine_unavailable")
        if not self._spool.writable():
            raise Unavailable("Usage cannot be recorded now, so nothing is served.", code="no_spool")

    def _check_fit(self, ask: Ask, longest: int) -> None:
        context = self._engine.info.max_model_len
        if longest + ask.sampling.max_tokens > context:
            raise BadRequest(
                f"This model's context holds {context} tokens, but the prompt has {longest} "
                f"and {ask.sampling.max_tokens} more are asked for.",
                param="messages" if ask.endpoint == "chat.completions" else "prompt",
                code="context_length_exceeded",
            )

    def _record(self, door: Door, ask: Ask, request_id: str, ts_us: int, prompt_tokens: int) -> OpenedRecord:
        return OpenedRecord(
            event_id=request_id,
            ts_us=ts_us,
            tenant=door.principal.tenant.id,
            key_id=door.principal.key.id,
            model=door.model,
            base_model=self._engine.info.name,
            adapter=door.adapter.name if door.adapter else "",
            endpoint=ask.endpoint,
            gateway=self._settings.gateway_id,
            n=ask.n,
            stream=ask.stream,
            user=ask.user,
            metadata=ask.metadata,
            prompt_tokens=prompt_tokens,
        )

    def _request(self, part_id: str, prompt: Sequence[int], ask: Ask, door: Door, purse: Purse) -> Request:
        tenant = door.principal.tenant
        return Request(
            id=part_id,
            prompt=list(prompt),
            sampling=ask.sampling,
            n=ask.n,
            adapter=door.adapter,
            tenant=tenant.id,
            cache_salt=ask.cache_salt,
            public_cache=ask.cache_salt in self._public_salts,
            token_ceiling=purse.ceiling(part_id),
            weight=float(tenant.limits.get(WEIGHT, 1)),
        )

    def refused(self, error: ApiError) -> None:
        """Count a refusal by its code."""
        self._telemetry["meterhouse_refused_total"].labels(error.code or str(error.status)).inc()


def adapter_ref(record: AdapterRecord, kept: Path | None = None) -> AdapterRef:
    """The engine's word for a tenant's adapter; `kept`: its files, if they lie elsewhere than where it was recorded."""
    return AdapterRef(id=record.id, name=record.name, path=str(kept or record.path), digest=record.digest)


def _part_ids(request_id: str, count: int) -> list[str]:
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]
