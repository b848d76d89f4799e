"""Leases: which part of a quota each gateway may spend, as rows beside the log.

A gateway commits (holds, and settles without it being recorded yet) no more of a quota than its lease, so for each

    sum of all leases <= what the books leave of it

and several gateways cannot overspend it together. A lease grows only by what nobody has leased, and only in a
transaction that holds the log for itself; a charge takes its amount from the lease of the gateway that ran it in the
very transaction that records it. What a gateway that died had leased is nobody's until all that it had open is
recorded, or an operator gives it up, or its expiry has passed. A gateway that was expired finds its epoch gone: it is
fenced, and spends nothing more under what it had.

Knows: two tables in the ledger's database (`migrations/ledger`, 0003). Does not know: what a quota is, how much a
gateway asks for (`billing/service/leasing.py`). Not thread-safe: it lives in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

_metadata = sa.MetaData()
_holders = sa.Table(
    "lease_holders",
    _metadata,
    sa.Column("gateway", sa.Text, primary_key=True),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("seen_us", sa.BigInteger, nullable=False),
    sa.Column("expires_us", sa.BigInteger, nullable=False),
    sa.Column("recorded_us", sa.BigInteger, nullable=False),
)
_leases = sa.Table(
    "leases",
    _metadata,
    sa.Column("quota", sa.Text, primary_key=True),
    sa.Column("gateway", sa.Text, primary_key=True),
    sa.Column("amount_femto", sa.Text, nullable=False),  # text: money may need more than 64 bits
    sa.Column("wants_femto", sa.Text, nullable=False),
    sa.Column("wanted_us", sa.BigInteger, nullable=False),
)

ALIVE_US = 15_000_000  # seen so lately: it may give something back
WANTS_US = 3_000_000  # what was asked for longer ago is not wanted any more


class Holder(msgspec.Struct, frozen=True):
    """A gateway that may lease, in the column order of the table."""

    gateway: str
    folder: str
    epoch: str
    seen_us: int
    expires_us: int  # from then on others may take what it has leased
    recorded_us: int  # all its requests that began earlier are recorded

    def alive(self, now_us: int) -> bool:
        return now_us - self.seen_us < ALIVE_US


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's part of a quota, and what it asks the others for; femto-units."""

    quota: str
    gateway: str
    amount: int
    wants: int = 0
    wanted_us: int = 0

    def asks(self, now_us: int) -> bool:
        """Whether it is short of money now."""
        return self.wants > 0 and now_us - self.wanted_us < WANTS_US


class LeaseTable:
    """The rows, in one transaction. Only one that holds the log for itself may let a lease grow."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    # -- holders ----------------------------------------------------------------------------------

    def holders(self) -> dict[str, Holder]:
        """Everybody who may have leases, by gateway."""
        rows = self._connection.execute(sa.select(_holders))
        return {holder.gateway: holder for holder in (Holder(*row) for row in rows)}

    def enter(self, holder: Holder) -> None:
        """Put a holder in, in place of any that its gateway had: whoever had that one is fenced."""
        self._connection.execute(_holders.delete().where(_holders.c.gateway == holder.gateway))
        self._connection.execute(_holders.insert().values(msgspec.structs.asdict(holder)))

    def renew(self, holder: Holder) -> bool:
        """Move a holder's times; False when its epoch is gone."""
        mine = (_holders.c.gateway == holder.gateway) & (_holders.c.epoch == holder.epoch)
        times = {"seen_us": holder.seen_us, "expires_us": holder.expires_us, "recorded_us": holder.recorded_us}
        return bool(self._connection.execute(_holders.update().where(mine).values(times)).rowcount)

    def leave(self, gateway: str) -> None:
        """A gateway has nothing open: its leases are nobody's, and it is fenced if it should be there after all."""
        self._connection.execute(_leases.delete().where(_leases.c.gateway == gateway))
        self._connection.execute(_holders.delete().where(_holders.c.gateway == gateway))

    def leave_folder(self, folder: str) -> None:
        """The same for whatever ran on a data folder."""
        for holder in self.holders().values():
            if holder.folder == folder:
                self.leave(holder.gateway)

    # -- leases -----------------------------------------------------------------------------------

    def of_quota(self, quota: str) -> dict[str, Lease]:
        """A quota's leases by gateway."""
        rows = self._connection.execute(sa.select(_leases).where(_leases.c.quota == quota))
        return {lease.gateway: lease for lease in map(_lease, rows)}

    def of_gateway(self, gateway: str) -> dict[str, Lease]:
        """A gateway's leases by quota."""
        rows = self._connection.execute(sa.select(_leases).where(_leases.c.gateway == gateway))
        return {lease.quota: lease for lease in map(_lease, rows)}

    def put(self, lease: Lease) -> None:
        """Write a lease; one of nothing that asks for nothing goes."""
        this = (_leases.c.quota == lease.quota) & (_leases.c.gateway == lease.gateway)
        self._connection.execute(_leases.delete().where(this))
        if lease.amount or lease.wants:
            self._connection.execute(
                _leases.insert().values(
                    quota=lease.quota,
                    gateway=lease.gateway,
                    amount_femto=str(lease.amount),
                    wants_femto=str(lease.wants),
                    wanted_us=lease.wanted_us,
                )
            )

    def use_up(self, used: Mapping[str, Mapping[str, int]]) -> None:
        """Charges were recorded: gateway → quota → femto-units that leave its lease."""
        for gateway, amounts in used.items():
            standing = self.of_gateway(gateway)
            for quota, amount in amounts.items():
                if quota in standing:
                    lease = standing[quota]
                    self.put(msgspec.structs.replace(lease, amount=max(lease.amount - amount, 0)))

    def sums(self) -> dict[str, int]:
        """All that is leased of each quota."""
        found: dict[str, int] = {}
        for quota, amount in self._connection.execute(sa.select(_leases.c.quota, _leases.c.amount_femto)):
            found[quota] = found.get(quota, 0) + int(amount)
        return found

    def wanted_from(self, gateway: str, now_us: int) -> set[str]:
        """Quotas of which another gateway is short."""
        rows = self._connection.execute(sa.select(_leases).where(_leases.c.gateway != gateway))
        return {lease.quota for lease in map(_lease, rows) if lease.asks(now_us)}


def _lease(row: sa.Row[Any]) -> Lease:
    quota, gateway, amount, wants, wanted_us = tuple(row)
    return Lease(quota=quota, gateway=gateway, amount=int(amount), wants=int(wants), wanted_us=wanted_us)
