"""Export of an invoice to Stripe: a draft, its items, a check of the total, then finalize; its void, its credit notes.

Knows: Stripe's invoices, items, customers and idempotency keys. Does not know: usage, prices, when to export.
How one call is made is `billing.stripe_calls`' to know.

Every step first looks for what an earlier attempt made (by metadata), and only then makes it, with an
idempotency key that depends on nothing but what is being made. So an export can be killed between any two
calls and begun again, also after Stripe has forgotten the keys. A key is *spent* when it answers with an error
that Stripe keeps, or with a thing that is gone since; then what exists is looked for again and the next key used.
What may still be under way (a timeout, a reset) is never tried with another key: the export ends with
`StripeUnavailable` and is begun again later.

https://docs.stripe.com/api/invoices, https://docs.stripe.com/api/idempotent_requests
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import stripe
import structlog

from billing.accounts import Tenant
from billing.errors import Conflict, ExportError, StripeNotConfigured
from billing.invoice import ExportResult, Invoice
from billing.line import InvoiceLine, LineKind
from billing.money import format_minor
from billing.notes import CreditNote, Way
from billing.provider import ProviderInvoice
from billing.stripe_calls import StripeCalls, StripeRefused, StripeUnavailable
from billing.terms import TaxMode
from billing.wording import describe, group_of

log = structlog.get_logger(__name__)

MAX_ITEMS = 250  # on one Stripe invoice
RECENT_S = 25 * 3600  # how far back things are listed; older ones are in Stripe's search index
VOID_LOOKS = 4  # at one Stripe invoice that changes while it is ended
TEXT_MAX = 500
MAX_FAULTS = 20  # named of one invoice

INVOICE_KEY = "meterhouse_invoice"
LINE_KEY = "meterhouse_line"
TENANT_KEY = "meterhouse_tenant"
NOTE_KEY = "meterhouse_credit_note"

__all__ = ["Item", "StripeExporter", "StripeMismatch", "StripeRefused", "StripeUnavailable", "items_of"]


class StripeMismatch(ExportError):
    """Stripe holds something else than our invoice says, or ours contradicts itself. This export finalized nothing."""


class NotExported(StripeNotConfigured):
    """This invoice is not one to be exported; nothing was sent."""


class Item(NamedTuple):
    """One item as it is sent. `id` is ours and stands in its metadata."""

    id: str
    amount_minor: int
    description: str
    start_s: int
    end_s: int  # inclusive, as Stripe reads it


def _seconds(line: InvoiceLine) -> tuple[int, int]:
    start = line.period_start_us // 1_000_000
    return start, max(start, (line.period_end_us - 1) // 1_000_000)


def _describe(line: InvoiceLine, currency: str) -> str:
    """What is asked for and at what price, as far as it fits."""
    return describe(line, currency)[:TEXT_MAX]


def items_of(invoice: Invoice, limit: int = MAX_ITEMS) -> list[Item]:
    """The invoice's lines as at most `limit` items, whose amounts sum to its total.

    Too many lines: the smallest are folded into one item per kind and token class. No lines: one item of 0, because
    Stripe does not finalize an empty invoice.
    """
    lines = list(invoice.lines)
    folded: list[InvoiceLine] = []
    if len(lines) > limit:
        classes = len({_group(line) for line in lines})
        by_size = sorted(lines, key=lambda line: (-abs(line.amount_minor), line.id))
        kept = {line.id for line in by_size[: limit - classes]}
        lines, folded = [line for line in lines if line.id in kept], [line for line in lines if line.id not in kept]
    items = [Item(line.id, line.amount_minor, _describe(line, invoice.currency), *_seconds(line)) for line in lines]
    items += _folded(invoice, folded)
    if not items:
        start, end = invoice.period_start_us // 1_000_000, (invoice.period_end_us - 1) // 1_000_000
        items.append(Item(f"{invoice.id}:none", 0, "No usage", start, max(start, end)))
    return items


def _folded(invoice: Invoice, lines: Sequence[InvoiceLine]) -> Iterator[Item]:
    groups: dict[tuple[str, str], list[InvoiceLine]] = defaultdict(list)
    for line in lines:
        groups[_group(line)].append(line)
    for (kind, name), part in sorted(groups.items()):
        yield Item(
            f"{invoice.id}:rest:{name if kind == LineKind.USAGE else f'{kind}:{name}'}",
            sum(line.amount_minor for line in part),
            f"{len(part)} smaller lines: {group_of(part[0].kind, part[0].token_class, part)}",
            min(_seconds(line)[0] for line in part),
            max(_seconds(line)[1] for line in part),
        )


def _group(line: InvoiceLine) -> tuple[str, str]:
    """What is folded into one item: lines of one kind and class."""
    return line.kind.value, "" if line.token_class is None else line.token_class.value


def _key(kind: str, *parts: str) -> str:
    """An idempotency key's stem: the same for the same thing, whatever characters its ids have."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"meterhouse-{kind}-{digest[:40]}"


