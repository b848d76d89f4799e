"""Reconciliation: journalled engine counts = spool + usage store = ledger = invoice lines = Stripe, or where they part.

Pure: rows in, a report out. Does not know: where any of the rows are kept.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

import msgspec

from billing.invoice import Invoice, InvoiceStatus, owner
from billing.ledger import Unrated, UsageRated
from billing.line import UNBOOKED, InvoiceLine, LineKind
from billing.money import parse_exact
from billing.provider import ProviderInvoice, status_fault
from billing.rating import quantities
from billing.tiers import REQUIRED
from metering.counts import CountRow, Drift, hour_of
from metering.events import UsageEvent, content_hash

SUMS_AND_EVENTS = "hourly sums and events"
LINES_AND_LEDGER = "invoice lines and ledger"
INVOICE_AND_PROVIDER = "invoice and payment provider"
IDS_SHOWN = 20  # event ids named per difference
T = TypeVar("T")
Cell = tuple[str, str, int]  # tenant, model, first microsecond of the hour in which the requests began


class Tokens(msgspec.Struct, frozen=True, order=True):
    """Sums of one cell or invoice."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.requests + other.requests,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
        )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant, model and hour, as each of the books has it."""

    tenant: str
    model: str
    hour_us: int
    journal: Tokens | None  # None: not compared, the hour has requests under way or there is no journal
    stored: Tokens
    rated: Tokens
    invoiced: Tokens
    amount_femto: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two books part. `between` names them; `event_ids` are the first that only one of them has."""

    between: str
    tenant: str
    model: str = ""
    hour_us: int | None = None
    invoice_id: str = ""
    left: str
    right: str
    event_ids: list[str] = []


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison that could not be made, and why: nothing is known to part there, or to agree."""

    between: str
    reason: str
    passing: bool = False  # it may be possible a little later


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's events whose hashes were checked, and the first at which the chain does not hold."""

    from_seq: int
    to_seq: int
    broken_at: int | None = None
    reason: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`ok` when all was compared and there is no difference."""

    start_us: int
    end_us: int
    chain: Chain
    rows: list[Row]
    differences: list[Difference]
    missing: list[Missing] = []
    reaching: dict[str, tuple[int, int]] = {}  # invoice whose lines reach out of the range, so not compared → from, to

    @property
    def ok(self) -> bool:
        return not self.differences and not self.missing


class Charged(msgspec.Struct, frozen=True):
    """A charge and its number in the ledger."""

    seq: int
    rated: UsageRated


class Sources(msgspec.Struct, kw_only=True):
    """What is compared, all of it for requests that began in [start_us, end_us), whole hours."""

    start_us: int
    end_us: int
    chain: Chain
    events: Iterable[UsageEvent]  # spool and usage store; one that is in both may come twice
    charged: Sequence[Charged]
    unrated: Sequence[Unrated]
    invoices: Mapping[str, Sequence[Invoice]]  # by tenant, all of them in the order of their cuts
    conflicts: Sequence[str] = ()  # ids that the usage store has with more than one content; `events` has one of them
    journal: Iterable[CountRow] | None = None
    gateway: str = ""  # whose journal it is
    open_from_us: int | None = None  # the oldest request under way: hours from its own on are not closed
    documents: Mapping[str, str] = {}  # invoice id → the hash of its document as it is made now
    unsound: Mapping[str, str] = {}  # invoice id → why its signature does not hold
    credited: Mapping[str, int] = {}  # by invoice: what its standing credit notes sum to, in minor units
    drifts: Sequence[Drift] = ()  # hours whose sums are not those of their events
    provider: Mapping[str, ProviderInvoice | None] = {}  # invoices to compare → what it has, None: it has none
    missing: Sequence[Missing] = ()  # what could not be read


def compare(sources: Sources) -> Report:
    """Every cell of every book, and every place where two of them part."""
    charges = {charge.rated.event_id: charge for charge in sources.charged}
    stored, conflicts = _stored(sources.events, {id: charge.rated.event_hash for id, charge in charges.items()})
    stored_cells, rated_cells, invoiced_cells, amounts = _cells(sources, stored)
    journal = _journal_cells(sources)
    rows = []
    for cell in sorted({*stored_cells, *rated_cells, *(journal or {})}):
        closed = journal is not None and (sources.open_from_us is None or cell[2] < hour_of(sources.open_from_us))
        rows.append(
            Row(
                tenant=cell[0],
                model=cell[1],
                hour_us=cell[2],
                journal=journal.get(cell, Tokens()) if journal is not None and closed else None,
                stored=stored_cells[cell],
                rated=rated_cells[cell],
                invoiced=invoiced_cells[cell],
                amount_femto=amounts[cell],
            )
        )
    differences = [
        *_chain_difference(sources.chain),
        *_conflicts({*conflicts, *sources.conflicts}, stored),
        *map(_drift_difference, sources.drifts),
        *_journal_differences(rows, _own_cells(sources, stored)),
        *_ledger_differences(sources, stored, charges),
        *_invoice_differences(sources),
    ]
    return Report(
        start_us=sources.start_us,
        end_us=sources.end_us,
        chain=sources.chain,
        rows=rows,
        differences=differences,
        missing=list(sources.missing),
        reaching=_reaching(sources),
    )


def join(start_us: int, end_us: int, parts: Sequence[Report], missing: Iterable[Missing]) -> Report:
    """One report of slices of [start_us, end_us), and of what no slice could compare. A slice's rows are its own; what
    more than one of them found is told once.

    An invoice whose lines lie whole in the range and in no slice was compared with its document, its signature and the
    provider, but not line by line: that is told too.
    """
    broken = min((part.chain for part in parts if part.chain.broken_at is not None), key=_where, default=None)
    chain = Chain(
        from_seq=min((part.chain.from_seq for part in parts), default=0),
        to_seq=max((part.chain.to_seq for part in parts), default=0),
        broken_at=None if broken is None else broken.broken_at,
        reason="" if broken is None else broken.reason,
    )
    reaching = {id: span for part in parts for id, span in part.reaching.items()}
    torn = [id for id, span in reaching.items() if start_us <= span[0] and span[1] <= end_us]
    found = [*missing, *(one for part in parts for one in part.missing)]
    if torn:
        reason = f"{len(torn)} invoices have more requests than are compared at once, the first {min(torn)}"
        found.append(Missing(between=LINES_AND_LEDGER, reason=reason))
    return Report(
        start_us=start_us,
        end_us=end_us,
        chain=chain,
        rows=[row for part in parts for row in part.rows],
        differences=_once(one for part in parts for one in part.differences),
        missing=_once(found),
        reaching={id: span for id, span in reaching.items() if id not in torn},
    )


def _where(chain: Chain) -> int:
    return chain.broken_at or 0


def _once(found: Iterable[T]) -> list[T]:
    kept: list[T] = []
    for one in found:
        if one not in kept:
            kept.append(one)
    return kept


def _reaching(sources: Sources) -> dict[str, tuple[int, int]]:
    """Invoices that touch the range, have lines and reach out of it: from when to when they are."""
    found = {}
    for invoice in itertools.chain.from_iterable(sources.invoices.values()):
        if invoice.status is InvoiceStatus.VOID:
            continue
        start_us = min([invoice.period_start_us, *(line.period_start_us for line in invoice.lines)])
        end_us = max([invoice.period_end_us, *(line.period_end_us for line in invoice.lines)])
        touches = start_us < sources.end_us and sources.start_us < end_us
        if touches and not (sources.start_us <= start_us and end_us <= sources.end_us):
            found[invoice.id] = (start_us, end_us)
    return found


def _stored(events: Iterable[UsageEvent], standing: Mapping[str, str]) -> tuple[dict[str, UsageEvent], set[str]]:
    """The one content of each id: what the ledger charged if it is there, else the first; and which ids have more."""
    kept: dict[str, tuple[str, UsageEvent]] = {}
    conflicts: set[str] = set()
    for event in events:
        digest = content_hash(event)
        before = kept.setdefault(event.event_id, (digest, event))
        if before[0] != digest:
            conflicts.add(event.event_id)
            if digest == standing.get(event.event_id):
                kept[event.event_id] = (digest, event)
    return {id: event for id, (_, event) in kept.items()}, conflicts


def _chain_difference(chain: Chain) -> Iterable[Difference]:
    if chain.broken_at is not None:
        yield Difference(
            between="ledger and its hash chain", tenant="", left=f"event {chain.broken_at}", right=chain.reason
        )


def _conflicts(ids: Iterable[str], stored: Mapping[str, UsageEvent]) -> Iterable[Difference]:
    """Ids under which more than one content came; the first stands, but somebody should look why."""
    apart: dict[Cell, list[str]] = defaultdict(list)
    for id in ids:
        apart[_cell(stored[id]) if id in stored else ("", "", -1)].append(id)
    for (tenant, model, hour_us), of_cell in sorted(apart.items()):
        yield Difference(
            between="event content",
            tenant=tenant,
            model=model,
            hour_us=None if hour_us < 0 else hour_us,
            left="conflict: more than one content",
            right=f"{len(of_cell)} requests",
            event_ids=sorted(of_cell)[:IDS_SHOWN],
        )


def _drift_difference(drift: Drift) -> Difference:
    """No bill is made of the sums; but what a tenant is told of its usage is."""
    return Difference(
        between=SUMS_AND_EVENTS,
        tenant="",
        hour_us=drift.hour_us,
        left=f"{drift.summed} requests, {drift.groups} groups otherwise",
        right=f"{drift.events} requests",
    )


def _of_event(event: UsageEvent | UsageRated) -> Tokens:
    return Tokens(1, event.prompt_tokens, event.cached_tokens, event.completion_tokens)


def _cell(event: UsageEvent | UsageRated) -> Cell:
    return event.tenant, event.model, hour_of(event.ts_us)


def _cells(
    sources: Sources, stored: Mapping[str, UsageEvent]
) -> tuple[dict[Cell, Tokens], dict[Cell, Tokens], dict[Cell, Tokens], dict[Cell, int]]:
    stored_cells: dict[Cell, Tokens] = defaultdict(Tokens)
    rated_cells: dict[Cell, Tokens] = defaultdict(Tokens)
    invoiced_cells: dict[Cell, Tokens] = defaultdict(Tokens)
    amounts: dict[Cell, int] = defaultdict(int)
    for event in stored.values():
        stored_cells[_cell(event)] += _of_event(event)
    for charge in sources.charged:
        cell = _cell(charge.rated)
        rated_cells[cell] += _of_event(charge.rated)
        amounts[cell] += int(charge.rated.amount_femto)
        if owner(charge.rated.ts_us, charge.seq, sources.invoices.get(charge.rated.tenant, ())):
            invoiced_cells[cell] += _of_event(charge.rated)
    return stored_cells, rated_cells, invoiced_cells, amounts


def _journal_cells(sources: Sources) -> dict[Cell, Tokens] | None:
    if sources.journal is None:
        return None
    cells: dict[Cell, Tokens] = defaultdict(Tokens)
    for row in sources.journal:
        cells[row.tenant, row.model, row.hour_us] += Tokens(row.requests, row.prompt, row.cached, row.completion)
    return cells


def _text(tokens: Tokens) -> str:
    return f"{tokens.prompt} prompt, {tokens.cached} cached, {tokens.completion} completion"


def _own_cells(sources: Sources, stored: Mapping[str, UsageEvent]) -> dict[Cell, Tokens]:
    """What the gateway settled whose journal is compared; all there is where nobody says which one that is."""
    cells: dict[Cell, Tokens] = defaultdict(Tokens)
    for event in stored.values():
        if sources.gateway in ("", event.gateway):
            cells[_cell(event)] += _of_event(event)
    return cells


def _journal_differences(rows: Iterable[Row], own: Mapping[Cell, Tokens]) -> Iterable[Difference]:
    """The engine's journal against what was settled; tokens only, as a request may end before any.

    A journal is one gateway's. It has all there is where that one is alone (under whatever names it had), and where
    there are others what it settled itself.
    """
    for row in rows:
        alone = own.get((row.tenant, row.model, row.hour_us), Tokens())
        if row.journal is not None and _text(row.journal) not in (_text(row.stored), _text(alone)):
            yield Difference(
                between="engine journal and usage store",
                tenant=row.tenant,
                model=row.model,
                hour_us=row.hour_us,
                left=_text(row.journal),
                right=_text(row.stored),
            )


def _ledger_differences(
    sources: Sources, stored: Mapping[str, UsageEvent], charges: Mapping[str, Charged]
) -> Iterable[Difference]:
    """Event by event: stored and not charged, charged and not stored, charged otherwise than stored."""
    unrated = {one.event_id: one for one in sources.unrated}
    apart: dict[tuple[str, Cell], list[str]] = defaultdict(list)
    for id, event in stored.items():
        if id in unrated:
            apart[f"unrated: {unrated[id].reason}", _cell(event)].append(id)
        elif id not in charges:
            apart["stored, not charged", _cell(event)].append(id)
        elif charges[id].rated.event_hash != content_hash(event):
            apart["charged for another content", _cell(event)].append(id)
    for id, charge in charges.items():
        if id not in stored:
            apart["charged, not stored", _cell(charge.rated)].append(id)
    for one in sources.unrated:
        if one.event_id not in stored:
            apart["unrated, not stored", (one.tenant, one.model, hour_of(one.ts_us))].append(one.event_id)
    for (what, cell), ids in sorted(apart.items()):
        yield Difference(
            between="usage store and ledger",
            tenant=cell[0],
            model=cell[1],
            hour_us=cell[2],
            left=what,
            right=f"{len(ids)} requests",
            event_ids=sorted(ids)[:IDS_SHOWN],
        )


def _invoice_differences(sources: Sources) -> Iterable[Difference]:
    charged: dict[str, list[Charged]] = defaultdict(list)
    for charge in sources.charged:
        charged[charge.rated.tenant].append(charge)
    for tenant, invoices in sorted(sources.invoices.items()):
        on: dict[tuple[str, str], list[UsageRated]] = defaultdict(list)
        for charge in charged[tenant]:
            owned = owner(charge.rated.ts_us, charge.seq, invoices)
            if owned is not None:
                late_of = "" if owned.has(charge.rated.ts_us) else _period_of(charge.rated.ts_us, owned, invoices)
                on[owned.id, late_of].append(charge.rated)
        for invoice in invoices:
            if invoice.status is not InvoiceStatus.VOID:
                yield from _lines_differences(sources, invoice, on)
            yield from _document_difference(sources, invoice)
            yield from _provider_difference(sources, invoice)


def _document_difference(sources: Sources, invoice: Invoice) -> Iterable[Difference]:
    """An invoice never changes: what is said of it now is what was said when it was cut."""
    now = sources.documents.get(invoice.id, invoice.content_hash)
    if now != invoice.content_hash:
        yield Difference(
            between="invoice and its document",
            tenant=invoice.tenant,
            invoice_id=invoice.id,
            left=f"sha256 {invoice.content_hash} when it was cut",
            right=f"sha256 {now} now",
        )
    if fault := sources.unsound.get(invoice.id):
        yield Difference(
            between="invoice and its signature",
            tenant=invoice.tenant,
            invoice_id=invoice.id,
            left=f"sha256 {invoice.content_hash}",
            right=fault,
        )


def _period_of(ts_us: int, invoice: Invoice, invoices: Sequence[Invoice]) -> str:
    """The invoice for whose period an event came too late, as it stood when `invoice` was cut."""
    return next((one.id for one in invoices if one.stood_at(invoice.cut_seq) and one.has(ts_us)), "")


def _lines_differences(
    sources: Sources, invoice: Invoice, on: Mapping[tuple[str, str], Sequence[UsageRated]]
) -> Iterable[Difference]:
    """Each of the invoice's periods that lies whole in what is compared: lines against charges."""
    if invoice.true_up != "0" or any(line.tiers or line.kind is not LineKind.USAGE for line in invoice.lines):
        yield from _tiered_differences(sources, invoice, on)
        return
    late_of = {line.late_of for line in invoice.lines} | {key[1] for key in on if key[0] == invoice.id} | {""}
    spans = {line.late_of: (line.period_start_us, line.period_end_us) for line in invoice.lines}
    spans[""] = (invoice.period_start_us, invoice.period_end_us)
    for late in sorted(late_of):
        if late in spans and not (sources.start_us <= spans[late][0] and spans[late][1] <= sources.end_us):
            continue
        lines = [line for line in invoice.lines if line.late_of == late]
        yield from _section_difference(invoice, lines, on.get((invoice.id, late), []), 0)


