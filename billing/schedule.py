"""Which periods of a tenant are due: have ended, and no invoice touches them, not even a void one.

They begin with the billing period in which the tenant was created, whole, as a clock elsewhere may have been behind. Of
a period that an invoice of another span has a part of, the rest is due. What was voided is left to whoever voided it.

Pure. Does not know: usage, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from billing.accounts import Tenant
from billing.invoice import Invoice
from billing.periods import Period, periods


def due_spans(tenant: Tenant, invoices: Sequence[Invoice], until_us: int) -> Iterator[Period]:
    """Periods, and parts of periods, that ended by `until_us`, in order of time. `invoices`: all of the tenant's."""
    taken = sorted((one.period_start_us, one.period_end_us) for one in invoices)
    for period in periods(tenant.created_us, until_us, tenant.billing_anchor_day, tenant.timezone):
        if period.end_us > until_us:
            return
        start_us = period.start_us
        for first_us, end_us in taken:
            if end_us <= start_us:
                continue
            if first_us >= period.end_us:
                break
            if first_us > start_us:
                yield Period(start_us=start_us, end_us=first_us)
            start_us = end_us
        if start_us < period.end_us:
            yield Period(start_us=start_us, end_us=period.end_us)
