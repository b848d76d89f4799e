"""All that the event log says, folded: accounts, prices, ledger, budgets, invoices, dunnings.

Pure: the same rows in the same order give the same books, in every process and at any later time.
"""

from __future__ import annotations

import msgspec

from billing.accounts import (
    AccountFact,
    Accounts,
    AdapterAdded,
    AdapterRemoved,
    KeyCreated,
    KeyRevoked,
    Tenant,
    TenantCreated,
    TenantUpdated,
)
from billing.admins import ActBegun, AdminFact, AdminKeyCreated, AdminKeyRevoked, Admins, CommandRefused
from billing.budgets import CAP, BudgetFact, BudgetReached, BudgetRemoved, Budgets, BudgetSet
from billing.charges import move
from billing.daily import DailyCharges
from billing.dunning import DunningEnded, DunningFact, Dunnings, DunningStarted, DunningStepped
from billing.errors import LedgerCorrupt, LedgerUnavailable
from billing.grants import CreditGranted, GrantExpired
from billing.invoice import InvoiceDrafted, InvoiceFact, InvoiceFinalized, Invoices, InvoiceStatus, InvoiceVoided
from billing.ledger import Ledger, LedgerFact, QuotaExhausted, TopUpRequested, UsageRated, UsageUnrated
from billing.margin import CostRates, CostRateSet
from billing.modes import ExportModeSet, Modes
from billing.money import parse_exact
from billing.notes import (
    CreditNote,
    CreditNoteExported,
    CreditNoteExportStarted,
    CreditNoteIssued,
    CreditNotes,
    CreditNoteVoided,
    NoteFact,
)
from billing.positions import Positions
from billing.prices import PriceBook, PriceSet
from billing.provider import ProviderEventSeen
from billing.restorations import ExportsReleased, LedgerRestored, Restorations, RestoreFact
from billing.signing import SigningKeyPublished, SigningKeys
from billing.stays import Stays
from billing.store import GENESIS, NewEvent, StoredEvent, chained
from billing.suspensions import SuspensionLifted, SuspensionPlaced
from billing.tariff import Tariffs
from billing.terms import CommitmentSet, DiscountEnded, DiscountGiven, TaxSet, Terms, TermsFact

Fact = (
    AccountFact
    | PriceSet
    | LedgerFact
    | BudgetFact
    | InvoiceFact
    | ProviderEventSeen
    | AdminFact
    | CostRateSet
    | SigningKeyPublished
    | TermsFact
    | NoteFact
    | DunningFact
    | RestoreFact
    | ExportModeSet
)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(Fact)


def new_event(
    stream: str, fact: Fact, *, key: str | None = None, payload_hash: str | None = None, result: str | None = None
) -> NewEvent:
    """A fact as a row to append; the payload is the same text for the same fact."""
    type_name = str(type(fact).__struct_config__.tag)
    payload = _encoder.encode(fact).decode()
    return NewEvent(stream=stream, type=type_name, payload=payload, key=key, payload_hash=payload_hash, result=result)


def fact_of(row: StoredEvent) -> Fact:
    """The fact of a stored row. Raises `LedgerUnavailable` for a row that this code is too old to understand."""
    try:
        return _decoder.decode(row.payload)
    except msgspec.DecodeError:
        raise LedgerUnavailable(f"this version does not understand event {row.seq} of the ledger") from None


