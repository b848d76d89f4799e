"""Taking over what a gateway that is gone has left in its data folder: its requests are settled, its usage delivered.

Knows: the folder is another gateway's on this ledger, its lock says whether that one still runs, and its own spool says
what was settled there before; so a takeover that is killed or runs twice settles and counts nothing twice. Does not
know: how the folder came here (its disk was mounted, or it was copied whole). Blocking.

Whoever starts on the folder itself does the same. This is for the gateway that will not start again: a replica that was
scaled away, a machine whose disk is left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import structlog

from billing.errors import Conflict, NotFound
from billing.gateways import GatewayRow, Gateways
from billing.service import Billing
from metering.clickhouse import UsageStore
from metering.journal import JournalError, recover_orphans
from metering.lock import FileLock, Locked
from metering.shipper import Drain, Shipper
from metering.spool import Spool, SpoolError

log = structlog.get_logger(__name__)

FLUSH_S = 120.0
"""So long the stores may take for what a folder holds; what they have not taken then is left there, for another try."""


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken over from a folder."""

    gateway: str
    settled: int  # requests that were running when its gateway died
    delivered: int  # events that the usage store did not have


def adopt(
    gateway_id: str,
    folder: Path,
    *,
    gateways: Gateways,
    billing: Billing,
    usage: UsageStore,
    clock_us: Callable[[], int],
) -> Adopted:
    """Settle and deliver all that the data folder of `gateway_id` holds, and take the gateway off the list.

    Raises `NotFound` for a gateway that is not listed, and `Conflict`, with everything left as it can be tried again:
    the folder is not that gateway's, a server runs on it, it cannot be used, or a store does not take its usage now.
    """
    row = next((row for row in gateways.all() if row.id == gateway_id), None)
    if row is None:
        raise NotFound("gateway", gateway_id)
    with ExitStack() as stack:
        _claim(row, folder, stack)
        try:
            spool = Spool(folder / "spool" / "spool.sqlite3", clock_us=clock_us)
            stack.callback(spool.close)
            settled = len(recover_orphans(folder / "journal", spool, clock_us(), row.id))
            delivered = spool.count("clickhouse")
            left = _deliver(spool, billing, usage)
        except (SpoolError, JournalError, OSError) as error:
            log.error("gateway_not_adopted", gateway=row.id, reason=str(error))
            raise Conflict(f"what the gateway {row.id!r} left cannot be read; the log says why") from error
        if left:
            log.error("gateway_not_adopted", gateway=row.id, left=left)
            raise Conflict(f"not all usage of the gateway {row.id!r} was taken by the stores in time: try again")
        billing.end_leases(row.folder)
        gateways.leave(row.folder)
    log.warning("gateway_adopted", gateway=row.id, settled=settled, delivered=delivered)
    return Adopted(gateway=row.id, settled=settled, delivered=delivered)


def _claim(row: GatewayRow, folder: Path, stack: ExitStack) -> None:
    """Take the folder's lock until the stack is closed."""
    try:
        if (folder / "folder.id").read_text().strip() != row.folder:
            raise Conflict(f"that is not the data folder of the gateway {row.id!r}")
        stack.enter_context(FileLock(folder / "server.lock"))
    except Locked:
        raise Conflict(f"a server runs on the data folder of the gateway {row.id!r}: stop it first") from None
    except (OSError, UnicodeDecodeError):
        raise Conflict(f"there is no data folder of the gateway {row.id!r} that this server can use") from None


def _deliver(spool: Spool, billing: Billing, usage: UsageStore) -> int:
    """Hand everything to the ledger, then to the usage store, as the running drains do. Returns what is left."""
    for drain in (Drain(spool, "ledger", billing.record), Shipper(spool, usage)):
        drain.start()
        drain.stop(FLUSH_S)
    return sum(spool.count(consumer) for consumer in spool.consumers)
