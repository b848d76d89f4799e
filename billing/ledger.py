"""The ledger: what each tenant was granted and what its usage cost.

    balance = granted - expired - charged + owed        available = balance - held

`charged` has two parts: what is recorded in the event log, and what is settled here but not recorded yet
(`pending`), so that a balance counts a request the moment it is settled. When the recorded charge
arrives, the pending one of the same event leaves: never both, whichever comes first. `owed` is what a postpaid tenant
was charged beyond its grants: its invoices ask for it, its balance does not.

Pure. Does not know: the store, prices, holds' rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from billing.accounts import Accounts, BillingMode
from billing.grants import Credit, CreditGranted, Grant, GrantExpired, GrantFact
from billing.money import parse_amount
from metering.events import UsageEvent

if TYPE_CHECKING:
    from billing.quotas import Quotas

BALANCE, BUDGET = "balance:", "budget:"  # what the id of a quota begins with (`billing/quotas.py`)
RECENT = 2**16  # recorded events whose late `settle` is recognised without asking the store

__all__ = [
    "Account",
    "Balance",
    "CreditGranted",
    "Grant",
    "GrantExpired",
    "Ledger",
    "LedgerFact",
    "Pending",
    "QuotaExhausted",
    "TopUpRequested",
    "Unrated",
    "UsageRated",
    "UsageUnrated",
]


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Femto-units; available = granted - expired - charged + owed - held, less what expired and is not booked yet."""

    tenant: str
    currency: str
    granted_femto: int
    charged_femto: int
    held_femto: int
    available_femto: int
    expired_femto: int = 0
    owed_femto: int = 0


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
    key_id: str = ""  # whose budgets it counts in
    gateway: str = ""  # whose leases it used up; empty: nobody's
    quantities: dict[str, int] = {}  # base units by class, where the price has more than three flat ones
    positions: dict[str, int] = {}  # of each class that is not linear: the period's units before these (`positions.py`)
    period_start_us: int = 0  # of the period that they count in; 0 where there are none


class UsageUnrated(msgspec.Struct, frozen=True, kw_only=True, tag="usage.unrated"):
    """A request that could not be charged, whole, so that it can be rated later."""

    event: UsageEvent
    event_hash: str
    reason: str


class TopUpRequested(msgspec.Struct, frozen=True, kw_only=True, tag="top_up.requested"):
    """The balance fell below the tenant's threshold: somebody is to charge the customer and grant the amount.

    Once for a crossing: the next one can come when a grant has brought the balance back to the threshold, or after
    the tenant's `top_up` was changed. The grant that answers names this `id`.
    """

    id: str
    tenant: str
    amount: str
    currency: str
    threshold: str
    balance_femto: str
    at_us: int


class QuotaExhausted(msgspec.Struct, frozen=True, kw_only=True, tag="quota.exhausted"):
    """A request was refused or stopped for want of money, or of a budget.

    Once until a grant (or what an invoice gives back), or until a new window or a change of the budget.

    `budget` is the budget's name, empty where the balance was at its end; `quota` as in `billing/quotas.py`.
    """

    quota: str
    tenant: str
    budget: str
    left_femto: str
    currency: str
    at_us: int


LedgerFact = GrantFact | UsageRated | UsageUnrated | TopUpRequested | QuotaExhausted


class Account:
    """One tenant's sums, in femto-units."""

    __slots__ = ("charged", "credit", "exhausted", "expired", "granted", "held", "owed", "pending", "topping_up")

    def __init__(self) -> None:
        self.credit = Credit()
        self.granted = 0
        self.expired = 0
        self.charged = 0  # recorded
        self.owed = 0  # of this, what a postpaid tenant has no grants for
        self.pending = 0  # settled, not recorded yet
        self.held = 0
        self.topping_up: TopUpRequested | None = None  # asked for, and the balance is still below the threshold
        self.exhausted: set[str] = set()  # quotas that are known to be at their end


class Spender(NamedTuple):
    """Whose request it is: what decides which quotas it spends of."""

    tenant: str
    key_id: str = ""
    adapter: str = ""


class Pending(msgspec.Struct, frozen=True):
    """A charge that memory knows and the log does not yet."""

    who: Spender
    amount: int
    event_hash: str
    quotas: Quotas = ()
    ts_us: int = 0


class Unrated(msgspec.Struct, frozen=True, kw_only=True):
    """Where usage without a charge is found again."""

    event_id: str
    tenant: str
    model: str
    base_model: str
    ts_us: int
    reason: str
    endpoint: str = ""
    images: int = 0
    audio_ms: int = 0


Applying = Callable[[str, str, str, int], "Quotas"]
"""`QuotaBook.applying`: what a request of a tenant, key and adapter spends of when it begins at a time."""


