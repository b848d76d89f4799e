"""Everything billing refuses, as one tree. A text here may be shown to the caller of the admin API.

BillingError
├── Invalid               the input is at fault; `faults` lists every (field, reason)
├── NotFound              no such tenant, key, adapter, invoice, hold
│   └── UnknownModel      no model of that name exists for this tenant
├── Conflict              the input is fine, the state does not allow it
│   ├── IdempotencyConflict
│   ├── PeriodOverlaps
│   ├── PeriodNotClosed
│   ├── NoSigningKey      an invoice cannot be signed here, so it is not made final
│   ├── UnratedUsage      usage without a price stands in the way of an invoice
│   └── LedgerDisagrees   two ways to the same sum part; nothing is invoiced until they agree
├── InsufficientCredits
├── NoPrice
├── ExportError           the payment provider did not take the invoice
│   └── StripeNotConfigured
└── LedgerUnavailable     the event store cannot be reached, or is not migrated
    ├── LeaseLost         it was away for too long: others may have what was leased here
    └── LedgerCorrupt     the hash chain does not hold
"""

from __future__ import annotations

from collections.abc import Sequence


class BillingError(Exception):
    """Root of billing's refusals."""


class Invalid(BillingError):
    """The input is at fault. `faults` holds every (field, reason), never just the first."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in self.faults))

    @property
    def field(self) -> str:
        return self.faults[0][0]

    @property
    def reason(self) -> str:
        return self.faults[0][1]


class NotFound(BillingError):
    """`what` is the kind of thing ("tenant", "invoice"), `id` what was asked for."""

    def __init__(self, what: str, id: str) -> None:
        self.what, self.id = what, id
        super().__init__(f"no {what} {id!r}")


class UnknownModel(NotFound):
    """No such model for this tenant; another tenant's adapter gives the same words."""

    def __init__(self, model: str) -> None:
        super().__init__("model", model)


class Conflict(BillingError):
    """The state does not allow it."""


class IdempotencyConflict(Conflict):
    """The idempotency key was used before, for something else."""


class PeriodOverlaps(Conflict):
    """Part of the period is already invoiced."""


class PeriodNotClosed(Conflict):
    """Usage of the period may still be on its way."""


class NoSigningKey(Conflict):
    """There is no key here that an invoice can be signed with."""


class UnratedUsage(Conflict):
    """Usage of the period has no price yet."""


class LedgerDisagrees(Conflict):
    """The ledger's rating and the one from the usage store differ."""


class InsufficientCredits(BillingError):
    """The balance, or the budget of this name, cannot cover the prompt and one token of answer; femto-units.

    `quota` is what it was refused by (`billing/quotas.py`).
    """

    def __init__(self, needed_femto: int, available_femto: int, quota: str = "", budget: str = "") -> None:
        self.needed_femto, self.available_femto = needed_femto, available_femto
        self.quota, self.budget = quota, budget
        by = f"The budget {budget!r}" if budget else "The balance"
        super().__init__(f"{by} does not cover this request.")


class TenantSuspended(BillingError):
    """The tenant is suspended: it is sold nothing, and may look at what it owes."""

    def __init__(self) -> None:
        super().__init__(
            "This account is suspended. GET /v1/billing/balance says why, GET /v1/billing/invoices what is due."
        )


class NoPrice(BillingError):
    """No price applies, so nothing may be sold: a missing price is never 0."""


class ExportError(BillingError):
    """The payment provider refused, or holds something else than we sent."""


class StripeNotConfigured(ExportError):
    """There is no key to export with; nothing was sent."""


class LedgerUnavailable(BillingError):
    """The event store cannot be used now."""


class LeaseLost(LedgerUnavailable):
    """This process may spend nothing more until it has leased it anew."""


class LedgerCorrupt(LedgerUnavailable):
    """The hash chain does not hold from `seq` on."""

    def __init__(self, seq: int, reason: str) -> None:
        self.seq, self.reason = seq, reason
        super().__init__(f"the ledger's hash chain is broken at event {seq}: {reason}")
