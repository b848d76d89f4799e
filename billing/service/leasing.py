"""What this process may spend of each quota beside others on the same ledger: taken in slices, given back when idle.

A slice covers what is lacking and some of what will be soon: it doubles while it is used up within seconds. Whoever is
short takes what nobody has leased; where that is not enough it says so beside the log, and the others give back what
lies idle with them when they look next. In memory a lease is never more than in its row: it shrinks before the row
does, and grows after.

Nothing here is on the way of a request that its lease covers. `exchange` and `tend` wait for the disk: call them on a
thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
import structlog

from billing.leases import ALIVE_US, Holder, Lease, LeaseTable
from billing.quotas import Quota
from billing.service.notices import NoticeService

GROW_US = 5_000_000  # a slice that is used up sooner was too small
IDLE_US = 30_000_000  # what is not used for so long goes back
FIRST_SLICE = 16  # times what is lacking
EXPIRY_S = 86_400.0

_log = structlog.get_logger(__name__)


Gives = Callable[[LeaseTable, int], Collection[str]]
"""Which quotas' idle parts go back, decided while the log is held: the table and the time are its arguments."""


class Ask(msgspec.Struct, frozen=True):
    """How much of a quota is lacking, and from how much on it is of use; femto-units."""

    femto: int
    least: int


class Answer(msgspec.Struct, frozen=True):
    """What an ask has led to. `waits`: others have some of the quota, and may give it back."""

    got: int
    waits: bool


class _Slice(msgspec.Struct):
    """How much is taken ahead of need, and when that was last."""

    size: int = 0
    taken_us: int = 0


class _Deal(msgspec.Struct):
    """One quota in an exchange: what stays of the lease meanwhile, and what comes to it."""

    quota: Quota
    keep: int
    took: int = 0
    waits: bool = False


