"""Credits, balances and holds."""

from __future__ import annotations

import msgspec

from billing.accounts import Tenant
from billing.books import new_event
from billing.errors import Conflict, InsufficientCredits, LeaseLost, NotFound, TenantSuspended
from billing.grants import PRIORITY, CreditGranted, Grant, GrantState, check_grant
from billing.holds import Hold, missing
from billing.ledger import Balance, Spender
from billing.money import cost, format_amount, parse_amount
from billing.prices import Rate
from billing.service.shell import PAGE_MAX, Idempotency, Shell, page
from billing.store import NewEvent


class CreditService(Shell):
    """What a tenant may still spend."""

    def grant_credit(
        self,
        tenant_id: str,
        amount: str,
        currency: str,
        reason: str,
        *,
        priority: int = PRIORITY,
        expires_us: int | None = None,
        top_up: str = "",
        idempotency: Idempotency | None = None,
    ) -> Grant:
        """Add prepaid credit; a lower priority is used first, and nothing of it from `expires_us` on.

        `top_up` names the request for a top-up that it answers, which can be answered once. Raises `Invalid` with every
        fault, `NotFound`, `Conflict`.
        """

        def decide(time_us: int) -> tuple[list[NewEvent], Grant]:
            tenant = self._books.accounts.tenant(tenant_id)
            grant = Grant(
                id=self._new_id("grant"),
                tenant=tenant_id,
                amount=amount,
                currency=currency,
                reason=reason,
                created_us=time_us,
                priority=priority,
                expires_us=expires_us,
                top_up=top_up,
            )
            check_grant(grant, tenant.currency)
            self._check_top_up(tenant, top_up)
            grant = msgspec.structs.replace(grant, amount=format_amount(parse_amount(amount)))
            return [new_event(f"tenant:{tenant_id}", CreditGranted(grant=grant))], grant

        return self._command("grant_credit", idempotency, Grant, decide)[0]

    def _check_top_up(self, tenant: Tenant, top_up: str) -> None:
        if not top_up:
            return
        if top_up in self._books.ledger.answered:
            raise Conflict("this request for a top-up was answered before")
        asked = self._books.ledger.account(tenant.id).topping_up
        if asked is None or asked.id != top_up:
            raise NotFound("top-up", top_up)

    def balance(self, tenant_id: str) -> Balance:
        """What is settled counts at once, recorded or not. Raises `NotFound`."""
        with self._state:
            tenant = self._books.accounts.tenant(tenant_id)
            return self._books.ledger.balance(tenant_id, tenant.currency, self._clock())

    def grants(self, tenant_id: str, limit: int = PAGE_MAX, after: str | None = None) -> list[GrantState]:
        """A tenant's grants, by age, and what became of each by what is recorded. Raises `NotFound`."""
        with self._state:
            self._books.accounts.tenant(tenant_id)
            states = list(self._books.ledger.account(tenant_id).credit.grants.values())
            found = page(states, lambda state: state.grant.id, limit, after)
            return [msgspec.structs.replace(state) for state in found]

    def open_hold(
        self,
        tenant_id: str,
        request_id: str,
        rate: Rate,
        prompt_tokens: int,
        want_tokens: int,
        *,
        key_id: str = "",
        adapter: str = "",
        ts_us: int | None = None,
    ) -> Hold:
        """Cover the prompt at its dearest and up to `want_tokens`, at least one where any is wanted.

        The hold counts against the tenant's balance, unless it pays afterwards, and against every hard budget of the
        tenant, the key and the adapter, in the window that has `ts_us`, when the request began. Raises
        `InsufficientCredits` or `TenantSuspended` with nothing kept, `NotFound`, `Invalid`, `Conflict` for an id in
        use, `LeaseLost`.
        """
        with self._state:
            self._books.accounts.tenant(tenant_id)
            if self._books.accounts.suspensions.holds(tenant_id):
                raise TenantSuspended
            now_us = self._clock()
            ts_us = now_us if ts_us is None else ts_us
            quotas = self._quotas.applying(tenant_id, key_id, adapter, ts_us)
            try:
                who = Spender(tenant_id, key_id, adapter)
                return self._holds.open(
                    who, request_id, quotas, rate, prompt_tokens, want_tokens, ts_us=ts_us, now_us=now_us
                )
            except InsufficientCredits as error:
                if self._quotas.fence.closed:
                    raise LeaseLost("what is leased here was not renewed in time") from error
                raise

    def lacking(
        self,
        tenant_id: str,
        rate: Rate,
        prompt_tokens: int,
        want_tokens: int,
        *,
        key_id: str = "",
        adapter: str = "",
        ts_us: int,
    ) -> dict[str, int]:
        """The quotas that do not bear such a request now → what each lacks; nothing is kept. Raises `NotFound`."""
        with self._state:
            self._books.accounts.tenant(tenant_id)
            quotas = self._quotas.applying(tenant_id, key_id, adapter, ts_us)
            femto = cost(prompt_tokens, rate.dearest_prompt()) + rate.fixed_femto + cost(want_tokens, rate.completion)
            return missing(quotas, femto, self._clock()) if femto else {}

    def lacking_more(self, request_id: str, want_tokens: int) -> dict[str, int]:
        """The quotas that do not bear so many tokens more of a request that runs → what each lacks."""
        with self._state:
            return self._holds.missing(request_id, want_tokens, now_us=self._clock())

    def extend_hold(self, request_id: str, want_tokens_total: int) -> Hold:
        """Cover up to that many completion tokens in all, as far as the money bears. Raises `NotFound`."""
        with self._state:
            return self._holds.extend(request_id, want_tokens_total, now_us=self._clock())

    def reprice_prompt(self, request_id: str, prompt: int, cached: int) -> None:
        """Free what the true counts of the prompt (so far) make it cheaper than its dearest."""
        with self._state:
            self._holds.reprice_prompt(request_id, prompt, cached)

    def release(self, request_id: str) -> None:
        """End a hold with nothing charged: the engine never took the request."""
        with self._state:
            self._holds.release(request_id)

    def holds_open(self) -> int:
        """How many holds stand; 0 when nothing runs."""
        with self._state:
            return len(self._holds)
