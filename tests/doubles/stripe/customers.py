"""Customers: create, retrieve, update, delete, list and search."""

from __future__ import annotations

from tests.doubles.stripe.forms import CREATED, EXPAND, METADATA, PAGE, Param, integer, text
from tests.doubles.stripe.state import Object, Params, Route, State, created_within, merge_metadata, page, search

_FIELDS = {
    "name": Param(text(256)),
    "email": Param(text(512)),
    "phone": Param(text(20)),
    "description": Param(text()),
    "metadata": METADATA,
    **EXPAND,
}


def create(state: State, params: Params) -> Object:
    ident = state.mint("cus")
    customer: Object = {
        "id": ident,
        "object": "customer",
        "address": None,
        "balance": 0,
        "created": state.clock.now(),
        "currency": None,
        "default_source": None,
        "delinquent": False,
        "description": params.get("description"),
        "discount": None,
        "email": params.get("email"),
        "invoice_prefix": params.get("invoice_prefix", ident[-8:].upper()),
        "invoice_settings": {
            "custom_fields": None,
            "default_payment_method": None,
            "footer": None,
            "rendering_options": None,
        },
        "livemode": False,
        "metadata": params.get("metadata", {}),
        "name": params.get("name"),
        "next_invoice_sequence": 1,
        "phone": params.get("phone"),
        "preferred_locales": [],
        "shipping": None,
        "tax_exempt": "none",
        "test_clock": None,
    }
    return state.add("customer", customer, event="customer.created")


def update(state: State, params: Params, ident: str) -> Object:
    customer = state.get("customer", ident)
    if "metadata" in params:
        merge_metadata(customer, params["metadata"])
    customer.update({name: params[name] for name in ("name", "email", "phone", "description") if name in params})
    state.touch(customer, "customer.updated")
    return customer


def retrieve(state: State, params: Params, ident: str) -> Object:
    if ident in state.objects.get("deleted_customer", {}):
        return {"id": ident, "object": "customer", "deleted": True}
    return state.get("customer", ident)


def delete(state: State, params: Params, ident: str) -> Object:
    customer = state.get("customer", ident)
    answer = state.remove("customer", customer, event="customer.deleted")
    state.add("deleted_customer", customer)
    return answer


def list_all(state: State, params: Params) -> Object:
    found = [
        customer
        for customer in state.all("customer")
        if created_within(customer, params) and params.get("email") in (None, customer["email"])
    ]
    return page(found, params, "/v1/customers")


def find(state: State, params: Params) -> Object:
    return search(state.searchable("customer"), params, "/v1/customers/search")


SEARCH = {"query": Param(text(), required=True), "limit": Param(integer(1, 100)), "page": Param(text()), **EXPAND}

ROUTES = [
    Route("POST", "/v1/customers", create, {**_FIELDS, "invoice_prefix": Param(text(12))}),
    Route("GET", "/v1/customers", list_all, {**PAGE, "created": CREATED, "email": Param(text())}),
    Route("GET", "/v1/customers/search", find, SEARCH),
    Route("GET", "/v1/customers/([^/]+)", retrieve, EXPAND),
    Route("POST", "/v1/customers/([^/]+)", update, _FIELDS),
    Route("DELETE", "/v1/customers/([^/]+)", delete),
]
