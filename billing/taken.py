"""What an invoice takes, folded one event after the other: sums of units, the digest, the leaves of the tree.

Every event is rated anew, and what the ledger charged must be that. Of an event remain the bytes that the digest and
the tree are made of, and its units in the sums of what an invoice's lines tell apart.

Pure. Does not know: where events and charges come from, how sums become lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from billing import merkle
from billing.charges import agrees
from billing.errors import LedgerDisagrees
from billing.invoice import Basis, CountedFrom, Invoice, LatePeriod
from billing.ledger import UsageRated
from billing.lines import Charge
from billing.prices import PriceBook
from billing.tariff import Tariff, Tariffs
from billing.terms import PeriodRule
from billing.tiers import TokenClass
from billing.witnesses import Entry
from metering.events import UsageEvent
from metering.receipts import leaf_of

LEAF_BYTES = 32


class _Sum:
    """Units of one price that no line tells apart."""

    __slots__ = ("charged_femto", "late_of", "quantities", "tariff")

    def __init__(self, tariff: Tariff, late_of: Invoice | None) -> None:
        self.tariff, self.late_of = tariff, late_of
        self.quantities: dict[str, int] = {}
        self.charged_femto = 0


class _Block:
    """The events of one period, in the order of time and id."""

    def __init__(self) -> None:
        self.contents = bytearray()  # a line of id and content hash for each
        self.leaves = bytearray()  # LEAF_BYTES for each
        self.counted: list[CountedFrom] = []


class Taken:
    """Events come in the order of time and id within each period; which period comes first does not matter."""

    def __init__(self, prices: PriceBook, currency: str) -> None:
        self.count = 0
        self._prices, self._currency = prices, currency
        self._tariffs = Tariffs(prices)
        self._sums: dict[tuple[str, str, str, str, int], _Sum] = {}
        self._blocks: dict[int, _Block] = {}  # by the start of the invoice's own period, or of the one it is late of
        self._late: dict[str, Invoice] = {}
        self._priced_later: dict[str, str] = {}

    def add(self, entry: Entry, event: UsageEvent, period_start_us: int) -> None:
        """`period_start_us`: of the invoice's own period. Raises `LedgerDisagrees`, `NoPrice`."""
        rated, late_of = entry.rated, entry.late_of
        tariff = self._price_again(rated, event)
        if not agrees(rated, event, tariff):
            raise LedgerDisagrees(f"request {event.event_id} was charged otherwise than it is rated now")
        self._add_units(rated, event, tariff, late_of)
        if late_of is not None:
            self._late[late_of.id] = late_of
            period_start_us = late_of.period_start_us
        if rated.rated_later:
            self._priced_later[event.event_id] = tariff.price.id
        self._add_to_block(rated, event, period_start_us)
        self.count += 1

    def charges(self) -> list[Charge]:
        """The sums."""
        return [
            Charge(
                model=model,
                adapter=adapter,
                quantities={TokenClass(name): units for name, units in found.quantities.items()},
                price=found.tariff.price,
                late_of=found.late_of,
                period_start_us=start_us,
                charged_femto=found.charged_femto,
            )
            for (_, model, adapter, _, start_us), found in self._sums.items()
        ]

    def digest(self) -> str:
        """SHA-256 hex over (event id, content hash) in the order of (time, id): what exactly was invoiced."""
        hashed = hashlib.sha256()
        for block in self._in_order():
            hashed.update(block.contents)
        return hashed.hexdigest()

    def basis(self, rule: PeriodRule) -> Basis:
        """What is kept of them so that the invoice can be computed again."""
        return Basis(
            root=merkle.root(list(self._leaves())).hex(),
            anchor_day=rule.anchor_day,
            timezone=rule.timezone,
            price_ids=tuple(sorted({price_id for _, _, _, price_id, _ in self._sums})),
            priced_later=self._priced_later,
            late=tuple(
                LatePeriod(invoice_id=one.id, start_us=one.period_start_us, end_us=one.period_end_us)
                for one in sorted(self._late.values(), key=lambda invoice: invoice.cut_seq)
            ),
            counted=tuple(self._counted()),
        )

    def _price_again(self, rated: UsageRated, event: UsageEvent) -> Tariff:
        if rated.rated_later:  # by its time alone there was no price: the operator set one for it afterwards
            return self._tariffs.of(rated.price_id)
        price = self._prices.resolve(
            event.tenant,
            event.model,
            event.base_model,
            self._currency,
            ts_us=event.ts_us,
            known_us=event.ts_us,
            endpoint=event.endpoint,
        )
        return self._tariffs.of(price.id)

    def _add_units(self, rated: UsageRated, event: UsageEvent, tariff: Tariff, late_of: Invoice | None) -> None:
        late = late_of.id if late_of is not None else ""
        key = late, event.model, event.adapter, tariff.price.id, rated.period_start_us
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = _Sum(tariff, late_of)
        quantities = found.quantities
        for name, units in tariff.counted(event).items():
            if units:
                quantities[name] = quantities.get(name, 0) + units
        found.charged_femto += int(rated.amount_femto)

    def _add_to_block(self, rated: UsageRated, event: UsageEvent, start_us: int) -> None:
        block = self._blocks.get(start_us)
        if block is None:
            block = self._blocks[start_us] = _Block()
        block.contents += f"{event.event_id} {rated.event_hash}\n".encode()
        block.leaves += leaf_of(event)
        counted_us = rated.period_start_us
        if counted_us and (not block.counted or block.counted[-1].start_us != counted_us):
            block.counted.append(CountedFrom(event_id=event.event_id, start_us=counted_us))

    def _in_order(self) -> Iterator[_Block]:
        """Standing periods do not overlap, and this one overlaps none of them: so their events are in order too."""
        for start_us in sorted(self._blocks):
            yield self._blocks[start_us]

    def _leaves(self) -> Iterator[bytes]:
        for block in self._in_order():
            for at in range(0, len(block.leaves), LEAF_BYTES):
                yield bytes(block.leaves[at : at + LEAF_BYTES])

    def _counted(self) -> Iterator[CountedFrom]:
        """Each event from which on they count in another period; an event whose price is linear counts nowhere."""
        before_us = 0
        for block in self._in_order():
            for counted in block.counted:
                if counted.start_us != before_us:
                    before_us = counted.start_us
                    yield counted
