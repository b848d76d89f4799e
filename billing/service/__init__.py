"""The shell of billing: load, decide, append.

`Billing` is what the other rooms use. Its parts are one file a subject; all state is folded from the
event store, and a decision is made while the log is held by this writer alone.
"""

from __future__ import annotations

from billing.grants import Grant
from billing.holds import Hold
from billing.ledger import Balance
from billing.service.accounts import AccountService
from billing.service.budgeting import BudgetService
from billing.service.crediting import CreditNoteService
from billing.service.credits import CreditService
from billing.service.daily import DailyService
from billing.service.leasing import LeaseService
from billing.service.modes import ModeService
from billing.service.pricing import PriceService
from billing.service.reconciling import ReconcileService
from billing.service.restoring import RestoreService
from billing.service.scheduling import ScheduleService
from billing.service.shell import Idempotency
from billing.service.simulating import SimulatingService
from billing.service.terms import TermsService


class Billing(
    AccountService,
    PriceService,
    TermsService,
    DailyService,
    CreditService,
    BudgetService,
    LeaseService,
    ScheduleService,
    CreditNoteService,
    ReconcileService,
    SimulatingService,
    RestoreService,
    ModeService,
):
    """Tenants, prices, credits, holds, charges and invoices over one event store.

    Thread-safe. `authenticate`, `resolve_model`, `quote`, the holds and `settle` touch memory only, for
    microseconds; everything that changes the ledger waits for the disk. After `lease_as` it holds only against what
    this process has leased, so that several of them cannot exceed a balance together; before, against all of it.
    """


__all__ = ["Balance", "Billing", "Grant", "Hold", "Idempotency"]
