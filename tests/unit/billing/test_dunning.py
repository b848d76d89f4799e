"""Dunning and suspension: each step once, whoever looks and whatever the clock does; the last hold opens the door."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from billing.accounts import TenantStatus
from billing.books import Books
from billing.errors import Conflict, Invalid, NotFound, TenantSuspended
from billing.invoice import ExportResult, Invoice, InvoiceStatus
from billing.provider import ProviderEvent, ProviderInvoice
from billing.service import Billing, Idempotency
from billing.steps import Policy, Step, StepKind, parse_steps
from billing.store import GENESIS, StoredEvent, chained
from tests.unit.billing.test_service_invoices import draft, period

DAY_US = 86_400_000_000
STEPS = "notice@3,notice@7,suspend@14"
SHOWN = ("dunning.started", "dunning.step", "dunning.ended", "suspension.placed", "suspension.lifted")


class Provider:
    """Holds what it is given; `status` and `attempts` are what it says of everything."""

    status, attempts = "open", 0

    def export(self, invoice: Invoice, *_: Any) -> ExportResult:
        return ExportResult(stripe_invoice_id=f"in_{invoice.id[-6:]}", total_minor=invoice.total_minor, status="open")

    def void(self, *_: Any) -> None:
        self.status = "void"

    def look(self, invoice: Invoice) -> ProviderInvoice:
        return ProviderInvoice(
            id=str(invoice.stripe_invoice_id),
            status=self.status,
            total_minor=invoice.total_minor,
            attempts=self.attempts,
        )


class Desk:
    """A house whose provider can be made to fail."""

    def __init__(self, house: Any) -> None:
        self.house, self.provider = house, Provider()
        house.set_price(prompt="1000000")
        self.with_policy(Policy(steps=parse_steps(STEPS)))

    def with_policy(self, policy: Policy) -> None:
        self.policy = policy
        self.billing._dunning = policy

    @property
    def billing(self) -> Billing:
        found = self.house.billing
        assert isinstance(found, Billing)
        return found

    def invoice(self, **more: Any) -> str:
        span = period(self.house)
        self.house.use(**more)
        id = self.billing.finalize_invoice(draft(self.house, span).id).id
        return self.billing.export_invoice(id, self.provider).id

    def sync(self, id: str, status: str, attempts: int = 1) -> None:
        self.provider.status, self.provider.attempts = status, attempts
        self.billing.sync_invoice(id, self.provider.look)

    def failed(self) -> str:
        """An invoice whose payment has failed, seen by the notices."""
        id = self.invoice()
        self.sync(id, "open")
        self.billing.notice()
        return id

    def days(self, days: float) -> None:
        self.house.clock.now_us += int(days * DAY_US)

    def told(self) -> list[str]:
        """What the log has of all this, in order."""
        found = []
        for row in self.billing._store.read(0, 10_000):
            if row.type in SHOWN:
                fact = msgspec.json.decode(row.payload)
                found.append(f"{row.type} {fact.get('kind') or fact.get('outcome') or ''}".strip())
        return found


@pytest.fixture
def desk(house: Any) -> Desk:
    return Desk(house)


def suspended(billing: Billing, tenant: str = "acme") -> list[str]:
    return [one.invoice_id for one in billing.standing(tenant).suspensions]


def test_steps_follow_by_the_day_and_each_once(desk: Desk) -> None:
    id = desk.failed()
    assert desk.told() == ["dunning.started"]
    seen = []
    for day in range(16):
        for _ in range(3):
            desk.billing.notice()
        seen.append((day, len(desk.told())))
        desk.days(1)
    assert [day for (day, count), (_, before) in zip(seen[1:], seen, strict=False) if count > before] == [3, 7, 14]
    assert desk.told()[1:] == [
        "dunning.step notice",
        "dunning.step notice",
        "dunning.step suspend",
        "suspension.placed",
    ]
    assert suspended(desk.billing) == [id]
    (reason,) = [one.reason for one in desk.billing.standing("acme").suspensions]
    assert id in reason
    assert desk.billing.tenant("acme").status is TenantStatus.ACTIVE, "the operator has not said a word"


def test_a_second_process_that_looks_at_once_writes_nothing(either_house: Any) -> None:
    desk = Desk(either_house)
    desk.failed()
    other = desk.house.open()
    other._dunning = desk.policy
    desk.days(3)
    with desk.billing._state, other._state:
        assert desk.billing._dunnings_due(desk.house.clock())
        assert other._dunnings_due(desk.house.clock())  # each finds it due by what it knows
    assert [desk.billing.notice(), other.notice(), desk.billing.notice(), other.notice()] == [1, 0, 0, 0]
    assert other.dunning(next(iter(desk.billing.dunnings())).invoice_id) == desk.billing.dunnings()[0]


def test_four_processes_that_look_together_take_each_step_once(either_house: Any) -> None:
    desk = Desk(either_house)
    desk.invoice()
    id = desk.invoice()
    for one in desk.billing.invoices():
        desk.sync(one.id, "open")
    others = [desk.house.open() for _ in range(4)]
    for other in others:
        other._dunning = desk.policy
    with ThreadPoolExecutor(len(others)) as threads:
        for _ in range(4):
            list(threads.map(Billing.notice, others * 2))
            desk.days(14)
    assert sorted(desk.told()) == sorted(
        ["dunning.started", "dunning.step notice", "dunning.step notice", "dunning.step suspend", "suspension.placed"]
        * 2
    )
    assert len(desk.billing._store.read(0, 10_000)) == desk.billing._store.verify_chain()
    desk.billing.refresh()
    assert id in suspended(desk.billing)


def test_payment_opens_the_door_and_the_other_process_learns_it(desk: Desk) -> None:
    id = desk.failed()
    for days in (3, 4, 7):
        desk.days(days)
        desk.billing.notice()
    other = desk.house.open()
    assert suspended(other) == [id]
    key, secret = desk.billing.create_key("acme", "k")
    assert secret
    assert desk.billing.authenticate(secret) is None
    found = desk.billing.key_holder(secret)
    assert found is not None
    assert found[0] == key
    desk.sync(id, "paid")
    desk.billing.notice()
    assert desk.told()[-2:] == ["dunning.ended paid", "suspension.lifted"]
    assert desk.billing.authenticate(secret) is not None
    assert suspended(other) == [id]
    other.refresh()
    assert suspended(other) == []
    assert desk.billing.dunnings() == []
    assert [one.outcome for one in desk.billing.dunnings(ended=True)] == ["paid"]
    desk.days(30)
    assert desk.billing.notice() == 0


def test_a_suspended_tenant_is_let_in_nowhere_and_nothing_is_held(house: Any) -> None:
    house.billing.grant_credit("acme", "10", "usd", "test")
    rate = house.billing.quote("acme", "base", "base", house.clock())
    house.billing.open_hold("acme", "running", rate, 10, 10)
    house.billing.suspend_tenant("acme", "Fraud.")
    with pytest.raises(TenantSuspended):
        house.billing.open_hold("acme", "late", rate, 10, 10)
    assert house.billing.extend_hold("running", 20).covered_tokens == 20, "what runs goes on to its end"
    house.billing.release("running")
    assert house.billing.holds_open() == 0


def test_an_operators_word_and_another_invoice_keep_the_door_shut(desk: Desk) -> None:
    first, second = desk.failed(), desk.failed()
    for days in (3, 4, 7):
        desk.days(days)
        desk.billing.notice()
    desk.billing.suspend_tenant("acme", "Call us.")
    assert suspended(desk.billing) == [first, second, ""]
    desk.sync(first, "paid")
    desk.billing.notice()
    assert suspended(desk.billing) == [second, ""]
    desk.billing.reactivate_tenant("acme", "They called.")
    assert suspended(desk.billing) == [second]
    with pytest.raises(Conflict, match=second):
        desk.billing.reactivate_tenant("acme", "again")
    desk.sync(second, "paid")
    desk.billing.notice()
    rows = [row for row in desk.billing._store.read(0, 10_000) if row.type == "suspension.lifted"]
    assert [msgspec.json.decode(row.payload)["active"] for row in rows] == [False, False, True]
    assert suspended(desk.house.restart()) == []


def test_two_that_end_at_once_open_the_door_once(desk: Desk) -> None:
    for id in (desk.failed(), desk.failed()):
        for _ in range(3):
            desk.days(14)
            desk.billing.notice()
        desk.sync(id, "paid")
    desk.billing.notice()
    rows = [row for row in desk.billing._store.read(0, 10_000) if row.type == "suspension.lifted"]
    assert [msgspec.json.decode(row.payload)["active"] for row in rows] == [False, True]


@pytest.mark.parametrize("status", ["void", "uncollectible"])
@pytest.mark.parametrize("ends", [False, True])
def test_what_else_ends_it(desk: Desk, status: str, ends: bool) -> None:
    desk.with_policy(Policy(steps=parse_steps(STEPS), ends_uncollectible=ends))
    id = desk.failed()
    desk.sync(id, status)
    desk.days(14)
    desk.billing.notice()
    over = status == "void" or ends
    assert desk.told()[-1] == (f"dunning.ended {status}" if over else "dunning.step notice")
    assert bool(desk.billing.dunnings()) is not over


def test_a_message_that_comes_again_begins_nothing_anew(desk: Desk) -> None:
    id = desk.invoice()
    theirs = ProviderInvoice(id="in_1", status="open", total_minor=1, attempts=1)
    event = ProviderEvent(id="evt_1", type="invoice.payment_failed", created_s=1, invoice_id=id, snapshot=theirs)
    assert [desk.billing.follow(event, None) for _ in range(2)] == ["moved", "duplicate"]
    desk.billing.notice()
    later = msgspec.structs.replace(event, id="evt_2", snapshot=msgspec.structs.replace(theirs, attempts=2))
    assert desk.billing.follow(later, None) == "moved"
    for _ in range(2):
        desk.billing.notice()
    assert desk.told() == ["dunning.started"]
    paid = msgspec.structs.replace(event, id="evt_3", snapshot=msgspec.structs.replace(theirs, status="paid"))
    assert desk.billing.follow(paid, None) == "moved"
    assert desk.billing.follow(msgspec.structs.replace(later, id="evt_4"), None) == "unchanged"
    desk.billing.notice()
    assert desk.told() == ["dunning.started", "dunning.ended paid"]


def test_paid_before_anybody_looked_begins_nothing(desk: Desk) -> None:
    id = desk.invoice()
    desk.sync(id, "open")
    desk.sync(id, "paid")
    desk.billing.notice()
    assert desk.told() == []


def test_who_looks_late_or_has_a_clock_that_jumps_gives_the_notices_first(desk: Desk) -> None:
    id = desk.failed()
    desk.days(400)
    seen = []
    for _ in range(8):
        desk.billing.notice()
        seen.append(len(desk.billing.dunning(id).taken))
        desk.days(0.5)
    assert seen == [1, 1, 2, 2, 3, 3, 3, 3]
    assert desk.billing.dunning(id).next_us is None


def test_a_clock_that_goes_back_repeats_nothing(desk: Desk) -> None:
    desk.failed()
    desk.days(3)
    desk.billing.notice()
    desk.days(-30)
    for _ in range(3):
        assert desk.billing.notice() == 0
    desk.days(34)
    assert desk.billing.notice() == 1
    assert desk.told() == ["dunning.started", "dunning.step notice", "dunning.step notice"]


def test_what_failed_long_ago_is_dunned_from_when_dunning_was_wanted(desk: Desk) -> None:
    desk.with_policy(Policy())
    id = desk.failed()
    desk.days(100)
    desk.billing.notice()
    assert desk.told() == []
    desk.with_policy(Policy(steps=parse_steps("suspend@5")))
    desk.billing.notice()
    assert suspended(desk.billing) == []
    desk.with_policy(Policy())  # and goes on as it began
    desk.days(5)
    desk.billing.notice()
    assert suspended(desk.billing) == [id]


def test_a_tenants_own_steps_come_before_the_houses(desk: Desk) -> None:
    desk.billing.update_tenant("acme", dunning_steps="none")
    desk.failed()
    assert desk.told() == []
    desk.billing.update_tenant("acme", dunning_steps="suspend@1")
    desk.billing.notice()
    assert desk.billing.dunnings()[0].steps == (Step(1, StepKind.SUSPEND),)
    with pytest.raises(Invalid, match="dunning_steps"):
        desk.billing.update_tenant("acme", dunning_steps="suspend@2,notice@3")


def test_a_waiver_ends_it_for_good(desk: Desk) -> None:
    id = desk.failed()
    for _ in range(3):
        desk.days(14)
        desk.billing.notice()
    once = Idempotency(key="k", payload_hash="h")
    waived = desk.billing.waive_dunning(id, "They pay in parts.", idempotency=once)
    assert (waived.outcome, waived.reason) == ("waived", "They pay in parts.")
    assert desk.billing.waive_dunning(id, "They pay in parts.", idempotency=once) == waived
    assert desk.billing.waive_dunning(id, "Again.") == waived
    assert suspended(desk.house.restart()) == []
    desk.with_policy(desk.policy)
    desk.sync(id, "open", attempts=5)
    desk.billing.notice()
    assert desk.told()[-2:] == ["dunning.ended waived", "suspension.lifted"]
    with pytest.raises(NotFound):
        desk.billing.waive_dunning("invoice-none", "x")


def test_reactivation_can_waive(desk: Desk) -> None:
    desk.failed()
    for _ in range(3):
        desk.days(14)
        desk.billing.notice()
    assert desk.billing.reactivate_tenant("acme", "A new card.", waive_dunning=True).suspended is False
    assert desk.billing.reactivate_tenant("acme", "Again.").suspended is False
    assert desk.told()[-2:] == ["dunning.ended waived", "suspension.lifted"]


def test_suspension_by_hand_is_once_and_has_a_reason(house: Any) -> None:
    once = Idempotency(key="k", payload_hash="h")
    first = house.billing.suspend_tenant("acme", "Abuse.", idempotency=once)
    assert house.billing.suspend_tenant("acme", "Abuse.", idempotency=once) == first
    assert house.billing.suspend_tenant("acme", "Other.") == first
    assert house.restart().standing("acme") == first
    assert house.billing.tenant("acme").status is TenantStatus.SUSPENDED
    assert house.billing.suspended_count() == 1
    with pytest.raises(Invalid, match="reason"):
        house.billing.suspend_tenant("acme", "  ")
    with pytest.raises(NotFound):
        house.billing.suspend_tenant("nobody", "x")
    house.billing.update_tenant("acme", status="active")
    assert house.billing.standing("acme").suspended is False


def test_a_ledger_of_before_folds_as_it_did() -> None:
    """Rows as older code wrote them: a status is an operator's word, a failure begins nothing by itself."""
    tenant = {"id": "acme", "name": "Acme", "currency": "usd", "created_us": 1}
    invoice = {
        "id": "invoice-1",
        "tenant": "acme",
        "currency": "usd",
        "status": "draft",
        "period_start_us": 0,
        "period_end_us": 10,
        "cut_us": 11,
        "cut_seq": 1,
        "lines": [],
        "total_minor": 0,
        "event_count": 0,
        "events_digest": "",
        "created_us": 11,
    }
    exported = {"stripe_invoice_id": "in_1", "total_minor": 0, "status": "open"}
    facts = [
        {"type": "tenant.created", "tenant": tenant},
        {"type": "tenant.updated", "tenant": {**tenant, "status": "suspended"}},
        {"type": "invoice.drafted", "invoice": invoice},
        {"type": "invoice.finalized", "invoice_id": "invoice-1", "at_us": 12},
        {"type": "invoice.exported", "invoice_id": "invoice-1", "at_us": 13, "result": exported},
        {"type": "invoice.payment_failed", "invoice_id": "invoice-1", "at_us": 14},
        {"type": "tenant.updated", "tenant": {**tenant, "status": "suspended", "name": "Renamed"}},
    ]
    books, head = Books(), GENESIS
    for seq, fact in enumerate(facts, 1):
        payload = msgspec.json.encode(fact).decode()
        row = StoredEvent(seq, "s", seq, str(fact["type"]), payload, "admin", seq, None, None, None, "")
        row = msgspec.structs.replace(row, hash=chained(head, row))
        books.apply(row)
        head = row.hash
    assert books.accounts.tenants["acme"].dunning_steps is None
    (own,) = books.accounts.suspensions.standing("acme").suspensions
    assert (own.invoice_id, own.reason, own.since_us) == ("", "", 2)
    assert books.invoices.get("invoice-1").status is InvoiceStatus.EXPORTED
    assert books.dunnings.by_invoice == {}
    (due,) = books.dunnings.due(99, books.invoices.get, lambda _: Policy(steps=parse_steps("notice@1")))
    assert due.at_us == 99


@pytest.mark.parametrize(
    "text",
    [
        *("", "notice", "notice@", "notice@0x1", "notice@3,notice@3", "notice@7,notice@3", "suspend@3,notice@5", "x@1"),
        *("notice@366", ",".join(f"notice@{day}" for day in range(21)), "notice@-1", "notice@1.5", "notice@\u0663"),
    ],
)
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_steps(text)


def test_steps_as_they_are_written() -> None:
    assert parse_steps("none") == ()
    assert parse_steps("notice@0, suspend@14") == (Step(0, StepKind.NOTICE), Step(14, StepKind.SUSPEND))
