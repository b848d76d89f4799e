"""A Stripe double: a real HTTP server with state in memory, for the official `stripe` SDK to talk to.

Knows: what Stripe documents of customers, one-off invoices, invoice items, credit notes, billing meters,
idempotency keys, errors and webhooks, and which of it our correctness leans on. Is strict there: what Stripe
would refuse is refused with Stripe's status, type and code. Does not know: subscriptions, prices, taxes,
payment methods; a parameter it has not learnt is refused, so a test cannot pass on one it ignores.

Use `StripeDouble()` as a context manager, or `python -m tests.doubles.stripe --port 0`.
"""

from tests.doubles.stripe.faults import Fault
from tests.doubles.stripe.server import StripeDouble

__all__ = ["Fault", "StripeDouble"]
