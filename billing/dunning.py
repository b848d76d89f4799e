"""Dunning: what follows, day by day, when an invoice's payment has failed, until it is paid or let go.

A dunning begins with the first failed payment of an invoice, once for each, and keeps the steps it began with: a
changed setting is for those that begin later. Its days count from its own beginning and not from the failure, so
what failed before anybody wanted dunning, or while no server ran, suspends nobody at once; and no step comes sooner
than a day after the one before it, so nobody is suspended without the notices, however long nobody looked.

Pure: facts are folded in, what is due at a time comes out. Does not know: who is told, what suspension does.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from billing.errors import NotFound
from billing.invoice import (
    Invoice,
    InvoiceFact,
    InvoicePaid,
    InvoicePaymentFailed,
    InvoiceStatus,
    InvoiceVoided,
)
from billing.steps import Policy, Step, StepKind

DAY_US = 86_400_000_000


class DunningStarted(msgspec.Struct, frozen=True, kw_only=True, tag="dunning.started"):
    """An invoice's payment failed, and these steps follow unless it is paid. Once for each invoice."""

    invoice_id: str
    tenant: str
    at_us: int
    steps: tuple[Step, ...]
    ends_uncollectible: bool = False


class DunningStepped(msgspec.Struct, frozen=True, kw_only=True, tag="dunning.step"):
    """One step was taken. Once for each invoice and step; a suspension stands behind it as a fact of its own."""

    invoice_id: str
    tenant: str
    at_us: int
    step: int  # from 1
    of: int
    kind: StepKind
    day: int
    next_us: int | None = None  # when the step behind it is due, if there is one


class DunningEnded(msgspec.Struct, frozen=True, kw_only=True, tag="dunning.ended"):
    """Nothing more follows from the failed payment. Once for each invoice, whatever fails later."""

    invoice_id: str
    tenant: str
    at_us: int
    outcome: str  # an `Outcome`
    reason: str = ""  # a person's, where one ended it


DunningFact = DunningStarted | DunningStepped | DunningEnded


class Outcome(StrEnum):
    """By what a dunning ended."""

    PAID = "paid"
    VOID = "void"
    UNCOLLECTIBLE = "uncollectible"
    WAIVED = "waived"


class Dunning(msgspec.Struct, frozen=True, kw_only=True):
    """One invoice's, as it stands."""

    invoice_id: str
    tenant: str
    started_us: int
    steps: tuple[Step, ...]
    ends_uncollectible: bool
    taken: tuple[int, ...] = ()  # when each step was taken
    outcome: str = ""  # empty: it goes on
    ended_us: int | None = None
    reason: str = ""

    @property
    def next_us(self) -> int | None:
        """When the next step is due; None when there is none."""
        if self.outcome or len(self.taken) == len(self.steps):
            return None
        due_us = self.started_us + self.steps[len(self.taken)].day * DAY_US
        return max(due_us, self.taken[-1] + DAY_US) if self.taken else due_us

    def ended_by(self, fact: DunningEnded) -> Dunning:
        return msgspec.structs.replace(self, outcome=fact.outcome, ended_us=fact.at_us, reason=fact.reason)


class Dunnings:
    """Every dunning there ever was, and the failed payments that may begin one."""

    def __init__(self) -> None:
        self.by_invoice: dict[str, Dunning] = {}
        self.open: dict[str, Dunning] = {}
        self._failed: dict[str, None] = {}  # invoices whose payment failed and that were never dunned

    def apply(self, fact: DunningFact) -> None:
        match fact:
            case DunningStarted(invoice_id=id):
                self._failed.pop(id, None)
                self._put(
                    Dunning(
                        invoice_id=id,
                        tenant=fact.tenant,
                        started_us=fact.at_us,
                        steps=fact.steps,
                        ends_uncollectible=fact.ends_uncollectible,
                    )
                )
            case DunningStepped(invoice_id=id, at_us=at_us):
                before = self.by_invoice[id]
                self._put(msgspec.structs.replace(before, taken=(*before.taken, at_us)))
            case DunningEnded(invoice_id=id):
                self._put(self.by_invoice[id].ended_by(fact))

    def follow(self, fact: InvoiceFact) -> None:
        """See an invoice's payment fail, or end."""
        match fact:
            case InvoicePaymentFailed(invoice_id=id) if id not in self.by_invoice:
                self._failed[id] = None
            case InvoicePaid(invoice_id=id) | InvoiceVoided(invoice_id=id):
                self._failed.pop(id, None)

    def get(self, invoice_id: str) -> Dunning:
        """Raises `NotFound`."""
        try:
            return self.by_invoice[invoice_id]
        except KeyError:
            raise NotFound("dunning of invoice", invoice_id) from None

    def due(self, now_us: int, invoice: Callable[[str], Invoice], policy: Callable[[str], Policy]) -> list[DunningFact]:
        """What is to be written now, at most one fact for each invoice; `policy` is a tenant's."""
        found: list[DunningFact] = []
        for id in self._failed:
            one = invoice(id)
            rule = policy(one.tenant)
            if rule.steps and not _outcome(one, rule.ends_uncollectible):
                found.append(
                    DunningStarted(
                        invoice_id=id,
                        tenant=one.tenant,
                        at_us=now_us,
                        steps=rule.steps,
                        ends_uncollectible=rule.ends_uncollectible,
                    )
                )
        for dunning in self.open.values():
            if outcome := _outcome(invoice(dunning.invoice_id), dunning.ends_uncollectible):
                found.append(ended(dunning, outcome, now_us))
            elif dunning.next_us is not None and dunning.next_us <= now_us:
                found.append(_stepped(dunning, now_us))
        return found

    def _put(self, dunning: Dunning) -> None:
        self.by_invoice[dunning.invoice_id] = dunning
        if dunning.outcome:
            self.open.pop(dunning.invoice_id, None)
        else:
            self.open[dunning.invoice_id] = dunning


def ended(dunning: Dunning, outcome: Outcome, now_us: int, reason: str = "") -> DunningEnded:
    """The fact that ends it."""
    return DunningEnded(
        invoice_id=dunning.invoice_id, tenant=dunning.tenant, at_us=now_us, outcome=outcome, reason=reason
    )


def _stepped(dunning: Dunning, now_us: int) -> DunningStepped:
    number = len(dunning.taken)
    after = msgspec.structs.replace(dunning, taken=(*dunning.taken, now_us))
    return DunningStepped(
        invoice_id=dunning.invoice_id,
        tenant=dunning.tenant,
        at_us=now_us,
        step=number + 1,
        of=len(dunning.steps),
        kind=dunning.steps[number].kind,
        day=dunning.steps[number].day,
        next_us=after.next_us,
    )


def _outcome(invoice: Invoice, ends_uncollectible: bool) -> Outcome | None:
    """By what its dunning is over; None while it is owed."""
    if invoice.status is InvoiceStatus.PAID:
        return Outcome.PAID
    if invoice.status is InvoiceStatus.VOID:
        return Outcome.VOID
    if invoice.status is InvoiceStatus.UNCOLLECTIBLE and ends_uncollectible:
        return Outcome.UNCOLLECTIBLE
    return None
