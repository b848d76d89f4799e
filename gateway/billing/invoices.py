"""`GET /v1/invoices/{id}` and its proof: what a tenant verifies its invoice by, without asking anybody further.

The answer is the invoice's canonical document with its hash and the seller's signed head. With `leaves` it has the id
and the hash of each event too, by which a verifier can name the one that is missing. Only invoices that were made final
are shown. A tree is built from the stored events, and must have the root that was signed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from litestar import MediaType, Request, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream
from msgspec import Meta

from billing import merkle
from billing.accounts import Tenant
from billing.errors import NotFound
from billing.invoice import Invoice
from billing.signing import SignedHead
from gateway.billing.desk import Desk
from gateway.billing.trees import Leaves
from gateway.billing.turns import begun, slices
from gateway.errors import Conflict


class InvoiceProof(msgspec.Struct, kw_only=True):
    """The file that `meterhouse verify` takes as the invoice."""

    document: Annotated[dict[str, Any], Meta(description="canonical: keys sorted, no floats; never changes")]
    content_hash: Annotated[str, Meta(description="SHA-256 of the document's canonical bytes")]
    status: str
    signed: Annotated[SignedHead | None, Meta(description="null: it was made final before invoices were signed")]
    leaves: Annotated[list[tuple[str, str]] | None, Meta(description="event and leaf hash, in order of time and id")]


class Inclusion(msgspec.Struct, kw_only=True):
    """That one event is in the tree: RFC 6962's audit path, the lowest sibling first."""

    event_id: str
    index: int
    leaf: str
    path: list[str]


class Proof(msgspec.Struct, kw_only=True):
    """The signed head, and where asked for how one event leads to its root."""

    invoice_id: str
    root: str
    tree_size: int
    signed: SignedHead | None
    inclusion: Inclusion | None


@get(
    "/v1/invoices/{invoice_id:str}",
    responses={200: ResponseSpec(InvoiceProof, generate_examples=False, description="The invoice.")},
)
async def invoice_document(
    invoice_id: FromPath[str],
    request: Request[Any, Any, Any],
    desk: NamedDependency[Desk],
    leaves: Annotated[bool, QueryParameter(description="With the id and leaf hash of each event.")] = False,
) -> Response[Any]:
    """Show one of the tenant's own invoices, as the document that its signed hash is of."""
    tenant = desk.tenant(request)
    invoice = desk.invoice(tenant, invoice_id)
    if leaves:
        return Stream(await begun(_with_leaves(desk, tenant, invoice)), media_type=MediaType.JSON)
    return Response(await asyncio.to_thread(_encoded, desk, invoice), media_type=MediaType.JSON)


@get("/v1/invoices/{invoice_id:str}/proof")
async def invoice_proof(
    invoice_id: FromPath[str],
    request: Request[Any, Any, Any],
    desk: NamedDependency[Desk],
    event_id: Annotated[str | None, QueryParameter(description="Prove that this event is on the invoice.")] = None,
) -> Proof:
    """Show the signed head of an invoice's tree, and how an event leads to its root."""
    tenant = desk.tenant(request)
    invoice = desk.invoice(tenant, invoice_id)
    if invoice.basis is None:
        raise Conflict("The invoice was cut by a version of Meterhouse that kept nothing to verify it by.")
    inclusion: Inclusion | None = None
    if event_id is not None:
        with desk.turns.seat(tenant.id):
            inclusion = await desk.read(tenant, _inclusion, desk, invoice, event_id)
    return Proof(
        invoice_id=invoice.id,
        root=invoice.basis.root,
        tree_size=invoice.event_count,
        signed=invoice.signed,
        inclusion=inclusion,
    )


async def _with_leaves(desk: Desk, tenant: Tenant, invoice: Invoice) -> AsyncGenerator[bytes, None]:
    """The answer in pieces: of a million events it has a hundred megabytes."""
    with desk.turns.seat(tenant.id):
        for piece in slices(await desk.read(tenant, _encoded, desk, invoice, leaves=True)):
            yield piece


def _encoded(desk: Desk, invoice: Invoice, *, leaves: bool = False) -> bytes:
    """The answer's bytes, made where nobody's stream waits for it."""
    proof = InvoiceProof(
        document=desk.billing.invoice_document(invoice.id),
        content_hash=invoice.content_hash,
        status=invoice.status,
        signed=invoice.signed,
        leaves=[(event_id, leaf.hex()) for event_id, leaf in _leaves(desk, invoice)] if leaves else None,
    )
    return msgspec.json.encode(proof)


def _leaves(desk: Desk, invoice: Invoice) -> Leaves:
    return desk.trees.leaves(invoice.id, lambda: desk.billing.invoice_leaves(invoice, desk.usage))


def _inclusion(desk: Desk, invoice: Invoice, event_id: str) -> Inclusion:
    """Raises `NotFound` for an event that is not on it."""
    leaves = _leaves(desk, invoice)
    index = next((number for number, (id, _) in enumerate(leaves) if id == event_id), None)
    if index is None:
        raise NotFound("event of this invoice", event_id)
    path = merkle.path([leaf for _, leaf in leaves], index)
    return Inclusion(
        event_id=event_id, index=index, leaf=leaves[index][1].hex(), path=[sibling.hex() for sibling in path]
    )
