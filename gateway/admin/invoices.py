"""Invoices: cut by watermark, finalized, exported, voided."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Router, get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from billing.errors import PeriodNotClosed
from billing.gateways import GatewayRow
from billing.invoice import Invoice, InvoiceLine, InvoiceStatus, LineKind
from billing.money import format_exact, format_minor, format_price, minor_digits, parse_exact
from billing.service import Billing
from billing.terms import CommitmentPart, TaxMode
from billing.tiers import UNITS, PriceModel, TokenClass
from billing.wording import describe
from gateway.admin.body import Fault
from gateway.admin.fields import Text, TimeText, time_fault
from gateway.admin.idempotency import Once
from gateway.admin.paging import DEFAULT_LIMIT, After, Limit, Page, page
from gateway.admin.state import Admin
from gateway.admin.times import format_time, parse_time
from gateway.admin.watermark import FLUSH_S, Watermark, watermark
from gateway.errors import Conflict

MAX_RETRY_AFTER_S = 3600


class InvoiceCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Cut an invoice over the usage of a period, from its start up to, and without, its end."""

    tenant: Text
    period_start: TimeText
    period_end: TimeText

    def faults(self) -> list[Fault]:
        faults = time_fault("period_start", self.period_start) + time_fault("period_end", self.period_end)
        if not faults and parse_time(self.period_start) >= parse_time(self.period_end):
            faults.append(("period_end", "must be later than period_start"))
        return faults


class TierView(msgspec.Struct, kw_only=True):
    """`price` is for `per` units, a package's for one package; `up_to` counts units of the period, null: to no end."""

    price: str
    up_to: int | None


class PartView(msgspec.Struct, kw_only=True):
    """A stretch of one billing period of `period_us` microseconds, in which a minimum of `amount` was in force."""

    amount: str
    start: str
    end: str
    start_us: int
    end_us: int
    period_us: int


class LineView(msgspec.Struct, kw_only=True):
    """Units of one class at one price: all that it takes to compute the line again. `amount` is `exact` rounded.

    A line without tiers: `exact` = `quantity` x `unit_price` / `per`. With tiers: what `total` units come to, with
    `position` units of the period before them, less `booked`; the period's first `allowance` units are free, and tiers
    and packages count those after them. A minimum: `minimum` less `base`, or 0, less `booked`. A discount: minus `rate`
    percent of `base`, or minus the lesser of `base` and `fixed` x `share`; less `booked`. A commitment: the sum of the
    parts' `amount` x (end - start) / `period_us`, less `base`, or 0; less `booked`. A carry: the greater of minus
    `base` and minus the sum of all lines before it. A tax: `rate` percent of `base`, which is the sum of the amounts of
    all lines that are no taxes. What does not end as a decimal number is a fraction, as `1/3`.
    """

    id: str
    kind: Annotated[str, Meta(description=", ".join(LineKind))]
    description: str
    model: str
    adapter: str
    endpoint: Annotated[str | None, Meta(description="whose own price it is")]
    token_class: Annotated[str | None, Meta(description=", ".join(TokenClass))]
    price: Annotated[str | None, Meta(description="id in the price book")]
    quantity: int
    unit: Annotated[str | None, Meta(description="what quantity, position, total, allowance and tiers count")]
    per: Annotated[int, Meta(description="how many units a price is for")]
    unit_price: Annotated[str | None, Meta(description="null where tiers say it, and where nothing is counted")]
    price_model: Annotated[str, Meta(description=", ".join(PriceModel))]
    tiers: list[TierView]
    package_size: int
    allowance: int
    minimum: str | None
    position: int
    total: int
    booked: Annotated[str, Meta(description="of the same period and price on earlier invoices")]
    base: str
    term: Annotated[str | None, Meta(description="id of the discount")]
    name: Annotated[str | None, Meta(description="of the discount or the tax")]
    rate: Annotated[str | None, Meta(description="percent")]
    fixed: Annotated[str | None, Meta(description="a discount's amount for a whole period")]
    share: Annotated[str, Meta(description="how many whole periods the invoice's is")]
    parts: list[PartView]
    exact: str
    amount: str
    period_start: str
    period_end: str
    late_of: Annotated[str | None, Meta(description="the invoice these units turned up too late for")]


class Rounding(msgspec.Struct, kw_only=True):
    """How exact amounts become amounts.

    The sum of the exact amounts is rounded half to even. Each line is rounded down, and what is missing to that sum is
    given in smallest units, one each, to the lines with the largest remainders, of equal ones to the first. Taxes stand
    apart: each is computed from the rounded sum of the other lines and rounded alone, half to even.
    """

    digits: Annotated[int, Meta(description="decimals of the currency's smallest unit")]
    total: str = "half_even"
    lines: str = "largest_remainder"