class Books:
    """The state; `seq` and `hash` are the last row's that was folded in."""

    def __init__(self) -> None:
        self.seq = 0
        self.hash = GENESIS
        self.accounts = Accounts()
        self.admins = Admins()
        self.costs = CostRates()
        self.prices = PriceBook()
        self.tariffs = Tariffs(self.prices)
        self.positions = Positions()
        self.ledger = Ledger(self.accounts)
        self.budgets = Budgets(self.accounts)
        self.stays = Stays()
        self.terms = Terms()
        self.invoices = Invoices()
        self.notes = CreditNotes()
        self.billed: dict[str, Tenant] = {}  # invoice → its tenant as it was when it was drafted
        self.signing_keys = SigningKeys()
        self.dunnings = Dunnings()
        self.restorations = Restorations()
        self.modes = Modes()
        self.daily = DailyCharges()

    def apply(self, row: StoredEvent) -> Fact | None:
        """Fold the next row in and give its fact; a row already folded in changes nothing and gives None.

        Raises `LedgerCorrupt`, with the row not folded in, where the hash chain does not hold.
        """
        if row.seq <= self.seq:
            return None
        if row.seq != self.seq + 1:
            raise LedgerCorrupt(self.seq + 1, "a number is missing")
        if row.hash != chained(self.hash, row):
            raise LedgerCorrupt(row.seq, "content and hash differ")
        fact = fact_of(row)
        match fact:
            case UsageRated():
                self.ledger.apply(fact)
                if fact.positions:
                    move(self.positions, fact, self.tariffs.of(fact.price_id))
                self.daily.apply(fact)
                self.invoices.charged(fact.tenant, fact.ts_us, row.seq)
                self.budgets.charge(fact.tenant, fact.key_id, fact.adapter, fact.ts_us, int(fact.amount_femto))
            case UsageUnrated() | CreditGranted() | GrantExpired() | TopUpRequested() | QuotaExhausted():
                self.ledger.apply(fact)
            case BudgetSet() | BudgetRemoved() | BudgetReached():
                self.budgets.apply(fact)
                self._budget_changed(fact)
            case TenantCreated() | TenantUpdated() | KeyCreated() | KeyRevoked() | AdapterAdded() | AdapterRemoved():
                self.accounts.apply(fact, row.time_us)
                if isinstance(fact, TenantUpdated):
                    self._budget_changed(fact)
                if isinstance(fact, AdapterAdded | AdapterRemoved):
                    self.stays.apply(fact, row.time_us)
            case DiscountGiven() | DiscountEnded() | CommitmentSet() | TaxSet():
                self.terms.apply(fact)
            case CreditNoteIssued(note=note):
                self.notes.apply(fact)
                self._credit(note, 1)
            case CreditNoteVoided(note_id=id):
                self._credit(self.notes.get(id), -1)
                self.notes.apply(fact)
            case CreditNoteExportStarted() | CreditNoteExported():
                self.notes.apply(fact)
            case SuspensionPlaced() | SuspensionLifted():
                self.accounts.apply(fact, row.time_us)
            case DunningStarted() | DunningStepped() | DunningEnded():
                self.dunnings.apply(fact)
            case PriceSet():
                self.prices.apply(fact)
            case AdminKeyCreated() | AdminKeyRevoked() | CommandRefused() | ActBegun():
                self.admins.apply(fact)
            case CostRateSet():
                self.costs.apply(fact)
            case SigningKeyPublished():
                self.signing_keys.apply(fact)
            case LedgerRestored() | ExportsReleased():
                self.restorations.apply(fact)
            case ExportModeSet():
                self.modes.apply(fact, row.seq)
            case ProviderEventSeen():
                pass  # what follows from it are facts of their own
            case _:
                self._true_up(fact)
                self.invoices.apply(fact, row.seq)
                if isinstance(fact, InvoiceDrafted):
                    self.billed[fact.invoice.id] = self.accounts.tenant(fact.invoice.tenant)
                self.dunnings.follow(fact)
        self.seq, self.hash = row.seq, row.hash
        return fact

    def _credit(self, note: CreditNote, sign: int) -> None:
        """A note gives its net amount back, until it is void; with its invoice voided there is nothing to give back."""
        invoice = self.invoices.get(note.invoice_id)
        if invoice.status is not InvoiceStatus.VOID:
            self.ledger.true_up(note.tenant, -sign * note.net_femto, invoice.period_end_us - 1)

    def _budget_changed(self, fact: BudgetFact | TenantUpdated) -> None:
        match fact:
            case BudgetSet(budget=budget):
                self.ledger.budget_changed(budget.tenant, budget.id)
            case BudgetRemoved(budget_id=id, tenant=tenant):
                self.ledger.budget_changed(tenant, id)
            case TenantUpdated(tenant=tenant):
                self.ledger.budget_changed(tenant.id, CAP + tenant.id)

    def _true_up(self, fact: InvoiceFact) -> None:
        """A final invoice's difference from its charges counts in the balance; a void one's no more."""
        match fact:
            case InvoiceFinalized(invoice_id=id):
                sign = 1
            case InvoiceVoided(invoice_id=id) if self.invoices.get(id).finalized_us is not None:
                sign = -1
            case _:
                return
        invoice = self.invoices.get(id)
        if sign < 0:  # what its credit notes gave back is not given twice
            for note in self.notes.standing(id):
                self._credit(note, -1)
        if amount := sign * round(parse_exact(invoice.true_up)):
            self.ledger.true_up(invoice.tenant, amount, invoice.period_end_us - 1)
