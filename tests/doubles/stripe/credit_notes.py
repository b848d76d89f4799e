"""Credit notes: what lowers a finalized invoice (https://docs.stripe.com/api/credit_notes).

On an open invoice a note lowers what is left to pay; on a paid one it says where the money goes back to.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

from tests.doubles.stripe.errors import refused
from tests.doubles.stripe.forms import EXPAND, METADATA, PAGE, Param, array, choice, decimal, group, integer, text
from tests.doubles.stripe.invoices import items_of, line
from tests.doubles.stripe.state import Object, Params, Route, State, page

_WAYS = ("credit_amount", "refund_amount", "out_of_band_amount")


def create(state: State, params: Params) -> Object:
    invoice = state.get("invoice", params["invoice"], "invoice", status=400)
    if invoice["status"] not in ("open", "paid", "uncollectible"):
        raise refused("A credit note needs a finalized invoice", code="invoice_not_editable", param="invoice")
    lines = [_line(state, invoice, wanted) for wanted in params.get("lines", [])]
    if ("amount" in params) == bool(lines):
        raise refused("You must specify exactly one of amount or lines", param="amount")
    amount = params.get("amount", sum(entry["amount"] for entry in lines))
    _fits(invoice, amount, params)
    before = min(amount, invoice["amount_remaining"])
    now = state.clock.now()
    number = sum(note["invoice"] == invoice["id"] for note in state.all("credit_note")) + 1
    ident = state.mint("cn")
    note: Object = {
        "id": ident,
        "object": "credit_note",
        "amount": amount,
        "amount_shipping": 0,
        "created": now,
        "currency": invoice["currency"],
        "customer": invoice["customer"],
        "customer_balance_transaction": None,
        "discount_amount": 0,
        "discount_amounts": [],
        "effective_at": now,
        "invoice": invoice["id"],
        "lines": page(lines, {"limit": 100}, f"/v1/credit_notes/{ident}/lines"),
        "livemode": False,
        "memo": params.get("memo"),
        "metadata": params.get("metadata", {}),
        "number": f"{invoice['number']}-CN-{number:02d}",
        "out_of_band_amount": params.get("out_of_band_amount"),
        "pdf": f"https://pay.stripe.com/credit_notes/{ident}/pdf",
        "post_payment_amount": amount - before,
        "pre_payment_amount": before,
        "pretax_credit_amounts": [],
        "reason": params.get("reason"),
        "refunds": [],
        "shipping_cost": None,
        "status": "issued",
        "subtotal": amount,
        "subtotal_excluding_tax": amount,
        "total": amount,
        "total_excluding_tax": amount,
        "total_taxes": [],
        "type": "pre_payment" if before == amount else "mixed" if before else "post_payment",
        "voided_at": None,
    }
    _apply(state, invoice, note, params.get("credit_amount", 0))
    return state.add("credit_note", note, event="credit_note.created")


def _line(state: State, invoice: Object, wanted: Params) -> Object:
    source = {shown["id"]: shown for shown in map(line, items_of(state, invoice["id"]))}
    if wanted["type"] == "invoice_line_item" and wanted.get("invoice_line_item") not in source:
        raise refused("No such invoice line item", code="resource_missing", param="lines[0][invoice_line_item]")
    unit = wanted.get("unit_amount_decimal", Decimal(wanted.get("unit_amount", 0)))
    amount = wanted.get("amount")
    if amount is None:
        amount = int((unit * wanted.get("quantity", 1)).quantize(Decimal(1), ROUND_HALF_UP))
    return {
        "id": state.mint("cnli"),
        "object": "credit_note_line_item",
        "amount": amount,
        "description": wanted.get("description"),
        "discount_amount": 0,
        "discount_amounts": [],
        "invoice_line_item": wanted.get("invoice_line_item"),
        "livemode": False,
        "metadata": wanted.get("metadata", {}),
        "pretax_credit_amounts": [],
        "quantity": wanted.get("quantity"),
        "tax_rates": [],
        "taxes": [],
        "type": wanted["type"],
        "unit_amount": wanted.get("unit_amount"),
        "unit_amount_decimal": format(unit, "f") if unit else None,
    }


def _fits(invoice: Object, amount: int, params: Params) -> None:
    credited = invoice["pre_payment_credit_notes_amount"] + invoice["post_payment_credit_notes_amount"]
    if amount <= 0:
        raise refused("The amount of a credit note must be positive", param="amount")
    if amount > invoice["total"] - credited:
        raise refused(
            f"The credit note's amount exceeds what is left of the invoice ({invoice['total'] - credited})",
            param="amount",
        )
    beyond = amount - min(amount, invoice["amount_remaining"])
    told = sum(params.get(way, 0) for way in _WAYS)
    if told != beyond:
        raise refused(
            f"The sum of {', '.join(_WAYS)} must equal the post-payment amount ({beyond})", param="credit_amount"
        )


def _apply(state: State, invoice: Object, note: Object, to_balance: int) -> None:
    invoice["pre_payment_credit_notes_amount"] += note["pre_payment_amount"]
    invoice["post_payment_credit_notes_amount"] += note["post_payment_amount"]
    if before := note["pre_payment_amount"]:
        invoice["amount_due"] -= before
        invoice["amount_remaining"] -= before
        if invoice["amount_remaining"] == 0:
            invoice["status"] = "paid"
            invoice["status_transitions"]["paid_at"] = state.clock.now()
            state.touch(invoice, "invoice.paid")
    state.get("customer", invoice["customer"])["balance"] -= to_balance


def void(state: State, params: Params, ident: str) -> Object:
    note = state.get("credit_note", ident)
    invoice = state.get("invoice", note["invoice"])
    if note["status"] == "void" or note["post_payment_amount"] or invoice["status"] != "open":
        raise refused("Only a credit note on an open invoice can be voided")
    note.update(status="void", voided_at=state.clock.now())
    invoice["pre_payment_credit_notes_amount"] -= note["amount"]
    invoice["amount_due"] += note["amount"]
    invoice["amount_remaining"] += note["amount"]
    state.touch(note, "credit_note.voided")
    return note


def retrieve(state: State, params: Params, ident: str) -> Object:
    return state.get("credit_note", ident)


def list_all(state: State, params: Params) -> Object:
    found = [
        note
        for note in state.all("credit_note")
        if all(params.get(name) in (None, note[name]) for name in ("invoice", "customer"))
    ]
    return page(found, params, "/v1/credit_notes")


_LINE = {
    "type": Param(choice("custom_line_item", "invoice_line_item"), required=True),
    "amount": Param(integer(0)),
    "description": Param(text()),
    "invoice_line_item": Param(text()),
    "metadata": METADATA,
    "quantity": Param(integer(0)),
    "unit_amount": Param(integer(0)),
    "unit_amount_decimal": Param(decimal()),
}
_CREATE = {
    "invoice": Param(text(), required=True),
    "amount": Param(integer()),
    **{way: Param(integer(0)) for way in _WAYS},
    "lines": Param(array(group(_LINE))),
    "memo": Param(text()),
    "metadata": METADATA,
    "reason": Param(choice("duplicate", "fraudulent", "order_change", "product_unsatisfactory")),
    **EXPAND,
}

ROUTES = [
    Route("POST", "/v1/credit_notes", create, _CREATE),
    Route("GET", "/v1/credit_notes", list_all, {**PAGE, "invoice": Param(text()), "customer": Param(text())}),
    Route("GET", "/v1/credit_notes/([^/]+)", retrieve, EXPAND),
    Route("POST", "/v1/credit_notes/([^/]+)/void", void, EXPAND),
]