def _tiered_differences(
    sources: Sources, invoice: Invoice, on: Mapping[tuple[str, str], Sequence[UsageRated]]
) -> Iterable[Difference]:
    """An invoice whose lines are not its charges alone: all of it at once, with what it asks beyond them."""
    starts = [invoice.period_start_us, *(line.period_start_us for line in invoice.lines)]
    ends = [invoice.period_end_us, *(line.period_end_us for line in invoice.lines)]
    if sources.start_us <= min(starts) and max(ends) <= sources.end_us:
        rated = [one for (id, _), found in on.items() if id == invoice.id for one in found]
        yield from _section_difference(invoice, invoice.lines, rated, parse_exact(invoice.true_up))


def _section_difference(
    invoice: Invoice, lines: Sequence[InvoiceLine], rated: Sequence[UsageRated], true_up: int | Fraction
) -> Iterable[Difference]:
    left: dict[str, int] = defaultdict(int)
    right: dict[str, int] = defaultdict(int)
    for line in lines:
        if line.kind is LineKind.USAGE:
            left[line.unit_class.value] += line.quantity
    for one in rated:
        for name, units in (one.quantities or _counts(one)).items():
            right[name] += units
    booked = (line.amount_femto for line in lines if line.kind not in UNBOOKED)
    ours = _words(left, sum(booked, Fraction(0)))
    theirs = _words(right, sum((int(one.amount_femto) for one in rated), Fraction(true_up)))
    if ours != theirs:
        yield Difference(
            between=LINES_AND_LEDGER,
            tenant=invoice.tenant,
            invoice_id=invoice.id,
            left=ours,
            right=theirs,
        )


