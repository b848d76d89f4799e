"""One-off invoices: draft → open → paid | void | uncollectible (https://docs.stripe.com/invoicing/overview)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tests.doubles.stripe.customers import SEARCH
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
    group,
    integer,
    text,
)
from tests.doubles.stripe.state import Object, Params, Route, State, created_within, merge_metadata, page, search

MINIMUM_CHARGE = {"usd": 50, "eur": 50, "gbp": 30, "jpy": 50}  # smaller totals are not due now
STATUSES = ("draft", "open", "paid", "uncollectible", "void")
SHOWN_LINES = 10  # embedded in the invoice itself


def create(state: State, params: Params) -> Object:
    customer = state.get("customer", params["customer"], "customer", status=400)
    currency = params.get("currency") or customer["currency"] or "usd"
    _one_currency(state, customer, currency)
    collection = params.get("collection_method", "charge_automatically")
    if collection == "send_invoice" and "days_until_due" not in params:
        raise refused("You must specify days_until_due when collection_method is send_invoice", param="days_until_due")
    if params.get("pending_invoice_items_behavior", "exclude") == "include":
        raise refused("The double keeps no pending items to include", param="pending_invoice_items_behavior")
    now = state.clock.now()
    ident = state.mint("in")
    invoice: Object = {
        "id": ident,
        "object": "invoice",
        **_blank(ident),
        "auto_advance": params.get("auto_advance", False),
        "collection_method": collection,
        "created": now,
        "currency": currency,
        "customer": customer["id"],
        "customer_email": customer["email"],
        "customer_name": customer["name"],
        "customer_phone": customer["phone"],
        "description": params.get("description"),
        "due_date": now + 86400 * params["days_until_due"] if "days_until_due" in params else None,
        "footer": params.get("footer"),
        "metadata": params.get("metadata", {}),
        "period_end": now,
        "period_start": now,
        "status": "draft",
        "status_transitions": {
            "finalized_at": None,
            "marked_uncollectible_at": None,
            "paid_at": None,
            "voided_at": None,
        },
    }
    customer["currency"] = customer["currency"] or currency
    invoice["automatic_tax"]["enabled"] = params.get("automatic_tax", {}).get("enabled", False)
    recount(state, invoice)
    return state.add("invoice", invoice, event="invoice.created")


def _one_currency(state: State, customer: Object, currency: str) -> None:
    """A customer with something open in one currency cannot be invoiced in another."""
    open_ones = [
        i for i in state.all("invoice") if i["customer"] == customer["id"] and i["status"] in ("draft", "open")
    ]
    if customer["currency"] in (None, currency) or not open_ones:
        return
    raise refused(
        f"You cannot combine currencies on a single customer. This customer has an active subscription, "
        f"subscription schedule, discount, quote, or invoice item with currency {customer['currency']}",
        param="currency",
    )


def _blank(ident: str) -> Object:
    """Fields of an invoice that the double never fills otherwise."""
    nothing = (
        "account_tax_ids application automatically_finalizes_at customer_address customer_shipping custom_fields "
        "default_payment_method default_source effective_at ending_balance from_invoice hosted_invoice_url "
        "invoice_pdf last_finalization_error latest_revision next_payment_attempt number on_behalf_of parent "
        "receipt_number rendering shipping_cost shipping_details statement_descriptor test_clock threshold_reason "
        "webhooks_delivered_at"
    )
    return {
        **dict.fromkeys(nothing.split()),
        "account_country": "US",
        "account_name": "Meterhouse double",
        "amount_due": 0,
        "amount_overpaid": 0,
        "amount_paid": 0,
        "amount_remaining": 0,
        "amount_shipping": 0,
        "attempt_count": 0,
        "attempted": False,
        "automatic_tax": {
            "disabled_reason": None,
            "enabled": False,
            "liability": None,
            "provider": None,
            "status": None,
        },
        "billing_reason": "manual",
        "customer_tax_exempt": "none",
        "customer_tax_ids": [],
        "default_tax_rates": [],
        "discounts": [],
        "issuer": {"type": "self"},
        "lines": {"object": "list", "data": [], "has_more": False, "url": f"/v1/invoices/{ident}/lines"},
        "livemode": False,
        "payment_settings": {
            "default_mandate": None,
            "payment_method_options": None,
            "payment_method_types": None,
        },
        "post_payment_credit_notes_amount": 0,
        "pre_payment_credit_notes_amount": 0,
        "starting_balance": 0,
        "total_discount_amounts": [],
        "total_pretax_credit_amounts": [],
        "total_taxes": [],
    }


def items_of(state: State, invoice_id: str) -> list[Object]:
    return [item for item in state.all("invoiceitem") if item["invoice"] == invoice_id]


def recount(state: State, invoice: Object) -> None:
    """Totals of a draft from its items; the embedded lines are the first ten."""
    items = items_of(state, invoice["id"])
    net = sum(item["amount"] for item in items)
    total = net + (_tax(state, net) if invoice["automatic_tax"]["enabled"] else 0)
    invoice.update(subtotal=net, subtotal_excluding_tax=net, total=total, total_excluding_tax=net)
    invoice.update(amount_due=max(total, 0), amount_remaining=max(total, 0))
    newest = [line(item) for item in items[-SHOWN_LINES:]]
    shown = page(newest, {"limit": SHOWN_LINES}, f"/v1/invoices/{invoice['id']}/lines")
    invoice["lines"] = {**shown, "has_more": len(items) > SHOWN_LINES}


def _tax(state: State, net: int) -> int:
    """Exclusive of the items' amounts; 0 while nobody knows where the customer is."""
    return round(Fraction(net * (state.tax_percent or 0), 100))


