"""Replay: an invoice rebuilt from the log and the usage store, or its archive, and compared with what was cut.

The log is folded anew from its first row, every hash checked, up to the number at which the invoice was cut: accounts,
price book, terms and earlier invoices are those of then. Every event is rated again. What comes out must have the same
canonical bytes. Nothing is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from billing.books import Books
from billing.document import canonical, document
from billing.errors import BillingError, LedgerUnavailable
from billing.invoice import Invoice, UsageSource
from billing.periods import Period
from billing.service.cutting import CuttingService, compose, cut_of, late_events
from billing.taken import Taken
from billing.witnesses import Witnesses

WITHOUT_BASIS = (
    *("currency", "period_start_us", "period_end_us", "total_minor"),
    *("event_count", "events_digest", "true_up"),
)
"""What is compared, beside the lines, of an invoice that was cut before there were documents."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One invoice, as it was cut and as it is rebuilt; hashes are of the canonical bytes."""

    invoice: Invoice
    content_hash: str
    rebuilt_hash: str  # empty: it cannot be rebuilt
    difference: str = ""  # the first; empty: the same bytes

    @property
    def equal(self) -> bool:
        return not self.difference


class ReplayService(CuttingService):
    """Whether invoices can be made again."""

    def replay_invoice(self, invoice_id: str, usage: UsageSource) -> Replay:
        """Raises `NotFound`, `LedgerCorrupt`."""
        self.refresh()
        with self._state:
            invoice = self._books.invoices.get(invoice_id)
        (found,) = self._replays([invoice], usage)
        return found

    def replay_invoices(self, start_us: int, end_us: int, usage: UsageSource) -> list[Replay]:
        """All that were made final and whose period touches the range, in the order of their cuts."""
        self.refresh()
        with self._state:
            known = list(self._books.invoices.by_id.values())
        wanted = [
            one
            for one in known
            if one.finalized_us is not None and one.period_start_us < end_us and start_us < one.period_end_us
        ]
        return list(self._replays(sorted(wanted, key=lambda one: one.cut_seq), usage))

    def _replays(self, invoices: Sequence[Invoice], usage: UsageSource) -> Iterator[Replay]:
        """In the order of their cuts, so the log is folded once."""
        books = Books()
        for invoice in invoices:
            self._fold_up_to(books, invoice.cut_seq)
            yield self._replay(books, invoice, usage)

    def _fold_up_to(self, books: Books, seq: int) -> None:
        while books.seq < seq:
            rows = self._store.read(books.seq, min(1000, seq - books.seq))
            if not rows:
                raise LedgerUnavailable(f"the ledger ends before event {seq}")
            for row in rows:
                books.apply(row)

    def _replay(self, books: Books, invoice: Invoice, usage: UsageSource) -> Replay:
        period = Period(start_us=invoice.period_start_us, end_us=invoice.period_end_us)
        earlier = books.invoices.of(invoice.tenant)
        cut = _content(invoice, books, earlier)
        said = invoice.content_hash or _hash(cut)
        try:
            rebuilt = _content(self._rebuilt(books, invoice, period, usage), books, earlier, like=invoice)
        except BillingError as error:
            return Replay(invoice=invoice, content_hash=said, rebuilt_hash="", difference=str(error))
        difference = first_difference(cut, rebuilt)
        if not difference and said != _hash(rebuilt):
            difference = "the document is not the one whose hash was kept when it was cut"
        return Replay(invoice=invoice, content_hash=said, rebuilt_hash=_hash(rebuilt), difference=difference)

    def _rebuilt(self, books: Books, invoice: Invoice, period: Period, usage: UsageSource) -> Invoice:
        cut = cut_of(books, invoice.tenant, period, invoice.cut_us)
        witnesses = Witnesses(self._entries(cut, period))
        taken = Taken(cut.prices, cut.tenant.currency)
        for entry, event in witnesses.match(usage.events(invoice.tenant, period.start_us, period.end_us)):
            taken.add(entry, event, period.start_us)
        witnesses.unknown()  # recorded after the cut: on a later invoice
        for entry, event in witnesses.match_rest(late_events(invoice.tenant, cut, witnesses.unseen(), usage)):
            taken.add(entry, event, period.start_us)
        if missing := witnesses.unseen():
            first = min(missing, key=lambda entry: (entry.rated.ts_us, entry.rated.event_id)).rated.event_id
            raise LedgerUnavailable(f"{len(missing)} events that were charged are not stored now, first {first}")
        return compose(invoice.id, period, cut, taken)


def _content(invoice: Invoice, books: Books, earlier: Sequence[Invoice], *, like: Invoice | None = None) -> Any:
    """What is compared: the document, or of an invoice without one what it has in common with one that has."""
    if (like or invoice).basis is not None:
        return document(invoice, books.prices, earlier)
    plain = {name: getattr(invoice, name) for name in WITHOUT_BASIS}
    return plain | {"lines": [msgspec.to_builtins(line) for line in invoice.lines]}


def _hash(content: Any) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


def first_difference(cut: Any, rebuilt: Any, path: str = "") -> str:
    """Where two JSON values part first, in the order of their canonical bytes; empty where they do not."""
    if isinstance(cut, dict) and isinstance(rebuilt, dict):
        for name in sorted({*cut, *rebuilt}):
            if found := first_difference(cut.get(name), rebuilt.get(name), f"{path}.{name}".lstrip(".")):
                return found
        return ""
    if isinstance(cut, list) and isinstance(rebuilt, list) and len(cut) == len(rebuilt):
        for number, (one, other) in enumerate(zip(cut, rebuilt, strict=True)):
            if found := first_difference(one, other, f"{path}[{number}]"):
                return found
        return ""
    return "" if cut == rebuilt else f"{path}: {_short(cut)} when it was cut, {_short(rebuilt)} now"


def _short(value: Any) -> str:
    return canonical(value).decode()[:120]
