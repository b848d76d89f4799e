"""Credit notes: what is taken back of an invoice that is final. The invoice itself never changes.

A note is for a whole invoice, an amount of it, or amounts of its lines. It is a fact with a number, one after the other
for each invoice; the standing notes of an invoice never sum to more than its total, and those of a line to no more than
the line. An amount has the tax that is in it, lines are without tax and get theirs: what is left of the tax, in
proportion to what is left, rounded half to even; so notes over all of an invoice have all of its tax.

Its net amount is booked in the balance when it is issued: a prepaid tenant can spend it again, a postpaid one owes
less.

    issued → exported (the payment provider has it) → void; issued → void

Pure. Does not know: the payment provider, what time it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from fractions import Fraction

import msgspec

from billing.checks import Faults
from billing.errors import Conflict, Invalid, NotFound
from billing.invoice import AT_PROVIDER, Invoice, InvoiceStatus
from billing.line import LineKind
from billing.money import MoneyError, format_minor, minor_femto, parse_amount
from billing.terms import TaxMode

NOTES_PER_INVOICE = 100


class NoteStatus(StrEnum):
    """issued → exported; both → void."""

    ISSUED = "issued"
    EXPORTED = "exported"
    VOID = "void"


class Way(StrEnum):
    """Where it goes what the customer has paid already; what is not paid yet is simply not asked for any more."""

    BALANCE = "balance"  # to the customer's credit with the payment provider, for its next invoices
    REFUND = "refund"  # back by the way it was paid
    OUT_OF_BAND = "out_of_band"  # beside the payment provider


class NoteLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken back of one line, without tax."""

    line_id: str
    amount_minor: int


class CreditNote(msgspec.Struct, frozen=True, kw_only=True):
    """`amount_minor` has `tax_minor` in it. The content never changes; only status, times and the provider's id do."""

    id: str
    number: str
    invoice_id: str
    tenant: str
    currency: str
    amount_minor: int
    tax_minor: int
    lines: tuple[NoteLine, ...] = ()  # empty: of the invoice as a whole
    reason: str
    way: Way
    created_us: int
    status: NoteStatus = NoteStatus.ISSUED
    export_started_us: int | None = None
    exported_us: int | None = None
    voided_us: int | None = None
    stripe_credit_note_id: str | None = None

    @property
    def net_femto(self) -> int:
        """What it books in the balance."""
        return minor_femto(self.amount_minor - self.tax_minor, self.currency)


class CreditNoteIssued(msgspec.Struct, frozen=True, kw_only=True, tag="credit_note.issued"):
    note: CreditNote


class CreditNoteExportStarted(msgspec.Struct, frozen=True, kw_only=True, tag="credit_note.export_started"):
    """From here on the provider may hold it: a void begins there."""

    note_id: str
    at_us: int


class CreditNoteExported(msgspec.Struct, frozen=True, kw_only=True, tag="credit_note.exported"):
    note_id: str
    at_us: int
    stripe_credit_note_id: str


class CreditNoteVoided(msgspec.Struct, frozen=True, kw_only=True, tag="credit_note.voided"):
    note_id: str
    at_us: int


NoteFact = CreditNoteIssued | CreditNoteExportStarted | CreditNoteExported | CreditNoteVoided


class CreditNotes:
    """Every note, in the order in which they were issued."""

    def __init__(self) -> None:
        self.by_id: dict[str, CreditNote] = {}
        self._ids_of: dict[str, list[str]] = {}  # by invoice

    def apply(self, fact: NoteFact) -> None:
        match fact:
            case CreditNoteIssued(note=note):
                self.by_id[note.id] = note
                self._ids_of.setdefault(note.invoice_id, []).append(note.id)
            case CreditNoteExportStarted(note_id=id, at_us=at_us):
                self._change(id, export_started_us=at_us)
            case CreditNoteExported(note_id=id, at_us=at_us, stripe_credit_note_id=theirs):
                self._change(id, status=NoteStatus.EXPORTED, exported_us=at_us, stripe_credit_note_id=theirs)
            case CreditNoteVoided(note_id=id, at_us=at_us):
                self._change(id, status=NoteStatus.VOID, voided_us=at_us)

    def get(self, note_id: str) -> CreditNote:
        try:
            return self.by_id[note_id]
        except KeyError:
            raise NotFound("credit note", note_id) from None

    def of(self, invoice_id: str) -> list[CreditNote]:
        """All of one invoice's, void ones too."""
        return [self.by_id[id] for id in self._ids_of.get(invoice_id, ())]

    def standing(self, invoice_id: str) -> list[CreditNote]:
        """Those that are not void."""
        return [note for note in self.of(invoice_id) if note.status is not NoteStatus.VOID]

    def _change(self, id: str, **changes: object) -> None:
        self.by_id[id] = msgspec.structs.replace(self.by_id[id], **changes)


