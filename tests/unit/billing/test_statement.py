"""Statements: the same bytes for ever, every amount in them, and no text that is anything but text."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from billing.accounts import Tenant
from billing.errors import Conflict
from billing.invoice import Invoice, InvoiceStatus
from billing.line import InvoiceLine, LineKind
from billing.statement import CSV_COLUMNS, as_csv, statement_of
from billing.statement_html import as_html
from billing.terms import InvoiceTerms, Tax, TaxMode
from billing.tiers import TokenClass
from tests.unit.billing.test_service_invoices import draft, period

NOVEMBER_US, DECEMBER_US = 1_793_487_600_000_000, 1_796_079_600_000_000  # midnights in Berlin
HOSTILE = '=HYPERLINK("http://x","<script>alert(1)</script>"),\'&\u202eü'


def line(number: int, **fields: Any) -> InvoiceLine:
    defaults: dict[str, Any] = {
        "id": f"invoice-1-{number}",
        "model": "llama",
        "adapter": "",
        "token_class": TokenClass.PROMPT,
        "price_id": "price-1",
        "period_start_us": NOVEMBER_US,
        "period_end_us": DECEMBER_US,
        "quantity": 1_234_567,
        "unit_price_nano": 500_000_000,
        "amount_minor": 62,
    }
    return InvoiceLine(**{**defaults, **fields})


def invoice(*lines: InvoiceLine, **fields: Any) -> Invoice:
    defaults: dict[str, Any] = {
        "id": "invoice-1",
        "tenant": "acme",
        "currency": "usd",
        "status": InvoiceStatus.FINALIZED,
        "period_start_us": NOVEMBER_US,
        "period_end_us": DECEMBER_US,
        "cut_us": DECEMBER_US,
        "cut_seq": 1,
        "lines": lines,
        "total_minor": sum(one.amount_minor for one in lines),
        "event_count": 1200,
        "events_digest": "d" * 64,
        "created_us": DECEMBER_US,
        "finalized_us": DECEMBER_US + 1_500_000,
    }
    return Invoice(**{**defaults, **fields})


def tenant(name: str = "Acme", **fields: Any) -> Tenant:
    defaults: dict[str, Any] = {"id": "acme", "currency": "usd", "created_us": 1, "timezone": "Europe/Berlin"}
    return Tenant(name=name, **{**defaults, **fields})


def rows(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


class Page(HTMLParser):
    """What a page has: its tags with their attributes, and its text outside of the style."""

    def __init__(self, data: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.style = ""
        self._in_style = False
        self.feed(data.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.style += data
        else:
            self.text += data


def test_the_bytes_stay_whatever_becomes_of_invoice_and_tenant(house: Any) -> None:
    house.billing.update_tenant("acme", timezone="Europe/Berlin", name="Acme GmbH")
    span = period(house)
    house.set_price(prompt="1000000")
    house.use()
    drafted = draft(house, span)
    with pytest.raises(Conflict, match="draft"):
        house.billing.statement(drafted.id)
    house.billing.finalize_invoice(drafted.id)

    def rendered() -> tuple[bytes, bytes]:
        statement = house.billing.statement(drafted.id)
        return as_html(statement), as_csv(statement)

    first = rendered()
    assert b"Acme GmbH" in first[0]
    signed = house.billing.invoice(drafted.id).signed
    assert signed is not None
    for text in (signed.head.root, signed.head.content_hash, signed.head.key_id, signed.signature):
        assert all(text.encode() in data for data in first)
    house.billing.update_tenant("acme", timezone="Asia/Tokyo", name="Renamed")
    house.restart()
    assert rendered() == first
    house.billing.void_invoice(drafted.id)
    void = rendered()
    mark = b'<p class="void" role="note">This invoice is void. It asks for nothing.</p>\n'
    assert void[0].replace(mark, b"") == first[0]
    assert void[1].replace(b",void,", b",final,") == first[1]


def test_the_status_of_a_payment_changes_nothing() -> None:
    final = invoice(line(1))
    later = msgspec.structs.replace(
        final, status=InvoiceStatus.PAID, paid_us=DECEMBER_US + 9, stripe_invoice_id="in_1", provider_tax_minor=7
    )
    assert as_html(statement_of(later, tenant())) == as_html(statement_of(final, tenant()))
    assert as_csv(statement_of(later, tenant())) == as_csv(statement_of(final, tenant()))


@pytest.mark.parametrize(
    ("currency", "amount", "shown"), [("jpy", 62, "62"), ("usd", 62, "0.62"), ("kwd", 617, "0.617"), ("jpy", 0, "0")]
)
def test_amounts_have_the_currencys_own_decimals(currency: str, amount: int, shown: str) -> None:
    statement = statement_of(invoice(line(1, amount_minor=amount), currency=currency), tenant(currency=currency))
    first, total = rows(as_csv(statement))
    assert (first["amount"], first["exact"], total["amount"], first["currency"]) == (
        shown,
        "0.6172835",
        shown,
        currency.upper(),
    )
    assert f"{shown} {currency.upper()}" in Page(as_html(statement)).text


def test_every_line_in_words_and_numbers_and_the_total_below() -> None:
    lines = (
        line(1),
        line(2, token_class=TokenClass.COMPLETION, adapter="pirate", quantity=10**9, amount_minor=50_000),
        line(
            3,
            kind=LineKind.DISCOUNT,
            model="",
            token_class=None,
            quantity=0,
            unit_price_nano=0,
            amount_minor=-5006,
            exact="-50061728350000000",
            base="500617283500000000",
            name="Friends",
            rate="10",
        ),
        line(
            4,
            kind=LineKind.TAX,
            model="",
            token_class=None,
            quantity=0,
            unit_price_nano=0,
            amount_minor=8561,
            exact="256833333333333334/3",
            base="450560000000000000",
            name="VAT",
            rate="19",
        ),
    )
    statement = statement_of(invoice(*lines), tenant())
    found = rows(as_csv(statement))
    assert [row["record"] for row in found] == ["line"] * 4 + ["total"]
    assert sum(Decimal(row["amount"]) for row in found[:4]) == Decimal(found[4]["amount"]) == Decimal("536.17")
    first = found[0]
    assert [first[name] for name in ("quantity", "unit", "unit_price", "per")] == [
        "1234567",
        "token",
        "0.50",
        "1000000",
    ]
    assert (found[2]["quantity"], found[2]["amount"]) == ("", "-50.06")
    assert "/" in found[3]["exact"]
    text = Page(as_html(statement)).text
    for words in ("1,234,567 prompt tokens", "0.50 USD per million", "Friends: 10% off", "VAT 19% on", "-50.06"):
        assert words in text
    assert "from 2026-11-01 00:00:00+01:00 up to, and without, 2026-12-01 00:00:00+01:00" in text
    assert ("Europe/Berlin" in text, "1,200" in text) == (True, True)
    assert ("450.56" in text, "85.61" in text) == (True, True)


def test_tax_that_is_found_elsewhere_is_told() -> None:
    there = invoice(line(1), terms=InvoiceTerms(tax=Tax(mode=TaxMode.STRIPE)))
    assert "payment provider finds what tax" in Page(as_html(statement_of(there, tenant()))).text
    assert "payment provider finds what tax" not in Page(as_html(statement_of(invoice(line(1)), tenant()))).text


def test_an_invoice_without_lines_and_without_a_tree() -> None:
    statement = statement_of(invoice(), tenant())
    assert "Nothing was used" in Page(as_html(statement)).text
    (total,) = rows(as_csv(statement))
    assert (total["record"], total["amount"], total["events_root"], total["key_id"]) == ("total", "0.00", "", "")


def test_hostile_names_stay_text() -> None:
    statement = statement_of(invoice(line(1, model=HOSTILE, adapter=HOSTILE, endpoint=HOSTILE)), tenant(HOSTILE))
    page = Page(as_html(statement))
    assert f"{HOSTILE} (acme)" in page.text
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "code", "dl", "dt", "dd", "p", "span"),
        *("div", "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td"),
    }
    first, total = rows(as_csv(statement))
    assert first["model"] == first["adapter"] == first["endpoint"] == first["tenant_name"] == f"'{HOSTILE}"
    assert total["tenant_name"] == f"'{HOSTILE}"
    assert set(first) == set(CSV_COLUMNS)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_no_cell_begins_like_a_formula_but_numbers(start: str) -> None:
    statement = statement_of(invoice(line(1, model=f"{start}1", amount_minor=-62)), tenant(f"{start}1"))
    data = as_csv(statement)
    for row in rows(data):
        for column, cell in row.items():
            assert column in ("amount", "exact") or not cell.startswith(start)
    assert rows(data)[0]["amount"] == "-0.62"


def test_the_csv_is_rfc_4180() -> None:
    data = as_csv(statement_of(invoice(line(1)), tenant('A "quoted", name')))
    assert data.endswith(b"\r\n")
    assert data.count(b"\n") == data.count(b"\r\n") == 3
    assert b'"A ""quoted"", name"' in data
    assert {len(row) for row in csv.reader(io.StringIO(data.decode(), newline=""))} == {len(CSV_COLUMNS)}


def test_the_page_stands_alone_and_can_be_read_aloud() -> None:
    page = Page(as_html(statement_of(invoice(line(1)), tenant())))
    assert "url(" not in page.style
    assert "@import" not in page.style
    for tag, attributes in page.tags:
        assert not {"src", "href", "action", "srcset", "style"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
    tags = [tag for tag, _ in page.tags]
    assert ("html", {"lang": "en"}) in page.tags
    assert [tags.count(one) for one in ("title", "h1", "main", "caption", "script")] == [1, 1, 1, 1, 0]
