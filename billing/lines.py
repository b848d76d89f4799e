"""From charges to the lines of an invoice: every unit once, exact, rounded once.

Linear charges of one (period, model, adapter, class, price) are one line: quantity x unit price.

What is not linear is asked for by the final quantity. For each period, slot of the price book and class, the units of
all versions of the slot stand in the order of the versions (`PriceBook.rank`), whenever they were recorded; what they
come to, less what standing invoices have of it already, is what this invoice asks. So usage that turns up late moves
the period's tiers, and the difference is booked against what was booked; over all standing invoices the lines of a
period sum to what its final quantity costs, in whatever order usage came and invoices were cut or voided.

Pure. Does not know: where usage is kept, what time it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import msgspec

from billing.invoice import Invoice, InvoiceStatus
from billing.line import UNBOOKED, InvoiceLine, LineKind
from billing.money import allocate, exact_text, parse_amount, parse_exact, percent_of
from billing.periods import Period
from billing.prices import PriceBook, PriceVersion, Slot, TokenClass
from billing.terms import UTC_MONTHS, PeriodRule
from billing.tiers import Component, cost_femto, unit_femto

__all__ = [
    "Charge",
    "Group",
    "Period",
    "PeriodRule",
    "again",
    "booked_lines",
    "close",
    "cut_lines",
    "true_up",
]


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """Units as they enter an invoice: of one event, or of several that no line tells apart."""

    model: str
    adapter: str
    quantities: dict[TokenClass, int]
    price: PriceVersion
    late_of: Invoice | None  # the standing invoice of their period, when they are late
    period_start_us: int = 0  # of the period whose tiers they count in
    charged_femto: int = 0  # what the ledger charged for them


class Group(msgspec.Struct, frozen=True, order=True):
    """Units that share tiers."""

    period_start_us: int
    slot: Slot
    token_class: TokenClass


def cut_lines(
    period: Period,
    charges: Iterable[Charge],
    *,
    book: PriceBook,
    earlier: Sequence[Invoice] = (),
    rule: PeriodRule = UTC_MONTHS,
) -> list[InvoiceLine]:
    """Charges → lines that are not rounded yet, in an order that depends on nothing but the charges.

    `earlier` are all invoices of the tenant, void ones too; `book` has every version that they or the charges name.
    """
    linear: dict[tuple[str, ...], InvoiceLine] = {}
    groups: dict[Group, list[tuple[Charge, int]]] = defaultdict(list)
    for charge in charges:
        priced = charge.price.by_class()
        for token_class, units in charge.quantities.items():
            if not units:
                continue
            if priced[token_class].linear:
                _add(linear, charge, token_class, units, period)
            else:
                groups[Group(charge.period_start_us, charge.price.slot, token_class)].append((charge, units))
    booked = booked_lines(earlier, book)
    lines = [linear[key] for key in sorted(linear)]
    for group in sorted(groups):
        lines += _tiered(group, groups[group], booked.get(group, []), period, book, rule)
    lines += _minimums(period, lines, booked, book, rule)
    return lines


def close(invoice_id: str, currency: str, lines: Sequence[InvoiceLine]) -> tuple[InvoiceLine, ...]:
    """The lines with their ids, rounded so that they sum to the rounded exact total."""
    rounded = allocate([line.amount_femto for line in lines], currency)
    return tuple(
        msgspec.structs.replace(line, id=f"{invoice_id}-{number}", amount_minor=minor)
        for number, (line, minor) in enumerate(zip(lines, rounded, strict=True), start=1)
    )


def again(line: InvoiceLine) -> int | Fraction | None:
    """What a line comes to when it is computed again from what it says; None for a carry, which hangs on all lines."""
    base, booked = parse_exact(line.base), parse_exact(line.booked)
    match line.kind:
        case LineKind.USAGE if not line.tiers:
            return line.quantity * unit_femto(line.unit_class, line.unit_price_nano)
        case LineKind.USAGE:
            return cost_femto(_component(line), line.position, line.total) - booked
        case LineKind.MINIMUM:
            return max(0, _component(line).minimum_femto - base) - booked
        case LineKind.ADAPTER:
            return Fraction(line.quantity * unit_femto(line.unit_class, line.unit_price_nano), line.total)
        case LineKind.DISCOUNT if line.rate:
            return -percent_of(base, line.rate) - booked
        case LineKind.DISCOUNT if line.fixed:
            return -min(base, parse_amount(line.fixed) * Fraction(line.share)) - booked
        case LineKind.DISCOUNT:  # one that its period's terms do not know any more: what was booked of it goes back
            return -booked
        case LineKind.COMMITMENT:
            return max(Fraction(0), sum((part.target_femto for part in line.parts), Fraction(0)) - base) - booked
        case LineKind.TAX:
            return percent_of(base, line.rate)
        case LineKind.CARRY:
            return None


def _component(line: InvoiceLine) -> Component:
    return Component(
        token_class=line.unit_class,
        model=line.price_model,
        tiers=line.tiers,
        package_size=line.package_size,
        allowance=line.allowance,
        minimum=line.minimum,
    )


# -- linear ----------------------------------------------------------------------------------------------------------


def _add(
    lines: dict[tuple[str, ...], InvoiceLine], charge: Charge, token_class: TokenClass, units: int, period: Period
) -> None:
    late, price = charge.late_of, charge.price
    key = (late.id if late else "", charge.model, charge.adapter, token_class.value, price.id)
    before = lines.get(key)
    nano = price.by_class()[token_class].tiers[0].price_nano if before is None else before.unit_price_nano
    quantity = units + (before.quantity if before else 0)
    exact = exact_text(quantity * unit_femto(token_class, nano))
    if before is not None:
        lines[key] = msgspec.structs.replace(before, quantity=quantity, exact=exact)
        return
    lines[key] = InvoiceLine(
        id="",
        model=charge.model,
        adapter=charge.adapter,
        token_class=token_class,
        price_id=price.id,
        period_start_us=late.period_start_us if late else period.start_us,
        period_end_us=late.period_end_us if late else period.end_us,
        late_of=late.id if late else "",
        quantity=quantity,
        unit_price_nano=nano,
        amount_minor=0,
        endpoint=price.endpoint,
        exact=exact,
    )


# -- tiers -----------------------------------------------------------------------------------------------------------


def booked_lines(earlier: Sequence[Invoice], book: PriceBook) -> dict[Group, list[InvoiceLine]]:
    """The lines of standing invoices that share tiers, and their minimums."""
    found: dict[Group, list[InvoiceLine]] = defaultdict(list)
    for invoice in earlier:
        if invoice.status is not InvoiceStatus.VOID:
            for line in invoice.lines:
                if line.tiers:
                    slot = book.versions[line.price_id].slot
                    found[Group(line.period_start_us, slot, line.unit_class)].append(line)
    return found


def _tiered(
    group: Group,
    new: Sequence[tuple[Charge, int]],
    booked: Sequence[InvoiceLine],
    period: Period,
    book: PriceBook,
    rule: PeriodRule,
) -> Iterator[InvoiceLine]:
    """One line for each version whose units or amount are not what was booked."""
    units: dict[str, int] = defaultdict(int)
    had: dict[str, int] = defaultdict(int)
    amounts: dict[str, int] = defaultdict(int)
    for charge, count in new:
        units[charge.price.id] += count
    for line in booked:
        if line.kind is LineKind.USAGE:
            had[line.price_id] += line.quantity
            amounts[line.price_id] += int(line.exact)
    late = {charge.late_of.id if charge.late_of else "" for charge, _ in new}
    late_of = late.pop() if len(late) == 1 else ""
    position = 0
    for id in sorted({*units, *had}, key=book.rank):
        component = book.versions[id].by_class()[group.token_class]
        total = units[id] + had[id]
        exact = cost_femto(component, position, total) - amounts[id]
        if units[id] or exact:
            yield _line(
                group,
                book.versions[id],
                component,
                end_us=rule.end_of(group.period_start_us),
                late_of=late_of,
                quantity=units[id],
                position=position,
                total=total,
                booked=exact_text(amounts[id]),
                exact=exact_text(exact),
            )
        position += total


def _minimums(
    period: Period,
    lines: Sequence[InvoiceLine],
    booked: dict[Group, list[InvoiceLine]],
    book: PriceBook,
    rule: PeriodRule,
) -> Iterator[InvoiceLine]:
    """For each period that has ended: what is missing to the minimum of the last version that has units in it."""
    sums: dict[Group, list[InvoiceLine]] = {group: list(found) for group, found in booked.items()}
    for line in lines:
        if line.tiers:
            slot = book.versions[line.price_id].slot
            sums.setdefault(Group(line.period_start_us, slot, line.unit_class), []).append(line)
    for group in sorted(sums):
        usage = [line for line in sums[group] if line.kind is LineKind.USAGE]
        end_us = rule.end_of(group.period_start_us)
        if not usage or end_us > period.end_us:
            continue
        price = book.versions[max((line.price_id for line in usage), key=book.rank)]
        component = price.by_class()[group.token_class]
        base = sum(int(line.exact) for line in usage)
        asked = sum(int(line.exact) for line in sums[group] if line.kind is LineKind.MINIMUM)
        exact = max(0, component.minimum_femto - base) - asked
        if exact:
            yield _line(
                group,
                price,
                component,
                kind=LineKind.MINIMUM,
                end_us=end_us,
                late_of=usage[-1].late_of,
                quantity=0,
                booked=exact_text(asked),
                base=exact_text(base),
                exact=exact_text(exact),
            )


def _line(
    group: Group,
    price: PriceVersion,
    component: Component,
    *,
    end_us: int,
    late_of: str,
    quantity: int,
    exact: str,
    booked: str,
    kind: LineKind = LineKind.USAGE,
    position: int = 0,
    total: int = 0,
    base: str = "0",
) -> InvoiceLine:
    return InvoiceLine(
        id="",
        kind=kind,
        model=price.model,
        adapter="",
        token_class=group.token_class,
        price_id=price.id,
        period_start_us=group.period_start_us,
        period_end_us=end_us,
        late_of=late_of,
        quantity=quantity,
        unit_price_nano=0,
        amount_minor=0,
        endpoint=price.endpoint,
        exact=exact,
        price_model=component.model,
        tiers=component.tiers,
        package_size=component.package_size,
        allowance=component.allowance,
        minimum=component.minimum,
        position=position,
        total=total,
        booked=booked,
        base=base,
    )


def true_up(lines: Iterable[InvoiceLine], charges: Iterable[Charge]) -> str:
    """What the lines book in the balance beyond what the ledger charged on the way, exactly."""
    booked = sum(line.amount_femto for line in lines if line.kind not in UNBOOKED)
    return exact_text(booked - sum(charge.charged_femto for charge in charges))