class InvoiceView(msgspec.Struct, kw_only=True):
    """An invoice. `exact_total` is before the one rounding; `total` after it, and the sum of the lines' amounts."""

    id: str
    tenant: str
    currency: str
    status: Annotated[str, Meta(description=", ".join(InvoiceStatus))]
    period_start: str
    period_end: str
    lines: list[LineView]
    rounding: Rounding
    exact_total: str
    subtotal: Annotated[str, Meta(description="total without tax")]
    tax: str
    total: str
    credited: Annotated[str, Meta(description="what credit notes took back")]
    due: Annotated[str, Meta(description="still to be paid: total and provider_tax, less credited")]
    tax_mode: Annotated[str, Meta(description=", ".join(TaxMode))]
    provider_tax: Annotated[str, Meta(description="what Stripe Tax added, on top of total")]
    true_up: Annotated[
        str, Meta(description="what its lines, without carry and tax, ask beyond what the ledger charged on the way")
    ]
    automatic: Annotated[bool, Meta(description="cut by the clock")]
    requests: int
    events_digest: Annotated[str, Meta(description="SHA-256 over the events the invoice is cut from")]
    stripe_invoice_id: str | None
    created_at: str
    finalized_at: str | None
    exported_at: str | None
    paid_at: str | None
    voided_at: str | None


def show_invoice(invoice: Invoice, billing: Billing) -> InvoiceView:
    credited = sum(note.amount_minor for note in billing.notes_of(invoice.id))
    return InvoiceView(
        id=invoice.id,
        tenant=invoice.tenant,
        currency=invoice.currency,
        status=invoice.status,
        period_start=format_time(invoice.period_start_us),
        period_end=format_time(invoice.period_end_us),
        lines=[show_line(line, invoice.currency) for line in invoice.lines],
        rounding=Rounding(digits=minor_digits(invoice.currency)),
        exact_total=format_exact(invoice.total_femto),
        subtotal=format_minor(invoice.total_minor - invoice.tax_minor, invoice.currency),
        tax=format_minor(invoice.tax_minor, invoice.currency),
        total=format_minor(invoice.total_minor, invoice.currency),
        credited=format_minor(credited, invoice.currency),
        due=format_minor(invoice.due_minor(credited), invoice.currency),
        tax_mode=invoice.terms.tax.mode,
        provider_tax=format_minor(invoice.provider_tax_minor, invoice.currency),
        true_up=format_exact(parse_exact(invoice.true_up)),
        automatic=invoice.automatic,
        requests=invoice.event_count,
        events_digest=invoice.events_digest,
        stripe_invoice_id=invoice.stripe_invoice_id,
        created_at=format_time(invoice.created_us),
        finalized_at=show_time(invoice.finalized_us),
        exported_at=show_time(invoice.exported_us),
        paid_at=show_time(invoice.paid_us),
        voided_at=show_time(invoice.voided_us),
    )


def show_line(line: InvoiceLine, currency: str) -> LineView:
    unit = None if line.token_class is None else UNITS[line.token_class]
    adapter = line.kind is LineKind.ADAPTER  # counted in microseconds of its period
    return LineView(
        id=line.id,
        kind=line.kind,
        description=describe(line, currency),
        model=line.model,
        adapter=line.adapter,
        endpoint=line.endpoint or None,
        token_class=line.token_class,
        price=line.price_id or None,
        quantity=line.quantity,
        unit="microsecond" if adapter else unit.base if unit else None,
        per=line.total if adapter else unit.per if unit else 1,
        unit_price=None if line.tiers or unit is None else format_price(line.unit_price_nano),
        price_model=line.price_model,
        tiers=[TierView(price=format_price(tier.price_nano), up_to=tier.up_to) for tier in line.tiers],
        package_size=line.package_size,
        allowance=line.allowance,
        minimum=line.minimum or None,
        position=line.position,
        total=line.total,
        booked=format_exact(parse_exact(line.booked)),
        base=format_exact(parse_exact(line.base)),
        term=line.term or None,
        name=line.name or None,
        rate=line.rate or None,
        fixed=line.fixed or None,
        share=line.share,
        parts=[_show_part(part) for part in line.parts],
        exact=format_exact(line.amount_femto),
        amount=format_minor(line.amount_minor, currency),
        period_start=format_time(line.period_start_us),
        period_end=format_time(line.period_end_us),
        late_of=line.late_of or None,
    )


