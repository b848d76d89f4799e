"""A line of an invoice: what it asks money for, and all that it takes to compute it again.

Pure. Does not know: where usage is kept, which invoice it stands on.
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

import msgspec

from billing.money import parse_exact
from billing.terms import CommitmentPart
from billing.tiers import PriceModel, Tier, TokenClass


class LineKind(StrEnum):
    """What a line asks money for."""

    USAGE = "usage"
    MINIMUM = "minimum"  # what a price's minimum asks beyond the usage of its period
    ADAPTER = "adapter"  # an adapter, for the time of the period that it stood
    DISCOUNT = "discount"  # below 0
    COMMITMENT = "commitment"  # what the tenant's minimum asks beyond all of these
    CARRY = "carry"  # a total below 0, put off to the next invoice; below 0 where this is the next one
    TAX = "tax"


LISTED = frozenset({LineKind.USAGE, LineKind.MINIMUM, LineKind.ADAPTER})
"""What follows from prices: discounts are of it, and it counts towards the tenant's minimum."""

UNBOOKED = frozenset({LineKind.CARRY, LineKind.TAX})
"""What the invoice asks and the balance does not know: tax is not the house's money, a carry is in it already."""


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """Units of one class at one price: linear ones of one model, or all that share the tiers of one period; or what
    follows from the sum of such lines.

    `id` is unique for ever and the same on every export. `late_of` names the earlier invoice whose
    period these units belong to when they turned up after its cut; empty for the period's own.

    A line can be computed again from itself (`billing/lines.py`): a linear one is quantity x unit price; one that is
    not is what all `total` units of this price, with `position` units of earlier versions before them, come to in the
    period by `tiers`, less `booked`, which earlier standing invoices have of it. How the other kinds are computed from
    `base`, `booked`, `rate`, `fixed`, `share` and `parts` is told in `billing/asked.py`.
    """

    id: str
    model: str
    adapter: str
    token_class: TokenClass | None  # None: of no class
    price_id: str
    period_start_us: int
    period_end_us: int
    late_of: str = ""
    quantity: int  # base units (`tiers.UNITS`): tokens, images, milliseconds …; of an adapter microseconds of `total`
    unit_price_nano: int  # nano-units of currency per million tokens, or for `tiers.Unit.per`; 0 where tiers say it
    amount_minor: int  # rounded; the lines' sum is the rounded exact total
    kind: LineKind = LineKind.USAGE
    endpoint: str = ""  # whose own price it is; empty: no endpoint's
    exact: str = ""  # femto-units before the one rounding, as n or n/d; empty: quantity x unit price
    price_model: PriceModel = PriceModel.FLAT
    tiers: tuple[Tier, ...] = ()  # empty: linear
    package_size: int = 0
    allowance: int = 0
    minimum: str = ""  # exact decimal text
    position: int = 0
    total: int = 0
    booked: str = "0"  # femto-units, as `exact`
    base: str = "0"  # femto-units that the line is computed from: for a minimum, what the period's usage came to
    term: str = ""  # id of the discount that it follows from
    name: str = ""  # of the discount or the tax
    rate: str = ""  # percent, exact decimal text
    fixed: str = ""  # of a discount: exact decimal text, for a whole period
    share: str = "1"  # which part of a whole period `fixed` is for, as `exact`
    parts: tuple[CommitmentPart, ...] = ()  # what the tenant's minimum is made of

    @property
    def amount_femto(self) -> int | Fraction:
        """The exact amount, before the one rounding."""
        return parse_exact(self.exact) if self.exact else self.quantity * self.unit_price_nano

    @property
    def unit_class(self) -> TokenClass:
        """The class of a line that has one: every listed one."""
        if self.token_class is None:
            raise ValueError(f"a line of the kind {self.kind} is of no class")
        return self.token_class
