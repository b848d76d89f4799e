"""Credit notes: never more than the invoice, its tax to the cent, once in the balance and once with the provider."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.accounts import BillingMode
from billing.errors import Conflict, ExportError, IdempotencyConflict, Invalid, NotFound
from billing.invoice import Invoice, InvoiceStatus
from billing.line import InvoiceLine, LineKind
from billing.money import FEMTO, format_minor
from billing.notes import CreditNote, NoteStatus, Way, take
from billing.provider import ProviderEvent, ProviderInvoice
from billing.service import Idempotency
from billing.terms import InvoiceTerms, Tax, TaxMode, TaxRate
from tests.unit.billing.test_service_invoices import Desk, draft, period


class NoteDesk(Desk):
    """An exporter of notes too."""

    def __init__(self) -> None:
        super().__init__()
        self.credited: list[str] = []
        self.taken_back: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def credit(self, note: CreditNote, invoice: Invoice) -> str:
        if self.fail:
            raise self.fail
        self.credited.append(note.id)
        self.meanwhile()
        return f"cn_{note.id}"

    def void_credit(self, note: CreditNote, invoice: Invoice) -> None:
        if self.fail:
            raise self.fail
        self.taken_back.append(note.id)


def final(house: Any, tokens: int = 100, percent: str = "19") -> Invoice:
    """An invoice over so many dollars and their tax."""
    house.set_price(prompt="1000000", cached="0", completion="2000000")
    rates = (TaxRate(name="VAT", percent=percent),)
    house.billing.set_tax("acme", Tax(mode=TaxMode.FIXED, rates=rates))
    span = period(house)
    house.use(prompt=tokens, completion=1)
    return house.billing.finalize_invoice(draft(house, span).id)  # type: ignore[no-any-return]  # a fixture is Any


def exported(house: Any, desk: NoteDesk) -> Invoice:
    return house.billing.export_invoice(final(house).id, desk)  # type: ignore[no-any-return]  # a fixture is Any


def charged(house: Any) -> int:
    return int(house.billing.balance("acme").charged_femto)


def told(note: CreditNote) -> tuple[str, int, int]:
    return note.number.partition("-CN")[2], note.amount_minor, note.tax_minor


def test_a_part_some_lines_and_the_rest_are_the_whole_invoice(either_house: Any) -> None:
    house = either_house
    invoice = final(house)
    assert (invoice.total_minor, invoice.tax_minor, charged(house)) == (12138, 1938, 102 * FEMTO)
    issue = house.billing.issue_credit_note
    part = issue(invoice.id, reason="outage", amount="11.9")
    assert told(part) == ("1", 1190, 190)
    assert charged(house) == 92 * FEMTO
    completion, prompt = invoice.lines[:2]
    assert (completion.amount_minor, prompt.amount_minor) == (200, 10000)
    lines = issue(invoice.id, reason="wrong", lines={completion.id: "2.00", prompt.id: "50"})
    assert told(lines) == ("2", 6188, 988)
    assert charged(house) == 40 * FEMTO
    with pytest.raises(Invalid, match=r"0\.00 that is left of this line"):
        issue(invoice.id, reason="twice", lines={completion.id: "0.01"})
    with pytest.raises(Invalid, match="that are left"):
        issue(invoice.id, reason="more", lines={prompt.id: "40.01"})
    with pytest.raises(Invalid, match=r"47\.60"):
        issue(invoice.id, reason="more", amount="47.61")
    rest = issue(invoice.id, reason="all of it")
    assert told(rest) == ("3", 4760, 760)
    assert charged(house) == 0
    with pytest.raises(Conflict, match="nothing is left"):
        issue(invoice.id, reason="again")
    assert house.billing.invoice(invoice.id) == invoice
    again = house.restart()
    assert again.credit_notes(invoice_id=invoice.id) == [part, lines, rest] == again.credit_notes(tenant_id="acme")
    assert again.balance("acme").charged_femto == 0
    assert again.reconcile(invoice.period_start_us, invoice.period_end_us, usage=house.shelf).ok


@pytest.mark.parametrize("mode", list(BillingMode))
def test_a_prepaid_tenant_can_spend_it_again_and_a_postpaid_one_owes_less(house: Any, mode: BillingMode) -> None:
    house.billing.update_tenant("acme", billing_mode=mode)
    if mode is BillingMode.PREPAID:
        house.billing.grant_credit("acme", "102", "usd", "r")
    invoice = final(house)
    before = house.billing.balance("acme")
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="11.90")
    now = house.billing.balance("acme")
    given = (now.available_femto - before.available_femto, before.owed_femto - now.owed_femto)
    assert given == ((10 * FEMTO, 0) if mode is BillingMode.PREPAID else (0, 10 * FEMTO))
    house.billing.void_credit_note(note.id)
    assert house.billing.balance("acme") == before == house.restart().balance("acme")


def test_what_is_no_final_invoice_or_taxed_by_stripe_takes_no_note(house: Any) -> None:
    issue = house.billing.issue_credit_note
    house.set_price(prompt="1000000")
    span = period(house)
    house.use(prompt=1)
    invoice = draft(house, span)
    with pytest.raises(Conflict, match="draft"):
        issue(invoice.id, reason="r")
    house.billing.void_invoice(invoice.id)
    with pytest.raises(Conflict, match="void"):
        issue(invoice.id, reason="r")
    house.billing.set_tax("acme", Tax(mode=TaxMode.STRIPE))
    taxed = house.billing.finalize_invoice(draft(house, span).id)
    with pytest.raises(Conflict, match="in Stripe"):
        issue(taxed.id, reason="r")
    for call in (lambda: issue("nothing", reason="r"), lambda: house.billing.credit_note("nothing")):
        with pytest.raises(NotFound):
            call()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"amount": "0"}, "amount"),
        ({"amount": "-1"}, "amount"),
        ({"amount": "1.001"}, "amount"),
        ({"amount": "x"}, "amount"),
        ({"lines": {}}, "lines"),
        ({"lines": {"other": "1"}}, "lines.other"),
        ({"reason": ""}, "reason"),
    ],
)
def test_a_fault_is_named_and_nothing_is_booked(house: Any, given: dict[str, Any], field: str) -> None:
    invoice = final(house)
    with pytest.raises(Invalid) as caught:
        house.billing.issue_credit_note(invoice.id, **{"reason": "r", **given})
    assert [name for name, _ in caught.value.faults] == [field]
    assert charged(house) == 102 * FEMTO


def test_an_invoice_with_notes_is_not_voided_here(house: Any) -> None:
    invoice = final(house)
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="1")
    with pytest.raises(Conflict, match="credit notes"):
        house.billing.void_invoice(invoice.id)
    house.billing.void_credit_note(note.id)
    assert house.billing.void_invoice(invoice.id).status is InvoiceStatus.VOID
    assert charged(house) == 102 * FEMTO


def test_one_that_the_provider_voided_all_the_same_gives_nothing_back_twice(house: Any) -> None:
    desk = NoteDesk()
    invoice = exported(house, desk)
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="11.90")
    assert charged(house) == 92 * FEMTO
    theirs = ProviderInvoice(id=f"in_{invoice.id}", status="void", total_minor=invoice.total_minor)
    event = ProviderEvent(id="evt_1", type="invoice.voided", created_s=1, invoice_id=invoice.id, snapshot=theirs)
    assert house.billing.follow(event, None) == "moved"
    assert charged(house) == 102 * FEMTO  # as it was charged on the way: it can be invoiced again
    house.billing.void_credit_note(note.id)
    assert charged(house) == 102 * FEMTO == house.restart().balance("acme").charged_femto


def test_a_note_goes_to_the_provider_once_and_behind_its_invoice(house: Any) -> None:
    desk = NoteDesk()
    invoice = final(house)
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="1", way=Way.REFUND)
    with pytest.raises(Conflict, match="finalized"):
        house.billing.export_credit_note(note.id, desk)
    house.billing.export_invoice(invoice.id, desk)
    assert house.billing.pending_credit_notes() == [note]
    desk.fail = ExportError("away")
    with pytest.raises(ExportError):
        house.billing.export_credit_note(note.id, desk)
    desk.fail = None
    for _ in range(2):
        done = house.restart().export_credit_note(note.id, desk)
        assert (done.status, done.stripe_credit_note_id) == (NoteStatus.EXPORTED, f"cn_{note.id}")
    assert desk.credited == [note.id]
    assert house.billing.pending_credit_notes() == []


def test_once_its_export_began_a_note_is_voided_with_the_provider_first(house: Any) -> None:
    desk = NoteDesk()
    invoice = exported(house, desk)
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="1")
    desk.fail = ExportError("away")
    with pytest.raises(ExportError):
        house.billing.export_credit_note(note.id, desk)
    with pytest.raises(Conflict):
        house.billing.void_credit_note(note.id)
    with pytest.raises(ExportError):
        house.billing.void_credit_note(note.id, desk)
    desk.fail = None
    for _ in range(2):
        assert house.billing.void_credit_note(note.id, desk).status is NoteStatus.VOID
    assert desk.taken_back == [note.id]
    with pytest.raises(Conflict, match="void"):
        house.billing.export_credit_note(note.id, desk)
    assert house.billing.issue_credit_note(invoice.id, reason="r").number == f"{invoice.id}-CN2"


def test_a_note_that_another_voids_while_it_is_exported_does_not_stay_with_the_provider(house: Any) -> None:
    desk = NoteDesk()
    invoice = exported(house, desk)
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="1")
    other = house.open()
    desk.meanwhile = lambda: other.void_credit_note(note.id, NoteDesk())
    with pytest.raises(Conflict, match="nothing of it stands"):
        house.billing.export_credit_note(note.id, desk)
    assert desk.taken_back == [note.id]


def test_a_repeated_command_issues_one_note(house: Any) -> None:
    invoice = final(house)
    key = Idempotency(key="k", payload_hash="h")
    note = house.billing.issue_credit_note(invoice.id, reason="r", amount="1", idempotency=key)
    assert house.restart().issue_credit_note(invoice.id, reason="r", amount="1", idempotency=key) == note
    assert house.billing.credit_notes() == [note]
    with pytest.raises(IdempotencyConflict):
        house.billing.void_credit_note(note.id, idempotency=key)


# -- how much --------------------------------------------------------------------------------------------------------


def invoice_of(amounts: list[int], percent: int) -> Invoice:
    """Lines of these cents, the first not negative, and a tax of their sum where that is above 0."""
    net = sum(amounts)
    tax = round(Fraction(net * percent, 100)) if net > 0 else 0
    kinds = [(LineKind.USAGE, amount) for amount in amounts] + ([(LineKind.TAX, tax)] if tax else [])
    lines = tuple(
        InvoiceLine(
            id=f"i-{number}",
            kind=kind,
            model="m",
            adapter="",
            token_class=None,
            price_id="",
            period_start_us=0,
            period_end_us=1,
            quantity=0,
            unit_price_nano=0,
            amount_minor=amount,
        )
        for number, (kind, amount) in enumerate(kinds)
    )
    return Invoice(
        id="i",
        tenant="t",
        currency="usd",
        status=InvoiceStatus.FINALIZED,
        period_start_us=0,
        period_end_us=1,
        cut_us=0,
        cut_seq=0,
        lines=lines,
        total_minor=net + tax,
        event_count=0,
        events_digest="",
        created_us=0,
        terms=InvoiceTerms(),
    )


@given(
    st.lists(st.integers(-50, 500), min_size=1, max_size=4),
    st.integers(0, 100),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 400)), max_size=8),
)
def test_notes_never_exceed_the_invoice_and_all_of_it_has_all_of_its_tax(
    amounts: list[int], percent: int, wanted: list[tuple[bool, int, int]]
) -> None:
    invoice = invoice_of(amounts, percent)
    notes: list[CreditNote] = []

    def issue(amount: str | None, lines: dict[str, str] | None) -> None:
        taken = take(invoice, notes, amount, lines)
        notes.append(
            CreditNote(
                id=str(len(notes)),
                number="",
                invoice_id="i",
                tenant="t",
                currency="usd",
                amount_minor=taken.amount_minor,
                tax_minor=taken.tax_minor,
                lines=taken.lines,
                reason="r",
                way=Way.BALANCE,
                created_us=0,
            )
        )

    for by_line, which, minor in wanted:
        text = format_minor(minor, "usd")
        try:
            issue(None if by_line else text, {f"i-{which}": text} if by_line else None)
        except (Invalid, Conflict):
            continue
        assert notes[-1].amount_minor > 0
        assert 0 <= notes[-1].tax_minor <= notes[-1].amount_minor
        for one in notes[-1].lines:
            of_line = sum(line.amount_minor for note in notes for line in note.lines if line.line_id == one.line_id)
            assert of_line <= next(line.amount_minor for line in invoice.lines if line.id == one.line_id)
        assert sum(note.amount_minor for note in notes) <= invoice.total_minor
        assert sum(note.tax_minor for note in notes) <= invoice.tax_minor
        net = sum(note.amount_minor - note.tax_minor for note in notes)
        assert net <= invoice.total_minor - invoice.tax_minor
    if invoice.total_minor > sum(note.amount_minor for note in notes):
        issue(None, None)
    if notes:
        assert sum(note.amount_minor for note in notes) == invoice.total_minor
        assert sum(note.tax_minor for note in notes) == invoice.tax_minor
    assert msgspec.json.decode(msgspec.json.encode(notes), type=list[CreditNote]) == notes