def _show_part(part: CommitmentPart) -> PartView:
    return PartView(
        amount=part.amount,
        start=format_time(part.start_us),
        end=format_time(part.end_us),
        start_us=part.start_us,
        end_us=part.end_us,
        period_us=part.period_us,
    )


def show_time(us: int | None) -> str | None:
    return None if us is None else format_time(us)


@post("/invoices")
async def create_invoice(data: JSONBody[InvoiceCreate], admin: Admin, idempotency: Once) -> InvoiceView:
    """Draft an invoice. 409 with `retry-after` while usage of the period may still be on its way."""
    end_us = parse_time(data.period_end)
    await admin.read(admin.flush, FLUSH_S)
    stored = await watermark(admin)
    try:
        invoice = await admin.read(
            admin.billing.draft_invoice,
            data.tenant,
            parse_time(data.period_start),
            end_us,
            usage=admin.usage,
            watermark_us=stored.us,
            idempotency=idempotency,
        )
    except PeriodNotClosed as error:
        told = _not_closed(end_us, admin.clock_us(), stored, str(error))
        raise Conflict(told, code="period_not_closed", headers=_retry(end_us - stored.us)) from None
    return show_invoice(invoice, admin.billing)


def _not_closed(end_us: int, now_us: int, stored: Watermark, reason: str) -> str:
    """What the period waits for: the clock, another gateway, or usage that is on its way."""
    if end_us > now_us:
        return f"the period is not over: it ends at {format_time(end_us)}, and it is {format_time(now_us)}"
    if stored.us < end_us and stored.held_by:
        return _waits_for(stored.held_by)
    return reason


def _waits_for(row: GatewayRow) -> str:
    return (
        f"usage of this period may still be on its way: the gateway {row.id!r} has stored what began before "
        f"{format_time(row.watermark_us)} and was last seen at {format_time(row.seen_us)}; if it is down, start it "
        "again, and if it is gone for good, remove it"
    )


def _retry(missing_us: int) -> dict[str, str]:
    seconds = -(-missing_us // 1_000_000)
    return {"retry-after": str(min(max(seconds, 1), MAX_RETRY_AFTER_S))}


@get("/invoices", sync_to_thread=True)
def list_invoices(
    admin: Admin,
    tenant: Annotated[str | None, QueryParameter(description="Only this tenant's.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Page[InvoiceView]:
    """List invoices in order of creation."""
    found = admin.billing.invoices(tenant, limit=limit + 1, after=after)
    return page(found, limit, lambda invoice: show_invoice(invoice, admin.billing), lambda invoice: invoice.id)


@get("/invoices/{invoice_id:str}", sync_to_thread=True)
def get_invoice(invoice_id: FromPath[str], admin: Admin) -> InvoiceView:
    """Show one invoice."""
    return show_invoice(admin.billing.invoice(invoice_id), admin.billing)


@post("/invoices/{invoice_id:str}/finalize", status_code=200, sync_to_thread=True)
def finalize_invoice(invoice_id: FromPath[str], admin: Admin, idempotency: Once) -> InvoiceView:
    """Make a draft final; from here on it can only be exported or voided."""
    return show_invoice(admin.billing.finalize_invoice(invoice_id, idempotency=idempotency), admin.billing)


@post("/invoices/{invoice_id:str}/export", status_code=200, sync_to_thread=True)
def export_invoice(invoice_id: FromPath[str], admin: Admin, idempotency: Once) -> InvoiceView:
    """Send a final invoice to Stripe; safe to repeat after any failure. 409 when STRIPE_API_KEY is not set."""
    return show_invoice(
        admin.billing.export_invoice(invoice_id, admin.exporter, idempotency=idempotency), admin.billing
    )


@post("/invoices/{invoice_id:str}/void", status_code=200, sync_to_thread=True)
def void_invoice(invoice_id: FromPath[str], admin: Admin, idempotency: Once) -> InvoiceView:
    """Void an invoice, in Stripe first if its export has begun; its usage can be invoiced again. Safe to repeat.

    409 when it is paid in Stripe, or when Stripe must be asked and STRIPE_API_KEY is not set.
    """
    return show_invoice(admin.billing.void_invoice(invoice_id, admin.exporter, idempotency=idempotency), admin.billing)


router = Router(
    "/",
    route_handlers=[create_invoice, list_invoices, get_invoice, finalize_invoice, export_invoice, void_invoice],
    tags=["invoices"],
)
