"""A tenant's own view of its money: over HTTP, with its key, of itself alone, suspended or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from billing.accounts import BillingMode, TopUp
from billing.budgets import BudgetPeriod, BudgetScope
from billing.invoice import ExportResult, Invoice
from billing.provider import ProviderInvoice
from billing.signer import Signer
from billing.statement import as_csv
from billing.statement_html import as_html
from gateway.app import now_us
from tests.fixtures.server import RunningGateway
from tests.unit.billing.conftest import Shelf

HOUR_US = 3_600_000_000


class Provider:
    """Has what it is given."""

    def export(self, invoice: Invoice, *_: Any) -> ExportResult:
        return ExportResult(stripe_invoice_id="in_1", total_minor=invoice.total_minor, status="open")

    def void(self, *_: Any) -> None: ...


class Tenant:
    """One that has used something, and its key's client."""

    def __init__(self, gateway: RunningGateway, id: str) -> None:
        self.gateway, self.id, self.billing = gateway, id, gateway.billing
        self.http = gateway.http(gateway.tenant(id))
        gateway.billing._signer = Signer(gateway.folder / "signing.key", "house")

    def use(self) -> None:
        before = len(self.gateway.events())
        body = {"model": "fake", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        assert self.http.post("/v1/completions", json=body).status_code == 200
        self.gateway.wait_events(before + 1)

    def draft(self) -> Invoice:
        """Of all that was used so far."""
        self.use()
        mine = [event for event in self.gateway.events() if event.tenant == self.id]
        self.billing.record(mine)
        start = mine[-1].ts_us
        end = now_us()
        return self.billing.draft_invoice(self.id, start, end, usage=Shelf(mine), watermark_us=end)

    def final(self) -> Invoice:
        return self.billing.finalize_invoice(self.draft().id)

    def get(self, path: str, expect: int = 200, **query: Any) -> Any:
        answer = self.http.get(f"/v1/billing{path}", params=query)
        assert answer.status_code == expect, answer.text
        return answer.json()


@pytest.fixture
def customer(gateway: RunningGateway) -> Iterator[Callable[[str], Tenant]]:
    made: list[Tenant] = []

    def make(id: str) -> Tenant:
        made.append(Tenant(gateway, id))
        return made[-1]

    yield make
    for one in made:
        one.http.close()


def test_a_prepaid_balance_adds_up(customer: Callable[[str], Tenant]) -> None:
    acme = customer("acme")
    acme.billing.grant_credit("acme", "5.5", "usd", "secret reason", priority=1, expires_us=now_us() + HOUR_US)
    acme.use()
    acme.billing.record(acme.gateway.events())
    seen = acme.get("/balance")
    assert (seen["granted"], seen["held"], seen["due"], seen["currency"]) == ("105.50", "0.00", "0.00", "usd")
    assert (seen["billing_mode"], seen["status"], seen["cap"], seen["budgets"]) == ("prepaid", "active", None, [])
    assert Decimal(seen["used"]) > 0
    money = {name: Decimal(seen[name]) for name in ("granted", "expired", "used", "held", "available")}
    assert money["available"] == money["granted"] - money["expired"] - money["used"] - money["held"]
    first, second = seen["grants"]
    assert [Decimal(one["left"]) for one in (first, second)] == [100, Decimal("5.5") - money["used"]]
    assert (first["expires_at"], second["expires_at"] is None) == (None, False)
    assert "secret reason" not in str(seen)


def test_a_postpaid_balance_tells_the_cap_and_only_the_budgets_that_apply(customer: Callable[[str], Tenant]) -> None:
    acme = customer("acme")
    acme.billing.update_tenant("acme", billing_mode=BillingMode.POSTPAID, monthly_cap="50.00")
    mine = acme.billing.keys("acme")[0].id
    other = acme.billing.create_key("acme", "other")[0].id
    for subject, scope in (("", "tenant"), (mine, "key"), (other, "key"), ("pirate", "adapter")):
        acme.billing.set_budget(
            "acme",
            name=f"{scope} {subject}".strip(),
            scope=BudgetScope(scope),
            subject=subject,
            period=BudgetPeriod.DAY,
            amount="1",
            currency="usd",
        )
    seen = acme.get("/balance")
    assert (seen["billing_mode"], seen["cap"]["amount"], seen["cap"]["period"]) == ("postpaid", "50.00", "month")
    assert [one["name"] for one in seen["budgets"]] == ["tenant", f"key {mine}", "adapter pirate"]


def test_invoices_are_its_own_and_final(customer: Callable[[str], Tenant]) -> None:
    acme, globex = customer("acme"), customer("globex")
    acme.billing.set_price(
        model="*",
        effective_at_us=2,
        currency="usd",
        per_million={"prompt": "50000", "cached": "50000", "completion": "50000"},
    )
    first, second, draft = acme.final(), acme.final(), acme.draft()
    theirs = globex.final()
    acme.billing.void_invoice(second.id, Provider())
    page = acme.get("/invoices", limit=1)
    assert [(one["id"], one["status"]) for one in page["data"]] == [(first.id, "finalized")]
    rest = acme.get("/invoices", after=page["next"])
    assert [(one["id"], one["status"], one["due"]) for one in rest["data"]] == [(second.id, "void", "0.00")]
    assert rest["has_more"] is False
    shown = acme.get(f"/invoices/{first.id}")
    assert {name: shown[name] for name in page["data"][0]} == page["data"][0]
    assert shown["due"] == shown["total"] != "0.00"
    assert sum(Decimal(line["amount"]) for line in shown["lines"]) == Decimal(shown["total"])
    assert acme.get("/balance")["due"] == shown["total"]
    note = acme.billing.issue_credit_note(first.id, amount="0.10", reason="Sorry.")
    after = acme.get(f"/invoices/{first.id}")
    assert (after["credited"], Decimal(after["due"])) == ("0.10", Decimal(shown["due"]) - Decimal("0.10"))
    assert [(one["number"], one["amount"]) for one in after["credit_notes"]] == [(note.number, "0.10")]
    assert acme.get("/balance")["due"] == after["due"]
    nothing = acme.get("/invoices/invoice-none", expect=404)["error"]
    for hidden in (draft.id, theirs.id):
        error = acme.get(f"/invoices/{hidden}", expect=404)["error"]
        assert error == {**nothing, "message": nothing["message"].replace("invoice-none", hidden)}
        acme.get("/invoices", expect=400, after=hidden)


def test_a_statement_is_a_page_or_a_table_of_ones_own(customer: Callable[[str], Tenant]) -> None:
    acme, globex = customer("acme"), customer("globex")
    draft, theirs = acme.draft(), globex.final()
    mine = acme.billing.finalize_invoice(draft.id)
    path = f"/v1/billing/invoices/{mine.id}/statement"
    page, table = acme.http.get(path), acme.http.get(path, params={"format": "csv"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert (page.headers["x-content-type-options"], page.headers["cache-control"]) == ("nosniff", "private, no-store")
    assert page.content == as_html(acme.billing.statement(mine.id))
    assert table.headers["content-type"].startswith("text/csv; charset=utf-8")
    assert table.headers["content-disposition"] == f'attachment; filename="statement-{mine.id}.csv"'
    assert table.content == as_csv(acme.billing.statement(mine.id))
    assert acme.get(f"/invoices/{mine.id}/statement", expect=400, format="pdf")["error"]["param"] == "format"
    for hidden in (theirs.id, acme.draft().id, "invoice-none"):
        acme.get(f"/invoices/{hidden}/statement", expect=404)
    acme.billing.suspend_tenant("acme", "x")
    assert acme.http.get(path).content == page.content


def test_what_is_asked_for_wrongly_is_refused_by_name(customer: Callable[[str], Tenant]) -> None:
    acme = customer("acme")
    for query in ({"limit": 0}, {"limit": "x"}, {"tenant": "globex"}, {"after": "no"}):
        error = acme.get("/invoices", expect=400, **query)["error"]
        assert error["param"] == next(iter(query))
    for path in ("/balance", "/invoices", "/invoices/x"):
        for headers in ({}, {"authorization": "Bearer mh-nobody"}):
            answer = httpx.get(f"{acme.gateway.url}/v1/billing{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert acme.http.post("/v1/billing/balance").status_code == 405


def test_a_suspended_tenant_sees_why_and_what_is_due(customer: Callable[[str], Tenant]) -> None:
    acme = customer("acme")
    acme.billing.update_tenant("acme", dunning_steps="suspend@0", top_up=TopUp(threshold="1", amount="5"))
    invoice = acme.billing.export_invoice(acme.final().id, Provider())

    def provider(status: str) -> Callable[[Invoice], ProviderInvoice]:
        return lambda one: ProviderInvoice(id="in_1", status=status, total_minor=one.total_minor, attempts=1)

    acme.billing.sync_invoice(invoice.id, provider("open"))
    acme.billing.notice()
    assert acme.get(f"/invoices/{invoice.id}")["dunning"]["next_step"] == "suspend"
    acme.billing.notice()
    with openai.OpenAI(base_url=f"{acme.gateway.url}/v1", api_key=acme.http.headers["authorization"][7:]) as client:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            client.completions.create(model="fake", prompt="hello")
        assert refused.value.code == "tenant_suspended"
        seen = acme.get("/balance")
        assert (seen["status"], [one["invoice"] for one in seen["suspensions"]]) == ("suspended", [invoice.id])
        shown = acme.get(f"/invoices/{invoice.id}")
        assert (shown["payment_failures"], shown["dunning"]["next_step"]) == (1, None)
        acme.billing.sync_invoice(invoice.id, provider("paid"))
        acme.billing.notice()
        assert client.completions.create(model="fake", prompt="hello", max_tokens=1).usage is not None
    assert acme.get(f"/invoices/{invoice.id}")["dunning"] is None
