"""Invoice items, on a draft only: `amount`, or `quantity_decimal` x `unit_amount_decimal` rounded once."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

from tests.doubles.stripe import invoices
from tests.doubles.stripe.errors import refused
from tests.doubles.stripe.forms import (
    CREATED,
    CURRENCY,
    EXPAND,
    METADATA,
    PAGE,
    Param,
    boolean,
    choice,
    decimal,
    group,
    integer,
    text,
)
from tests.doubles.stripe.state import Object, Params, Route, State, merge_metadata, page

MAX_ITEMS = 250
MAX_AMOUNT = 99_999_999  # eight digits
STEP_OF_TEN = {"kwd", "bhd", "jod", "omr", "tnd"}  # three-decimal currencies must end in 0


def create(state: State, params: Params) -> Object:
    customer = state.get("customer", params["customer"], "customer", status=400)
    if "invoice" not in params:
        raise refused("The double keeps no pending items: name the invoice", code="parameter_missing", param="invoice")
    invoice = state.get("invoice", params["invoice"], "invoice", status=400)
    _accepts(state, invoice, customer, params.get("currency"))
    now = state.clock.now()
    period = params.get("period", {"start": now, "end": now})
    if period["end"] < period["start"]:
        raise refused("The end of the period must be greater than or equal to the start", param="period[end]")
    item: Object = {
        "id": state.mint("ii"),
        "object": "invoiceitem",
        "currency": invoice["currency"],
        "customer": customer["id"],
        "date": now,
        "description": params.get("description"),
        "discountable": params.get("discountable", True),
        "discounts": [],
        "invoice": invoice["id"],
        "livemode": False,
        "metadata": params.get("metadata", {}),
        "parent": None,
        "period": period,
        "proration": False,
        "proration_details": None,
        "tax_rates": [],
        "test_clock": None,
        **_priced(params, invoice["currency"]),
    }
    state.add("invoiceitem", item, event="invoiceitem.created")
    _recounted(state, invoice)
    return item


def _accepts(state: State, invoice: Object, customer: Object, currency: str | None) -> None:
    if invoice["customer"] != customer["id"]:
        raise refused("The invoice belongs to another customer", param="invoice")
    if invoice["status"] != "draft":
        raise refused("You can only add invoice items to draft invoices", code="invoice_not_editable", param="invoice")
    if currency not in (None, invoice["currency"]):
        raise refused(f"The invoice's currency is {invoice['currency']}", param="currency")
    if len(invoices.items_of(state, invoice["id"])) >= MAX_ITEMS:
        raise refused(f"You can only add up to {MAX_ITEMS} items to an invoice", param="invoice")


def _priced(params: Params, currency: str) -> Object:
    """Amount, quantity and unit price of an item. Raises where Stripe would."""
    if "amount" in params and ("unit_amount_decimal" in params or "quantity_decimal" in params):
        raise refused("You may only specify one of these parameters: amount, unit_amount_decimal.", param="amount")
    if "amount" in params:
        amount, quantity, unit = params["amount"], Decimal(1), Decimal(params["amount"])
    elif "unit_amount_decimal" in params:
        unit = params["unit_amount_decimal"]
        quantity = params.get("quantity_decimal", Decimal(params.get("quantity", 1)))
        amount = int((quantity * unit).quantize(Decimal(1), ROUND_HALF_UP))
    else:
        raise refused("You must specify one of amount or unit_amount_decimal", code="parameter_missing", param="amount")
    if abs(amount) > MAX_AMOUNT:
        raise refused(f"Amount must be no more than {MAX_AMOUNT}", code="amount_too_large", param="amount")
    if currency in STEP_OF_TEN and amount % 10:
        raise refused(f"Amounts in {currency} must end in 0", code="parameter_invalid_integer", param="amount")
    return {
        "amount": amount,
        "net_amount": amount,
        "quantity": int(quantity),
        "quantity_decimal": _plain(quantity),
        "pricing": {
            "type": "price_details",
            "price_details": {"price": "price_double", "product": "prod_double"},
            "unit_amount_decimal": _plain(unit),
        },
    }


def _plain(number: Decimal) -> str:
    written = format(number, "f")
    return written.rstrip("0").rstrip(".") if "." in written else written


def _recounted(state: State, invoice: Object) -> None:
    invoices.recount(state, invoice)
    state.touch(invoice, "invoice.updated")


def _on_draft(state: State, ident: str) -> tuple[Object, Object]:
    item = state.get("invoiceitem", ident)
    invoice = state.get("invoice", item["invoice"])
    if invoice["status"] != "draft":
        raise refused("The invoice of this item is no longer editable", code="invoice_not_editable")
    return item, invoice


def update(state: State, params: Params, ident: str) -> Object:
    item, invoice = _on_draft(state, ident)
    if "amount" in params:
        item.update(_priced(params, item["currency"]))
    if "metadata" in params:
        merge_metadata(item, params["metadata"])
    if "description" in params:
        item["description"] = params["description"]
    _recounted(state, invoice)
    return item


def delete(state: State, params: Params, ident: str) -> Object:
    item, invoice = _on_draft(state, ident)
    answer = state.remove("invoiceitem", item, event="invoiceitem.deleted")
    _recounted(state, invoice)
    return answer


def retrieve(state: State, params: Params, ident: str) -> Object:
    return state.get("invoiceitem", ident)


def list_all(state: State, params: Params) -> Object:
    if "invoice" in params:
        state.get("invoice", params["invoice"], "invoice", status=400)
    found = [
        item
        for item in state.all("invoiceitem")
        if all(params.get(name) in (None, item[name]) for name in ("customer", "invoice")) and not params.get("pending")
    ]
    return page(found, params, "/v1/invoiceitems")


_PERIOD = Param(group({"start": Param(integer(0), required=True), "end": Param(integer(0), required=True)}))
_CREATE = {
    "amount": Param(integer()),
    "currency": CURRENCY,
    "customer": Param(text(), required=True),
    "description": Param(text()),
    "discountable": Param(boolean),
    "invoice": Param(text()),
    "metadata": METADATA,
    "period": _PERIOD,
    "quantity": Param(integer(0)),
    "quantity_decimal": Param(decimal()),
    "tax_behavior": Param(choice("exclusive", "inclusive", "unspecified")),
    "unit_amount_decimal": Param(decimal(negative=True)),
    **EXPAND,
}
_LIST = {**PAGE, "created": CREATED, "customer": Param(text()), "invoice": Param(text()), "pending": Param(boolean)}

ROUTES = [
    Route("POST", "/v1/invoiceitems", create, _CREATE),
    Route("GET", "/v1/invoiceitems", list_all, _LIST),
    Route("GET", "/v1/invoiceitems/([^/]+)", retrieve, EXPAND),
    Route(
        "POST",
        "/v1/invoiceitems/([^/]+)",
        update,
        {"amount": Param(integer()), "description": Param(text()), "metadata": METADATA, **EXPAND},
    ),
    Route("DELETE", "/v1/invoiceitems/([^/]+)", delete),
]