def _quoted(value: str) -> str:
    """A value inside a clause of Stripe's search language."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class StripeExporter(StripeCalls):
    """Exports invoices with one API key. Implements `billing.invoice.Exporter`.

    `refusal` says why an invoice must not be exported (empty: it may be); `on_failure` is told of each export that
    ended with an error.
    """

    refusal: Callable[[Invoice], str] = staticmethod(lambda _: "")
    on_failure: Callable[[Invoice, ExportError], None] = staticmethod(lambda *_: None)

    # -- what callers use -----------------------------------------------------------------------------------------

    def export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult:
        """One finalized Stripe invoice for ours, made now or by an earlier attempt.

        Raises `StripeUnavailable` (begin again later), `StripeRefused` or `StripeMismatch` (a person must look;
        the draft is left as it is), all of them `ExportError`; `Conflict` when it was voided in Stripe.
        """
        self._api()  # without a key nothing at all happens
        if reason := self.refusal(invoice):
            raise NotExported(reason)
        try:
            return self._export(invoice, tenant, previous_ids)
        except ExportError as error:
            try:
                self.on_failure(invoice, error)
            except Exception as failed:  # whoever is told must not hide what went wrong
                log.error("export_failure_not_told", invoice=invoice.id, reason=str(failed) or type(failed).__name__)
            raise

    def _export(self, invoice: Invoice, tenant: Tenant, previous_ids: Mapping[str, str]) -> ExportResult:
        self._exportable(invoice)
        items = items_of(invoice)
        found = self._find_invoice(invoice, previous_ids.get(invoice.id))
        if found is None:
            customer = tenant.stripe_customer_id or self._customer(tenant)
            found = self._draft(invoice, tenant, customer)
        elif found.status == "draft" and tenant.stripe_customer_id not in (None, _id(found.customer)):
            raise StripeMismatch(
                f"the draft {found.id} in Stripe is for customer {_id(found.customer)}, but the tenant's customer is "
                f"{tenant.stripe_customer_id}: delete the draft in Stripe and export again"
            )
        made = self._items(found.id)
        if found.status == "draft":
            self._add_items(invoice, found, items, made)
            found = self._finalize(invoice, found.id, items, made)
        self._check_total(invoice, found)
        ids = {invoice.id: found.id, **{ours: theirs[0].id for ours, theirs in made.items() if ours}}
        total_minor = _net(found)
        return ExportResult(
            stripe_invoice_id=found.id,
            total_minor=total_minor,
            status=str(found.status),
            ids=dict(sorted(ids.items())),
            tax_minor=found.total - total_minor,
        )

    def void(self, invoice: Invoice, previous_ids: Mapping[str, str]) -> None:
        """End what Stripe holds for ours: a draft is deleted, what is open or uncollectible is voided.

        Looks, acts, and looks again until nothing is left to do, so it can be killed anywhere and begun again. Nothing
        there, or void already, is well. Raises `Conflict` for a paid one, before anything was ended; otherwise as
        `export` does.
        """
        self._api()  # without a key nothing at all happens
        held = self._held(invoice, previous_ids.get(invoice.id))
        for theirs in held:
            self._not_paid(invoice, theirs)
        for theirs in held:
            self._end(invoice, theirs)

    def customer(self, tenant: Tenant) -> str:
        """The id of the tenant's customer in Stripe, found or made on demand. Raises `ExportError`."""
        self._api()  # without a key nothing at all happens
        return tenant.stripe_customer_id or self._customer(tenant)

    def look(self, invoice: Invoice) -> ProviderInvoice | None:
        """What Stripe has now for an exported invoice of ours; None: it has none (any more). Raises `ExportError`."""
        theirs = None if invoice.stripe_invoice_id is None else self._retrieve(invoice.stripe_invoice_id)
        return None if theirs is None else _state(theirs)

    def held(self, invoices: Sequence[Invoice]) -> dict[str, ProviderInvoice]:
        """The same for many, each compared line by line with what we sent: by our id. Raises `ExportError`.

        An invoice that Stripe does not have (any more) is left out.
        """
        found = {}
        for invoice in invoices:
            if (theirs := self.look(invoice)) is not None:
                items, made = items_of(invoice), self._items(theirs.id)
                missing = [f"line {item.id} not at all" for item in items if item.id not in made]
                faults = tuple(missing + _item_faults(items, made))
                found[invoice.id] = msgspec.structs.replace(theirs, faults=faults[:MAX_FAULTS])
        return found

    def credit(self, note: CreditNote, invoice: Invoice) -> str:
        """The id of the one credit note that Stripe has for ours, made now or by an earlier attempt.

        What is not paid yet lowers what the invoice asks for; what is paid goes the note's way. Raises as `export`.
        """
        self._api()  # without a key nothing at all happens
        theirs = None if invoice.stripe_invoice_id is None else self._retrieve(invoice.stripe_invoice_id)
        if theirs is None or theirs.status == "void":
            raise Conflict(f"Stripe has no standing invoice for {invoice.id} that a credit note could be of")
        found = self._find_note(note, theirs.id) or self._make_note(note, theirs)
        if (found.total, found.currency) != (note.amount_minor, note.currency):
            raise StripeMismatch(
                f"Stripe's credit note {found.id} is over {found.total} minor units of {found.currency}, ours over "
                f"{note.amount_minor} of {note.currency}"
            )
        return found.id

    def void_credit(self, note: CreditNote, invoice: Invoice) -> None:
        """Void what Stripe holds for our note. Stripe refuses where the invoice is not open any more. Raises as
        `export`; nothing there, or void already, is well.
        """
        self._api()
        standing = invoice.stripe_invoice_id and self._find_note(note, invoice.stripe_invoice_id)
        if not standing:
            return
        id = standing.id

        def find() -> stripe.CreditNote | None:
            now = self._call(lambda: self._api().credit_notes.retrieve(id))
            return now if now.status == "void" else None

        def create(key: str) -> stripe.CreditNote:
            return self._api().credit_notes.void_credit_note(id, {}, {"idempotency_key": key})

        self._make("void of a credit note", _key("void-credit-note", id), find, create)

    # -- the steps ------------------------------------------------------------------------------------------------

    @staticmethod
    def _exportable(invoice: Invoice) -> None:
        total = sum(line.amount_minor for line in invoice.lines)
        if total != invoice.total_minor:
            raise StripeMismatch(
                f"the lines of invoice {invoice.id} sum to {total}, its total is {invoice.total_minor}"
            )
        if total < 0:
            raise StripeMismatch(
                f"invoice {invoice.id} is negative: Stripe takes that as a credit note, not an invoice"
            )

    def _customer(self, tenant: Tenant) -> str:
        """The tenant's customer, found by metadata or made."""

        def find() -> stripe.Customer | None:
            clause = f"metadata['{TENANT_KEY}']:{_quoted(tenant.id)}"
            found = self._call(lambda: self._api().customers.search({"query": clause, "limit": 100})).data
            if not found:  # the search index is a minute behind, lists are not
                since = int(self._clock_s()) - RECENT_S
                recent = self._call(
                    lambda: list(
                        self._api().customers.list({"created": {"gte": since}, "limit": 100}).auto_paging_iter()
                    )
                )
                found = [customer for customer in recent if _tag(customer, TENANT_KEY) == tenant.id]
            return min(found, key=lambda customer: (customer.created, customer.id), default=None)

        def create(key: str) -> stripe.Customer:
            # Without the name, which may change: two makers' parameters must be equal, or their one key is none.
            return self._api().customers.create({"metadata": {TENANT_KEY: tenant.id}}, {"idempotency_key": key})

        def again(made: stripe.Customer) -> stripe.Customer | None:
            return self._there(lambda: self._api().customers.retrieve(made.id))

        customer = find() or self._make("customer", _key("customer", tenant.id), find, create, again)
        if not customer.name:
            self._call(lambda: self._api().customers.update(customer.id, {"name": tenant.name[:256]}))
        return customer.id

    def _find_invoice(self, invoice: Invoice, known: str | None) -> stripe.Invoice | None:
        """By the id an earlier export told us, else by metadata in the search index."""
        if known is not None and (found := self._retrieve(known)) is not None:
            return found
        clause = f"metadata['{INVOICE_KEY}']:{_quoted(invoice.id)}"
        hits = self._call(lambda: self._api().invoices.search({"query": clause, "limit": 100})).data
        fresh = (self._retrieve(hit.id) for hit in hits)  # the index may be behind, and show what is deleted
        return self._only(invoice, [hit for hit in fresh if hit is not None])

    def _draft(self, invoice: Invoice, tenant: Tenant, customer: str) -> stripe.Invoice:
        """The invoice in the customer's list, which is never behind, else a new draft."""

        def find() -> stripe.Invoice | None:
            listed = self._call(
                lambda: list(self._api().invoices.list({"customer": customer, "limit": 100}).auto_paging_iter())
            )
            return self._only(invoice, [hit for hit in listed if _tag(hit, INVOICE_KEY) == invoice.id])

        def create(key: str) -> stripe.Invoice:
            asked: stripe.params.InvoiceCreateParams = {
                "customer": customer,
                "currency": invoice.currency,
                "auto_advance": False,
                "pending_invoice_items_behavior": "exclude",
                "metadata": {INVOICE_KEY: invoice.id, TENANT_KEY: tenant.id},
            }
            if _taxed_there(invoice):
                asked["automatic_tax"] = {"enabled": True}
            return self._api().invoices.create(asked, {"idempotency_key": key})

        def again(made: stripe.Invoice) -> stripe.Invoice | None:
            return self._retrieve(made.id)

        return find() or self._make("invoice", _key("invoice", invoice.id, customer), find, create, again)

    @staticmethod
    def _only(invoice: Invoice, found: Sequence[stripe.Invoice]) -> stripe.Invoice | None:
        """The one that counts: there is at most one that is not void."""
        standing = [hit for hit in found if hit.status != "void"]
        if len(standing) > 1:
            names = ", ".join(sorted(hit.id for hit in standing))
            raise StripeMismatch(f"Stripe holds more than one invoice for {invoice.id}: {names}")
        if not standing and found:
            raise _voided(invoice, found[0])
        return standing[0] if standing else None

    def _items(self, invoice_id: str) -> dict[str, list[stripe.InvoiceItem]]:
        """What stands on a Stripe invoice: our line id ('' for foreign items) → items."""
        listed = self._call(
            lambda: list(self._api().invoice_items.list({"invoice": invoice_id, "limit": 100}).auto_paging_iter())
        )
        found: dict[str, list[stripe.InvoiceItem]] = {}
        for item in listed:
            found.setdefault(_tag(item, LINE_KEY), []).append(item)
        return found

    def _add_items(
        self,
        invoice: Invoice,
        draft: stripe.Invoice,
        items: Sequence[Item],
        made: dict[str, list[stripe.InvoiceItem]],
    ) -> None:
        """Add what is missing; `made` grows by it."""
        for item in items:
            if item.id not in made:
                made[item.id] = [self._add_item(invoice, draft, item)]

    def _add_item(self, invoice: Invoice, draft: stripe.Invoice, item: Item) -> stripe.InvoiceItem:
        def find() -> stripe.InvoiceItem | None:
            return next(iter(self._items(draft.id).get(item.id, [])), None)

        def create(key: str) -> stripe.InvoiceItem:
            asked: stripe.params.InvoiceItemCreateParams = {
                "customer": _id(draft.customer),
                "invoice": draft.id,
                "currency": invoice.currency,
                "amount": item.amount_minor,
                "description": item.description,
                "period": {"start": item.start_s, "end": item.end_s},
                "metadata": {LINE_KEY: item.id},
            }
            if _taxed_there(invoice):
                asked["tax_behavior"] = "exclusive"
            return self._api().invoice_items.create(asked, {"idempotency_key": key})

        def again(made: stripe.InvoiceItem) -> stripe.InvoiceItem | None:
            return self._there(lambda: self._api().invoice_items.retrieve(made.id))

        return self._make("invoice item", _key("item", draft.id, item.id), find, create, again)

    def _finalize(
        self,
        invoice: Invoice,
        draft_id: str,
        items: Sequence[Item],
        made: Mapping[str, list[stripe.InvoiceItem]],
    ) -> stripe.Invoice:
        """Finalize a draft that holds exactly our items and our total."""
        draft = self._retrieve(draft_id)
        if draft is None:
            raise StripeMismatch(f"the draft {draft_id} was deleted in Stripe while it was exported: export again")
        if draft.status == "draft":
            self._check_items(invoice, draft, items, made)
            self._check_total(invoice, draft)

        def find() -> stripe.Invoice | None:
            now = self._retrieve(draft_id)
            return None if now is None or now.status == "draft" else now

        def create(key: str) -> stripe.Invoice:
            return self._api().invoices.finalize_invoice(draft_id, {"auto_advance": False}, {"idempotency_key": key})

        if draft.status != "draft":
            return draft
        return self._make("finalization", _key("finalize", draft_id), find, create)

    @staticmethod
    def _check_items(
        invoice: Invoice,
        draft: stripe.Invoice,
        items: Sequence[Item],
        made: Mapping[str, list[stripe.InvoiceItem]],
    ) -> None:
        """The draft holds each of our items once, at our amount, and nothing else."""
        faults = _item_faults(items, made)
        if draft.currency != invoice.currency:
            faults.append(f"currency {draft.currency} instead of {invoice.currency}")
        if faults:
            raise StripeMismatch(
                f"the draft {draft.id} in Stripe holds {'; '.join(faults[:5])}. It was not finalized: "
                "delete the draft in Stripe and export again"
            )

    @staticmethod
    def _check_total(invoice: Invoice, theirs: stripe.Invoice) -> None:
        if theirs.status == "void":
            raise _voided(invoice, theirs)
        same_tax = theirs.automatic_tax.enabled == _taxed_there(invoice)
        if same_tax and (_net(theirs), theirs.currency) == (invoice.total_minor, invoice.currency):
            return
        ours = f"{format_minor(invoice.total_minor, invoice.currency)} {invoice.currency}"
        was = "It was not finalized." if theirs.status == "draft" else "It is finalized already."
        raise StripeMismatch(
            f"Stripe's total of {theirs.id} is {_net(theirs)} minor units of {theirs.currency}, ours is {ours} "
            f"(a discount or tax set in Stripe?). {was}"
        )

    def _find_note(self, note: CreditNote, invoice_id: str) -> stripe.CreditNote | None:
        """Ours among the notes of a Stripe invoice, a list that is never behind; void ones do not count."""
        listed = self._call(
            lambda: list(self._api().credit_notes.list({"invoice": invoice_id, "limit": 100}).auto_paging_iter())
        )
        ours = [one for one in listed if _tag(one, NOTE_KEY) == note.id and one.status != "void"]
        if len(ours) > 1:
            names = ", ".join(sorted(one.id for one in ours))
            raise StripeMismatch(f"Stripe holds more than one credit note for {note.id}: {names}; void one there")
        return ours[0] if ours else None

    def _make_note(self, note: CreditNote, theirs: stripe.Invoice) -> stripe.CreditNote:
        def create(key: str) -> stripe.CreditNote:
            asked: stripe.params.CreditNoteCreateParams = {
                "invoice": theirs.id,
                "amount": note.amount_minor,
                "memo": f"{note.number}: {note.reason}"[:TEXT_MAX],
                "metadata": {NOTE_KEY: note.id},
            }
            if paid := note.amount_minor - min(note.amount_minor, theirs.amount_remaining):
                match note.way:
                    case Way.BALANCE:
                        asked["credit_amount"] = paid
                    case Way.REFUND:
                        asked["refund_amount"] = paid
                    case Way.OUT_OF_BAND:
                        asked["out_of_band_amount"] = paid
            return self._api().credit_notes.create(asked, {"idempotency_key": key})

        def find() -> stripe.CreditNote | None:
            return self._find_note(note, theirs.id)

        self._make("credit note", _key("credit-note", note.id), find, create)
        made = find()  # one, also where an attempt that was given up for lost came through after all
        if made is None:
            raise StripeUnavailable("the credit note is not in Stripe's list yet; this can be begun again")
        return made

    # -- the way back ---------------------------------------------------------------------------------------------

    def _held(self, invoice: Invoice, known: str | None) -> list[stripe.Invoice]:
        """All that Stripe has for ours, whatever its status and whoever its customer is.

        The search index may be a minute behind; the list of what was made lately is not.
        """
        if known is not None and (found := self._retrieve(known)) is not None:
            return [found]
        clause = f"metadata['{INVOICE_KEY}']:{_quoted(invoice.id)}"
        hits = self._call(lambda: self._api().invoices.search({"query": clause, "limit": 100})).data
        since = int(self._clock_s()) - RECENT_S
        recent = self._call(
            lambda: list(self._api().invoices.list({"created": {"gte": since}, "limit": 100}).auto_paging_iter())
        )
        ids = dict.fromkeys(hit.id for hit in [*hits, *recent] if _tag(hit, INVOICE_KEY) == invoice.id)
        fresh = (self._retrieve(id) for id in ids)
        return [theirs for theirs in fresh if theirs is not None]

    def _end(self, invoice: Invoice, theirs: stripe.Invoice) -> None:
        """Delete or void one, and see that it is so: what it was may have changed since it was looked at."""
        told: ExportError = StripeUnavailable(f"{theirs.id} keeps changing in Stripe; this can be begun again")
        for _ in range(VOID_LOOKS):
            now = self._retrieve(theirs.id)
            if now is None or now.status == "void":
                return
            self._not_paid(invoice, now)
            if now.status == "paid":
                return
            try:
                self._delete(now.id) if now.status == "draft" else self._void(now.id)
            except StripeRefused as refused:
                told = refused
        raise told

    @staticmethod
    def _not_paid(invoice: Invoice, theirs: stripe.Invoice) -> None:
        """Stripe pays an invoice of 0 by itself: nobody did, so it is no hindrance."""
        if theirs.status == "paid" and theirs.total != 0:
            raise Conflict(
                f"invoice {invoice.id} is paid in Stripe ({theirs.id}), so it cannot be voided: what was paid is "
                "corrected by a credit note"
            )

    def _delete(self, draft_id: str) -> None:
        self._call(lambda: self._api().invoices.delete(draft_id))  # Stripe takes no key here: deleting twice is once

    def _void(self, invoice_id: str) -> None:
        def find() -> stripe.Invoice | None:
            now = self._retrieve(invoice_id)
            return now if now is not None and now.status in ("void", "paid") else None

        def create(key: str) -> stripe.Invoice:
            return self._api().invoices.void_invoice(invoice_id, {}, {"idempotency_key": key})

        self._make("void", _key("void", invoice_id), find, create)


