"""Who is suspended, by what, and why: an operator's own word, or an invoice whose dunning came to its last step.

A tenant is suspended while any of these holds it: to lift one opens the door only when it was the last.

Pure. Does not know: what a suspended tenant may still do (`gateway/auth.py`, `service/credits.py`), what a tenant is.
"""

from __future__ import annotations

import msgspec

OPERATOR = ""
"""In place of an invoice's id: the suspension is an operator's own."""


class Suspension(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that holds a tenant suspended."""

    invoice_id: str  # the invoice in dunning, or `OPERATOR`
    reason: str  # for the tenant to read; empty: none was given
    since_us: int


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """All that holds a tenant suspended, the oldest first; nothing: it is active."""

    tenant: str
    suspensions: tuple[Suspension, ...] = ()

    @property
    def suspended(self) -> bool:
        return bool(self.suspensions)


class SuspensionPlaced(msgspec.Struct, frozen=True, kw_only=True, tag="suspension.placed"):
    """From now on this holds the tenant suspended."""

    tenant: str
    reason: str
    at_us: int
    invoice_id: str = OPERATOR


class SuspensionLifted(msgspec.Struct, frozen=True, kw_only=True, tag="suspension.lifted"):
    """This no longer holds the tenant; `active`: nothing else does."""

    tenant: str
    reason: str
    at_us: int
    active: bool
    invoice_id: str = OPERATOR


SuspensionFact = SuspensionPlaced | SuspensionLifted


class Suspensions:
    """All that stand."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Suspension]] = {}  # tenant → invoice or `OPERATOR`

    def apply(self, fact: SuspensionFact) -> None:
        match fact:
            case SuspensionPlaced(tenant=tenant, invoice_id=invoice_id, reason=reason, at_us=at_us):
                self._place(tenant, Suspension(invoice_id=invoice_id, reason=reason, since_us=at_us))
            case SuspensionLifted(tenant=tenant, invoice_id=invoice_id):
                self._lift(tenant, invoice_id)

    def follow(self, tenant: str, suspended: bool, time_us: int) -> None:
        """An operator's word that came as a change of the tenant, without a reason; one that stands keeps its own."""
        if not suspended:
            self._lift(tenant, OPERATOR)
        elif OPERATOR not in self._of.get(tenant, {}):
            self._place(tenant, Suspension(invoice_id=OPERATOR, reason="", since_us=time_us))

    def standing(self, tenant: str) -> Standing:
        return Standing(tenant=tenant, suspensions=tuple(self._of.get(tenant, {}).values()))

    def holds(self, tenant: str) -> bool:
        """Whether the tenant is suspended."""
        return tenant in self._of

    def __len__(self) -> int:
        """How many tenants are suspended."""
        return len(self._of)

    def _place(self, tenant: str, suspension: Suspension) -> None:
        self._of.setdefault(tenant, {})[suspension.invoice_id] = suspension

    def _lift(self, tenant: str, invoice_id: str) -> None:
        mine = self._of.get(tenant, {})
        mine.pop(invoice_id, None)
        if not mine:
            self._of.pop(tenant, None)
