"""Whatever lines an invoice has: at most so many items, each line in exactly one, and the total to the cent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from billing.invoice import Invoice, InvoiceStatus
from billing.line import InvoiceLine, LineKind
from billing.money import allocate
from billing.prices import TokenClass
from billing.stripe import items_of

CLASSES = [*((LineKind.USAGE, one) for one in TokenClass), (LineKind.DISCOUNT, None), (LineKind.TAX, None)]
LINE = st.tuples(st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(CLASSES))
Drawn = list[tuple[int, int, tuple[LineKind, TokenClass | None]]]


def _invoice(drawn: Drawn) -> Invoice:
    minors = allocate([quantity * price for quantity, price, _ in drawn], "usd")
    lines = tuple(
        InvoiceLine(
            id=f"l{n}",
            model="m",
            adapter="",
            kind=kind,
            token_class=token_class,
            price_id="p",
            period_start_us=n * 10**6,
            period_end_us=(n + 1) * 10**6,
            quantity=quantity,
            unit_price_nano=price,
            amount_minor=minors[n],
        )
        for n, (quantity, price, (kind, token_class)) in enumerate(drawn)
    )
    return Invoice(
        id="i",
        tenant="t",
        currency="usd",
        status=InvoiceStatus.FINALIZED,
        period_start_us=0,
        period_end_us=10**9,
        cut_us=10**9,
        cut_seq=1,
        lines=lines,
        total_minor=sum(minors),
        event_count=len(lines),
        events_digest="",
        created_us=10**9,
    )


@given(st.lists(LINE, max_size=40), st.integers(len(CLASSES) + 1, 20))
def test_items_hold_every_line_once_and_sum_to_the_total(drawn: Drawn, limit: int) -> None:
    invoice = _invoice(drawn)
    items = items_of(invoice, limit)
    assert sum(item.amount_minor for item in items) == invoice.total_minor
    assert 1 <= len(items) <= max(limit, 1)
    assert len({item.id for item in items}) == len(items)
    assert all(item.start_s <= item.end_s for item in items)
    kept = [line for line in invoice.lines if line.id in {item.id for item in items}]
    folded = [line for line in invoice.lines if line not in kept]
    if folded:
        assert max(line.amount_minor for line in folded) <= min(line.amount_minor for line in kept)
    assert items_of(invoice, limit) == items