class Share(msgspec.Struct, frozen=True):
    """How much a note is for. `amount_minor` with tax."""

    amount_minor: int
    tax_minor: int
    lines: tuple[NoteLine, ...] = ()


def check_creditable(invoice: Invoice) -> None:
    """Raise `Conflict` for an invoice that takes no notes."""
    if invoice.status not in AT_PROVIDER | {InvoiceStatus.FINALIZED}:
        raise Conflict(f"only an invoice that is final takes a credit note; this one is {invoice.status}")
    if invoice.terms.tax.mode is TaxMode.STRIPE:
        raise Conflict("the tax of this invoice is Stripe's to take back: make its credit note in Stripe")


def take(
    invoice: Invoice, standing: Sequence[CreditNote], amount: str | None, lines: Mapping[str, str] | None
) -> Share:
    """What a new note takes; all that is left where neither an amount nor lines are given.

    Raises `Invalid` with every fault, `Conflict` where nothing is left.
    """
    left = invoice.total_minor - sum(note.amount_minor for note in standing)
    left_tax = invoice.tax_minor - sum(note.tax_minor for note in standing)
    if left <= 0:
        raise Conflict("nothing is left of this invoice: its credit notes have all of it")
    if lines is not None:
        return _of_lines(invoice, standing, lines, left - left_tax, left_tax)
    if amount is None:
        return Share(left, left_tax)
    faults = Faults()
    minor = _minor(faults, "amount", amount, invoice.currency, left, "is left of the invoice")
    faults.raise_if_any()
    return Share(minor, round(Fraction(left_tax * minor, left)))


def _of_lines(
    invoice: Invoice, standing: Sequence[CreditNote], lines: Mapping[str, str], left_net: int, left_tax: int
) -> Share:
    faults = Faults()
    by_id = {line.id: line for line in invoice.lines if line.kind is not LineKind.TAX}
    found = []
    for id, text in lines.items():
        if id not in by_id:
            faults.add(f"lines.{id}", "is not a line of this invoice without its tax")
            continue
        taken = sum(one.amount_minor for note in standing for one in note.lines if one.line_id == id)
        most = by_id[id].amount_minor - taken
        minor = _minor(faults, f"lines.{id}", text, invoice.currency, most, "is left of this line")
        found.append(NoteLine(line_id=id, amount_minor=minor))
    net = sum(line.amount_minor for line in found)
    if not lines:
        faults.add("lines", "must not be empty")
    elif not faults.found and net > left_net:
        faults.add("lines", f"come to more than the {format_minor(left_net, invoice.currency)} that are left")
    faults.raise_if_any()
    tax = round(Fraction(left_tax * net, left_net))
    return Share(net + tax, tax, tuple(found))


def _minor(faults: Faults, field: str, text: str, currency: str, most: int, of: str) -> int:
    """An amount in minor units, from 1 to `most`; 0 with a fault added."""
    try:
        femto = parse_amount(text)
    except MoneyError as error:
        faults.add(field, str(error))
        return 0
    minor, rest = divmod(femto, minor_femto(1, currency))
    if rest:
        faults.add(field, f"has more decimals than {currency.upper()}")
    elif not 1 <= minor <= most:
        faults.add(field, f"must be more than 0 and at most the {format_minor(max(most, 0), currency)} that {of}")
    else:
        return minor
    return 0


def check_reason(reason: str) -> None:
    """Raise `Invalid`."""
    faults = Faults()
    faults.text("reason", reason)
    if faults.found:
        raise Invalid(faults.found)