def line(item: Object) -> Object:
    """How an item shows on its invoice."""
    return {
        "id": item["id"].replace("ii_", "il_"),
        "object": "line_item",
        "amount": item["amount"],
        "currency": item["currency"],
        "description": item["description"],
        "discount_amounts": [],
        "discountable": item["discountable"],
        "discounts": [],
        "invoice": item["invoice"],
        "livemode": False,
        "metadata": item["metadata"],
        "parent": {
            "invoice_item_details": {
                "invoice_item": item["id"],
                "proration": False,
                "proration_details": None,
                "subscription": None,
            },
            "subscription_item_details": None,
            "type": "invoice_item_details",
        },
        "period": item["period"],
        "pretax_credit_amounts": [],
        "pricing": item["pricing"],
        "quantity": item["quantity"],
        "quantity_decimal": item["quantity_decimal"],
        "subtotal": item["amount"],
        "taxes": [],
    }


def _in_status(invoice: Object, *allowed: str, doing: str) -> None:
    if invoice["status"] not in allowed:
        raise refused(f"This invoice cannot be {doing}: its status is {invoice['status']}", code="invoice_not_editable")


def update(state: State, params: Params, ident: str) -> Object:
    invoice = state.get("invoice", ident)
    if set(params) - {"metadata", "auto_advance", "expand"}:
        _in_status(invoice, "draft", doing="changed")
    if "metadata" in params:
        merge_metadata(invoice, params["metadata"])
    invoice.update({name: params[name] for name in ("auto_advance", "description", "footer") if name in params})
    state.touch(invoice, "invoice.updated")
    return invoice


def finalize(state: State, params: Params, ident: str) -> Object:
    invoice = state.get("invoice", ident)
    if invoice["status"] != "draft":
        raise refused(
            "This invoice is already finalized, you can't re-finalize a non-draft invoice.",
            code="invoice_not_editable",
        )
    if not items_of(state, ident):
        raise refused("You cannot finalize an invoice without line items", code="invoice_no_customer_line_items")
    customer = state.get("customer", invoice["customer"], "customer", status=400)
    if invoice["automatic_tax"]["enabled"] and state.tax_percent is None:
        raise refused(
            "The customer's location isn't recognized. Set a valid customer address in order to automatically "
            "calculate tax.",
            code="customer_tax_location_invalid",
        )
    recount(state, invoice)
    now = state.clock.now()
    invoice.update(
        status="open",
        number=f"{customer['invoice_prefix']}-{customer['next_invoice_sequence']:04d}",
        auto_advance=params.get("auto_advance", invoice["auto_advance"]),
        effective_at=now,
        hosted_invoice_url=f"https://invoice.stripe.com/i/{ident}",
        invoice_pdf=f"https://pay.stripe.com/invoice/{ident}/pdf",
    )
    customer["next_invoice_sequence"] += 1
    invoice["status_transitions"]["finalized_at"] = now
    state.touch(invoice, "invoice.finalized")
    _settle_balance(state, invoice, customer)
    return invoice


def _settle_balance(state: State, invoice: Object, customer: Object) -> None:
    """The customer's balance is applied; a total too small to charge, or below zero, moves to the balance."""
    invoice["starting_balance"] = customer["balance"]
    due = invoice["total"] + customer["balance"]
    if due < MINIMUM_CHARGE.get(invoice["currency"], 1):
        customer["balance"], due = due, 0
    else:
        customer["balance"] = 0
    invoice.update(amount_due=due, amount_remaining=due, ending_balance=customer["balance"])
    if due == 0:
        _paid(state, invoice)