class Ledger:
    """Accounts, pending charges and usage without a charge. `tenants` say who pays before and who after."""

    def __init__(self, tenants: Accounts) -> None:
        self._tenants = tenants
        self.accounts: dict[str, Account] = {}
        self.moved: set[str] = set()  # tenants whose balance changed since `due` was told
        self.expiring: dict[str, str] = {}  # grants whose expiry is to come → tenant
        self.answered: set[str] = set()  # top-ups that a grant has answered
        self.unleased: set[str] = (
            set()
        )  # tenants of which something went that was on no gateway's lease; the shell empties it
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
                self._granted(grant)
            case GrantExpired(grant_id=id, tenant=tenant, amount_femto=amount):
                account = self.account(tenant)
                account.credit.expire(id)
                account.expired += int(amount)
                self.expiring.pop(id, None)
                self.moved.add(tenant)
                self.unleased.add(tenant)
            case UsageRated():
                self._recorded(fact.event_id, fact.event_hash)
                self._charged(fact.tenant, int(fact.amount_femto), fact.ts_us)
                if not fact.gateway:
                    self.unleased.add(fact.tenant)
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
                    endpoint=event.endpoint,
                    images=event.images,
                    audio_ms=event.audio_ms,
                )
            case TopUpRequested(tenant=tenant):
                self.account(tenant).topping_up = fact
            case QuotaExhausted(tenant=tenant, quota=quota):
                self._exhausted(self.account(tenant), quota)

    def _exhausted(self, account: Account, quota: str) -> None:
        """Told once: of a budget its newest windows are remembered, so no more than one for each that stands."""
        budget, _, _ = quota.rpartition(":")
        if quota.startswith(BUDGET):
            account.exhausted -= {one for one in account.exhausted if one.startswith(f"{budget}:") and one < quota}
        account.exhausted.add(quota)

    def budget_changed(self, tenant: str, budget_id: str) -> None:
        """It may be reached again, and is told again then; what it leaves is another sum than what was leased of."""
        account = self.account(tenant)
        account.exhausted -= {one for one in account.exhausted if one.startswith(f"{BUDGET}{budget_id}:")}
        self.unleased.add(tenant)

    def _granted(self, grant: Grant) -> None:
        account = self.account(grant.tenant)
        account.granted += parse_amount(grant.amount)
        account.credit.add(grant)
        account.exhausted.discard(f"{BALANCE}{grant.tenant}")
        if grant.expires_us is not None:
            self.expiring[grant.id] = grant.tenant
        if grant.top_up:
            self.answered.add(grant.top_up)
        asked = account.topping_up
        if asked is not None and account.credit.spendable(grant.created_us) >= parse_amount(asked.threshold):
            account.topping_up = None
        self.moved.add(grant.tenant)

    def _charged(self, tenant: str, amount: int, ts_us: int) -> None:
        account = self.account(tenant)
        account.charged += amount
        uncovered = account.credit.use(amount, ts_us)
        who = self._tenants.tenants.get(tenant)
        if who is not None and who.billing_mode is BillingMode.POSTPAID:
            account.owed += uncovered
        else:
            account.credit.debt += uncovered
        self.moved.add(tenant)

    def true_up(self, tenant: str, amount: int, ts_us: int) -> None:
        """Book what an invoice asks beyond the charges of its usage; below 0 it gives back."""
        self.unleased.add(tenant)
        if amount >= 0:
            self._charged(tenant, amount, ts_us)
            return
        account = self.account(tenant)
        account.charged += amount
        forgiven = min(account.owed, -amount)
        account.owed -= forgiven
        account.credit.debt += amount + forgiven
        account.exhausted.discard(f"{BALANCE}{tenant}")
        self.moved.add(tenant)

    def told(self) -> None:
        """All that was due stands in the log."""
        self.moved.clear()

    def due(self, now_us: int) -> list[tuple[str, int]]:
        """Tenants to be asked for a top-up, with their balances: below the threshold, and not asked for yet."""
        found: list[tuple[str, int]] = []
        for id in self.moved:
            tenant = self._tenants.tenants.get(id)
            if tenant is None or tenant.top_up is None or tenant.billing_mode is not BillingMode.PREPAID:
                continue
            account = self.account(id)
            balance, asked = account.credit.spendable(now_us), account.topping_up
            same = asked is not None and (asked.threshold, asked.amount) == (
                tenant.top_up.threshold,
                tenant.top_up.amount,
            )
            if balance < parse_amount(tenant.top_up.threshold) and not same:
                found.append((id, balance))
        return found

    def known_hash(self, event_id: str) -> str | None:
        """The content that was settled or recently recorded under this id."""
        pending = self.pending.get(event_id)
        return pending.event_hash if pending else self._recent.get(event_id)

    def settle(
        self, event_id: str, event_hash: str, who: Spender, amount: int, quotas: Quotas = (), ts_us: int = 0
    ) -> None:
        """Charge memory, and the quotas it spends of, for an event that the log does not know yet."""
        self.pending[event_id] = Pending(who, amount, event_hash, quotas, ts_us)
        self.account(who.tenant).pending += amount
        for quota in quotas:
            quota.pending += amount

    def attach(self, tenants: Collection[str], applying: Applying) -> None:
        """Count what is settled and not recorded against the quotas that apply now."""
        for event_id, pending in self.pending.items():
            if pending.who.tenant not in tenants:
                continue
            quotas = applying(*pending.who, pending.ts_us)
            for quota in pending.quotas:
                quota.pending -= pending.amount
            for quota in quotas:
                quota.pending += pending.amount
            self.pending[event_id] = msgspec.structs.replace(pending, quotas=quotas)

    def balance(self, tenant: str, currency: str, now_us: int) -> Balance:
        account = self.account(tenant)
        return Balance(
            tenant=tenant,
            currency=currency,
            granted_femto=account.granted,
            charged_femto=account.charged + account.pending,
            held_femto=account.held,
            available_femto=account.credit.spendable(now_us) - account.pending - account.held,
            expired_femto=account.expired,
            owed_femto=account.owed,
        )

    def _recorded(self, event_id: str, event_hash: str) -> None:
        pending = self.pending.pop(event_id, None)
        if pending is not None:
            self.account(pending.who.tenant).pending -= pending.amount
            for quota in pending.quotas:
                quota.pending -= pending.amount
        self._recent[event_id] = event_hash
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