class LeaseService(NoticeService):
    """Leases. Alarm: `lease_lost`. Until `lease_as` this process may commit all that the books leave."""

    _holder: Holder | None = None
    _expiry_s = EXPIRY_S
    _slices: dict[str, _Slice]
    _still: dict[str, tuple[Holder, float]]  # gateway → as it was seen, and since when

    def lease_as(self, gateway: str, folder: str, *, expiry_s: float = EXPIRY_S) -> None:
        """From now on commit only what is leased. All that the folder's last server left must be recorded by now.

        Others may take what is leased when this process was not heard of for `expiry_s`; it knows that by its own
        clock before them.
        """
        with self._writing, self._store.exclusive() as log:
            self._catch_up_as_writer(log)
            began_s, now_us = self._elapsed(), self._clock()
            table = LeaseTable(log.connection)
            table.leave_folder(folder)
            table.leave(gateway)
            self._expiry_s = expiry_s
            holder = Holder(gateway, folder, secrets.token_hex(8), now_us, self._expires_us(now_us), now_us)
            table.enter(holder)
            with self._state:
                self._holder, self._gateway, self._slices, self._still = holder, gateway, {}, {}
                self._quotas.fence.from_s = self._fenced_from_s(began_s)
                self._quotas.lease_all()

    @property
    def leased(self) -> bool:
        """Whether this process commits only what it has leased."""
        return self._holder is not None

    @property
    def seq(self) -> int:
        """How far the log is folded in: a verdict on money may be another one when it has moved."""
        return self._books.seq

    def exchange(self, asks: Mapping[str, Ask], gives: Collection[str] = ()) -> dict[str, Answer]:
        """Take what is asked for as far as nobody has leased it, and give back what lies idle of `gives`.

        Raises `LedgerUnavailable`; what was given is then lost to this process until the next exchange of that quota,
        and nothing is taken.
        """
        return self._exchange(asks, lambda *_: gives)

    def tend(self) -> None:
        """Every few seconds: say that this process is alive, and give back what others want or nobody uses here."""
        self._exchange({}, self._goes_back)

    def _exchange(self, asks: Mapping[str, Ask], gives: Gives) -> dict[str, Answer]:
        """One transaction that has the log for itself, so nobody takes this process's leases while it renews them."""
        if self._holder is None:
            return {}
        with self._writing:
            began_s = self._elapsed()
            with self._store.exclusive() as log:
                self._catch_up_as_writer(log)
                now_us, table = self._clock(), LeaseTable(log.connection)
                lost = self._renewed(table, now_us)
                giving = {*gives(table, now_us), *lost}
                deals = self._deals({*asks, *giving}, giving, now_us)
                holders = table.holders()
                self._watch(holders)
                for id, deal in deals.items():
                    self._deal(table, deal, asks.get(id), holders, now_us)
            with self._state:
                self._quotas.fence.from_s = self._fenced_from_s(began_s)
                for deal in deals.values():
                    self._dealt(deal, now_us)
        return {id: Answer(deals[id].took, deals[id].waits) for id in asks}

    def give_what_is_wanted(self) -> None:
        """Give back what lies idle here and another gateway is short of. Touches no disk where nothing lies idle."""
        holder = self._holder
        with self._state:
            idle = {quota.id for quota in self._quotas.all() if quota.idle}
        if holder is None or not idle:
            return
        with self._store.connected() as connection:
            wanted = idle & LeaseTable(connection).wanted_from(holder.gateway, self._clock())
        if wanted:
            self.exchange({}, wanted)

    def retire(self) -> None:
        """This process admits nothing more: give back all that is idle, and leave if nothing is committed.

        What is settled and not recorded keeps its lease, and the grants that pay for it do not expire, until the
        folder's next server has recorded it.
        """
        holder = self._holder
        if holder is None:
            return
        with self._state:
            ids = [quota.id for quota in self._quotas.all()]
        self.exchange({}, ids)
        with self._state:
            committed = any(quota.committed for quota in self._quotas.all())
            open_ = len(self._holds) > 0 or bool(self._books.ledger.pending)
        if not committed and not open_:
            with self._store.exclusive() as log:
                LeaseTable(log.connection).leave(holder.gateway)

    def end_leases(self, folder: str) -> None:
        """All that was ever settled on a data folder is recorded, and nobody serves on it: its leases are nobody's."""
        with self._store.exclusive() as log:
            LeaseTable(log.connection).leave_folder(folder)

    # -- how much ---------------------------------------------------------------------------------

    def _deals(self, ids: set[str], gives: set[str], now_us: int) -> dict[str, _Deal]:
        """Freeze the leases in question: until the exchange is done they do not grow, and what is given is not used."""
        deals: dict[str, _Deal] = {}
        with self._state:
            for id in sorted(ids):
                quota = self._quotas.find(id)
                lease = quota.lease or 0
                keep = quota.committed if id in gives or now_us >= quota.until_us else max(lease, quota.committed)
                quota.lease = keep
                deals[id] = _Deal(quota, keep)
        return deals

    def _deal(
        self, table: LeaseTable, deal: _Deal, ask: Ask | None, holders: Mapping[str, Holder], now_us: int
    ) -> None:
        assert self._holder is not None
        quota, mine = deal.quota, self._holder.gateway
        others = [lease for lease in table.of_quota(quota.id).values() if lease.gateway != mine]
        free = quota.left_at(now_us) - sum(lease.amount for lease in others) - deal.keep
        if free < 0:  # together more is leased than the books leave: nothing that is not committed may stay
            with self._state:
                free += deal.keep - quota.committed
                deal.keep = quota.lease = quota.committed
        if ask is not None and free < ask.least:
            free += self._expired(table, others, holders, now_us)
            others = [lease for lease in others if lease.gateway in table.holders()]
        wants = 0
        if ask is not None:
            alive = [one for one in others if one.gateway in holders and holders[one.gateway].alive(now_us)]
            short = [one for one in alive if one.asks(now_us)]
            seen = sum(holder.alive(now_us) for id, holder in holders.items() if id != mine)
            if free >= ask.least:
                deal.took = self._taken(quota, ask, free, ahead=not short, others=seen, now_us=now_us)
            else:
                wants = max(ask.femto, 1)
                deal.waits = any(one.amount and not one.asks(now_us) for one in alive)
                if alive:  # what is of no use here may be of use there
                    with self._state:
                        deal.keep = quota.lease = quota.committed
        table.put(
            Lease(
                quota=quota.id,
                gateway=mine,
                amount=deal.keep + deal.took,
                wants=wants,
                wanted_us=now_us if wants else 0,
            )
        )

    def _taken(self, quota: Quota, ask: Ask, free: int, *, ahead: bool, others: int, now_us: int) -> int:
        """What is lacking, and a slice ahead of need unless somebody else is short.

        Where others may want some too it is at most this gateway's share of what is free, if that is of any use: it
        can ask again.
        """
        share = max(free // (others + 1), ask.least)
        need = min(max(ask.femto, ask.least), share)
        one = self._slices.setdefault(quota.id, _Slice())
        hurried = now_us - one.taken_us < GROW_US
        one.size = max(2 * one.size if hurried else one.size // 2, FIRST_SLICE * need)
        one.taken_us = now_us
        return need + (min(one.size, share - need) if ahead else 0)

    def _dealt(self, deal: _Deal, now_us: int) -> None:
        """The exchange stands: what came is this process's. `_state` is held."""
        quota = deal.quota
        quota.lease = deal.keep + deal.took
        quota.until_us = self._quotas.until_us(quota, now_us)
        quota.used_us = now_us
        self._quotas.forget(quota.id)
        if not quota.lease:
            self._slices.pop(quota.id, None)

    def _goes_back(self, table: LeaseTable, now_us: int) -> list[str]:
        """Leases that are to be fitted anew.

        Another gateway wants some of it, nothing was taken of it for long, what is idle may not be used any more or is
        more than there is, or more is committed than leased (of a budget that was set meanwhile).
        """
        assert self._holder is not None
        wanted, sums = table.wanted_from(self._holder.gateway, now_us), table.sums()
        with self._state:
            return [quota.id for quota in self._quotas.all() if self._is_unfit(quota, wanted, sums, now_us)]

    def _is_unfit(self, quota: Quota, wanted: Collection[str], sums: Mapping[str, int], now_us: int) -> bool:
        if quota.lease is not None and quota.committed > quota.lease:
            return True
        if not quota.idle:
            return False
        if quota.id in wanted or now_us >= quota.until_us or sums.get(quota.id, 0) > quota.left_at(now_us):
            return True
        return not 0 <= now_us - quota.used_us < IDLE_US  # used in the future: the clock was put back

    # -- who --------------------------------------------------------------------------------------

    def _renewed(self, table: LeaseTable, now_us: int) -> list[str]:
        """Renew the holder; the quotas of which only what is committed is left, where its epoch is gone."""
        assert self._holder is not None
        renewed = self._renewal(self._holder, now_us)
        if table.renew(renewed):
            self._holder = renewed
            return []
        with self._state:
            self._alarms["lease_lost"] += 1
            lost = [quota.id for quota in self._quotas.all()]
        _log.error("lease_lost", gateway=renewed.gateway)
        self._holder = msgspec.structs.replace(renewed, epoch=secrets.token_hex(8))
        table.enter(self._holder)
        return lost

    def _renewal(self, holder: Holder, now_us: int) -> Holder:
        with self._state:
            recorded_us = self._recorded_until_us(now_us)
        return msgspec.structs.replace(
            holder, seen_us=now_us, expires_us=self._expires_us(now_us), recorded_us=recorded_us
        )

    def _expired(self, table: LeaseTable, others: Iterable[Lease], holders: Mapping[str, Holder], now_us: int) -> int:
        """Take from whoever was not heard of for as long as it had said: what it had of this quota."""
        freed = 0
        for lease in others:
            holder = holders.get(lease.gateway)
            if holder is None or (holder.expires_us <= now_us and self._is_still(holder)):
                _log.warning("lease_expired", gateway=lease.gateway, quota=lease.quota, amount_femto=str(lease.amount))
                table.leave(lease.gateway)
                freed += lease.amount
        return freed

    def _watch(self, holders: Mapping[str, Holder]) -> None:
        """Note when each was first seen as it is now, by a clock that no step moves."""
        now_s = self._elapsed()
        before = self._still
        self._still = {}
        for id, holder in holders.items():
            seen = before.get(id)
            self._still[id] = seen if seen is not None and seen[0] == holder else (holder, now_s)

    def _is_still(self, holder: Holder) -> bool:
        """Whether it was silent while this process looked on: no clock that is put forward makes leases free."""
        return self._elapsed() - self._still[holder.gateway][1] >= ALIVE_US / 1e6

    def _expires_us(self, now_us: int) -> int:
        return now_us + int(self._expiry_s * 1_000_000)

    def _fenced_from_s(self, began_s: float) -> float:
        """A quarter earlier than the others think it: clocks run differently, and a stream takes a moment to stop."""
        return began_s + self._expiry_s * 0.75