def _paid(state: State, invoice: Object) -> None:
    invoice.update(status="paid", attempted=True)
    invoice["status_transitions"]["paid_at"] = state.clock.now()
    state.touch(invoice, "invoice.paid")


def pay(state: State, params: Params, ident: str) -> Object:
    invoice = state.get("invoice", ident)
    if invoice["status"] == "paid":
        raise refused("Invoice is already paid", code="invoice_already_paid")
    if invoice["status"] == "draft":
        finalize(state, {}, ident)
    _in_status(invoice, "open", "paid", "uncollectible", doing="paid")
    if invoice["status"] != "paid":
        invoice.update(amount_paid=invoice["amount_remaining"], amount_remaining=0, attempt_count=1)
        _paid(state, invoice)
    return invoice


def void(state: State, params: Params, ident: str) -> Object:
    invoice = state.get("invoice", ident)
    _in_status(invoice, "open", "uncollectible", doing="voided")
    invoice.update(status="void", amount_due=0, amount_remaining=0)
    invoice["status_transitions"]["voided_at"] = state.clock.now()
    state.touch(invoice, "invoice.voided")
    return invoice


def mark_uncollectible(state: State, params: Params, ident: str) -> Object:
    invoice = state.get("invoice", ident)
    _in_status(invoice, "open", doing="marked uncollectible")
    invoice["status"] = "uncollectible"
    invoice["status_transitions"]["marked_uncollectible_at"] = state.clock.now()
    state.touch(invoice, "invoice.marked_uncollectible")
    return invoice


def delete(state: State, params: Params, ident: str) -> Object:
    invoice = state.get("invoice", ident)
    if invoice["status"] != "draft":
        raise refused("You can only delete draft invoices", code="invoice_not_editable")
    for item in items_of(state, ident):
        state.remove("invoiceitem", item)
    return state.remove("invoice", invoice, event="invoice.deleted")


def list_all(state: State, params: Params) -> Object:
    def wanted(invoice: Object) -> bool:
        same = all(params.get(name) in (None, invoice[name]) for name in ("customer", "status", "collection_method"))
        return same and created_within(invoice, params)

    return page(filter(wanted, state.all("invoice")), params, "/v1/invoices")


def list_lines(state: State, params: Params, ident: str) -> Object:
    state.get("invoice", ident)
    return page([line(item) for item in items_of(state, ident)], params, f"/v1/invoices/{ident}/lines")


def retrieve(state: State, params: Params, ident: str) -> Object:
    return state.get("invoice", ident)


def find(state: State, params: Params) -> Object:
    return search(state.searchable("invoice"), params, "/v1/invoices/search")


_CHANGES: dict[str, Any] = {
    "auto_advance": Param(boolean),
    "description": Param(text(1500)),
    "footer": Param(text()),
    "metadata": METADATA,
    **EXPAND,
}
_CREATE = {
    **_CHANGES,
    "automatic_tax": Param(group({"enabled": Param(boolean, required=True)})),
    "collection_method": Param(choice("charge_automatically", "send_invoice")),
    "currency": CURRENCY,
    "customer": Param(text(), required=True),
    "days_until_due": Param(integer(0, 3650)),
    "pending_invoice_items_behavior": Param(choice("exclude", "include")),
}
_LIST = {
    **PAGE,
    "collection_method": Param(choice("charge_automatically", "send_invoice")),
    "created": CREATED,
    "customer": Param(text()),
    "status": Param(choice(*STATUSES)),
}

ROUTES = [
    Route("POST", "/v1/invoices", create, _CREATE),
    Route("GET", "/v1/invoices", list_all, _LIST),
    Route("GET", "/v1/invoices/search", find, SEARCH),
    Route("GET", "/v1/invoices/([^/]+)", retrieve, EXPAND),
    Route("POST", "/v1/invoices/([^/]+)", update, _CHANGES),
    Route("DELETE", "/v1/invoices/([^/]+)", delete),
    Route("GET", "/v1/invoices/([^/]+)/lines", list_lines, PAGE),
    Route("POST", "/v1/invoices/([^/]+)/finalize", finalize, {"auto_advance": Param(boolean), **EXPAND}),
    Route("POST", "/v1/invoices/([^/]+)/pay", pay, {"paid_out_of_band": Param(boolean), **EXPAND}),
    Route("POST", "/v1/invoices/([^/]+)/void", void, EXPAND),
    Route("POST", "/v1/invoices/([^/]+)/mark_uncollectible", mark_uncollectible, EXPAND),
]
