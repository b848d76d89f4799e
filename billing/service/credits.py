"""Credits, balances and holds."""

from __future__ import annotations

from billing.books import new_event
from billing.holds import Hold
from billing.ledger import Balance, CreditGranted, Grant, check_grant
from billing.money import format_amount, parse_amount
from billing.prices import Rate
from billing.service.shell import Idempotency, Shell
from billing.store import NewEvent


class CreditService(Shell):
    """What a tenant may still spend."""

    def grant_credit(
        self, tenant_id: str, amount: str, currency: str, reason: str, *, idempotency: Idempotency | None = None
    ) -> Grant:
        """Add prepaid credit. Raises `Invalid` with every fault, `NotFound`."""

        def decide(time_us: int) -> tuple[list[NewEvent], Grant]:
            tenant = self._books.accounts.tenant(tenant_id)
            check_grant(amount, currency, tenant.currency, reason)
            grant = Grant(
                id=self._new_id("grant"),
                tenant=tenant_id,
                amount=format_amount(parse_amount(amount)),
                currency=currency,
                reason=reason,
                created_us=time_us,
            )
            return [new_event(f"tenant:{tenant_id}", CreditGranted(grant=grant))], grant

        return self._command("grant_credit", idempotency, Grant, decide)[0]

    def balance(self, tenant_id: str) -> Balance:
        """What is settled counts at once, recorded or not. Raises `NotFound`."""
        with self._state:
            tenant = self._books.accounts.tenant(tenant_id)
            return self._books.ledger.balance(tenant_id, tenant.currency)

    def open_hold(self, tenant_id: str, request_id: str, rate: Rate, prompt_tokens: int, want_tokens: int) -> Hold:
        """Cover the prompt at its dearest and up to `want_tokens`, at least one where any is wanted.

        Raises `InsufficientCredits` with nothing kept, `NotFound`, `Invalid`, `Conflict` for an id in use.
        """
        with self._state:
            self._books.accounts.tenant(tenant_id)
            return self._holds.open(tenant_id, request_id, rate, prompt_tokens, want_tokens)

    def extend_hold(self, request_id: str, want_tokens_total: int) -> Hold:
        """Cover up to that many completion tokens in all, as far as the balance bears. Raises `NotFound`."""
        with self._state:
            return self._holds.extend(request_id, want_tokens_total)

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
