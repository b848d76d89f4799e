"""How a line of an invoice is told to people: one sentence, numbers written out, never in exponent form."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from fractions import Fraction

from billing.line import InvoiceLine, LineKind
from billing.money import format_exact, format_price, parse_amount, parse_exact
from billing.tiers import TOKENS, UNITS, PriceModel, Tier, TokenClass

_NOUNS = {
    TokenClass.CACHE_WRITE: "cache write tokens",
    TokenClass.IMAGE: "images",
    TokenClass.AUDIO_SECOND: "seconds of audio",
    TokenClass.TOOL_CALL: "tool calls",
    TokenClass.REQUEST: "requests",
    TokenClass.COMPUTE_SECOND: "seconds of compute time",
    TokenClass.ADAPTER_MONTH: "months of an adapter",
}


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_GROUPS = {
    LineKind.MINIMUM: "minimums",
    LineKind.ADAPTER: "adapters",
    LineKind.DISCOUNT: "discounts",
    LineKind.COMMITMENT: "minimums of a period",
    LineKind.CARRY: "amounts carried",
    LineKind.TAX: "taxes",
}


def describe(line: InvoiceLine, currency: str) -> str:
    """What the line asks for, how many, and at what price; for late usage, that it adjusts which period."""
    text = _describe(line, currency.upper())
    if not line.late_of:
        return text
    return f"Adjustment for {when(line.period_start_us)} to {when(line.period_end_us)}, late usage: {text}"


def _describe(line: InvoiceLine, unit: str) -> str:
    match line.kind:
        case LineKind.MINIMUM:
            return f"{line.model}: minimum of {line.minimum} {unit} for {noun(line.unit_class)}"
        case LineKind.ADAPTER:
            stood = Fraction(line.quantity, line.total)
            part = "a month" if stood == 1 else f"{stood} of a month"
            return f"{line.adapter}: adapter for {part} at {format_price(line.unit_price_nano)} {unit} per month"
        case LineKind.DISCOUNT:
            return f"{line.name}: {_discount(line, unit)}"
        case LineKind.COMMITMENT:
            target = sum((part.target_femto for part in line.parts), Fraction(0))
            return f"Minimum of {format_exact(target)} {unit}, less {format_exact(parse_exact(line.base))} {unit}"
        case LineKind.CARRY if line.amount_femto > 0:
            return "Credit carried to the next invoice"
        case LineKind.CARRY:
            return "Credit carried from an earlier invoice"
        case LineKind.TAX:
            return f"{line.name} {line.rate}% on {format_exact(parse_exact(line.base))} {unit}"
        case LineKind.USAGE:
            words = f"{line.model}: {amount_of(line.unit_class, line.quantity)} {noun(line.unit_class)}"
            return f"{words} {price_of(line, unit)}"


def _discount(line: InvoiceLine, unit: str) -> str:
    """What is taken off of what, and that an amount is more than there was."""
    what = ", ".join(filter(None, (line.model, line.token_class and noun(line.token_class)))) or "usage"
    base = parse_exact(line.base)
    if line.rate:
        return f"{line.rate}% off {format_exact(base)} {unit} of {what}"
    if not line.fixed:
        return "discount taken back"
    part = "" if line.share == "1" else f" x {line.share}"
    most = parse_amount(line.fixed) * Fraction(line.share)
    limited = f", limited to the {format_exact(base)} {unit} that there are" if most > base else ""
    return f"{line.fixed} {unit}{part} off {what}{limited}"


def when(us: int) -> str:
    """An instant: the day where it is midnight UTC, else with its time."""
    time = _EPOCH + timedelta(microseconds=us)
    return f"{time:%Y-%m-%d}" if us % 86_400_000_000 == 0 else f"{time:%Y-%m-%d %H:%M} UTC"


def group_of(kind: LineKind, token_class: TokenClass | None, lines: Iterable[InvoiceLine]) -> str:
    """Several lines of one kind and class, as one."""
    if kind is not LineKind.USAGE or token_class is None:
        return _GROUPS[kind]
    return f"{amount_of(token_class, sum(line.quantity for line in lines))} {noun(token_class)}"


def noun(token_class: TokenClass) -> str:
    """The class in words, in the plural."""
    return _NOUNS.get(token_class, f"{token_class.value} tokens")


def amount_of(token_class: TokenClass, quantity: int) -> str:
    """Base units as people count them: milliseconds as seconds, exactly."""
    scale = UNITS[token_class].scale
    whole, rest = divmod(abs(quantity), scale)
    fraction = f"{rest:0{len(str(scale)) - 1}}".rstrip("0") if rest else ""
    return f"{'-' if quantity < 0 else ''}{whole:,}{'.' + fraction if fraction else ''}"


def price_of(line: InvoiceLine, currency: str) -> str:
    """The price of the line, as `at 2.00 USD per million`."""
    each = "per million" if line.unit_class in TOKENS else "each"
    if not line.tiers:
        return f"at {format_price(line.unit_price_nano)} {currency.upper()} {each}"
    free = f", {amount_of(line.unit_class, line.allowance)} free" if line.allowance else ""
    first = line.tiers[0]
    match line.price_model:
        case PriceModel.FLAT:
            text = f"at {format_price(first.price_nano)} {currency.upper()} {each}"
        case PriceModel.PACKAGE:
            size = amount_of(line.unit_class, line.package_size)
            text = f"at {format_price(first.price_nano)} {currency.upper()} per {size} begun"
        case _:
            steps = "; ".join(_step(line, tier) for tier in line.tiers)
            text = f"{line.price_model.value}, {steps} {currency.upper()} {each}"
    return text + free


def _step(line: InvoiceLine, tier: Tier) -> str:
    end = "beyond" if tier.up_to is None else f"up to {amount_of(line.unit_class, tier.up_to)}"
    return f"{end} {format_price(tier.price_nano)}"
