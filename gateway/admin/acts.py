"""Acts of an admin that the ledger itself knows nothing of: a gateway given up, a backup taken, an alert sent again.

Each is one event, written before the act is done. Written after it, a crash in between, or a ledger that is away just
then, would leave an act that nobody did; written before it, such an act is not done, or stands there as begun. One that
is refused after all has its `admin.refused` behind it.

Knows: the act's name and what it is done to. Does not know: paths of the server, secrets, how it ended.
"""

from __future__ import annotations

from billing.admins import ActBegun
from billing.service import Idempotency
from gateway.admin.state import AdminState

TARGET_MAX = 300


def begin(admin: AdminState, act: str, target: str = "", *, idempotency: Idempotency | None = None) -> None:
    """Write down that the caller begins `act`; once for all calls with one idempotency key. Blocking.

    Raises `LedgerUnavailable`, `IdempotencyConflict`: the act must not be done then.
    """
    admin.billing.note_begun(ActBegun(act=act, target=target[:TARGET_MAX]), idempotency=idempotency)