def _counts(rated: UsageRated) -> dict[str, int]:
    return {token_class.value: tokens for token_class, tokens in quantities(rated).items()}


def _words(quantities: Mapping[str, int], femto: int | Fraction) -> str:
    """What is compared, as text: the classes that every price has always, the others where there are any."""
    shown = {token_class.value: 0 for token_class in REQUIRED} | {name: n for name, n in quantities.items() if n}
    return ", ".join([*(f"{units} {name}" for name, units in shown.items()), f"{femto} femto"])


def _provider_difference(sources: Sources, invoice: Invoice) -> Iterable[Difference]:
    """Status, total and lines of what the payment provider has now, against ours."""
    if invoice.id not in sources.provider:
        return
    theirs = sources.provider[invoice.id]
    void = invoice.status is InvoiceStatus.VOID
    if theirs is None and not void:
        yield _apart(invoice, str(invoice.total_minor), "nothing")
    if theirs is None:
        return
    if void and theirs.status != "void" and theirs.total_minor:
        yield _apart(invoice, "void", f"{theirs.id} status {theirs.status}")
    if void:
        return
    if fault := status_fault(invoice, theirs):
        yield _apart(invoice, str(invoice.status), f"{theirs.id} {fault}")
    if theirs.total_minor != invoice.total_minor:
        yield _apart(invoice, str(invoice.total_minor), f"{theirs.id} total {theirs.total_minor}")
    if (credited := sources.credited.get(invoice.id, 0)) != theirs.credited_minor:
        yield _apart(invoice, f"credit notes {credited}", f"{theirs.id} credit notes {theirs.credited_minor}")
    if theirs.tax_minor != invoice.provider_tax_minor:
        yield _apart(invoice, f"tax {invoice.provider_tax_minor}", f"{theirs.id} tax {theirs.tax_minor}")
    if theirs.faults:
        yield _apart(invoice, f"{len(invoice.lines)} lines", f"{theirs.id} {'; '.join(theirs.faults)}")


def _apart(invoice: Invoice, left: str, right: str) -> Difference:
    return Difference(
        between=INVOICE_AND_PROVIDER, tenant=invoice.tenant, invoice_id=invoice.id, left=left, right=right
    )
