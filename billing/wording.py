"""How a line of an invoice is told to people: one sentence, numbers written out, never in exponent form."""

from __future__ import annotations

from billing.invoice import InvoiceLine, LineKind
from billing.money import format_price
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


def describe(line: InvoiceLine, currency: str) -> str:
    """What the line asks for, how many, and at what price."""
    late = " (late)" if line.late_of else ""
    if line.kind is LineKind.MINIMUM:
        return f"{line.model}: minimum of {line.minimum} {currency.upper()} for {noun(line.token_class)}{late}"
    words = f"{line.model}: {amount_of(line.token_class, line.quantity)} {noun(line.token_class)}"
    return f"{words} {price_of(line, currency)}{late}"


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
    each = "per million" if line.token_class in TOKENS else "each"
    if not line.tiers:
        return f"at {format_price(line.unit_price_nano)} {currency.upper()} {each}"
    free = f", {amount_of(line.token_class, line.allowance)} free" if line.allowance else ""
    first = line.tiers[0]
    match line.price_model:
        case PriceModel.FLAT:
            text = f"at {format_price(first.price_nano)} {currency.upper()} {each}"
        case PriceModel.PACKAGE:
            size = amount_of(line.token_class, line.package_size)
            text = f"at {format_price(first.price_nano)} {currency.upper()} per {size} begun"
        case _:
            steps = "; ".join(_step(line, tier) for tier in line.tiers)
            text = f"{line.price_model.value}, {steps} {currency.upper()} {each}"
    return text + free


def _step(line: InvoiceLine, tier: Tier) -> str:
    end = "beyond" if tier.up_to is None else f"up to {amount_of(line.token_class, tier.up_to)}"
    return f"{end} {format_price(tier.price_nano)}"
