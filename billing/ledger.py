"""The ledger: what each tenant was granted and what its usage cost.

    balance = granted - charged        available = balance - held

`charged` has two parts: what is recorded in the event log, and what is settled here but not recorded yet
(`pending`), so that a balance counts a request the moment it is settled. When the recorded charge
arrives, the pending one of the same event leaves: never both, whichever comes first.

Pure. Does not know: the store, prices, holds' rules.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from billing.checks import Faults
from billing.money import FEMTO, parse_amount
from metering.events import UsageEvent

RECENT = 2**16  # recorded events whose late `settle` is recognised without asking the store
GRANT_MAX_FEMTO = 10**12 * FEMTO


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Credits given to a tenant; the amount is exact decimal text."""

    id: str
    tenant: str
    amount: str
    currency: str
    reason: str
    created_us: int


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Femto-units; available = granted - charged - held."""

    tenant: str
    currency: str
    granted_femto: int
    charged_femto: int
    held_femto: int
    available_femto: int


class CreditGranted(msgspec.Struct, frozen=True, kw_only=True, tag="credit.granted"):
    grant: Grant


class UsageRated(msgspec.Struct, frozen=True, kw_only=True, tag="usage.rated"):
    """One request's charge. The counts are the event's; `event_hash` says which content was charged."""

    event_id: str
    event_hash: str
    ts_us: int
    settled_us: int
    tenant: str
    model: str
    adapter: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    price_id: str
    amount_femto: str  # text: a charge may need more than 64 bits
    rated_later: bool = False  # it had no price at first: by its time alone the book would still find none
    key_id: str = ""


class UsageUnrated(msgspec.Struct, frozen=True, kw_only=True, tag="usage.unrated"):
    """A request that could not be charged, whole, so that it can be rated later."""

    event: UsageEvent
    event_hash: str
    reason: str


LedgerFact = CreditGranted | UsageRated | UsageUnrated


class Account:
    """One tenant's sums, in femto-units."""

    __slots__ = ("charged", "granted", "held", "pending")

    def __init__(self) -> None:
        self.granted = 0
        self.charged = 0  # recorded
        self.pending = 0  # settled, not recorded yet
        self.held = 0

    @property
    def available(self) -> int:
        return self.granted - self.charged - self.pending - self.held


class Pending(msgspec.Struct, frozen=True):
    """A charge that memory knows and the log does not yet."""

    tenant: str
    amount: int
    event_hash: str


class Unrated(msgspec.Struct, frozen=True, kw_only=True):
    """Where usage without a charge is found again."""

    event_id: str
    tenant: str
    model: str
    base_model: str
    ts_us: int
    reason: str


class Ledger:
    """Accounts, pending charges and usage without a charge."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.pending: dict[str, Pending] = {}
        self.unrated: dict[str, Unrated] = {}
        self._recent: OrderedDict[str, str] = OrderedDict()

    def account(self, tenant: str) -> Account:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account()
        return account

    def apply(self, fact: LedgerFact) -> None:
        match fact:
            case CreditGranted(grant=grant):
                self.account(grant.tenant).granted += parse_amount(grant.amount)
            case UsageRated():
                self._recorded(fact.event_id, fact.event_hash)
                self.account(fact.tenant).charged += int(fact.amount_femto)
                self.unrated.pop(fact.event_id, None)
            case UsageUnrated(event=event):
                self._recorded(event.event_id, fact.event_hash)
                self.unrated[event.event_id] = Unrated(
                    event_id=event.event_id,
                    tenant=event.tenant,
                    model=event.model,
                    base_model=event.base_model,
                    ts_us=event.ts_us,
                    reason=fact.reason,
                )

    def known_hash(self, event_id: str) -> str | None:
        """The content that was settled or recently recorded under this id."""
        pending = self.pending.get(event_id)
        return pending.event_hash if pending else self._recent.get(event_id)

    def settle(self, event_id: str, event_hash: str, tenant: str, amount: int) -> None:
        """Charge memory for an event that the log does not know yet."""
        self.pending[event_id] = Pending(tenant, amount, event_hash)
        self.account(tenant).pending += amount

    def balance(self, tenant: str, currency: str) -> Balance:
        account = self.account(tenant)
        return Balance(
            tenant=tenant,
            currency=currency,
            granted_femto=account.granted,
            charged_femto=account.charged + account.pending,
            held_femto=account.held,
            available_femto=account.available,
        )

    def _recorded(self, event_id: str, event_hash: str) -> None:
        pending = self.pending.pop(event_id, None)
        if pending is not None:
            self.account(pending.tenant).pending -= pending.amount
        self._recent[event_id] = event_hash
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)


def check_grant(amount: str, currency: str, tenant_currency: str, reason: str) -> None:
    """Raise `Invalid` with every fault."""
    faults = Faults()
    before = len(faults.found)
    femto = faults.money("amount", amount, parse_amount, GRANT_MAX_FEMTO)
    if femto == 0 and len(faults.found) == before:
        faults.add("amount", "must be more than 0")
    if currency != tenant_currency:
        faults.add("currency", f"must be the tenant's, {tenant_currency}")
    faults.text("reason", reason)
    faults.raise_if_any()