def _item_faults(items: Sequence[Item], made: Mapping[str, list[stripe.InvoiceItem]]) -> list[str]:
    """What stands on a Stripe invoice beside each of our items once, at our amount."""
    wanted = {item.id: item.amount_minor for item in items}
    faults = [f"{len(made[ours])} item(s) that are not ours" for ours in made if ours not in wanted]
    faults += [f"line {ours} {len(theirs)} times" for ours, theirs in made.items() if ours and len(theirs) > 1]
    faults += [
        f"line {ours} at {theirs[0].amount} instead of {wanted[ours]}"
        for ours, theirs in made.items()
        if ours in wanted and theirs[0].amount != wanted[ours]
    ]
    return faults


def _state(theirs: stripe.Invoice) -> ProviderInvoice:
    total_minor = _net(theirs)
    return ProviderInvoice(
        id=theirs.id,
        status=str(theirs.status),
        total_minor=total_minor,
        attempts=theirs.attempt_count or 0,
        tax_minor=theirs.total - total_minor,
        credited_minor=(theirs.pre_payment_credit_notes_amount or 0) + (theirs.post_payment_credit_notes_amount or 0),
    )


def _taxed_there(invoice: Invoice) -> bool:
    """Whether Stripe Tax is to find its tax."""
    return invoice.terms.tax.mode is TaxMode.STRIPE


def _net(theirs: stripe.Invoice) -> int:
    """The total without the tax that Stripe Tax added: what is to be ours."""
    if theirs.automatic_tax.enabled and theirs.total_excluding_tax is not None:
        return theirs.total_excluding_tax
    return theirs.total


def _voided(invoice: Invoice, theirs: stripe.Invoice) -> Conflict:
    return Conflict(
        f"invoice {invoice.id} was voided in Stripe ({theirs.id}), so it cannot be exported: void it here too, then "
        "its usage can be invoiced again"
    )


def _tag(thing: Any, key: str) -> str:
    """A metadata value, or the empty string."""
    return str(thing.metadata[key]) if thing.metadata is not None and key in thing.metadata else ""


def _id(reference: Any) -> str:
    """The id of a field that may be expanded."""
    return reference if isinstance(reference, str) else str(reference.id)
